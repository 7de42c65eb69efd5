"""How the prefill kernel makes weights of each format out of plane words.

A format is static. It says which ``table`` the kernel gets, and what takes the scale of
its weights back from a product. Its ``rows`` are 64 rows of a linear inside of the
kernel, which begin to ``load`` what the next column tiles need and ``unpack`` them.
Two numbers fit the registers of a thread. ``wide_bits`` are the most bits at which the
words of two column tiles are loaded at once; ``in_flight`` products, 1 or 0, run while
the next weights are unpacked.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float16, Int32, UInt32

from pallas_kernels.bitplane import TILE
from pallas_kernels.fused_moe import half_weights
from pallas_kernels.fused_moe.half_weights import Words
from pallas_kernels.fused_moe.registers import Ref
from pallas_kernels.side_tables import (
    AffineTables,
    CodebookTables,
    RefinedTables,
    SideTables,
)

Loaded = tuple[UInt32[Array, "256"], ...]
"""What a row tile has loaded beside the plane words."""


@dataclass(frozen=True, kw_only=True)
class AffineRows:
    """64 rows of affine weights."""

    table: Ref  # [groups, 64]
    group_size: int
    interpret: bool

    def load(self, column_tile: Int32[Array, ""], width: int) -> Loaded:
        """Begins to load what ``width`` column tiles need beside the planes."""
        groups = max(1, width * TILE // self.group_size)
        first = lax.div(column_tile * TILE, self.group_size)
        return tuple(
            half_weights.load_rows(self.table.at[first + i], interpret=self.interpret)
            for i in range(groups)
        )

    def unpack(
        self, words: Words, loaded: Loaded, column: int
    ) -> Float16[Array, "64 64"]:
        """Makes the weights of one of these column tiles."""
        return half_weights.affine_weights(
            words,
            loaded[min(column, len(loaded) - 1)],
            column=column,
            interpret=self.interpret,
        )


@dataclass(frozen=True, kw_only=True)
class Affine:
    """Scale and zero for each row and group of columns."""

    bit_widths: range
    group_size: int
    interpret: bool
    wide_bits: int = 6
    in_flight: int = 1

    def table(self, tables: SideTables, layer: Int32[Array, ""]) -> Array:
        """Returns the words of all layers, so that none is copied."""
        assert isinstance(tables, AffineTables)
        return jnp.asarray(tables.words)

    def rows(self, table: Ref, layer: Array, e: Array, row_tile: Array) -> AffineRows:
        """Returns 64 rows."""
        return AffineRows(
            table=table.at[layer, e, row_tile],
            group_size=self.group_size,
            interpret=self.interpret,
        )

    def product_scale(self, bits: int) -> float:
        """Affine weights come ``2**bits`` times too large."""
        return 2.0**-bits


@dataclass(frozen=True, kw_only=True)
class CodebookRows:
    """64 rows of looked-up weights."""

    lut: Ref  # [64, entries]
    seed_entries: int
    interpret: bool

    def load(self, column_tile: Int32[Array, ""], width: int) -> Loaded:
        """Begins to load what ``width`` column tiles need beside the planes."""
        return ()

    def unpack(
        self, words: Words, loaded: Loaded, column: int
    ) -> Float16[Array, "64 64"]:
        """Makes the weights of one of these column tiles."""
        return half_weights.codebook_weights(
            words,
            self.lut,
            first=2 ** len(words) - self.seed_entries,
            column=column,
            interpret=self.interpret,
        )


@dataclass(frozen=True, kw_only=True)
class Codebook:
    """A lookup table for each row; its levels stand one after the other."""

    bit_widths: range
    seed_entries: int
    interpret: bool
    wide_bits: int = 0
    in_flight: int = 0

    def table(self, tables: SideTables, layer: Int32[Array, ""]) -> Array:
        """Returns the lookup tables of all layers, so that none is copied."""
        assert isinstance(tables, CodebookTables)
        return jnp.asarray(tables.lut)

    def rows(self, table: Ref, layer: Array, e: Array, row_tile: Array) -> CodebookRows:
        """Returns 64 rows."""
        return CodebookRows(
            lut=table.at[layer, e, pl.ds(row_tile * TILE, TILE)],
            seed_entries=self.seed_entries,
            interpret=self.interpret,
        )

    def product_scale(self, bits: int) -> float:
        """Weights come as they are."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class RefinedRows:
    """64 rows of refined weights."""

    clusters: Ref  # [64, 8]
    interpret: bool

    def load(self, column_tile: Int32[Array, ""], width: int) -> Loaded:
        """Begins to load what ``width`` column tiles need beside the planes."""
        return ()  # 8 words a row would take too many registers; L1 has them

    def unpack(
        self, words: Words, loaded: Loaded, column: int
    ) -> Float16[Array, "64 64"]:
        """Makes the weights of one of these column tiles."""
        return half_weights.refined_weights(
            words, self.clusters, column=column, interpret=self.interpret
        )


@dataclass(frozen=True, kw_only=True)
class Refined:
    """8 clusters for each row, and uniform levels within them."""

    bit_widths: range
    interpret: bool
    wide_bits: int = 0
    in_flight: int = 1

    def table(self, tables: SideTables, layer: Int32[Array, ""]) -> Array:
        """Returns the clusters of one layer as bytes; a few megabytes."""
        assert isinstance(tables, RefinedTables)
        return half_weights.cluster_bytes(jnp.asarray(tables.words)[layer])

    def rows(self, table: Ref, layer: Array, e: Array, row_tile: Array) -> RefinedRows:
        """Returns 64 rows."""
        return RefinedRows(clusters=table.at[e, row_tile], interpret=self.interpret)

    def product_scale(self, bits: int) -> float:
        """Weights come as they are."""
        return 1.0


Rows = AffineRows | CodebookRows | RefinedRows

Format = Affine | Codebook | Refined


def format_of(
    tables: SideTables, parent_bits: int, k: int, *, interpret: bool
) -> Format:
    """Returns the format of the tables of a linear with ``k`` columns.

    Raises:
      NotImplementedError: if the tables do not fit the tiles.
    """
    if isinstance(tables, CodebookTables):
        seed_entries = 2 ** (parent_bits + 1) - tables.lut.shape[-1]
        return Codebook(
            bit_widths=range(seed_entries.bit_length() - 1, parent_bits + 1),
            seed_entries=seed_entries,
            interpret=interpret,
        )
    if isinstance(tables, RefinedTables):
        if tables.cluster_bits != half_weights.CLUSTER_BITS:
            raise NotImplementedError(
                f"clusters of {tables.cluster_bits} bits, but a byte permutation looks"
                f" {half_weights.CLUSTER_BITS} up; use implementation='reference'"
            )
        return Refined(
            bit_widths=range(half_weights.CLUSTER_BITS, parent_bits + 1),
            interpret=interpret,
        )
    group_size = k // tables.num_groups
    if group_size % TILE:
        raise NotImplementedError(
            f"groups of {group_size} columns are not made of {TILE}-column tiles;"
            f" use a multiple of {TILE}, or implementation='reference'"
        )
    return Affine(
        bit_widths=range(1, parent_bits + 1),
        group_size=group_size,
        interpret=interpret,
    )
