"""The compiled programs of a step.

    forward           reads the pool; enters blocks in the slots; logits of the rows
    commit_kv         writes the step's keys and values to the pool
    sample            the next tokens, into the slots; results for the host
    token_logprobs    of the sampled tokens, where a row wants them
    prompt_logprobs   of the prompts' tokens, where a row wants them

All are compiled ahead of time for a fixed list of shapes, and only these executables
are ever called: a change of batch or precision cannot trace or compile anything. What
the host tells of a step is one packed array, and so is what the step tells the host.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.stages import Compiled, Lowered
from jaxtyping import Array, Float, Float32, Int32

from pagedweight_jax.engine.packing import num_words, pack, unpack
from pagedweight_jax.engine.sampling import (
    SAMPLING_KINDS,
    SamplingInputs,
    SamplingKind,
    TokenLogprobs,
    sample,
    token_logprobs,
)
from pagedweight_jax.engine.slots import (
    Slots,
    abstract_slots,
    enter_blocks,
    rows_of,
    tokens_of,
)
from pagedweight_jax.engine.step import (
    Batch,
    ForwardOutput,
    Params,
    StepResults,
    StepShape,
    abstract_batch,
    abstract_results,
    array,
)
from pagedweight_jax.models.interface import (
    ModelInputs,
    ModelOutputs,
    Pages,
    RoutingCounts,
)
from pagedweight_jax.paging import pool as paged_pool
from pagedweight_jax.paging.pool import PoolLayout
from pallas_kernels.paged_attention import KvLayout

_LOGITS_ROWS = 32  # prompt positions whose logits exist at one time


@runtime_checkable
class Model(Protocol):
    """What the engine asks of a model."""

    def __call__(self, inputs: ModelInputs, layout: KvLayout) -> ModelOutputs:
        """Runs all layers."""
        ...

    def logits(self, hidden: Float[Array, "M D"]) -> Float32[Array, "M V"]:
        """Computes logits."""
        ...


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Executables by shape, or by sampled rows.

    Attributes:
      forward: (params, pool, pages, slots, words) to (`ForwardOutput`, slots).
      commit_kv: (pool, fresh_kv, slots, words) to the pool.
      sample: (logits, sampling inputs, routing, slots) to (packed `StepResults`, their
        tokens, slots).
      token_logprobs: (logits, tokens) to `TokenLogprobs`.
      prompt_logprobs: (params, hidden, targets) to `TokenLogprobs`, from the hidden
        states of the whole step and the targets of its prefill group.
      commit_planes: (pool, words, frames) to the pool.
      results: what the packed results unpack to.
      shapes: the buckets.
      slots: sizes of the slots.
    """

    forward: dict[StepShape, Compiled]
    commit_kv: dict[StepShape, Compiled]
    sample: dict[tuple[int, SamplingKind], Compiled]
    token_logprobs: dict[int, Compiled]
    prompt_logprobs: dict[StepShape, Compiled]
    commit_planes: Compiled
    results: dict[int, StepResults]
    shapes: tuple[StepShape, ...]
    slots: Slots

    def empty_slots(self) -> Slots:
        """Allocates the slots."""
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self.slots)

    def workspace_bytes(self) -> int:
        """Returns the most bytes that a step needs beside parameters and pool."""
        compiled = [
            *self.forward.values(),
            *self.commit_kv.values(),
            *self.sample.values(),
            *self.token_logprobs.values(),
            *self.prompt_logprobs.values(),
            self.commit_planes,
        ]
        slots = 4 * num_words(self.slots)
        return slots + max(_extra_bytes(c) for c in compiled)


def _extra_bytes(compiled: Compiled) -> int:
    memory = compiled.memory_analysis()
    if memory is None:
        return 0
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes + max(0, fresh)


def compile_programs(
    graphdef: nnx.GraphDef[Any],
    params: Params,
    shapes: tuple[StepShape, ...],
    *,
    pool: PoolLayout,
    kv: KvLayout,
    pages: Pages | None,
    max_blocks: int,
    staging_frames: int,
) -> Programs:
    """Compiles every program for every shape.

    Args:
      graphdef: the model's structure.
      params: its parameters, or their shapes.
      shapes: the buckets that the engine will use.
      pool: sizes of the pool.
      kv: layout of the key-value blocks.
      pages: page arrays of any content; None for a model without pages.
      max_blocks: blocks of the longest sequence.
      staging_frames: frames that one plane commit writes.
    """
    frames = array(jnp.uint32, pool.num_frames, pool.frame_words)
    params, pages = _abstract(params), _abstract(pages)
    slots = abstract_slots(max(s.decode_rows for s in shapes), max_blocks, kv)
    forward, commit_kv, prompt_logprobs = {}, {}, {}
    outputs: dict[int, ForwardOutput] = {}  # by rows
    for shape in shapes:
        words = array(jnp.int32, num_words(abstract_batch(shape, kv)))
        forward[shape] = _lower(
            _forward_program(graphdef, shape, kv),
            *(params, frames, pages, slots, words),
            donate="slots",
        )
        output: ForwardOutput = _abstract(forward[shape].out_info[0])
        outputs[shape.num_rows] = output
        commit_kv[shape] = _lower(
            _commit_kv_program(shape, kv),
            *(frames, output.fresh_kv, slots, words),
            donate="pool",
        )
        if shape.prefill_rows:
            targets = array(jnp.int32, shape.prefill_rows * shape.prefill_queries)
            prompt_logprobs[shape] = _lower(
                _prompt_logprobs_program(graphdef), params, output.hidden, targets
            )
    lowered = {
        "forward": forward,
        "commit_kv": commit_kv,
        "prompt_logprobs": prompt_logprobs,
        "commit_planes": _lower(
            paged_pool.commit_planes,
            frames,
            array(jnp.uint32, staging_frames, pool.frame_words),
            array(jnp.int32, staging_frames),
            donate="pool",
        ),
        **_lower_by_rows(outputs, slots),
    }
    return Programs(
        **_compile(lowered),
        results={rows: abstract_results(out) for rows, out in outputs.items()},
        shapes=shapes,
        slots=slots,
    )


