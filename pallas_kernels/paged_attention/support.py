"""What the Mosaic GPU kernels can do."""

import jax.numpy as jnp

from pallas_kernels.paged_attention.layout import KvLayout

HEAD_DIMS = (64, 128, 256, 512)


def is_supported(layout: KvLayout, dtype: jnp.dtype) -> bool:
    """Whether the kernel can read this layout for queries of this type."""
    typed = dtype == jnp.bfloat16 and layout.dtype != "float32"
    aligned = layout.frame_words % 4 == 0 and layout.row_words % 4 == 0
    return typed and aligned and layout.head_dim in HEAD_DIMS


def check_supported(layout: KvLayout, dtype: jnp.dtype) -> None:
    """Refuses what `is_supported` says no to.

    Raises:
      NotImplementedError: if so.
    """
    if not is_supported(layout, dtype):
        raise NotImplementedError(
            f"queries are {dtype.name}, keys {layout.dtype} with"
            f" head_dim={layout.head_dim} in frames of {layout.frame_words} words; the"
            " Mosaic GPU kernels take bfloat16 queries, bfloat16 or float8_e4m3fn"
            f" keys, head_dim in {HEAD_DIMS} and multiples of 4 words: use"
            " implementation='reference'"
        )
