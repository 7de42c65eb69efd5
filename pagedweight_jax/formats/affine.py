"""The affine format: uniform levels in a range per row and group of columns.

    weight_b = scale * (code_b + 1/2) * 2**-b + zero,    code_b = code >> (parent - b)

The cells of b bits are halved by bit b + 1, so every level is a uniform quantiser of
the same range [zero, zero + scale] and codes are nested without any training. What is
left to choose is the range. A wide one costs every weight, a narrow one costs the
weights outside it, and the best compromise depends on the bits: `quantize` tries a
grid of ranges and keeps the one with the least weighted error over all levels.
"""

import functools
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float16, Float32, Integer, UInt8

from pagedweight_jax.formats import common
from pallas_kernels.side_tables import AffineTables, SideTables

GroupSize = Literal[64, 128]

_CUTS = (0.0, 0.02, 0.04, 0.07, 0.10, 0.14, 0.19)
"""Parts of the range that may be cut off at either end."""

_GROUPS_PER_BLOCK = 2048


@dataclass(frozen=True, kw_only=True)
class AffineFormat:
    """Uniform nested levels, for groups of columns.

    Attributes:
      seed_bits: bits of the lowest level.
      parent_bits: bits of the best level, and planes of a weight.
      group_size: columns that share a range; "auto" is the larger of 128 and 64 that
        divides the columns.
    """

    seed_bits: int = 3
    parent_bits: int = 6
    group_size: GroupSize | Literal["auto"] = "auto"

    name: ClassVar[Literal["affine"]] = "affine"
    tables: ClassVar[type[AffineTables]] = AffineTables

    def __post_init__(self) -> None:
        common.check_bits(self.seed_bits, self.parent_bits)
        if self.group_size not in ("auto", 64, 128):
            raise ValueError(f"group_size={self.group_size!r} must be auto, 64 or 128")

    def group_size_for(self, k: int) -> int:
        """Returns the group size of a linear block with ``k`` columns.

        Raises:
          ValueError: if no group size divides ``k``.
        """
        choices = (128, 64) if self.group_size == "auto" else (self.group_size,)
        for size in choices:
            if k % size == 0:
                return size
        raise ValueError(
            f"{k} columns are not a multiple of group_size={self.group_size}"
            " (auto: 128 or 64); choose one that divides them"
        )

    def side_table_bytes(self, n: int, k: int) -> int:
        """Returns the bytes of the side tables of one linear block ``[n, k]``."""
        return 4 * n * (k // self.group_size_for(k))

    def max_error(self, bits: int) -> float:
        """Returns a bound of the error, in parts of the spread of a group.

        The root of the weighted mean square error of a group is at most this part of
        its largest minus its smallest weight. Reason: the uncut range is on the grid;
        there a weight is off by half a cell at most, 2**-(b+1) of the range, which is
        the spread times 2**P / (2**P - 1). `quantize` adds the square errors of level
        b with weight 2**b, so the sum is at most the geometric one of the uncut
        range, twice its first term; a level's share of it is largest when it has all.
        """
        common.check_level(bits, self.seed_bits, self.parent_bits)
        seed_error = 2.0 ** -(self.seed_bits + 1) / (1 - 2.0**-self.parent_bits)
        return 2.0**0.5 * seed_error * 2.0 ** ((self.seed_bits - bits) / 2)

    def quantize(
        self, weights: common.Weights, importance: common.Weights | None = None
    ) -> tuple[UInt8[np.ndarray, "*batch n k"], AffineTables]:
        """Computes codes of ``parent_bits`` bits and the side tables.

        Args:
          weights: linear blocks.
          importance: what a squared error of each weight costs; None counts all
            alike, and so does a group without any importance.
        Returns:
          The codes, nearest to the weights given the side tables as float16 holds
          them, and the side tables in host memory.
        Raises:
          ValueError: see `common.weights_and_importance` and `group_size_for`.
        """
        *batch, n, k = weights.shape
        size = self.group_size_for(k)
        w, h = common.weights_and_importance(weights, importance)
        w, h = w.reshape(-1, size), h.reshape(-1, size)
        codes = np.empty(w.shape, np.uint8)
        scale, zero = np.empty((2, len(w)), np.float16)
        for block in common.row_blocks(len(w), _GROUPS_PER_BLOCK):
            padding = ((0, _GROUPS_PER_BLOCK - len(w[block])), (0, 0))
            parts = _quantize_groups(
                np.pad(w[block], padding),
                np.pad(h[block], padding),
                self.seed_bits,
                self.parent_bits,
            )
            for whole, part in zip((codes, scale, zero), parts, strict=True):
                whole[block] = np.asarray(part)[: len(w[block])]

        parts = {
            name: values.reshape(*batch, n, k // size).swapaxes(-1, -2)
            for name, values in (("scale", scale), ("zero", zero))
        }
        words = AffineTables.from_parts(**parts).words
        tables = AffineTables(words=common.host_array(np.asarray(words)))
        return codes.reshape(*batch, n, k), tables

    def dequantize(
        self,
        codes: Integer[Array | np.ndarray, "*batch n k"],
        tables: SideTables,
        bits: int,
    ) -> Float32[Array, "*batch n k"]:
        """Computes the weights of the first ``bits`` planes of parent codes."""
        common.check_level(bits, self.seed_bits, self.parent_bits)
        kept = common.kept_planes(codes, self.parent_bits, bits)
        return tables.weights(kept, jnp.int32(bits), self.parent_bits)


@common.on_host
@functools.partial(jax.jit, static_argnums=(2, 3))
def _quantize_groups(
    w: Float32[Array, "G size"],
    h: Float32[Array, "G size"],
    seed_bits: int,
    parent_bits: int,
) -> tuple[UInt8[Array, "G size"], Float16[Array, "G"], Float16[Array, "G"]]:
    """Chooses the range of each group from the grid of cuts."""
    total = jnp.sum(h, axis=-1, keepdims=True)
    h = jnp.where(total > 0, h / jnp.where(total > 0, total, 1), 1 / h.shape[-1])
    low, high = jnp.min(w, axis=-1), jnp.max(w, axis=-1)
    # Of the uncut range, the outermost parent cells have their middles on low, high.
    scale = (high - low) / (1 - 2.0**-parent_bits)
    zero = low - (scale - (high - low)) / 2

    def ranges(cuts: Array) -> tuple[Float16[Array, "G"], Float16[Array, "G"]]:
        cut_scale = scale * (1 - cuts[0] - cuts[1])
        return cut_scale.astype(jnp.float16), (zero + cuts[0] * scale).astype(
            jnp.float16
        )

    def keep_better(best: tuple[Array, Array], cuts: Array) -> tuple[tuple, None]:
        error = _weighted_error(w, h, *ranges(cuts), seed_bits, parent_bits)
        better = error < best[0]
        chosen = jnp.where(better[:, None], cuts[None], best[1])
        return (jnp.where(better, error, best[0]), chosen), None

    start = (jnp.full(low.shape, jnp.inf), jnp.zeros((len(w), 2)))
    grid = jnp.asarray(list(product(_CUTS, _CUTS)), jnp.float32)
    (_, cuts), _ = lax.scan(keep_better, start, grid)
    best_scale, best_zero = ranges(cuts.T)
    codes = _codes(w, best_scale, best_zero, parent_bits)[1]
    return codes.astype(jnp.uint8), best_scale, best_zero


def _codes(
    w: Float32[Array, "G size"],
    scale: Float16[Array, "G"],
    zero: Float16[Array, "G"],
    bits: int,
) -> tuple[Float32[Array, "G size"], Float32[Array, "G size"]]:
    """Returns weights in parts of the range, and their cells."""
    width = scale.astype(jnp.float32)
    inverse = jnp.where(width > 0, 1 / jnp.where(width > 0, width, 1), 0)
    parts = (w - zero.astype(jnp.float32)[:, None]) * inverse[:, None]
    return parts, jnp.clip(jnp.floor(parts * 2.0**bits), 0, 2**bits - 1)


def _weighted_error(
    w: Float32[Array, "G size"],
    h: Float32[Array, "G size"],
    scale: Float16[Array, "G"],
    zero: Float16[Array, "G"],
    seed_bits: int,
    parent_bits: int,
) -> Float32[Array, "G"]:
    """Adds up the weighted square errors of all levels, level b counting 2**b.

    An error falls by 4 a bit. Adding plain errors would let the seed level alone
    decide and cost the parent level 2.5 dB on Gaussian rows; adding relative errors
    (4**b) would gain the seed level nothing. Half way, 3 to 5 bits gain up to 1 dB
    over the uncut range and 6 bits lose 0.6 dB of 32.
    """
    parts, codes = _codes(w, scale, zero, parent_bits)
    errors = jnp.zeros_like(parts)
    for bits in range(seed_bits, parent_bits + 1):
        cells = jnp.floor(codes * 2.0 ** (bits - parent_bits))
        errors += 2.0**bits * (parts - (cells + 0.5) * 2.0**-bits) ** 2
    return jnp.sum(h * errors, axis=-1) * scale.astype(jnp.float32) ** 2
