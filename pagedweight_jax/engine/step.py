"""The data of a step: its shape, what the host tells of it, and what it answers."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, UInt32

from pagedweight_jax.engine.sampling import Sampled, SamplingInputs
from pagedweight_jax.engine.slots import RowInputs, blocks_per_row
from pagedweight_jax.models.interface import RoutingCounts
from pallas_kernels.paged_attention import KvLayout
from pallas_kernels.pytree import pytree

Params = nnx.State


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

    rows: tuple[RowInputs, ...]
    sampling: SamplingInputs


@pytree
@dataclass(frozen=True, kw_only=True)
class ForwardOutput:
    """What a forward pass returns beside the slots; the pool is unchanged."""

    logits: Float32[Array, "M V"]
    sampling: SamplingInputs
    routing: RoutingCounts
    hidden: Float[Array, "T D"]
    fresh_kv: UInt32[Array, "num_layers T row_words"]


@pytree
@dataclass(frozen=True, kw_only=True)
class StepResults:
    """What the host wants to know of every step."""

    sampled: Sampled
    routing: RoutingCounts


def abstract_batch(shape: StepShape, kv: KvLayout) -> Batch:
    """Returns the shapes of a batch."""
    m, ints, floats = shape.num_rows, jnp.int32, jnp.float32
    return Batch(
        rows=tuple(
            RowInputs(
                slots=array(ints, r),
                tokens=array(ints, r, q),
                starts=array(ints, r),
                lengths=array(ints, r),
                cached=array(ints, r),
                written=array(ints, r, blocks_per_row(q, kv), kv.frames_per_block),
            )
            for r, q in shape.groups
        ),
        sampling=SamplingInputs(
            token_index=array(ints, m),
            temperature=array(floats, m),
            top_p=array(floats, m),
            top_k=array(ints, m),
            seed=array(jnp.uint32, m),
            position=array(ints, m),
            slots=array(ints, m),
        ),
    )


def abstract_results(output: ForwardOutput) -> StepResults:
    """Returns the shapes of the results that follow a forward pass."""
    rows = output.logits.shape[0]
    sampled = Sampled(tokens=array(jnp.int32, rows), finite=array(jnp.bool, rows))
    return StepResults(sampled=sampled, routing=output.routing)


def array(dtype: Any, *shape: int) -> Any:
    """Returns what stands in for an array in a tree of shapes."""
    return jax.ShapeDtypeStruct(shape, dtype)
