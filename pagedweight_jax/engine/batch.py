"""From a schedule to the arrays of a step."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from pagedweight_jax.engine.block_manager import BlockManager
from pagedweight_jax.engine.sampling import SamplingInputs
from pagedweight_jax.engine.scheduler import Chunk, Schedule
from pagedweight_jax.engine.step import Batch, StepShape
from pallas_kernels.paged_attention import Rows


def choose_shape(schedule: Schedule, shapes: Sequence[StepShape]) -> StepShape:
    """Returns the smallest bucket that holds the schedule.

    Raises:
      ValueError: if none does.
    """
    decode, prefill = len(schedule.decode), len(schedule.prefill)
    for shape in sorted(shapes, key=lambda s: s.num_tokens):
        if decode <= shape.decode_rows and prefill <= shape.prefill_rows:
            return shape
    raise ValueError(
        f"no bucket holds {decode} decode and {prefill} prefill rows; the buckets are"
        f" {list(shapes)}"
    )


def rows_of_chunks(schedule: Schedule, shape: StepShape) -> list[tuple[int, Chunk]]:
    """Numbers the rows of a step: decode rows first, then those of the prefill."""
    prefill = [(shape.decode_rows + i, c) for i, c in enumerate(schedule.prefill)]
    return list(enumerate(schedule.decode)) + prefill


def first_token(shape: StepShape, row: int) -> int:
    """Returns where a row's tokens begin in the step's flat token axis."""
    if row < shape.decode_rows:
        return row
    return shape.decode_rows + (row - shape.decode_rows) * shape.prefill_queries


def build_batch(
    schedule: Schedule, shape: StepShape, blocks: BlockManager, max_blocks: int
) -> Batch:
    """Fills the arrays of a bucket; unused rows have length 0."""
    groups = [schedule.decode, schedule.prefill][: len(shape.groups)]
    pairs = list(zip(groups, shape.groups, strict=True))
    return Batch(
        tokens=tuple(_tokens(chunks, *size) for chunks, size in pairs),  # pyright: ignore
        rows=tuple(
            _rows(chunks, size[0], blocks, max_blocks) for chunks, size in pairs
        ),
        sampling=_sampling(schedule, shape),
    )


def _tokens(
    chunks: Sequence[Chunk], num_rows: int, num_queries: int
) -> Int32[np.ndarray, "R Q"]:
    tokens = np.zeros((num_rows, num_queries), np.int32)
    for row, chunk in enumerate(chunks):
        stop = chunk.start + chunk.length
        tokens[row, : chunk.length] = chunk.request.token_ids[chunk.start : stop]
    return tokens


def _rows(
    chunks: Sequence[Chunk], num_rows: int, blocks: BlockManager, max_blocks: int
) -> Rows:
    starts, lengths, cached = np.zeros((3, num_rows), np.int32)
    sequences = np.full(num_rows, -1, np.int32)
    frames_per_block = blocks.layout.frames_per_block
    frames = np.zeros((num_rows, max_blocks, frames_per_block), np.int32)
    numbers: dict[str, int] = {}
    for row, chunk in enumerate(chunks):
        request = chunk.request
        starts[row], lengths[row] = chunk.start, chunk.length
        cached[row] = request.num_computed
        sequences[row] = numbers.setdefault(request.request_id, len(numbers))
        held = blocks.frames(request.request_id)
        frames[row, : len(held)] = held
    return Rows(
        starts=starts,  # pyright: ignore
        lengths=lengths,  # pyright: ignore
        cached=cached,  # pyright: ignore
        sequences=sequences,  # pyright: ignore
        block_frames=frames,  # pyright: ignore
    )


def _sampling(schedule: Schedule, shape: StepShape) -> SamplingInputs:
    token_index, top_k, position = np.zeros((3, shape.num_rows), np.int32)
    temperature = np.zeros(shape.num_rows, np.float32)
    top_p = np.ones(shape.num_rows, np.float32)
    seed = np.zeros(shape.num_rows, np.uint32)
    for row, chunk in rows_of_chunks(schedule, shape):
        request, params = chunk.request, chunk.request.params
        token_index[row] = first_token(shape, row) + chunk.length - 1
        temperature[row], top_p[row] = params.temperature, params.top_p
        top_k[row] = max(0, params.top_k)
        seed[row] = request.seed
        position[row] = len(request.output_token_ids)
    return SamplingInputs(
        token_index=token_index,  # pyright: ignore
        temperature=temperature,  # pyright: ignore
        top_p=top_p,  # pyright: ignore
        top_k=top_k,  # pyright: ignore
        seed=seed,  # pyright: ignore
        position=position,  # pyright: ignore
    )
