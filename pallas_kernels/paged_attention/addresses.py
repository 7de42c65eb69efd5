"""Where a cached token's row lies, for the threads of a kernel and the interpreter.

The same law as `layout.row_address`, which reads whole arrays.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int32, UInt32

from pallas_kernels.paged_attention import instructions as ins
from pallas_kernels.paged_attention.instructions import Register
from pallas_kernels.paged_attention.layout import KvLayout
from pallas_kernels.paged_attention.rows import Rows

Ref = Any
"""A Pallas reference; its type has no public name."""


def flat_table(rows: Rows) -> Int32[Array, "R entries"]:
    """Returns the frames of all blocks of each row, at least one."""
    table = rows.block_frames.reshape(rows.block_frames.shape[0], -1)
    return jnp.zeros((table.shape[0], 1), jnp.int32) if table.shape[1] == 0 else table


def cached_frame(
    layout: KvLayout,
    table: Register,
    row: Register,
    layer: Register,
    position: Register,
) -> Register:
    """Returns the frame of a token's row in a layer, in threads.

    Args:
      layout: of the blocks.
      table: reference to the frames of each row's blocks.
      row: of the step.
      layer: of the model.
      position: of the token, which must have a block.
    """
    block, nth_row = _row_in_block(layout, layer, position)
    nth, _ = ins.divide(nth_row, layout.rows_per_frame)
    entry = ins.add(ins.multiply(block, layout.frames_per_block), nth)
    return ins.load(table, row, entry)


def cached_row(
    layout: KvLayout,
    pool: Register,
    frame: Register,
    layer: Register,
    position: Register,
) -> Register:
    """Returns the address of a token's row in its frame, in threads."""
    _, nth_row = _row_in_block(layout, layer, position)
    _, in_frame = ins.divide(nth_row, layout.rows_per_frame)
    start = ins.row_address(ins.global_address(pool), frame, 4 * layout.frame_words)
    return ins.offset_address(start, ins.multiply(in_frame, 4 * layout.row_words))


def _row_in_block(
    layout: KvLayout, layer: Register, position: Register
) -> tuple[Register, Register]:
    block, token = ins.divide(position, layout.block_size)
    return block, ins.add(ins.multiply(layer, layout.block_size), token)


def load_cached(
    layout: KvLayout,
    pool: Ref,
    table: Ref,
    row: Int32[Array, ""],
    layer: Int32[Array, ""],
    position: Int32[Array, ""],
    column: Int32[Array, ""],
    words: int,
) -> UInt32[Array, "words"]:
    """Loads words of a token's row from a column on, with jnp."""
    block = lax.div(position, layout.block_size)
    nth_row = layer * layout.block_size + position - block * layout.block_size
    nth = lax.div(nth_row, layout.rows_per_frame)
    start = (nth_row - nth * layout.rows_per_frame) * layout.row_words
    frame = table[row, block * layout.frames_per_block + nth]
    return pool[frame, pl.ds(start + column, words)]
