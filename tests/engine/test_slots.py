"""What the device remembers of requests, against tables that are sent whole."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight_jax.engine.slots import (
    NEWEST,
    RowInputs,
    Slots,
    blocks_per_row,
    enter_blocks,
    rows_of,
    tokens_of,
)
from pallas_kernels.paged_attention import KvLayout

NUM_SLOTS, MAX_BLOCKS = 3, 8
ROWS, QUERIES = 3, 6
LAYOUT = KvLayout(
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    block_size=4,
    dtype="float32",
    frame_words=32,
)
MOST = MAX_BLOCKS * LAYOUT.block_size

jit_enter = jax.jit(lambda frames, rows: enter_blocks(frames, rows, LAYOUT))
jit_rows = jax.jit(rows_of)


def row_inputs(chunks: list[tuple[int, int, int, np.ndarray]]) -> RowInputs:
    """Rows (slot, start, length, block table); the others are unused."""
    starts, lengths, cached = np.zeros((3, ROWS), np.int32)
    slots = np.full(ROWS, NUM_SLOTS, np.int32)
    size = (ROWS, blocks_per_row(QUERIES, LAYOUT), LAYOUT.frames_per_block)
    written = np.zeros(size, np.int32)
    for row, (slot, start, length, table) in enumerate(chunks):
        slots[row], starts[row], lengths[row] = slot, start, length
        cached[row] = start
        first = start // LAYOUT.block_size
        part = table[first : first + size[1]]
        written[row, : len(part)] = part
    tokens = np.zeros((ROWS, QUERIES), np.int32)
    return RowInputs(
        slots=slots,
        tokens=tokens,
        starts=starts,
        lengths=lengths,
        cached=cached,
        written=written,
    )


@given(
    steps=st.lists(
        st.lists(
            st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(1, QUERIES)),
            max_size=ROWS,
            unique_by=lambda row: row[0],
        ),
        min_size=1,
        max_size=30,
    ),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=100)
def test_a_row_finds_all_blocks_that_hold_tokens_of_its_request(steps, seed):
    """Requests grow by a few tokens at a time, end at any time, and slots are reused.

    Frames are random, so a block that is left over from another request shows.
    """
    rng = np.random.default_rng(seed)
    frames = np.zeros((NUM_SLOTS, MAX_BLOCKS, LAYOUT.frames_per_block), np.int32)
    tables = rng.integers(1, 10**6, frames.shape).astype(np.int32)
    tokens = np.zeros(NUM_SLOTS, int)
    for chunks in steps:
        for slot, length in chunks:
            if tokens[slot] + length > MOST or rng.random() < 0.1:
                tables[slot] = rng.integers(1, 10**6, tables[slot].shape)
                tokens[slot] = 0
        rows = row_inputs([(s, tokens[s], n, tables[s]) for s, n in chunks])
        frames = jit_enter(frames, rows)
        got = jit_rows(rows, frames)
        for row, (slot, length) in enumerate(chunks):
            tokens[slot] += length
            used = -(-int(tokens[slot]) // LAYOUT.block_size)
            np.testing.assert_array_equal(
                np.asarray(got.block_frames)[row, :used], tables[slot, :used]
            )
            assert got.sequences[row] == slot
        assert np.asarray(got.sequences)[len(chunks) :].tolist() == [-1] * (
            ROWS - len(chunks)
        )


@pytest.mark.parametrize(("queries", "most"), [(1, 1), (2, 2), (4, 2), (5, 2), (6, 3)])
def test_blocks_of_a_row_are_those_of_its_worst_start(queries, most):
    starts = range(3 * LAYOUT.block_size)
    touched = [
        len({(start + i) // LAYOUT.block_size for i in range(queries)})
        for start in starts
    ]
    assert blocks_per_row(queries, LAYOUT) == max(touched) == most


def test_a_token_that_the_host_has_not_seen_is_the_newest_of_the_slot():
    slots = Slots(
        tokens=np.array([70, 71, 72], np.int32),
        block_frames=np.zeros((3, 1, 1), np.int32),
    )
    rows = RowInputs(
        slots=np.array([2, 0, 1, NUM_SLOTS], np.int32),
        tokens=np.array([[NEWEST], [5], [NEWEST], [0]], np.int32),
        starts=np.zeros(4, np.int32),
        lengths=np.array([1, 1, 1, 0], np.int32),
        cached=np.zeros(4, np.int32),
        written=np.zeros((4, 1, 1), np.int32),
    )
    got = jax.jit(tokens_of)(rows, slots.tokens)
    assert np.asarray(got).tolist() == [[72], [5], [71], [0]]
