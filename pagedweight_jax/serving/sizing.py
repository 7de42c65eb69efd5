"""How large things are: buckets, key-value blocks, workspace, and the split budget."""

import jax
import numpy as np

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.engine.memory import (
    MemoryPlan,
    Needs,
    device_memory_bytes,
    parse_bytes,
    plan_memory,
    step_workspace_bytes,
)
from pagedweight_jax.engine.step import StepShape
from pagedweight_jax.models.qwen2_moe import layer_runs
from pagedweight_jax.paging import planner
from pagedweight_jax.paging.migration import MAX_IN_FLIGHT
from pagedweight_jax.paging.planner import PlannerLimits
from pagedweight_jax.paging.statistics import RoutingStatistics, initial
from pagedweight_jax.paging.table import BLOCK_PLANES
from pagedweight_jax.serving.load import LoadedModel
from pagedweight_jax.serving.options import Dtype, KvCacheDtype, ServeOptions
from pallas_kernels.bitplane import plane_words
from pallas_kernels.paged_attention import KvLayout
from pallas_kernels.paged_attention.layout import KvDtype

STAGING_FRAMES = 64
"""Frames of a staging array: the most that one commit of planes writes."""

_PREFILL_QUERIES = 64


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


def kv_layout(
    config: ModelConfig,
    dtype: Dtype,
    block_size: int,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> KvLayout:
    """Returns the layout of key-value blocks in frames of one down plane."""
    stored: dict[KvCacheDtype, KvDtype] = {
        "auto": "float32" if dtype == "float32" else "bfloat16",
        "bfloat16": "bfloat16",
        "fp8_e4m3": "float8_e4m3fn",
    }
    return KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=stored[kv_cache_dtype],
        frame_words=plane_words(config.hidden_size, config.expert_width),
    )


def workspace(model: LoadedModel, kv: KvLayout, shapes: tuple[StepShape, ...]) -> int:
    """Bounds what any step needs beside parameters and pool, with plain-JAX kernels."""
    config = model.config
    return max(
        step_workspace_bytes(
            shape,
            kv,
            hidden_size=config.hidden_size,
            inner_size=max(
                3 * config.num_heads * config.head_dim,
                config.shared_expert_width,
                0 if all(config.moe_layers) else config.dense_width,
            ),
            vocab_size=config.vocab_size,
            weight_bytes=_weight_bytes(model, shape),
        )
        for shape in shapes
    )


def _weight_bytes(model: LoadedModel, shape: StepShape) -> int:
    """Bytes of weights that a step holds a second time, or in another form.

    The scan over layers copies what it slices out of the stacked parameters. Paged
    experts are dequantised one at a time (codes, weights and their operands). For a
    single row XLA's CPU backend widens the whole head to float32.
    """
    config = model.config
    layers = [
        sum(leaf.nbytes for leaf in jax.tree.leaves(model.params["runs"][run]))
        // length
        for run, (_, length) in enumerate(layer_runs(config))
    ]
    expert = 4 * 4 * 3 * config.hidden_size * config.expert_width
    head = 4 * config.vocab_size * config.hidden_size
    return max(
        *layers,
        expert if model.pages is not None else 0,
        head if shape.num_rows == 1 and jax.default_backend() == "cpu" else 0,
    )


def needs_of(
    model: LoadedModel,
    options: ServeOptions,
    kv: KvLayout,
    workspace_bytes: int,
    limits: PlannerLimits,
) -> Needs:
    """Collects what must fit in the budget at the least.

    Raises:
      ValueError: if max_model_len is more than the model's positions.
    """
    max_model_len = options.max_model_len or kv.block_size
    if max_model_len > model.config.max_position_embeddings:
        raise ValueError(
            f"max_model_len={max_model_len} is more than the model's"
            f" {model.config.max_position_embeddings} positions; lower it"
        )
    staging = MAX_IN_FLIGHT * STAGING_FRAMES * kv.frame_words * 4
    return Needs(
        dense_bytes=model.dense_bytes,
        side_table_bytes=0 if model.pages is None else model.side_table_bytes,
        reserve_bytes=workspace_bytes + (0 if model.pages is None else staging),
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
    one_bit = num_layers * num_experts * int(blocks.sum())
    if options.pin_bits is not None:
        return one_bit * options.pin_bits
    if options.expert_budget is not None:
        frames = parse_bytes(options.expert_budget) // frame_bytes
        return min(frames, one_bit * model.sensitivity.parent_bits)
    even = np.full((num_layers, num_experts), 1 / num_experts, np.float32)
    worst = RoutingStatistics(even, initial(model.sensitivity).features)
    floors = planner.floors(model.sensitivity, worst, limits)
    return int(floors.sum(axis=(0, 1)) @ blocks)


def split_memory(
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
