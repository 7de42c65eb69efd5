"""Random problems for tests and benches of the kernels.

A problem is made adversarial on purpose: frames lie in random order, every frame that
the kernel must not read holds random words, and a page table names such frames for
planes that are not committed, as it does while a plane is in transfer.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8, UInt32

from pallas_kernels import bitplane
from pallas_kernels.fused_moe.arg_specs import MoeSpec
from pallas_kernels.side_tables import (
    AffineTables,
    CodebookTables,
    RefinedTables,
    SideTables,
)

Format = Literal["affine", "codebook", "refined"]

_TABLES = {
    "affine": AffineTables,
    "codebook": CodebookTables,
    "refined": RefinedTables,
}

NUM_LAYERS = 2
LAYER = 1
"""The layer of a problem; the pages and tables of the other one are garbage."""


@dataclass(frozen=True, kw_only=True)
class MoeProblem:
    """Arguments of `fused_moe`, and the codes that its planes were packed from."""

    spec: MoeSpec
    x: Float[Array, "T D"]
    expert_ids: Int32[Array, "T top_k"]
    expert_weights: Float32[Array, "T top_k"]
    pool: UInt32[Array, "num_frames frame_words"]
    frames: Int32[Array, "L E 3 parent_bits frames_per_plane"]
    bits: Int32[Array, "L E 2"]
    gate_up: SideTables
    down: SideTables
    gate_up_codes: UInt8[np.ndarray, "E rows D"]
    down_codes: UInt8[np.ndarray, "E D F"]

    @property
    def args(self) -> tuple:
        """The positional arguments of `fused_moe`."""
        return (
            self.x,
            self.expert_ids,
            self.expert_weights,
            self.pool,
            self.frames,
            self.bits,
            self.gate_up,
            self.down,
            jnp.int32(LAYER),
        )


def make_tables(
    rng: np.random.Generator, spec: MoeSpec, format: Format, n: int, k: int
) -> SideTables:
    """Makes side tables ``[L, E, ...]``; weights have a variance of about 1/k."""
    batch, size = (NUM_LAYERS, spec.num_experts), k**-0.5
    if format == "affine":
        shape = (*batch, k // spec.group_size, n)
        scale = rng.uniform(2.0, 4.0, shape) * size
        zero = -scale * rng.uniform(0.4, 0.6, shape)
        return AffineTables.from_parts(
            scale=jnp.asarray(scale, jnp.float16), zero=jnp.asarray(zero, jnp.float16)
        )
    if format == "refined":
        shape = (*batch, 2**spec.seed_bits, n)
        center = rng.standard_normal(shape, np.float32) * size
        width = rng.uniform(0.2, 1.0, shape) * size
        return RefinedTables.from_parts(
            center=jnp.asarray(center, jnp.float16),
            width=jnp.asarray(width, jnp.float16),
        )
    entries = 2 ** (spec.parent_bits + 1) - 2**spec.seed_bits
    lut = rng.standard_normal((*batch, n, entries), np.float32) * size
    return CodebookTables(lut=jnp.asarray(lut, jnp.float16))


def random_routing(
    rng: np.random.Generator, num_tokens: int, spec: MoeSpec
) -> Int32[np.ndarray, "T top_k"]:
    """Chooses different experts for each token."""
    keys = rng.random((num_tokens, spec.num_experts))
    return np.argsort(keys, axis=1)[:, : spec.top_k].astype(np.int32)


def make_moe_problem(
    rng: np.random.Generator,
    spec: MoeSpec,
    format: Format,
    *,
    num_tokens: int,
    bits: Int32[np.ndarray, "E 2"] | int | None = None,
    expert_ids: Int32[np.ndarray, "T top_k"] | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> MoeProblem:
    """Makes a problem.

    Args:
      rng: source of all that is random.
      spec: static sizes.
      format: of the side tables.
      num_tokens: T.
      bits: committed bits; None draws them for each (expert, block).
      expert_ids: experts of each token; None draws them.
      dtype: of the tokens.
    """
    experts, d, f = spec.num_experts, spec.width, spec.expert_width
    if bits is None:
        fewest = 2 if format == "affine" else spec.seed_bits
        bits = rng.integers(fewest, spec.parent_bits + 1, (experts, 2), np.int32)
    bits = np.broadcast_to(np.asarray(bits, np.int32), (experts, 2))
    levels = 2**spec.parent_bits
    gate_up_codes = rng.integers(0, levels, (experts, 2 * f, d), np.uint8, False)
    down_codes = rng.integers(0, levels, (experts, d, f), np.uint8, False)

    frames, pool = _fill_pool(rng, spec, format, bits, gate_up_codes, down_codes)
    if expert_ids is None:
        expert_ids = random_routing(rng, num_tokens, spec)
    return MoeProblem(
        spec=spec,
        x=jnp.asarray(rng.standard_normal((num_tokens, d), np.float32), dtype),
        expert_ids=jnp.asarray(expert_ids),
        expert_weights=jnp.asarray(
            rng.random((num_tokens, spec.top_k), np.float32), jnp.float32
        ),
        pool=pool,
        frames=_in_layer(rng, frames, len(pool)),
        bits=_in_layer(rng, bits, spec.parent_bits + 1),
        gate_up=make_tables(rng, spec, format, 2 * f, d),
        down=make_tables(rng, spec, format, d, f),
        gate_up_codes=gate_up_codes,
        down_codes=down_codes,
    )


def _in_layer(
    rng: np.random.Generator, values: Int32[np.ndarray, "*shape"], stop: int
) -> Int32[Array, "L *shape"]:
    """Puts values at `LAYER` of an array whose other layers are random."""
    layers = rng.integers(0, stop, (NUM_LAYERS, *values.shape), np.int32)
    layers[LAYER] = values
    return jnp.asarray(layers)


def _fill_pool(
    rng: np.random.Generator,
    spec: MoeSpec,
    format: Format,
    bits: Int32[np.ndarray, "E 2"],
    gate_up_codes: UInt8[np.ndarray, "E rows D"],
    down_codes: UInt8[np.ndarray, "E D F"],
) -> tuple[
    Int32[np.ndarray, "E 3 parent_bits frames_per_plane"],
    UInt32[Array, "num_frames frame_words"],
]:
    """Puts committed planes into random frames and random words everywhere else."""
    order = _TABLES[format].order
    parts, f = spec.frames_per_plane, spec.expert_width
    shape = (spec.num_experts, 3, spec.parent_bits, parts)
    num_frames = 2 + int(np.prod(shape))
    frame_words = bitplane.plane_words(f, spec.width) // parts
    frames = rng.permutation(np.arange(1, num_frames, dtype=np.int32))
    frames = frames[: np.prod(shape)].reshape(shape)
    pool = rng.integers(0, 2**32, (num_frames, frame_words), np.uint32, False)
    pool[0] = 0
    pack = jax.jit(bitplane.pack, static_argnames=("bits", "order"))
    for e in range(spec.num_experts):
        linears = (gate_up_codes[e, :f], gate_up_codes[e, f:], down_codes[e])
        for i, codes in enumerate(linears):
            committed = int(bits[e, i // 2])
            planes = np.asarray(pack(codes, bits=spec.parent_bits, order=order))
            pool[frames[e, i, :committed]] = planes[:committed].reshape(
                committed, parts, frame_words
            )
            # Of the absent planes some are on their way, and some have no frame.
            absent = rng.integers(committed, spec.parent_bits + 1)
            frames[e, i, absent:] = 0
    return frames, jnp.asarray(pool)


def relative_error(
    actual: Shaped[Array | np.ndarray, "*shape"],
    expected: Shaped[Array | np.ndarray, "*shape"],
) -> float:
    """Returns the largest error over the largest expected value."""
    difference = np.abs(np.asarray(actual, np.float64) - np.asarray(expected))
    return float(difference.max() / max(np.abs(expected).max(), 1e-30))
