"""The compiled programs of a step: forward, commits and prompt log probabilities.

All are compiled ahead of time for a fixed list of shapes, and only these executables
are ever called: a change of batch or precision cannot trace or compile anything.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.stages import Compiled
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pagedweight_jax.engine.sampling import (
    Sampled,
    SamplingInputs,
    TokenLogprobs,
    sample,
    token_logprobs,
)
from pagedweight_jax.models.interface import (
    ModelInputs,
    ModelOutputs,
    Pages,
    RoutingCounts,
)
from pagedweight_jax.paging import pool as paged_pool
from pagedweight_jax.paging.pool import PoolLayout
from pallas_kernels.paged_attention import KvLayout, Rows
from pallas_kernels.pytree import pytree

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


@dataclass(frozen=True, kw_only=True, order=True)
class StepShape:
    """A bucket: rows of the decode group, and of the prefill group if there is one."""

    decode_rows: int
    prefill_rows: int = 0
    prefill_queries: int = 0

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(rows, tokens per row) of each group."""
        decode = (self.decode_rows, 1)
        if not self.prefill_rows:
            return (decode,)
        return (decode, (self.prefill_rows, self.prefill_queries))

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return sum(rows * queries for rows, queries in self.groups)

    @property
    def num_rows(self) -> int:
        """Rows of all groups; each may sample one token."""
        return self.decode_rows + self.prefill_rows


@pytree
@dataclass(frozen=True, kw_only=True)
class Batch:
    """What the host tells the device about one step."""

    tokens: tuple[Int32[Array, "_R _Q"], ...]
    rows: tuple[Rows, ...]
    sampling: SamplingInputs


@pytree
@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a forward pass returns; the pool is unchanged."""

    sampled: Sampled
    routing: RoutingCounts
    hidden: Float[Array, "T D"]
    fresh_kv: UInt32[Array, "num_layers T row_words"]


Params = nnx.State


@dataclass(frozen=True, kw_only=True)
class Programs:
    """Executables by shape.

    ``prompt_logprobs`` takes the hidden states of the whole step, and the targets of
    its prefill group.
    """

    forward: dict[StepShape, Compiled]
    commit_kv: dict[StepShape, Compiled]
    prompt_logprobs: dict[StepShape, Compiled]
    commit_planes: Compiled
    shapes: tuple[StepShape, ...] = field(default=())

    def temporary_bytes(self) -> int:
        """Returns the most bytes that one call needs beside its arguments."""
        compiled = [
            *self.forward.values(),
            *self.commit_kv.values(),
            *self.prompt_logprobs.values(),
            self.commit_planes,
        ]
        return max(_extra_bytes(c) for c in compiled)


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
      params: its parameters.
      shapes: the buckets that the engine will use.
      pool: sizes of the pool.
      kv: layout of the key-value blocks.
      pages: page arrays of any content; None for a model without pages.
      max_blocks: blocks of the longest sequence.
      staging_frames: frames that one plane commit writes.
    """
    pool_array = jax.ShapeDtypeStruct((pool.num_frames, pool.frame_words), jnp.uint32)
    abstract_params = _abstract(params)
    abstract_pages = _abstract(pages)

    def forward(
        params: Params, pool: Array, pages: Pages | None, batch: Batch
    ) -> StepOutput:
        with _matmul_precision(kv):
            return _forward(nnx.merge(graphdef, params), pool, pages, batch, kv)

    def prompt_logprobs(params: Params, hidden: Array, targets: Array) -> TokenLogprobs:
        prefill = hidden[hidden.shape[0] - targets.shape[0] :]
        with _matmul_precision(kv):
            return _prompt_logprobs(nnx.merge(graphdef, params), prefill, targets)

    forwards, commits, prompts = {}, {}, {}
    for shape in shapes:
        batch = abstract_batch(shape, kv, max_blocks)
        lowered = jax.jit(forward).lower(
            abstract_params, pool_array, abstract_pages, batch
        )
        output: StepOutput = lowered.out_info
        forwards[shape] = lowered.compile()
        commits[shape] = _compile_commit_kv(
            pool_array, _abstract(output.fresh_kv), batch.rows, shape, kv
        )
        if shape.prefill_rows:
            count = shape.prefill_rows * shape.prefill_queries
            targets = jax.ShapeDtypeStruct((count,), jnp.int32)
            prompts[shape] = (
                jax.jit(prompt_logprobs)
                .lower(abstract_params, _abstract(output.hidden), targets)
                .compile()
            )
    words = jax.ShapeDtypeStruct((staging_frames, pool.frame_words), jnp.uint32)
    frames = jax.ShapeDtypeStruct((staging_frames,), jnp.int32)
    commit_planes = jax.jit(paged_pool.commit_planes, donate_argnums=0)
    return Programs(
        forward=forwards,
        commit_kv=commits,
        prompt_logprobs=prompts,
        commit_planes=commit_planes.lower(pool_array, words, frames).compile(),
        shapes=shapes,
    )


def _compile_commit_kv(
    pool: jax.ShapeDtypeStruct,
    fresh_kv: jax.ShapeDtypeStruct,
    rows: tuple[Rows, ...],
    shape: StepShape,
    kv: KvLayout,
) -> Compiled:
    queries = tuple(q for _, q in shape.groups)

    def commit(pool: Array, fresh_kv: Array, rows: tuple[Rows, ...]) -> Array:
        return paged_pool.commit_kv(pool, fresh_kv, rows, kv, queries)

    return jax.jit(commit, donate_argnums=0).lower(pool, fresh_kv, rows).compile()


def _matmul_precision(kv: KvLayout) -> AbstractContextManager[None]:
    """Keeps float32 what it says: a GPU would multiply it as TF32 otherwise."""
    exact = kv.dtype == "float32"
    return jax.default_matmul_precision("highest" if exact else "default")


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def abstract_batch(shape: StepShape, kv: KvLayout, max_blocks: int) -> Batch:
    """Returns the shapes of a batch."""

    def ints(*size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.int32)

    def floats(*size: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.float32)

    m = shape.num_rows
    return Batch(
        tokens=tuple(ints(*group) for group in shape.groups),  # pyright: ignore
        rows=tuple(
            Rows(
                starts=ints(r),  # pyright: ignore
                lengths=ints(r),  # pyright: ignore
                cached=ints(r),  # pyright: ignore
                sequences=ints(r),  # pyright: ignore
                block_frames=ints(r, max_blocks, kv.frames_per_block),  # pyright: ignore
            )
            for r, _ in shape.groups
        ),
        sampling=SamplingInputs(
            token_index=ints(m),  # pyright: ignore
            temperature=floats(m),  # pyright: ignore
            top_p=floats(m),  # pyright: ignore
            top_k=ints(m),  # pyright: ignore
            seed=jax.ShapeDtypeStruct((m,), jnp.uint32),  # pyright: ignore
            position=ints(m),  # pyright: ignore
        ),
    )


def _forward(
    model: Model, pool: Array, pages: Pages | None, batch: Batch, kv: KvLayout
) -> StepOutput:
    inputs = ModelInputs(tokens=batch.tokens, rows=batch.rows, pool=pool, pages=pages)
    outputs = model(inputs, kv)
    logits = model.logits(outputs.hidden[batch.sampling.token_index])
    return StepOutput(
        sampled=sample(logits, batch.sampling),
        routing=outputs.routing,
        hidden=outputs.hidden,
        fresh_kv=outputs.fresh_kv,
    )


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
