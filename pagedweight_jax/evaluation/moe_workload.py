"""Inputs of a fused MoE layer for benches: random planes, tables, routing, and bytes.

Everything large is made on the device. A workload holds several page sets, which are
the layers of its page table: each call of a bench reads another one, so that no plane
is in the L2 cache from the call before.
"""

from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float16, Float32, Int32, UInt32

from pallas_kernels import bitplane
from pallas_kernels.fused_moe.arg_specs import MoeSpec
from pallas_kernels.side_tables import (
    AffineTables,
    CodebookTables,
    RefinedTables,
    SideTables,
)
from pallas_kernels.testing import Format, random_routing

Routing = Literal["balanced", "random"]

NUM_SETS = 4


@dataclass(frozen=True, kw_only=True)
class Planes:
    """A pool of random planes and the page table of `NUM_SETS` sets of experts."""

    spec: MoeSpec
    pool: UInt32[Array, "num_frames frame_words"]
    frames: Int32[Array, "L E 3 parent_bits frames_per_plane"]


def random_planes(spec: MoeSpec, seed: int = 0) -> Planes:
    """Makes planes of all bits for all sets, in frames in random order."""
    shape = (NUM_SETS, spec.num_experts, 3, spec.parent_bits, spec.frames_per_plane)
    count = int(np.prod(shape))
    words = bitplane.plane_words(spec.expert_width, spec.width) // spec.frames_per_plane
    numbers = 1 + np.random.default_rng(seed).permutation(count).astype(np.int32)

    @jax.jit
    def make(key: Array) -> Array:
        pool = jax.random.bits(key, (1 + count, words), jnp.uint32)
        return pool.at[0].set(0)

    return Planes(
        spec=spec,
        pool=make(jax.random.key(seed)),
        frames=jnp.asarray(numbers.reshape(shape)),
    )


def in_order(planes: Planes) -> Planes:
    """Returns the same pool with frames in order: one contiguous copy of the planes."""
    numbers = 1 + np.arange(planes.frames.size, dtype=np.int32)
    return replace(planes, frames=jnp.asarray(numbers.reshape(planes.frames.shape)))


def random_tables(
    spec: MoeSpec, format: Format, n: int, k: int, group_size: int
) -> SideTables:
    """Makes side tables ``[NUM_SETS, E, ...]``; weights vary by about 1/k.

    Args:
      spec: sizes of the layer.
      format: of the planes.
      n: rows (outputs) of the block.
      k: columns (inputs) of the block.
      group_size: columns that share a scale (affine).
    """
    batch = (NUM_SETS, spec.num_experts)

    @jax.jit
    def make(key: Array) -> SideTables:
        if format == "codebook":
            entries = 2 ** (spec.parent_bits + 1) - 2**spec.seed_bits
            return CodebookTables.from_parts(lut=_halves(key, (*batch, n, entries), k))
        if format == "affine":
            scale = _halves(key, (*batch, k // group_size, n), k)
            return AffineTables.from_parts(scale=scale, zero=-scale / 2)
        center = _halves(key, (*batch, 2**spec.seed_bits, n), k)
        return RefinedTables.from_parts(center=center, width=jnp.abs(center))

    return make(jax.random.key(n))


def _halves(key: Array, shape: tuple[int, ...], k: int) -> Float16[Array, "..."]:
    return jax.random.normal(key, shape, jnp.float16) * k**-0.5


def table_bytes(tables: SideTables, bits: Int32[np.ndarray, "*pages"]) -> np.ndarray:
    """Returns the side-table bytes of a page that its bits make a kernel read.

    A page reads them all, but of a codebook the entries of its level only.
    """
    if isinstance(tables, CodebookTables):
        return 2 * tables.num_rows * 2**bits
    pages = tables.words.shape[0] * tables.words.shape[1]
    return np.full_like(bits, 4 * tables.words.size // pages)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens with their routing, another one for each call.

    Attributes:
      x: the tokens, the same for all calls.
      ids: experts, by call.
      weights: combine weights.
      routing: how they were drawn.
    """

    x: Float[Array, "T D"]
    ids: Int32[np.ndarray, "calls T top_k"]
    weights: Float32[Array, "T top_k"]
    routing: Routing

    @property
    def num_calls(self) -> int:
        """Routings."""
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.ids.shape[1]

    @property
    def active_experts(self) -> float:
        """Experts that a call visits, on average."""
        return float(np.mean([len(np.unique(ids)) for ids in self.ids]))


def make_tokens(
    spec: MoeSpec, num_tokens: int, routing: Routing, num_calls: int, seed: int = 0
) -> Tokens:
    """Makes tokens.

    Args:
      spec: sizes of the layer.
      num_tokens: T.
      routing: "balanced" deals the experts out in turn, so that all get equally many
        tokens and, with enough tokens, all are active; "random" draws different
        experts for each token.
      num_calls: routings to make.
      seed: of all that is random.
    """
    rng = np.random.default_rng(seed)
    x = jax.random.normal(jax.random.key(seed), (num_tokens, spec.width), jnp.bfloat16)
    return Tokens(
        x=x,
        ids=np.stack(
            [_routing(rng, spec, num_tokens, routing) for _ in range(num_calls)]
        ),
        weights=jnp.full((num_tokens, spec.top_k), 1 / spec.top_k, jnp.float32),
        routing=routing,
    )


def _routing(
    rng: np.random.Generator, spec: MoeSpec, num_tokens: int, routing: Routing
) -> Int32[np.ndarray, "T top_k"]:
    if routing == "random":
        return random_routing(rng, num_tokens, spec)
    dealt = np.arange(num_tokens * spec.top_k) % spec.num_experts
    order = rng.permutation(spec.num_experts).astype(np.int32)
    return order[dealt].reshape(num_tokens, spec.top_k)


def uniform_bits(spec: MoeSpec, bits: int) -> Int32[np.ndarray, "L E 2"]:
    """Returns the same bits for all pages."""
    return np.full((NUM_SETS, spec.num_experts, 2), bits, np.int32)


def mixed_bits(
    spec: MoeSpec, low: int, high: int, seed: int = 0
) -> Int32[np.ndarray, "L E 2"]:
    """Draws the bits of each page, both ends included."""
    rng = np.random.default_rng(seed)
    shape = (NUM_SETS, spec.num_experts, 2)
    return rng.integers(low, high, shape, np.int32, endpoint=True)


@dataclass(frozen=True, kw_only=True)
class BytesRead:
    """What the active experts of a call must read at the least."""

    planes: float
    tables: float

    @property
    def total(self) -> float:
        """Planes and side tables."""
        return self.planes + self.tables


def bytes_read(
    spec: MoeSpec,
    tokens: Tokens,
    bits: Int32[np.ndarray, "L E 2"],
    gate_up: SideTables,
    down: SideTables,
) -> BytesRead:
    """Counts planes and side tables of the active experts, averaged over the calls."""
    plane_bytes = spec.width * spec.expert_width // 8
    planes = bits @ np.array([2, 1]) * plane_bytes
    tables = table_bytes(gate_up, bits[..., 0]) + table_bytes(down, bits[..., 1])

    def average(per_expert: np.ndarray) -> float:
        calls = enumerate(tokens.ids)
        return float(
            np.mean([per_expert[i % NUM_SETS, np.unique(e)].sum() for i, e in calls])
        )

    return BytesRead(planes=average(planes), tables=average(tables))
