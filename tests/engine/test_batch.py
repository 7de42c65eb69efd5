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
MAX_BLOCKS = 6


def schedule(num_decode: int, chunks: list[tuple[str, int, int]]) -> Schedule:
    """Decode rows of requests d0, d1, ..., and (name, start, length) of prefill."""
    params = SamplingParams(temperature=0.5, top_p=0.8, top_k=-1, seed=5)
    requests = {
        name: tiny.request(name, range(10 * i, 10 * i + 10), params)
        for i, name in enumerate([*(f"d{i}" for i in range(num_decode)), "a", "b"])
    }
    for i in range(num_decode):
        requests[f"d{i}"].num_computed = 9
    return Schedule(
        decode=tuple(Chunk(requests[f"d{i}"], 9, 1) for i in range(num_decode)),
        prefill=tuple(Chunk(requests[n], start, size) for n, start, size in chunks),
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
    batch = build_batch(chosen, shape, blocks, MAX_BLOCKS)
    flat = np.concatenate([tokens.ravel() for tokens in batch.tokens])
    assert flat.size == shape.num_tokens
    starts = np.concatenate([rows.starts for rows in batch.rows])
    lengths = np.concatenate([rows.lengths for rows in batch.rows])
    frames = np.concatenate([rows.block_frames for rows in batch.rows])
    sampling = batch.sampling
    used = dict(rows_of_chunks(chosen, shape))
    assert sorted(used) == [0, 1, 4, 5], "decode rows first, then those of the prefill"
    for row in range(shape.num_rows):
        if row not in used:
            assert lengths[row] == 0 and sampling.temperature[row] == 0
            continue
        chunk = used[row]
        first = first_token(shape, row)
        tokens = chunk.request.token_ids[chunk.start : chunk.start + chunk.length]
        assert flat[first : first + chunk.length].tolist() == tokens
        assert (starts[row], lengths[row]) == (chunk.start, chunk.length)
        assert sampling.token_index[row] == first + chunk.length - 1
        held = blocks.frames(chunk.request.request_id)
        np.testing.assert_array_equal(frames[row, : len(held)], held)
        assert not frames[row, len(held) :].any(), "blocks that are not held are null"
        assert (sampling.top_k[row], sampling.seed[row]) == (0, 5)
    prefill = batch.rows[1]
    assert prefill.sequences.tolist() == [0, 0], "both rows are one sequence"
    assert prefill.cached.tolist() == [0, 0]
    assert batch.rows[0].cached.tolist() == [9, 9, 0, 0]
    assert batch.rows[0].sequences.tolist() == [0, 1, -1, -1]
