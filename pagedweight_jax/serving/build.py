"""From a model in memory to an engine: split the budget, compile, bring the planes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pagedweight_jax.engine.block_manager import BlockManager
from pagedweight_jax.engine.engine import Engine
from pagedweight_jax.engine.memory import MemoryPlan, parse_bytes
from pagedweight_jax.engine.precision import PrecisionControl
from pagedweight_jax.engine.programs import Programs, compile_programs
from pagedweight_jax.engine.scheduler import Scheduler, SchedulerLimits
from pagedweight_jax.engine.step import StepShape
from pagedweight_jax.models.interface import Pages
from pagedweight_jax.paging import planner
from pagedweight_jax.paging import pool as paged_pool
from pagedweight_jax.paging.allocator import FrameAllocator
from pagedweight_jax.paging.host_store import HostStore
from pagedweight_jax.paging.migration import Migrator
from pagedweight_jax.paging.planner import PlannerLimits, Watermarks
from pagedweight_jax.paging.staging import PageableStaging, Transfer
from pagedweight_jax.paging.statistics import RoutingStatistics, initial
from pagedweight_jax.paging.table import BLOCK_PLANES, PageTable, empty_table
from pagedweight_jax.serving.load import LoadedModel
from pagedweight_jax.serving.options import ServeOptions
from pagedweight_jax.serving.sizing import (
    STAGING_FRAMES,
    kv_layout,
    needs_of,
    split_memory,
    step_shapes,
    workspace,
)
from pallas_kernels.paged_attention import KvLayout


@dataclass(frozen=True, kw_only=True)
class Built:
    """A running engine and what was decided for it."""

    engine: Engine
    memory: MemoryPlan
    kv: KvLayout
    allocator: FrameAllocator
    migrator: Migrator | None
    max_model_len: int
    shapes: tuple[StepShape, ...]


def build_engine(
    model: LoadedModel,
    options: ServeOptions,
    *,
    put: Callable[[np.ndarray], Transfer] | None = None,
) -> Built:
    """Splits the budget, compiles all steps and brings the first planes.

    Args:
      model: what to serve.
      options: checked options.
      put: starts a copy of planes to the device, in place of the fastest way; tests
        pass one that fails.
    Raises:
      ValueError: if the budget is too small or an option does not fit the model.
    """
    _check_pin(model, options)
    kv = kv_layout(
        model.config, options.dtype, options.block_size, options.kv_cache_dtype
    )
    shapes = step_shapes(options)
    limits = _limits(options)
    plan = _first_plan(model, options, limits, 4 * kv.frame_words)
    memory, max_model_len, programs = _fit(model, options, kv, shapes, limits)
    allocator = FrameAllocator(memory.pool.num_frames)
    blocks = BlockManager(allocator, kv)
    migrator = _migrator(model, allocator, put)
    control, statistics = _control(model, options, blocks, limits)
    engine = Engine(
        programs=programs,
        params=model.params,
        pool=paged_pool.allocate(memory.pool),
        allocator=allocator,
        blocks=blocks,
        scheduler=Scheduler(blocks, _scheduler_limits(shapes)),
        max_steps_in_flight=options.max_steps_in_flight,
        migrator=migrator,
        control=control,
        statistics=statistics,
        tokenizer=model.tokenizer,
    )
    if migrator is not None and plan is not None:
        migrator.adopt(plan, step=0)
    engine.settle()
    return Built(
        engine=engine,
        memory=memory,
        kv=kv,
        allocator=allocator,
        migrator=migrator,
        max_model_len=max_model_len,
        shapes=shapes,
    )


def _limits(options: ServeOptions) -> PlannerLimits:
    if options.limits is not None:
        return options.limits
    if options.expert_budget is not None:
        return PlannerLimits(floors=(1, 1, 1))  # clipped to the seed bits
    return PlannerLimits()


def _check_pin(model: LoadedModel, options: ServeOptions) -> None:
    if options.pin_bits is None or model.sensitivity is None:
        return
    low, high = model.sensitivity.seed_bits, model.sensitivity.parent_bits
    if not low <= options.pin_bits <= high:
        raise ValueError(
            f"pin_bits={options.pin_bits} but the checkpoint holds {low} to {high}"
            " bits; choose one of these, or convert with other --seed_bits and"
            " --parent_bits"
        )


def _fit(
    model: LoadedModel,
    options: ServeOptions,
    kv: KvLayout,
    shapes: tuple[StepShape, ...],
    limits: PlannerLimits,
) -> tuple[MemoryPlan, int, Programs]:
    """Splits the budget and compiles the steps for it.

    The workspace that is reserved is a bound for the plain-JAX kernels. Where the
    compiled steps turn out to need more, the budget is split again with what they
    need, which does not depend on the size of the pool, and they are compiled again.

    Returns:
      The split, the longest sequence, and the programs.
    """
    reserved = workspace(model, kv, shapes)
    while True:
        needs = needs_of(model, options, kv, reserved, limits)
        memory, max_model_len = split_memory(model, options, kv, needs)
        programs = compile_programs(
            model.graphdef,
            model.params,
            shapes,
            pool=memory.pool,
            kv=kv,
            pages=_empty_pages(model),
            max_blocks=-(-max_model_len // kv.block_size),
            staging_frames=STAGING_FRAMES,
        )
        if programs.workspace_bytes() <= reserved:
            return memory, max_model_len, programs
        reserved = programs.workspace_bytes()


def _empty_pages(model: LoadedModel) -> Pages | None:
    if model.pages is None:
        return None
    table = _empty_table(model.pages)
    return Pages(bits=table.bits, frames=table.frames)  # pyright: ignore


def _empty_table(pages: HostStore) -> PageTable:
    return empty_table(pages.num_layers, pages.num_experts, pages.parent_bits, 1)


def _migrator(
    model: LoadedModel,
    allocator: FrameAllocator,
    put: Callable[[np.ndarray], Transfer] | None,
) -> Migrator | None:
    if model.pages is None:
        return None
    table = _empty_table(model.pages)
    return Migrator(
        model.pages,
        allocator,
        table,
        staging_frames=STAGING_FRAMES,
        staging=None if put is None else PageableStaging(put),
    )


def _control(
    model: LoadedModel,
    options: ServeOptions,
    blocks: BlockManager,
    limits: PlannerLimits,
) -> tuple[PrecisionControl | None, RoutingStatistics | None]:
    if model.sensitivity is None or _is_fixed(options):
        return None, None
    low = max(1, blocks.num_free // 64)
    marks = options.watermarks or Watermarks(
        low_blocks=low, high_blocks=3 * low, dwell_steps=16
    )
    control = PrecisionControl(
        sensitivity=model.sensitivity, limits=limits, watermarks=marks
    )
    return control, initial(model.sensitivity)


def _is_fixed(options: ServeOptions) -> bool:
    return options.pin_bits is not None or options.expert_budget is not None


def _first_plan(
    model: LoadedModel,
    options: ServeOptions,
    limits: PlannerLimits,
    frame_bytes: int,
) -> planner.Plan | None:
    """Makes the plan to start with: the only one of an engine of fixed precision.

    Otherwise all pages come up to their floors, for which the budget has room whatever
    the watermarks say; the engine raises them from there.
    """
    if model.pages is None or model.sensitivity is None:
        return None
    table = _empty_table(model.pages)
    statistics = initial(model.sensitivity)
    inputs = (table, model.sensitivity, statistics, limits)
    if options.pin_bits is not None:
        bits = np.full_like(table.desired, options.pin_bits)
        return planner.plan_exactly(*inputs, bits=bits, frame_bytes=frame_bytes)
    if options.expert_budget is None:
        bits = planner.floors(model.sensitivity, statistics, limits)
        return planner.plan_exactly(
            *inputs, bits=bits, frame_bytes=frame_bytes, reason="floors"
        )
    budget = parse_bytes(options.expert_budget)
    plan = planner.plan_raise(
        *inputs, slack_bytes=budget, frame_bytes=frame_bytes, reason="expert_budget"
    )
    if not plan.feasible:
        floors = planner.floors(model.sensitivity, statistics, limits)
        least = int(floors.sum(axis=(0, 1)) @ np.array(BLOCK_PLANES)) * frame_bytes
        raise ValueError(
            f"expert_budget={options.expert_budget!r} is {budget} bytes but all pages"
            f" at their floors take {least}; raise it, or lower the floors in limits"
        )
    return plan


def _scheduler_limits(shapes: tuple[StepShape, ...]) -> SchedulerLimits:
    largest = max(shapes, key=lambda s: s.num_tokens)
    return SchedulerLimits(
        max_num_seqs=largest.decode_rows,
        prefill_rows=largest.prefill_rows,
        prefill_queries=largest.prefill_queries,
    )
