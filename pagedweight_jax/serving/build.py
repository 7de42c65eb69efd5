"""From a folder to an engine: load, split the budget, compile, bring the planes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from checkpoints_tools.huggingface import load_parameters
from pagedweight_jax.checkpoint import Checkpoint, open_checkpoint
from pagedweight_jax.config import ModelConfig, read_config
from pagedweight_jax.engine.block_manager import BlockManager
from pagedweight_jax.engine.engine import Engine, PrecisionControl
from pagedweight_jax.engine.memory import (
    MemoryPlan,
    Needs,
    device_memory_bytes,
    parse_bytes,
    plan_memory,
    workspace_bytes,
)
from pagedweight_jax.engine.scheduler import Scheduler, SchedulerLimits
from pagedweight_jax.engine.step import Params, StepShape, compile_programs
from pagedweight_jax.models.interface import Pages
from pagedweight_jax.models.moe import SideTableShapes
from pagedweight_jax.models.qwen2_moe import Qwen2Moe, layer_runs
from pagedweight_jax.paging import planner
from pagedweight_jax.paging import pool as paged_pool
from pagedweight_jax.paging.allocator import FrameAllocator
from pagedweight_jax.paging.host_store import HostStore
from pagedweight_jax.paging.migration import (
    MAX_IN_FLIGHT,
    Migrator,
    Transfer,
    device_put_transfer,
)
from pagedweight_jax.paging.planner import PlannerLimits, Watermarks
from pagedweight_jax.paging.statistics import RoutingStatistics, initial
from pagedweight_jax.paging.table import BLOCK_PLANES, PageTable, empty_table
from pagedweight_jax.sensitivity import Sensitivity
from pagedweight_jax.serving.options import ServeOptions
from pallas_kernels.bitplane import plane_words
from pallas_kernels.paged_attention import KvLayout
from pallas_kernels.side_tables import AffineTables

_PREFILL_QUERIES = 64
_STAGING_FRAMES = 64


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model in memory; ``pages`` is what the pool will be filled from."""

    config: ModelConfig
    graphdef: nnx.GraphDef[Qwen2Moe]
    params: Params
    tokenizer: Tokenizer | None
    pages: HostStore | None = None
    sensitivity: Sensitivity | None = None

    @property
    def side_table_bytes(self) -> int:
        """Bytes of the paged experts' side tables."""
        return sum(a.nbytes for path, a in self._leaves() if "experts" in path)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all other parameters; experts that are not paged included."""
        total = sum(a.nbytes for _, a in self._leaves())
        return total if self.pages is None else total - self.side_table_bytes

    def _leaves(self) -> list[tuple[str, jax.Array]]:
        leaves = jax.tree.leaves_with_path(self.params)
        return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def load_model(folder: Path, options: ServeOptions) -> LoadedModel:
    """Loads a converted checkpoint, or (policy "bf16") a Hugging Face folder."""
    dtype = "bfloat16" if options.dtype == "auto" else options.dtype
    if options.policy == "bf16":
        config = read_config(folder)
        tree = load_parameters(folder, dtype)
        file = folder / "tokenizer.json"
        return LoadedModel(
            config=config,
            tokenizer=Tokenizer.from_file(str(file)) if file.is_file() else None,
            **_with_parameters(config, None, tree, dtype),
        )
    checkpoint = open_checkpoint(folder)
    layers = [checkpoint.layer(i) for i in range(checkpoint.config.num_moe_layers)]
    tree = checkpoint.dense()
    first = 0
    for run, (routed, length) in enumerate(layer_runs(checkpoint.config)):
        if routed:
            part = layers[first : first + length]
            tree["runs"][run]["mlp"]["experts"] = {
                "gate_up": jax.tree.map(_stack, *[p.gate_up for p in part]),
                "down": jax.tree.map(_stack, *[p.down for p in part]),
            }
            first += length
    return LoadedModel(
        config=checkpoint.config,
        tokenizer=Tokenizer.from_file(str(checkpoint.tokenizer_file)),
        pages=HostStore([layer.planes for layer in layers]),
        sensitivity=checkpoint.sensitivity(),
        **_with_parameters(checkpoint.config, _table_shapes(checkpoint), tree, dtype),
    )


def _stack(*arrays: np.ndarray) -> np.ndarray:
    return np.stack(arrays)


def _table_shapes(checkpoint: Checkpoint) -> SideTableShapes:
    config, form = checkpoint.config, checkpoint.format
    layer = checkpoint.layer(0)
    group_size = (0, 0)
    if isinstance(layer.gate_up, AffineTables) and isinstance(layer.down, AffineTables):
        group_size = (
            config.hidden_size // layer.gate_up.scale.shape[-2],
            config.expert_width // layer.down.scale.shape[-2],
        )
    return SideTableShapes(
        format=form.name,
        parent_bits=form.parent_bits,
        seed_bits=form.seed_bits,
        group_size=group_size,
    )


def _with_parameters(
    config: ModelConfig, tables: SideTableShapes | None, tree: dict, dtype: str
) -> dict:
    """Builds the model's structure and puts the parameters on the device."""
    kind = jnp.dtype(dtype)
    abstract = nnx.eval_shape(
        lambda: Qwen2Moe(config, tables=tables, dtype=kind, rngs=nnx.Rngs(0))
    )
    graphdef, state = nnx.split(abstract)

    def place(want: jax.ShapeDtypeStruct, have: np.ndarray) -> jax.Array:
        assert want.shape == have.shape, f"{want} came as {have.shape}"
        return jnp.asarray(have, want.dtype)

    placed = jax.tree.map(place, nnx.to_pure_dict(state), tree)
    nnx.replace_by_pure_dict(state, placed)
    return {"graphdef": graphdef, "params": state}


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


