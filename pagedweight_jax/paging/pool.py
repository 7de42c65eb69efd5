"""The pool: one device array of frames that planes and key-value blocks share.

It is allocated once and donated through every write, so that each write is in place.
Writes happen between steps only; a step reads.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt32

from pallas_kernels.paged_attention import KvLayout, Rows
from pallas_kernels.paged_attention.layout import row_address


@dataclass(frozen=True, kw_only=True)
class PoolLayout:
    """Sizes of the pool; a plane of one linear is ``frames_per_plane`` frames."""

    num_frames: int
    frame_words: int
    frames_per_plane: int

    @property
    def frame_bytes(self) -> int:
        """Bytes of one frame."""
        return 4 * self.frame_words

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_frames * self.frame_bytes


def allocate(layout: PoolLayout) -> UInt32[Array, "num_frames frame_words"]:
    """Allocates the pool, all zeros."""
    return jnp.zeros((layout.num_frames, layout.frame_words), jnp.uint32)


def commit_planes(
    pool: UInt32[Array, "num_frames frame_words"],
    words: UInt32[Array, "staging frame_words"],
    frames: Int32[Array, "staging"],
) -> UInt32[Array, "num_frames frame_words"]:
    """Writes arrived frames; frame number ``num_frames`` drops what it would write."""
    return pool.at[frames].set(words, mode="drop", unique_indices=True)


def commit_kv(
    pool: UInt32[Array, "num_frames frame_words"],
    fresh_kv: UInt32[Array, "num_layers T row_words"],
    rows: tuple[Rows, ...],
    layout: KvLayout,
    queries_per_row: tuple[int, ...],
) -> UInt32[Array, "num_frames frame_words"]:
    """Writes a step's fresh key-value rows to their blocks."""
    addresses = [
        _row_addresses(group, num_queries, layout, pool.shape[0])
        for group, num_queries in zip(rows, queries_per_row, strict=True)
    ]
    index = jnp.concatenate(addresses, axis=1).reshape(-1, 2)
    dims = lax.ScatterDimensionNumbers(
        update_window_dims=(1,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0, 1),
    )
    return lax.scatter(
        pool,
        index,
        fresh_kv.reshape(-1, layout.row_words),
        dims,
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


def _row_addresses(
    rows: Rows, num_queries: int, layout: KvLayout, num_frames: int
) -> Int32[Array, "num_layers tokens 2"]:
    """Returns (frame, word) of every token in every layer; unused ones are dropped."""
    offsets = jnp.arange(num_queries, dtype=jnp.int32)[None]
    positions = rows.starts[:, None] + offsets  # [R, Q]
    last = rows.block_frames.shape[1] - 1
    block = jnp.minimum(positions // layout.block_size, last)
    frames = jnp.take_along_axis(rows.block_frames, block[..., None], axis=1)

    def of_layer(layer: Array) -> Array:
        token = positions % layout.block_size
        frame, word = row_address(frames, token, layer, layout)
        frame = jnp.where(offsets < rows.lengths[:, None], frame, num_frames)
        return jnp.stack([frame, word], axis=-1).reshape(-1, 2)

    return jax.vmap(of_layer)(jnp.arange(layout.num_layers, dtype=jnp.int32))
