"""From a schedule to the arrays of a step."""

from collections.abc import Sequence

import numpy as np

from pagedweight_jax.engine.block_manager import BlockManager
from pagedweight_jax.engine.sampling import SamplingInputs
from pagedweight_jax.engine.scheduler import Chunk, Schedule
from pagedweight_jax.engine.slots import NEWEST, RowInputs, blocks_per_row
from pagedweight_jax.engine.step import Batch, StepShape


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
    schedule: Schedule, shape: StepShape, blocks: BlockManager, num_slots: int
) -> Batch:
    """Fills the arrays of a bucket; unused rows have length 0."""
    groups = [schedule.decode, schedule.prefill][: len(shape.groups)]
    return Batch(
        rows=tuple(
            _rows(chunks, size, blocks, num_slots)
            for chunks, size in zip(groups, shape.groups, strict=True)
        ),
        sampling=_sampling(schedule, shape, num_slots),
    )


def _rows(
    chunks: Sequence[Chunk],
    size: tuple[int, int],
    blocks: BlockManager,
    num_slots: int,
) -> RowInputs:
    num_rows, num_queries = size
    layout = blocks.layout
    starts, lengths, cached = np.zeros((3, num_rows), np.int32)
    slots = np.full(num_rows, num_slots, np.int32)
    tokens = np.zeros(size, np.int32)
    most = blocks_per_row(num_queries, layout)
    written = np.zeros((num_rows, most, layout.frames_per_block), np.int32)
    for row, chunk in enumerate(chunks):
        request = chunk.request
        slots[row] = chunk.slot
        starts[row], lengths[row] = chunk.start, chunk.length
        cached[row] = request.num_computed
        known = request.token_ids[chunk.start : chunk.stop]
        tokens[row, : chunk.length] = known or NEWEST
        first = chunk.start // layout.block_size
        held = blocks.frames(request.request_id)[first : first + most]
        written[row, : len(held)] = held
    return RowInputs(
        slots=slots,  # pyright: ignore
        tokens=tokens,  # pyright: ignore
        starts=starts,  # pyright: ignore
        lengths=lengths,  # pyright: ignore
        cached=cached,  # pyright: ignore
        written=written,  # pyright: ignore
    )


def _sampling(schedule: Schedule, shape: StepShape, num_slots: int) -> SamplingInputs:
    token_index, top_k, position = np.zeros((3, shape.num_rows), np.int32)
    temperature = np.zeros(shape.num_rows, np.float32)
    top_p = np.ones(shape.num_rows, np.float32)
    seed = np.zeros(shape.num_rows, np.uint32)
    slots = np.full(shape.num_rows, num_slots, np.int32)
    for row, chunk in rows_of_chunks(schedule, shape):
        if not chunk.samples:
            continue
        request, params = chunk.request, chunk.request.params
        token_index[row] = first_token(shape, row) + chunk.length - 1
        temperature[row], top_p[row] = params.temperature, params.top_p
        top_k[row] = max(0, params.top_k)
        seed[row] = request.seed
        position[row] = request.num_output_tokens
        slots[row] = chunk.slot
    return SamplingInputs(
        token_index=token_index,  # pyright: ignore
        temperature=temperature,  # pyright: ignore
        top_p=top_p,  # pyright: ignore
        top_k=top_k,  # pyright: ignore
        seed=seed,  # pyright: ignore
        position=position,  # pyright: ignore
        slots=slots,  # pyright: ignore
    )