def step_shapes(options: ServeOptions) -> tuple[StepShape, ...]:
    """Returns the buckets: few and many decode rows, with and without prefill."""
    most = options.max_num_seqs
    queries = min(_PREFILL_QUERIES, options.max_num_batched_tokens)
    rows = max(1, options.max_num_batched_tokens // queries)
    decode = {min(4, most), most}
    prefill = {1, rows}
    return tuple(
        [StepShape(decode_rows=n) for n in sorted(decode)]
        + [
            StepShape(decode_rows=most, prefill_rows=r, prefill_queries=queries)
            for r in sorted(prefill)
        ]
    )


def kv_layout(config: ModelConfig, dtype: str, block_size: int) -> KvLayout:
    """Returns the layout of key-value blocks in frames of one down plane."""
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype="float32" if dtype == "float32" else "bfloat16",
        frame_words=plane_words(config.hidden_size, config.expert_width),
    )


def build_engine(
    model: LoadedModel,
    options: ServeOptions,
    *,
    put: Callable[[np.ndarray], Transfer] = device_put_transfer,
) -> Built:
    """Splits the budget, compiles all steps and brings the first planes.

    Args:
      model: what to serve.
      options: checked options.
      put: starts a copy of planes to the device; tests pass one that fails.
    Raises:
      ValueError: if the budget is too small or an option does not fit the model.
    """
    _check_pin(model, options)
    kv = kv_layout(model.config, options.dtype, options.block_size)
    shapes = step_shapes(options)
    limits = _limits(options)
    needs = _needs(model, options, kv, shapes, limits)
    memory, max_model_len = _memory(model, options, kv, needs)
    max_blocks = -(-max_model_len // kv.block_size)
    programs = compile_programs(
        model.graphdef,
        model.params,
        shapes,
        pool=memory.pool,
        kv=kv,
        pages=_empty_pages(model),
        max_blocks=max_blocks,
        staging_frames=_STAGING_FRAMES,
    )
    _check_workspace(programs.temporary_bytes(), _workspace(model, kv, shapes))
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
        max_blocks=max_blocks,
        migrator=migrator,
        control=control,
        statistics=statistics,
        tokenizer=model.tokenizer,
    )
    if migrator is not None and control is None:
        plan = _fixed_plan(model, options, limits, migrator, memory.pool.frame_bytes)
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


def _workspace(model: LoadedModel, kv: KvLayout, shapes: tuple[StepShape, ...]) -> int:
    config = model.config
    return max(
        workspace_bytes(
            shape,
            kv,
            hidden_size=config.hidden_size,
            inner_size=max(
                3 * config.num_heads * config.head_dim,
                config.shared_expert_width,
                0 if all(config.moe_layers) else config.dense_width,
            ),
            vocab_size=config.vocab_size,
            expert_bytes=_expert_bytes(model),
        )
        for shape in shapes
    )


def _expert_bytes(model: LoadedModel) -> int:
    """Bytes that the experts of one layer need while they are computed.

    Paged experts are dequantised one at a time (codes, weights and their operands);
    of dense ones, the scan over layers copies a layer's matrices.
    """
    config = model.config
    one = 3 * config.hidden_size * config.expert_width
    if model.pages is not None:
        return 4 * 4 * one
    itemsize = jax.tree.leaves(model.params)[0].dtype.itemsize
    return config.num_experts * one * itemsize


