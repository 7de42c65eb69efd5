"""How the decode kernel makes weights of planes, one class for each kind of tables."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.bitplane import TILE
from pallas_kernels.fused_moe import fixed_point, tile_product
from pallas_kernels.fused_moe.decode_sizes import Linear
from pallas_kernels.fused_moe.fixed_point import FixedPointTile
from pallas_kernels.fused_moe.registers import Ref
from pallas_kernels.fused_moe.routing import Segment
from pallas_kernels.fused_moe.staging import Tile, stage
from pallas_kernels.side_tables import AffineTables, CodebookTables, SideTables


@dataclass(frozen=True, kw_only=True)
class Affine:
    """Codes are multiplied as they are; scale and zero correct the product.

    A *span* is what a load and a group have in common: columns of one scale whose
    product is corrected at once.
    """

    linear: Linear
    group_size: int

    rows_per_token: ClassVar[int] = 1  # of sums

    @property
    def bit_widths(self) -> range:
        """Bits that a page can be committed at."""
        return range(1, self.linear.parent_bits + 1)

    @property
    def _spans(self) -> int:
        return self._load_columns // self._tile.span

    @property
    def _load_columns(self) -> int:
        return TILE * self.linear.vector

    @property
    def _tile(self) -> FixedPointTile:
        linear = self.linear
        return FixedPointTile(
            tokens=linear.config.tokens_per_tile,
            columns=linear.columns_per_part,
            parts=linear.parts,
            span=math.gcd(self.group_size, self._load_columns),
            pairs_per_row=linear.pairs_per_row,
            warpgroups=linear.config.warpgroups,
        )

    def scratch(self) -> tuple[Any, Any]:
        """Returns shared memory for tokens and for their scales."""
        return (
            plgpu.SMEM(self._tile.shape, jnp.int8),
            plgpu.SMEM(self._tile.scales_shape, jnp.float32),
        )

    def prepare(
        self,
        source_ref: Ref,
        order_ref: Ref,
        x_ref: Ref,
        scales_ref: Ref,
        segment: Segment,
        warpgroup: Array,
    ) -> None:
        """Gathers the tokens of a segment."""
        fixed_point.convert(
            self._tile,
            source_ref,
            order_ref,
            x_ref,
            scales_ref,
            first_pair=segment.first_pair,
            num_tokens=segment.num_tokens,
            column=segment.column_part * self._tile.columns,
            warpgroup=warpgroup,
            interpret=self.linear.interpret,
        )

    def of_tile(self, table_ref: Ref, tile: Array) -> Ref:
        """Returns the words of a row tile, ``[groups, 64]``."""
        return table_ref.at[tile]

    def load(self, table_ref: Ref, number: Array) -> list[Array]:
        """Loads scale and zero of the rows for each span of a load of planes."""
        return [
            tile_product.row_words(
                table_ref.at[
                    lax.div(
                        number * self._load_columns + i * self._tile.span,
                        self.group_size,
                    )
                ],
                interpret=self.linear.interpret,
            )
            for i in range(self._spans)
        ]

    def product(
        self,
        sums: Array,
        x_ref: Ref,
        scales_ref: Ref,
        number: Array,
        planes: list[Array],
        side: list[Array],
        table_ref: Ref,
    ) -> Array:
        """Adds the product of a load, whose number counts within the column part."""
        del table_ref
        return tile_product.affine_product(
            sums,
            x_ref,
            scales_ref.at[pl.ds(number * self._spans, self._spans)],
            planes,
            side,
            interpret=self.linear.interpret,
        )


@dataclass(frozen=True, kw_only=True)
class Codebook:
    """Looks weights up; the levels of a row stand one after the other."""

    linear: Linear
    seed_entries: int

    @property
    def bit_widths(self) -> range:
        """Bits that a page can be committed at."""
        return range(self.seed_entries.bit_length() - 1, self.linear.parent_bits + 1)

    @property
    def rows_per_token(self) -> int:
        """Rows of sums that belong to a token: bfloat16 parts of its values."""
        return 1 if self.linear.parts == 2 else 3

    @property
    def _tile(self) -> Tile:
        linear = self.linear
        return Tile(
            tokens=linear.config.tokens_per_tile,
            columns=linear.columns_per_part,
            parts=self.rows_per_token,
            pairs_per_row=linear.pairs_per_row,
            warpgroups=linear.config.warpgroups,
        )

    def scratch(self) -> tuple[Any, Any]:
        """Returns shared memory for tokens, and a word for the scales they lack."""
        return (
            plgpu.SMEM(self._tile.shape, jnp.bfloat16),
            plgpu.SMEM((1, 1, 1), jnp.float32),
        )

    def prepare(
        self,
        source_ref: Ref,
        order_ref: Ref,
        x_ref: Ref,
        scales_ref: Ref,
        segment: Segment,
        warpgroup: Array,
    ) -> None:
        """Gathers the tokens of a segment."""
        del scales_ref
        stage(
            self._tile,
            source_ref,
            order_ref,
            x_ref,
            first_pair=segment.first_pair,
            num_tokens=segment.num_tokens,
            column=segment.column_part * self._tile.columns,
            warpgroup=warpgroup,
            interpret=self.linear.interpret,
        )

    def of_tile(self, table_ref: Ref, tile: Array) -> Ref:
        """Returns the lookup tables of a row tile, ``[64, entries]``."""
        return table_ref.at[pl.ds(tile * TILE, TILE)]

    def load(self, table_ref: Ref, number: Array) -> list[Array]:
        """Loads nothing: a product looks its weights up."""
        del table_ref, number
        return []

    def product(
        self,
        sums: Array,
        x_ref: Ref,
        scales_ref: Ref,
        number: Array,
        planes: list[Array],
        side: list[Array],
        table_ref: Ref,
    ) -> Array:
        """Adds the product of a load."""
        del scales_ref, number, side
        return tile_product.codebook_product(
            sums,
            x_ref,
            planes,
            table_ref,
            first=2 ** len(planes) - self.seed_entries,
            exact=self.rows_per_token > 1,
            interpret=self.linear.interpret,
        )


def format_of(linear: Linear, tables: SideTables) -> Affine | Codebook:
    """Chooses how weights are made; checks that the tables fit the tiles."""
    if isinstance(tables, CodebookTables):
        seed_entries = 2 ** (linear.parent_bits + 1) - tables.lut.shape[-1]
        return Codebook(linear=linear, seed_entries=seed_entries)
    if not isinstance(tables, AffineTables):
        raise NotImplementedError(
            f"{type(tables).__name__} have no kernel; use implementation='reference'"
        )
    group_size = linear.num_columns // tables.num_groups
    if group_size % TILE:
        raise NotImplementedError(
            f"groups of {group_size} columns are not made of {TILE}-column tiles;"
            f" use a multiple of {TILE}, or implementation='reference'"
        )
    return Affine(linear=linear, group_size=group_size)
