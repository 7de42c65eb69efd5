"""Side tables: what turns the integer codes of a linear block into weights.

A format is nested: the first ``b`` planes together with the same side tables are a
good ``b``-bit format. Each table type knows the word order that its planes are packed
in and computes weights from codes at a number of bits that is data, not shape.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Float16, Float32, Int, Int32

from pallas_kernels.bitplane import BitOrder
from pallas_kernels.pytree import pytree


@pytree
@dataclass(frozen=True, kw_only=True)
class AffineTables:
    """Uniform levels in a range per row and group of columns.

    weight = scale[k // group, n] * (code_b + 1/2) * 2**-b + zero[k // group, n]
    """

    scale: Float16[Array, "*batch groups n"]
    zero: Float16[Array, "*batch groups n"]

    order: ClassVar[BitOrder] = "split"

    @property
    def num_rows(self) -> int:
        """Rows (outputs) of the linear block."""
        return self.scale.shape[-1]

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
        groups = self.scale.shape[-2]
        half = jnp.exp2((parent_bits - 1 - bits).astype(jnp.float32))
        level = (codes.astype(jnp.float32) + half) * jnp.float32(2.0**-parent_bits)
        level = level.reshape(*batch, n, groups, k // groups)
        scale = jnp.swapaxes(self.scale, -1, -2).astype(jnp.float32)[..., None]
        zero = jnp.swapaxes(self.zero, -1, -2).astype(jnp.float32)[..., None]
        return (scale * level + zero).reshape(*batch, n, k)


@pytree
@dataclass(frozen=True, kw_only=True)
class CodebookTables:
    """A lookup table per row for every level (Any-Precision LLM, arXiv 2402.10517).

    weight = lut[n, 2**b - 2**seed_bits + code_b]

    The levels ``seed_bits..parent_bits`` stand one after the other, so a row has
    ``2**(parent_bits + 1) - 2**seed_bits`` entries.
    """

    lut: Float16[Array, "*batch n entries"]

    order: ClassVar[BitOrder] = "pair"

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


SideTables = AffineTables | CodebookTables
