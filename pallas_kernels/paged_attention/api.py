"""The public face of paged attention: argument checks and choice of kernel."""

from jaxtyping import Array, Float, Int32, UInt32

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.layout import KvLayout
from pallas_kernels.paged_attention.rows import Rows


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
    Returns:
      The weighted values, in the type of ``q``; zeros for unused rows.
    Raises:
      ValueError: if the query heads are not a multiple of the key-value heads.
    """
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads cannot share {k.shape[2]} key-value heads;"
            " the first must be a multiple of the second"
        )
    return reference.paged_attention(
        q, k, v, pool, rows, layer, layout, scale=scale, window=window
    )
