"""What the device remembers of each running request, so that the host need not send it.

A request has a slot from the step that starts it to the step that samples its last
token. Two things are kept in it:

    tokens         the newest token: a step reads here what the step before it sampled,
                   whether or not the host has seen it
    block_frames   the block table: a row brings the frames of the blocks that it
                   writes, and finds those that earlier steps wrote

So nothing that the device knows travels twice, and the next step can be enqueued while
the last one runs. A slot is never cleared: a row reads only blocks that hold computed
tokens of its request, and the rows that computed them have entered those blocks.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.paged_attention import KvLayout, Rows
from pallas_kernels.pytree import pytree


@pytree
@dataclass(frozen=True, kw_only=True)
class Slots:
    """The state of S slots on the device, donated from step to step."""

    tokens: Int32[Array, "S"]
    block_frames: Int32[Array, "S max_blocks frames_per_block"]


@pytree
@dataclass(frozen=True, kw_only=True)
class RowInputs:
    """R rows of Q tokens as the host tells of them; see `Rows`.

    Attributes:
      slots: of the row's request; S for an unused row.
      tokens: `NEWEST` stands for the token in the slot.
      written: frames of the blocks that the row's tokens lie in, in order.
    """

    slots: Int32[Array, "R"]
    tokens: Int32[Array, "R Q"]
    starts: Int32[Array, "R"]
    lengths: Int32[Array, "R"]
    cached: Int32[Array, "R"]
    written: Int32[Array, "R blocks_per_row frames_per_block"]


NEWEST = -1
"""Stands for a token that the host has not seen yet."""


def abstract_slots(num_slots: int, max_blocks: int, layout: KvLayout) -> Slots:
    """Returns the shapes of slots."""
    size = (num_slots, max_blocks, layout.frames_per_block)
    return Slots(
        tokens=jax.ShapeDtypeStruct((num_slots,), jnp.int32),  # pyright: ignore
        block_frames=jax.ShapeDtypeStruct(size, jnp.int32),  # pyright: ignore
    )


def blocks_per_row(num_queries: int, layout: KvLayout) -> int:
    """Returns the most blocks that so many consecutive tokens lie in."""
    return (num_queries + layout.block_size - 2) // layout.block_size + 1


def enter_blocks(
    block_frames: Int32[Array, "S max_blocks frames_per_block"],
    rows: RowInputs,
    layout: KvLayout,
) -> Int32[Array, "S max_blocks frames_per_block"]:
    """Enters the blocks that rows are about to write."""
    first = rows.starts // layout.block_size
    last = (rows.starts + rows.lengths - 1) // layout.block_size
    offsets = jnp.arange(rows.written.shape[1], dtype=jnp.int32)
    blocks = first[:, None] + offsets[None]
    nowhere = block_frames.shape[1]
    blocks = jnp.where(blocks <= last[:, None], blocks, nowhere)
    return block_frames.at[rows.slots[:, None], blocks].set(rows.written, mode="drop")


def rows_of(
    rows: RowInputs, block_frames: Int32[Array, "S max_blocks frames_per_block"]
) -> Rows:
    """Looks up the block tables of rows."""
    return Rows(
        starts=rows.starts,
        lengths=rows.lengths,
        cached=rows.cached,
        sequences=jnp.where(rows.lengths > 0, rows.slots, -1),
        block_frames=block_frames.at[rows.slots].get(mode="clip"),
    )


def tokens_of(rows: RowInputs, tokens: Int32[Array, "S"]) -> Int32[Array, "R Q"]:
    """Fills in the tokens that the host has not seen."""
    newest = tokens.at[rows.slots].get(mode="clip")
    return jnp.where(rows.tokens == NEWEST, newest[:, None], rows.tokens)
