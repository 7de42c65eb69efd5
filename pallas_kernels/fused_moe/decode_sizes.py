"""The sizes of one launch of the decode kernel."""

from dataclasses import dataclass

from pallas_kernels.bitplane import TILE, vector_width
from pallas_kernels.fused_moe.reference import Activation
from pallas_kernels.fused_moe.routing import Work
from pallas_kernels.fused_moe.tile_product import TOKENS

SHARED_MEMORY = 212 * 1024
"""Bytes that the tokens of a segment may take; Hopper has 227 KiB in all."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the kernel.

    Attributes:
      tokens_per_tile: M, a multiple of 8.
      warpgroups: of a CTA, an even number.
      ctas: of the grid; a multiple of the multiprocessors.
      column_parts: of the down linear, so that a tile of tokens fits.
    """

    tokens_per_tile: int = 8
    warpgroups: int = 4
    ctas: int = 132
    column_parts: int = 1

    def __post_init__(self) -> None:
        if self.tokens_per_tile % TOKENS or self.tokens_per_tile <= 0:
            raise ValueError(
                f"tokens_per_tile={self.tokens_per_tile} must be a positive multiple"
                f" of {TOKENS}"
            )
        if self.warpgroups % 2 or self.warpgroups <= 0:
            raise ValueError(f"warpgroups={self.warpgroups} must be even and positive")


def default_config(
    num_pairs: int,
    num_experts: int,
    width: int,
    expert_width: int,
    parts: int,
) -> Config:
    """Returns tiles that hold an expert's mean number of tokens, and fit.

    Args:
      num_pairs: tokens times experts of each.
      num_experts: E.
      width: D, columns of gate and up.
      expert_width: F, columns of down.
      parts: bytes of a token's value.
    """
    mean = -(-num_pairs // num_experts)
    tokens = 8 if mean <= 8 or parts == 3 else 16
    columns = max(width, SHARED_MEMORY // (2 * parts * tokens))
    return Config(tokens_per_tile=tokens, column_parts=-(-expert_width // columns))


@dataclass(frozen=True, kw_only=True)
class Linear:
    """The static sizes of one launch: gate and up (``activation``), or down."""

    num_rows: int  # of one linear
    num_columns: int
    num_pairs: int
    num_experts: int
    parent_bits: int
    frames_per_plane: int
    parts: int
    pairs_per_row: int
    activation: Activation | None
    config: Config
    interpret: bool

    def __post_init__(self) -> None:
        if self.row_tiles % self.frames_per_plane:
            raise ValueError(
                f"a linear of {self.num_rows} rows has {self.row_tiles} tiles of"
                f" {TILE} rows, which cannot be cut into"
                f" frames_per_plane={self.frames_per_plane} equal runs; choose a"
                " divisor"
            )

    @property
    def row_tiles(self) -> int:
        """64-row tiles of one linear."""
        return self.num_rows // TILE

    @property
    def tiles_per_frame(self) -> int:
        """64-row tiles of one frame."""
        return self.row_tiles // self.frames_per_plane

    @property
    def vector(self) -> int:
        """Column tiles that one load covers."""
        return vector_width(self.num_columns)

    @property
    def loads(self) -> int:
        """Loads of one row tile of a plane."""
        return self.num_columns // (TILE * self.vector)

    @property
    def loads_per_chunk(self) -> int:
        """Loads that are on their way together: 4 column tiles, 16 bytes a thread."""
        return 4 // self.vector

    @property
    def chunks(self) -> int:
        """Chunks of one row tile; the last one may be short of loads."""
        return -(-self.loads // self.loads_per_chunk)

    @property
    def columns_per_part(self) -> int:
        """Columns of a column part; those past the last one meet tokens of zero."""
        return self.chunks_per_part * self.loads_per_chunk * self.vector * TILE

    @property
    def linears(self) -> range:
        """Gate and up, or down, as the page table numbers them."""
        return range(2, 3) if self.activation is None else range(2)

    @property
    def column_parts(self) -> int:
        """Parts of the columns; gate and up are never cut."""
        return self.config.column_parts if self.activation is None else 1

    @property
    def chunks_per_part(self) -> int:
        """Chunks of all parts but perhaps the last."""
        return -(-self.chunks // self.column_parts)

    @property
    def work(self) -> Work:
        """What the routing needs to know."""
        steps = self.row_tiles if self.activation else -(-self.row_tiles // 2)
        return Work(
            num_pairs=self.num_pairs,
            num_experts=self.num_experts,
            tokens_per_tile=self.config.tokens_per_tile,
            column_parts=self.column_parts,
            row_steps=steps,
        )
