"""From a schedule to the arrays of a step."""

import numpy as np
import pytest
import tiny

from pagedweight_jax.engine.batch import (
    build_batch,
    choose_shape,
    first_token,
    rows_of_chunks,
)
from pagedweight_jax.engine.block_manager import BlockManager
from pagedweight_jax.engine.request import SamplingParams
from pagedweight_jax.engine.scheduler import Chunk, Schedule
from pagedweight_jax.engine.slots import NEWEST
from pagedweight_jax.engine.step import StepShape
from pagedweight_jax.paging.allocator import FrameAllocator
from pallas_kernels.paged_attention import KvLayout

SHAPES = (
    StepShape(decode_rows=4, prefill_rows=2, prefill_queries=8),
    StepShape(decode_rows=4),
    StepShape(decode_rows=2),
    StepShape(decode_rows=4, prefill_rows=1, prefill_queries=8),
)
LAYOUT = KvLayout(
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    block_size=4,
    dtype="float32",
    frame_words=32,
)
NUM_SLOTS = 6


def schedule(num_decode: int, chunks: list[tuple[str, int, int]]) -> Schedule:
    """Decode rows of requests d0, d1, ..., and (name, start, length) of prefill."""
    params = SamplingParams(temperature=0.5, top_p=0.8, top_k=-1, seed=5)
    requests = {
        name: tiny.request(name, range(10 * i, 10 * i + 10), params)
        for i, name in enumerate([*(f"d{i}" for i in range(num_decode)), "a", "b"])
    }
    for slot, request in enumerate(requests.values()):
        request.slot = NUM_SLOTS - 1 - slot
    for i in range(num_decode):
        requests[f"d{i}"].num_computed = 9
    return Schedule(
        decode=tuple(
            Chunk(requests[f"d{i}"], 9, 1, samples=True) for i in range(num_decode)
        ),
        prefill=tuple(
            Chunk(requests[n], start, size, samples=start + size == 10)
            for n, start, size in chunks
        ),
        preempted=(),
    )


@pytest.mark.parametrize(
    ("decode", "prefill", "wanted"),
    [(0, 1, 3), (1, 0, 2), (2, 0, 2), (3, 0, 1), (4, 1, 3), (1, 2, 0)],
)
def test_the_smallest_bucket_that_holds_a_schedule_is_taken(decode, prefill, wanted):
    chunks = [("a", 8 * i, 2) for i in range(prefill)]
    assert choose_shape(schedule(decode, chunks), SHAPES) == SHAPES[wanted]


def test_a_schedule_that_no_bucket_holds_is_refused():
    with pytest.raises(ValueError, match="no bucket holds 1 decode and 3 prefill rows"):
        choose_shape(schedule(1, [("a", 0, 1)] * 3), SHAPES)


def test_rows_tokens_and_frames_are_those_of_the_chunks():
    chosen = schedule(2, [("a", 0, 8), ("a", 8, 2)])
    blocks = BlockManager(FrameAllocator(40), LAYOUT)
    for chunk in chosen.chunks:
        blocks.grow(chunk.request.request_id, 10)
    shape = SHAPES[0]
    batch = build_batch(chosen, shape, blocks, NUM_SLOTS)
    flat = np.concatenate([rows.tokens.ravel() for rows in batch.rows])
    assert flat.size == shape.num_tokens
    starts = np.concatenate([rows.starts for rows in batch.rows])
    lengths = np.concatenate([rows.lengths for rows in batch.rows])
    slots = np.concatenate([rows.slots for rows in batch.rows])
    written = [table for rows in batch.rows for table in rows.written]
    used = dict(rows_of_chunks(chosen, shape))
    assert sorted(used) == [0, 1, 4, 5], "decode rows first, then those of the prefill"
    for row in range(shape.num_rows):
        if row not in used:
            assert lengths[row] == 0 and slots[row] == NUM_SLOTS
            continue
        chunk = used[row]
        first = first_token(shape, row)
        tokens = chunk.request.token_ids[chunk.start : chunk.stop]
        assert flat[first : first + chunk.length].tolist() == tokens
        assert (starts[row], lengths[row]) == (chunk.start, chunk.length)
        assert slots[row] == chunk.request.slot
        held = blocks.frames(chunk.request.request_id)[chunk.start // 4 :]
        held = held[: len(written[row])]
        np.testing.assert_array_equal(written[row][: len(held)], held)
    prefill = batch.rows[1]
    assert prefill.slots.tolist() == [3, 3], "both rows are one sequence"
    assert prefill.cached.tolist() == [0, 0]
    assert batch.rows[0].cached.tolist() == [9, 9, 0, 0]


def test_rows_that_sample_say_how_and_where_to():
    chosen = schedule(2, [("a", 0, 8), ("a", 8, 2)])
    blocks = BlockManager(FrameAllocator(40), LAYOUT)
    for chunk in chosen.chunks:
        blocks.grow(chunk.request.request_id, 10)
    shape = SHAPES[0]
    sampling = build_batch(chosen, shape, blocks, NUM_SLOTS).sampling
    nowhere = NUM_SLOTS
    # The first row of the prompt samples nothing; rows 2 and 3 are unused.
    assert sampling.slots.tolist() == [5, 4, nowhere, nowhere, nowhere, 3]
    assert sampling.token_index[[0, 1, 5]].tolist() == [0, 1, 4 + 8 + 1]
    assert sampling.temperature.tolist() == [0.5, 0.5, 0, 0, 0, 0.5]
    assert sampling.top_k.tolist() == [0] * 6
    assert sampling.seed.tolist() == [5, 5, 0, 0, 0, 5]


def test_a_token_in_flight_is_left_to_the_device():
    chosen = schedule(2, [])
    late = chosen.decode[1].request
    late.num_in_flight, late.num_computed = 2, 11
    chosen = Schedule(
        decode=(chosen.decode[0], Chunk(late, 11, 1, samples=True)),
        prefill=(),
        preempted=(),
    )
    blocks = BlockManager(FrameAllocator(40), LAYOUT)
    for chunk in chosen.chunks:
        blocks.grow(chunk.request.request_id, 12)
    batch = build_batch(chosen, SHAPES[2], blocks, NUM_SLOTS)
    seen = chosen.decode[0].request.token_ids[-1]
    assert batch.rows[0].tokens.tolist() == [[seen], [NEWEST]]
    assert batch.sampling.position.tolist() == [0, 2]