def _lower_by_rows(outputs: dict[int, ForwardOutput], slots: Slots) -> dict[str, Any]:
    """Lowers what follows the logits of so many rows, whatever the step's shape."""
    return {
        "sample": {
            (rows, kind): _lower(
                _sample_program(kind),
                *(output.logits, output.sampling, output.routing, slots),
                donate="slots",
            )
            for rows, output in outputs.items()
            for kind in SAMPLING_KINDS
        },
        "token_logprobs": {
            rows: _lower(token_logprobs, output.logits, array(jnp.int32, rows))
            for rows, output in outputs.items()
        },
    }


def _lower(
    program: Callable[..., Any], *arguments: Any, donate: str | None = None
) -> Lowered:
    return jax.jit(program, donate_argnames=donate).lower(*arguments)


def _compile(lowered: dict[str, Any]) -> dict[str, Any]:
    """Compiles a tree of programs side by side: it is most of an engine's start."""
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        futures = jax.tree.map(lambda program: threads.submit(program.compile), lowered)
        return jax.tree.map(lambda future: future.result(), futures)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def _forward_program(
    graphdef: nnx.GraphDef[Any], shape: StepShape, kv: KvLayout
) -> Callable[..., tuple[ForwardOutput, Slots]]:
    def forward(
        params: Params, pool: Array, pages: Pages | None, slots: Slots, words: Array
    ) -> tuple[ForwardOutput, Slots]:
        batch: Batch = unpack(words, abstract_batch(shape, kv))
        block_frames = slots.block_frames
        for rows in batch.rows:
            block_frames = enter_blocks(block_frames, rows, kv)
        inputs = ModelInputs(
            tokens=tuple(tokens_of(rows, slots.tokens) for rows in batch.rows),
            rows=tuple(rows_of(rows, block_frames) for rows in batch.rows),
            pool=pool,
            pages=pages,
        )
        with _matmul_precision(params):
            output = _forward(nnx.merge(graphdef, params), inputs, batch.sampling, kv)
        return output, Slots(tokens=slots.tokens, block_frames=block_frames)

    return forward


def _forward(
    model: Model, inputs: ModelInputs, sampling: SamplingInputs, kv: KvLayout
) -> ForwardOutput:
    outputs = model(inputs, kv)
    return ForwardOutput(
        logits=model.logits(outputs.hidden[sampling.token_index]),
        sampling=sampling,
        routing=outputs.routing,
        hidden=outputs.hidden,
        fresh_kv=outputs.fresh_kv,
    )


def _commit_kv_program(shape: StepShape, kv: KvLayout) -> Callable[..., Array]:
    queries = tuple(q for _, q in shape.groups)

    def commit_kv(pool: Array, fresh_kv: Array, slots: Slots, words: Array) -> Array:
        batch: Batch = unpack(words, abstract_batch(shape, kv))
        rows = tuple(rows_of(rows, slots.block_frames) for rows in batch.rows)
        return paged_pool.commit_kv(pool, fresh_kv, rows, kv, queries)

    return commit_kv


def _sample_program(kind: SamplingKind) -> Callable[..., tuple[Array, Array, Slots]]:
    def sample_rows(
        logits: Array, inputs: SamplingInputs, routing: RoutingCounts, slots: Slots
    ) -> tuple[Array, Array, Slots]:
        sampled = sample(logits, inputs, kind)
        tokens = slots.tokens.at[inputs.slots].set(sampled.tokens, mode="drop")
        results = jnp.asarray(pack(StepResults(sampled=sampled, routing=routing)))
        new = Slots(tokens=tokens, block_frames=slots.block_frames)
        return results, sampled.tokens, new

    return sample_rows


def _prompt_logprobs_program(
    graphdef: nnx.GraphDef[Any],
) -> Callable[..., TokenLogprobs]:
    def prompt_logprobs(params: Params, hidden: Array, targets: Array) -> TokenLogprobs:
        prefill = hidden[hidden.shape[0] - targets.shape[0] :]
        with _matmul_precision(params):
            return _prompt_logprobs(nnx.merge(graphdef, params), prefill, targets)

    return prompt_logprobs


def _matmul_precision(params: Params) -> AbstractContextManager[None]:
    """Keeps float32 what it says: a GPU would multiply it as TF32 otherwise."""
    exact = any(a.dtype == jnp.float32 for a in jax.tree.leaves(params))
    return jax.default_matmul_precision("highest" if exact else "default")


def _prompt_logprobs(
    model: Model, hidden: Float[Array, "T D"], targets: Int32[Array, "T"]
) -> TokenLogprobs:
    """Computes log probabilities of a prompt a few positions at a time.

    All logits of a long prompt at once would be the largest array of the engine.
    """
    size = min(_LOGITS_ROWS, len(targets))
    padding = -len(targets) % size
    hidden = jnp.pad(hidden, ((0, padding), (0, 0)))
    targets = jnp.pad(targets, (0, padding))

    def some(part: tuple[Array, Array]) -> TokenLogprobs:
        return token_logprobs(model.logits(part[0]), part[1])

    width = hidden.shape[1]
    parts = lax.map(some, (hidden.reshape(-1, size, width), targets.reshape(-1, size)))
    count = len(targets) - padding
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:count], parts)
