"""Tokens sorted by expert and cut into tiles, for kernels that multiply many tokens.

    pairs (token, k)  --sort by expert-->  runs, one an expert
    rows   the runs one after the other, each padded to 8 rows only: what is gathered
    tiles  M rows of one run (the last one fewer), at most `tiles_per_group` in a group
    slots  M for each tile, filled or not: where results are written

Tiles of a group are computed by neighbouring CTAs, which read the same weights; a group
is small enough that its tokens stay in L2 beside them.

Everything is counting, and one scatter of a word a pair.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Int32

from pallas_kernels.pytree import pytree

ROW_ALIGNMENT = 8
"""Rows that a run begins at a multiple of, so that per-row factors load in pairs."""


_BLOCK = 128  # pairs that are counted by one product


@pytree
@dataclass(frozen=True, kw_only=True)
class TokenTiles:
    """Tiles of one expert's tokens; fields of tiles past the real count are garbage.

    Attributes:
      experts: expert of each tile; E for a tile past the real count.
      rows: first row of each tile.
      num_rows: rows of each tile, 1 to M.
      group_starts: first tile of each tile's group.
      group_sizes: tiles of each tile's group.
      tokens: token of each row; 0 for padding. M rows more than the runs need, so that
        a tile may always read M.
      slots: slot of each pair of a token and its k-th expert; 0 without an expert.
      valid: whether the pair has an expert.
    """

    experts: Int32[Array, "tiles"]
    rows: Int32[Array, "tiles"]
    num_rows: Int32[Array, "tiles"]
    group_starts: Int32[Array, "tiles"]
    group_sizes: Int32[Array, "tiles"]
    tokens: Int32[Array, "rows"]
    slots: Int32[Array, "T top_k"]
    valid: Bool[Array, "T top_k"]


def max_tiles(num_pairs: int, num_experts: int, tokens_per_tile: int) -> int:
    """Bounds ``sum(ceil(count_e / M))`` over all ways to spread the pairs.

    Every expert with tokens adds at most (M - 1) / M to the number of full tiles.
    """
    active = min(num_experts, num_pairs)
    return (num_pairs + active * (tokens_per_tile - 1)) // tokens_per_tile


def make_token_tiles(
    expert_ids: Int32[Array, "T top_k"],
    num_experts: int,
    *,
    tokens_per_tile: int,
    tiles_per_group: int,
) -> TokenTiles:
    """Sorts pairs by expert and cuts each expert's run into tiles.

    Args:
      expert_ids: experts of each token; ``num_experts`` or more for none.
      num_experts: E.
      tokens_per_tile: M, a multiple of `ROW_ALIGNMENT`.
      tiles_per_group: most tiles in a group.
    """
    num_tokens, top_k = expert_ids.shape
    num_pairs, m = num_tokens * top_k, tokens_per_tile
    flat = jnp.minimum(expert_ids.reshape(-1), num_experts)
    ranks, counts = _ranks(flat, num_experts)
    row_starts = _sums_before(_round_up(counts, ROW_ALIGNMENT))
    tiles = _round_up(counts, m) // m
    tile_starts = _sums_before(tiles)

    valid = flat < num_experts
    num_rows = num_pairs + num_experts * (ROW_ALIGNMENT - 1) + m
    num_rows = -(-num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT
    row = jnp.where(valid, row_starts[flat] + ranks, num_rows)
    token = jnp.arange(num_pairs, dtype=jnp.int32) // top_k
    tokens = jnp.zeros(num_rows, jnp.int32).at[row].set(token, mode="drop")
    slots = jnp.where(valid, tile_starts[flat] * m + ranks, 0)

    tile = jnp.arange(max_tiles(num_pairs, num_experts, m), dtype=jnp.int32)
    ends = tile_starts + tiles
    experts = jnp.sum(ends[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    within = tile - tile_starts[experts]
    group = within // tiles_per_group * tiles_per_group
    return TokenTiles(
        experts=experts,
        rows=row_starts[experts] + within * m,
        num_rows=jnp.minimum(counts[experts] - within * m, m),
        group_starts=tile_starts[experts] + group,
        group_sizes=jnp.minimum(tiles[experts] - group, tiles_per_group),
        tokens=tokens,
        slots=slots.reshape(num_tokens, top_k),
        valid=valid.reshape(num_tokens, top_k),
    )


def _ranks(
    experts: Int32[Array, " pairs"], num_experts: int
) -> tuple[Int32[Array, " pairs"], Int32[Array, " experts"]]:
    """Counts the pairs of each expert, and those before each pair.

    A sort by counting. In a block of pairs a product with a triangle of ones counts;
    the numbers are small integers, exact in bfloat16 and float32. XLA's sort of as many
    words takes twice as long.
    """
    blocks = -(-experts.size // _BLOCK)
    padding = blocks * _BLOCK - experts.size
    padded = jnp.pad(experts, (0, padding), constant_values=num_experts)
    numbers = jnp.arange(num_experts, dtype=jnp.int32)
    chosen = padded.reshape(blocks, _BLOCK, 1) == numbers[None, None]
    ones = chosen.astype(jnp.bfloat16)
    in_block = jnp.einsum(
        "ij,bje->bie", _triangle(_BLOCK), ones, preferred_element_type=jnp.float32
    )
    of_block = jnp.sum(chosen, axis=1, dtype=jnp.int32)
    before = jnp.einsum(
        "ab,be->ae",
        _triangle(blocks),
        of_block.astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    )
    ranks = jnp.sum(jnp.where(chosen, in_block + before[:, None], 0), axis=-1)
    ranks = ranks.reshape(-1)[: experts.size].astype(jnp.int32)
    return ranks, jnp.sum(of_block, axis=0, dtype=jnp.int32)


def _triangle(n: int) -> BFloat16[Array, "n n"]:
    """Returns ones below the diagonal."""
    i = jnp.arange(n, dtype=jnp.int32)
    return (i[None] < i[:, None]).astype(jnp.bfloat16)


def _round_up(x: Int32[Array, "*n"], multiple: int) -> Int32[Array, "*n"]:
    return (x + (multiple - 1)) // multiple * multiple


def _sums_before(counts: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Sums what comes before; one small kernel, where a cumulative sum is several."""
    n = jnp.arange(counts.size, dtype=jnp.int32)
    return jnp.sum(jnp.where(n[None] < n[:, None], counts[None], 0), axis=1)