def _check_workspace(came: int, reserved: int) -> None:
    if came > reserved:
        raise RuntimeError(
            f"a compiled step needs {came} bytes of workspace but {reserved} are"
            " reserved; please report this with your model's config.json"
        )


def _needs(
    model: LoadedModel,
    options: ServeOptions,
    kv: KvLayout,
    shapes: tuple[StepShape, ...],
    limits: PlannerLimits,
) -> Needs:
    max_model_len = options.max_model_len or kv.block_size
    if max_model_len > model.config.max_position_embeddings:
        raise ValueError(
            f"max_model_len={max_model_len} is more than the model's"
            f" {model.config.max_position_embeddings} positions; lower it"
        )
    staging = MAX_IN_FLIGHT * _STAGING_FRAMES * kv.frame_words * 4
    return Needs(
        dense_bytes=model.dense_bytes,
        side_table_bytes=0 if model.pages is None else model.side_table_bytes,
        reserve_bytes=_workspace(model, kv, shapes)
        + (0 if model.pages is None else staging),
        plane_frames=_least_plane_frames(model, options, limits, 4 * kv.frame_words),
        kv_frames=-(-max_model_len // kv.block_size) * kv.frames_per_block,
    )


def _least_plane_frames(
    model: LoadedModel, options: ServeOptions, limits: PlannerLimits, frame_bytes: int
) -> int:
    """Frames of the planes when all pages are at their floors, at the worst routing.

    Floors follow the routing; they add up to most when all experts are equally hot.
    """
    if model.sensitivity is None:
        return 0
    num_layers, num_experts = model.sensitivity.expert_share.shape
    blocks = np.array(BLOCK_PLANES)
    if options.pin_bits is not None:
        return num_layers * num_experts * int(blocks.sum()) * options.pin_bits
    if options.expert_budget is not None:
        return parse_bytes(options.expert_budget) // frame_bytes
    even = np.full((num_layers, num_experts), 1 / num_experts, np.float32)
    worst = RoutingStatistics(even, initial(model.sensitivity).features)
    floors = planner.floors(model.sensitivity, worst, limits)
    return int(floors.sum(axis=(0, 1)) @ blocks)


def _memory(
    model: LoadedModel, options: ServeOptions, kv: KvLayout, needs: Needs
) -> tuple[MemoryPlan, int]:
    """Returns the split budget and the longest sequence."""
    budget = _budget(model, options, kv, needs)
    memory = plan_memory(budget, needs, frame_words=kv.frame_words, frames_per_plane=1)
    if options.max_model_len is not None:
        return memory, options.max_model_len
    kv_frames = memory.pool.num_frames - 1 - needs.plane_frames
    tokens = kv_frames // kv.frames_per_block * kv.block_size
    return memory, min(model.config.max_position_embeddings, tokens)


def _budget(
    model: LoadedModel, options: ServeOptions, kv: KvLayout, needs: Needs
) -> int:
    if options.memory_budget is not None:
        return parse_bytes(options.memory_budget)
    share = int(options.gpu_memory_utilization * device_memory_bytes())
    if jax.default_backend() == "gpu":
        return share + needs.dense_bytes + needs.side_table_bytes  # both in use already
    # On the CPU memory belongs to others as well: take what can be used at most.
    length = options.max_model_len or model.config.max_position_embeddings
    blocks = options.max_num_seqs * -(-length // kv.block_size)
    planes = 0 if model.pages is None else model.pages.nbytes
    most = needs.dense_bytes + needs.side_table_bytes + needs.reserve_bytes
    most += planes + (blocks + 64) * kv.block_bytes
    return min(share, most)


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
    put: Callable[[np.ndarray], Transfer],
) -> Migrator | None:
    if model.pages is None:
        return None
    table = _empty_table(model.pages)
    return Migrator(
        model.pages, allocator, table, staging_frames=_STAGING_FRAMES, put=put
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


def _fixed_plan(
    model: LoadedModel,
    options: ServeOptions,
    limits: PlannerLimits,
    migrator: Migrator,
    frame_bytes: int,
) -> planner.Plan:
    """Makes the one plan of an engine whose precision stays as it is."""
    assert model.sensitivity is not None
    statistics = initial(model.sensitivity)
    inputs = (migrator.table, model.sensitivity, statistics, limits)
    if options.pin_bits is not None:
        bits = np.full_like(migrator.table.desired, options.pin_bits)
        return planner.plan_exactly(*inputs, bits=bits, frame_bytes=frame_bytes)
    assert options.expert_budget is not None
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
