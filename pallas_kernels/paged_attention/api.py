"""The public face of paged attention: argument checks and choice of kernel."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.layout import KvLayout, pack_rows
from pallas_kernels.paged_attention.rows import Rows
from pallas_kernels.paged_attention.support import check_supported

Implementation = Literal["reference", "mosaic_gpu", "mosaic_gpu_interpret"]


def paged_attention(
    q: Float[Array, "R Q N H"],
    k: Float[Array, "R Q K H"],
    v: Float[Array, "R Q K H"],
    pool: UInt32[Array, "num_frames frame_words"],
    rows: Rows,
    layer: Int32[Array, ""] | int,
    layout: KvLayout,
    *,
    scale: float,
    window: int | None = None,
    implementation: Implementation = "reference",
) -> Float[Array, "R Q N H"]:
    """Attends to the cached tokens of each row's sequence and to the step's fresh ones.

    The fresh keys and values are arguments because a step only reads the pool; they
    are written by the commit that follows it.

    Args:
      q: queries, after rotary embedding; head ``n`` uses key-value head
        ``n // (N / K)``.
      k: fresh keys, after rotary embedding.
      v: fresh values.
      pool: the paged pool, one frame a row.
      rows: which positions of which sequences the queries are.
      layer: the layer whose rows of a block are read.
      layout: where a token's key and value lie in its block.
      scale: factor on the scores.
      window: tokens that a query sees, itself included; None for all.
      implementation: "mosaic_gpu" must be asked for: its present form has been checked
        by interpreter, emulator and ptxas, but has not run on a device. It multiplies
        bfloat16 and rounds the weights of the values to it; for float8 keys and values
        it is fp16.
    Returns:
      The weighted values, in the type of ``q``; zeros for unused rows.
    Raises:
      ValueError: if the query heads are not a multiple of the key-value heads.
      NotImplementedError: if the implementation asked for cannot do it.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads cannot share {k.shape[2]} key-value heads;"
            " the first must be a multiple of the second"
        )
    if implementation == "reference":
        return reference.paged_attention(
            q, k, v, pool, rows, layer, layout, scale=scale, window=window
        )
    # Only where they can be lowered.
    from pallas_kernels.paged_attention import decode, prefill

    check_supported(layout, q.dtype)
    several = q.shape[1] > 1
    return (prefill if several else decode).paged_attention(
        q,
        pack_rows(k, v, layout),
        pool,
        rows,
        jnp.asarray(layer, jnp.int32),
        layout,
        scale=scale,
        window=window,
        interpret=implementation == "mosaic_gpu_interpret",
    )
