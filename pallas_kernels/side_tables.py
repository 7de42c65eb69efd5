"""Side tables: what turns the integer codes of a linear block into weights.

A format is nested: the first ``b`` planes together with the same side tables are a
good ``b``-bit format. Each table type knows the word order that its planes are packed
in and computes weights from codes at a number of bits that is data, not shape.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float16, Float32, Int, Int32, Shaped, UInt32

from pallas_kernels.bitplane import BitOrder
from pallas_kernels.pytree import pytree


def rows_to_fragments(
    values: Shaped[Array | np.ndarray, "*batch n"],
) -> Shaped[Array | np.ndarray, "*batch tiles 64"]:
    """Orders the rows of each 64-row tile as a warpgroup's threads want them.

    Thread ``32 w + 4 g + t`` of a warpgroup owns rows ``16 w + g`` and ``16 w + g + 8``
    of a tile (the A fragment of mma.m16n8k16); here they are neighbours, at
    ``16 w + 2 g`` and the next place.
    """
    *batch, n = values.shape
    cut = values.reshape(*batch, n // 64, 4, 2, 8)
    return cut.swapaxes(-1, -2).reshape(*batch, n // 64, 64)


def rows_from_fragments(
    values: Shaped[Array | np.ndarray, "*batch tiles 64"],
) -> Shaped[Array | np.ndarray, "*batch n"]:
    """Undoes `rows_to_fragments`."""
    *batch, tiles, _ = values.shape
    cut = values.reshape(*batch, tiles, 4, 8, 2)
    return cut.swapaxes(-1, -2).reshape(*batch, 64 * tiles)


def _pair(
    low: Float16[Array | np.ndarray, "*shape"],
    high: Float16[Array | np.ndarray, "*shape"],
) -> UInt32[Array | np.ndarray, "*shape"]:
    """Packs two halves into a word."""
    xp = jnp if isinstance(low, jax.Array) else np
    return xp.stack([low, high], axis=-1).view(np.uint32)[..., 0]


def _halves(
    words: UInt32[Array | np.ndarray, "*shape"],
) -> Float16[Array | np.ndarray, "*shape 2"]:
    """Undoes `_pair`; the low half comes first."""
    return words[..., None].view(np.float16)


def _to_tiles(
    low: Float16[Array | np.ndarray, "*batch entries n"],
    high: Float16[Array | np.ndarray, "*batch entries n"],
) -> UInt32[Array | np.ndarray, "*batch tiles entries 64"]:
    """Packs two tables of all rows into the words of 64-row tiles."""
    return rows_to_fragments(_pair(low, high)).swapaxes(-3, -2)


def _from_tiles(
    words: UInt32[Array | np.ndarray, "*batch tiles entries 64"], half: int
) -> Float16[Array | np.ndarray, "*batch entries n"]:
    """Undoes `_to_tiles`: returns the low (0) or the high (1) table."""
    return rows_from_fragments(_halves(words)[..., half].swapaxes(-3, -2))


@pytree
@dataclass(frozen=True, kw_only=True)
class AffineTables:
    """Uniform levels in a range per row and group of columns.

    weight = scale[k // group, n] * (code_b + 1/2) * 2**-b + zero[k // group, n]

    Attributes:
      words: scale (low half) and zero (high half), both fp16, by 64-row tile, group
        and row; rows in the order of `rows_to_fragments`.
    """

    words: UInt32[Array | np.ndarray, "*batch tiles groups 64"]

    order: ClassVar[BitOrder] = "split"
    parts: ClassVar[tuple[str, ...]] = ("scale", "zero")

    @classmethod
    def from_parts(
        cls,
        *,
        scale: Float16[Array | np.ndarray, "*batch groups n"],
        zero: Float16[Array | np.ndarray, "*batch groups n"],
    ) -> "AffineTables":
        """Builds tables from what is stored on disk."""
        return cls(words=_to_tiles(scale, zero))

    @property
    def scale(self) -> Float16[Array | np.ndarray, "*batch groups n"]:
        """Width of the range of each row and group."""
        return _from_tiles(self.words, 0)

    @property
    def zero(self) -> Float16[Array | np.ndarray, "*batch groups n"]:
        """Lower end of the range of each row and group."""
        return _from_tiles(self.words, 1)

    @property
    def num_rows(self) -> int:
        """Rows (outputs) of the linear block."""
        return 64 * self.words.shape[-3]

    @property
    def num_groups(self) -> int:
        """Groups of columns."""
        return self.words.shape[-2]

    def weights(
        self, codes: Int[Array, "*batch n k"], bits: Int32[Array, ""], parent_bits: int
    ) -> Float32[Array, "*batch n k"]:
        """Computes weights from parent codes whose absent planes are zero.

        Args:
          codes: parent codes; bits below the committed ones are zero.
          bits: committed bits, a traced scalar.
          parent_bits: bits of ``codes``.
        """
        *batch, n, k = codes.shape
        groups = self.num_groups
        half = jnp.exp2((parent_bits - 1 - bits).astype(jnp.float32))
        level = (codes.astype(jnp.float32) + half) * jnp.float32(2.0**-parent_bits)
        level = level.reshape(*batch, n, groups, k // groups)
        scale, zero = (
            jnp.asarray(part).swapaxes(-1, -2).astype(jnp.float32)[..., None]
            for part in (self.scale, self.zero)
        )
        return (scale * level + zero).reshape(*batch, n, k)


@pytree
@dataclass(frozen=True, kw_only=True)
class CodebookTables:
    """A lookup table per row for every level (Any-Precision LLM, arXiv 2402.10517).

    weight = lut[n, 2**b - 2**seed_bits + code_b]

    The levels ``seed_bits..parent_bits`` stand one after the other, so a row has
    ``2**(parent_bits + 1) - 2**seed_bits`` entries.
    """

    lut: Float16[Array | np.ndarray, "*batch n entries"]

    order: ClassVar[BitOrder] = "pair"
    parts: ClassVar[tuple[str, ...]] = ("lut",)

    @classmethod
    def from_parts(
        cls, *, lut: Float16[Array | np.ndarray, "*batch n entries"]
    ) -> "CodebookTables":
        """Builds tables from what is stored on disk."""
        return cls(lut=lut)

    @property
    def num_rows(self) -> int:
        """Rows (outputs) of the linear block."""
        return self.lut.shape[-2]

    def weights(
        self, codes: Int[Array, "*batch n k"], bits: Int32[Array, ""], parent_bits: int
    ) -> Float32[Array, "*batch n k"]:
        """Computes weights from parent codes whose absent planes are zero.

        Args:
          codes: parent codes; bits below the committed ones are zero.
          bits: committed bits, a traced scalar, at least ``seed_bits``.
          parent_bits: bits of ``codes``.
        """
        seed_entries = 2 ** (parent_bits + 1) - self.lut.shape[-1]
        index = (codes >> (parent_bits - bits)) + (1 << bits) - seed_entries
        return jnp.take_along_axis(self.lut, index, axis=-1).astype(jnp.float32)


@pytree
@dataclass(frozen=True, kw_only=True)
class RefinedTables:
    """A cluster for the first bits of a code, and uniform levels within the cluster.

    weight = center[code_p, n] + width[code_p, n] * (rest - 1/2)    rounded to fp16
    rest = (code_b % 2**(b - p) + 1/2) * 2**-(b - p)

    ``code_p`` is the first ``p`` bits of ``code_b``; a row has ``2**p`` clusters, and
    the same tables serve every ``b >= p``. At ``b = p`` the weight is the center.

    The sum is rounded once, as one fp16 multiply-add does it: kernels multiply fp16
    weights, and the terms are exact in fp16.

    Attributes:
      words: center (low half) and width (high half), both fp16, by 64-row tile,
        cluster and row; rows in the order of `rows_to_fragments`.
    """

    words: UInt32[Array | np.ndarray, "*batch tiles clusters 64"]

    order: ClassVar[BitOrder] = "split"
    parts: ClassVar[tuple[str, ...]] = ("center", "width")

    @classmethod
    def from_parts(
        cls,
        *,
        center: Float16[Array | np.ndarray, "*batch clusters n"],
        width: Float16[Array | np.ndarray, "*batch clusters n"],
    ) -> "RefinedTables":
        """Builds tables from what is stored on disk."""
        return cls(words=_to_tiles(center, width))

    @property
    def center(self) -> Float16[Array | np.ndarray, "*batch clusters n"]:
        """Middle of each cluster of each row."""
        return _from_tiles(self.words, 0)

    @property
    def width(self) -> Float16[Array | np.ndarray, "*batch clusters n"]:
        """Width of the range of the levels of each cluster of each row."""
        return _from_tiles(self.words, 1)

    @property
    def num_rows(self) -> int:
        """Rows (outputs) of the linear block."""
        return 64 * self.words.shape[-3]

    @property
    def cluster_bits(self) -> int:
        """p, the bits of a code that name its cluster."""
        return self.words.shape[-2].bit_length() - 1

    def weights(
        self, codes: Int[Array, "*batch n k"], bits: Int32[Array, ""], parent_bits: int
    ) -> Float32[Array, "*batch n k"]:
        """Computes weights from parent codes whose absent planes are zero.

        Args:
          codes: parent codes; bits below the committed ones are zero.
          bits: committed bits, a traced scalar, at least ``cluster_bits``.
          parent_bits: bits of ``codes``.
        """
        rest_bits = parent_bits - self.cluster_bits
        cluster = codes >> rest_bits
        half = jnp.exp2((parent_bits - 1 - bits).astype(jnp.float32))
        rest = (codes & (2**rest_bits - 1)).astype(jnp.float32) + half
        center, width = (
            jnp.take_along_axis(
                jnp.asarray(part).swapaxes(-1, -2), cluster, axis=-1
            ).astype(jnp.float32)
            for part in (self.center, self.width)
        )
        weight = center + width * (rest * jnp.float32(2.0**-rest_bits) - 0.5)
        # Without the barrier XLA takes float32 -> float16 -> float32 for no change.
        return lax.optimization_barrier(weight.astype(jnp.float16)).astype(jnp.float32)


SideTables = AffineTables | CodebookTables | RefinedTables
