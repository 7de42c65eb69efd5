"""The fused MoE on Hopper, in Pallas Mosaic GPU.

    expert_ids -> pairs (token, expert) sorted by expert, cut in tiles of M tokens
    x          -> fp16 with a power of two per token -> gathered, B fragments   [XLA]
                                |
      gate_up  grid = (64-row tiles, token tiles), one warpgroup each
               e = expert of the token tile;  none: done
               b = bits[e, 0];  branch for each b that can be
                 for chunk of V column tiles:
                   planes 0..b-1: pool[frames[e, linear, plane, part]] -> registers
                   unpack -> mma.sync -> fp32 sums  (`mosaic_tile`)
                   affine: sums of a column tile * scale + zero * sum of x
                                |
      h = act(gate) * up -> fp16 with a power of two per token -> B fragments   [XLA]
      down     the same kernel on the third linear
                                |
    y[t] = sum_k weight[t, k] * row of the pair (t, k)                          [XLA]

Nothing is shared between warpgroups and nothing is asynchronous: all operands are read
from global memory (tokens and tables repeat, so they come from L1 and L2). An expert
without tokens has no tile; the number of tiles has a static bound, and a tile past the
real count returns at once. Precision is data: bits and frames are read by the kernel.

Activations are fp16 for the tensor cores. A token is scaled by a power of two so that
its largest value lies in [2**14, 2**15): then bfloat16 is represented exactly down to
2**-29 of the largest value. For float32 a tile holds every token twice, rounded to fp16
and what the rounding left over, so that 22 bits count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Float16, Float32, Int32, UInt32

from pallas_kernels.bitplane import TILE, vector_width
from pallas_kernels.fused_moe import mosaic_tile
from pallas_kernels.fused_moe.mosaic_tile import Ref
from pallas_kernels.fused_moe.reference import Activation, activation_function
from pallas_kernels.pytree import pytree
from pallas_kernels.side_tables import AffineTables, CodebookTables, SideTables

_PART_BITS = 11  # of the significand of fp16


@dataclass(frozen=True, kw_only=True)
class Config:
    """Block sizes of the kernel."""

    tokens_per_tile: int  # M, a multiple of 8

    def __post_init__(self) -> None:
        if self.tokens_per_tile % mosaic_tile.TOKENS or self.tokens_per_tile <= 0:
            raise ValueError(
                f"tokens_per_tile={self.tokens_per_tile} must be a positive multiple"
                f" of {mosaic_tile.TOKENS}"
            )


def default_config(num_pairs: int, num_experts: int, parts: int) -> Config:
    """Returns tiles that hold an expert's mean number of tokens, 8 to 64 / parts."""
    mean = -(-num_pairs // num_experts)
    tokens = min(64 // parts, max(8, 1 << (mean - 1).bit_length()))
    return Config(tokens_per_tile=tokens)


def max_tiles(num_pairs: int, num_experts: int, tokens_per_tile: int) -> int:
    """Bounds ``sum(ceil(count_e / M))`` over all ways to spread the pairs.

    Every expert with tokens adds at most (M - 1) / M to the number of full tiles.
    """
    active = min(num_experts, num_pairs)
    return (num_pairs + active * (tokens_per_tile - 1)) // tokens_per_tile


@pytree
@dataclass(frozen=True, kw_only=True)
class TokenTiles:
    """Tiles of up to M tokens of one expert, and where each pair went.

    Attributes:
      experts: expert of each tile; E for a tile past the real count.
      tokens: token of each slot; T for an empty one.
      slots: slot (tile * M + place) of each pair of a token and its k-th expert.
      valid: whether the pair has an expert.
    """

    experts: Int32[Array, "tiles"]
    tokens: Int32[Array, "tiles M"]
    slots: Int32[Array, "T top_k"]
    valid: Bool[Array, "T top_k"]


def make_tiles(
    expert_ids: Int32[Array, "T top_k"], num_experts: int, tokens_per_tile: int
) -> TokenTiles:
    """Sorts pairs by expert and cuts each expert's run into tiles."""
    num_tokens, top_k = expert_ids.shape
    flat = expert_ids.reshape(-1)
    num_pairs = flat.size
    num_tiles = max_tiles(num_pairs, num_experts, tokens_per_tile)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    places = jnp.arange(num_pairs, dtype=jnp.int32)
    rank = jnp.zeros_like(order).at[order].set(places, unique_indices=True)

    # ids from E on are padding; they sort behind all experts
    counts = jnp.zeros(num_experts, jnp.int32).at[flat].add(1, mode="drop")
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    tiles = (counts + (tokens_per_tile - 1)) // tokens_per_tile
    ends = jnp.cumsum(tiles, dtype=jnp.int32)

    tile = jnp.arange(num_tiles, dtype=jnp.int32)
    experts = jnp.searchsorted(ends, tile, side="right").astype(jnp.int32)
    e = jnp.minimum(experts, num_experts - 1)
    local = (tile - (ends - tiles)[e]) * tokens_per_tile
    local = local[:, None] + jnp.arange(tokens_per_tile, dtype=jnp.int32)[None]
    filled = (local < counts[e][:, None]) & (experts < num_experts)[:, None]
    pair = order[jnp.clip(starts[e][:, None] + local, 0, num_pairs - 1)]

    valid = flat < num_experts
    own = jnp.where(valid, flat, 0)
    slots = (ends - tiles)[own] * tokens_per_tile + rank - starts[own]
    return TokenTiles(
        experts=experts,
        tokens=jnp.where(filled, pair // top_k, num_tokens),
        slots=jnp.where(valid, slots, 0).reshape(num_tokens, top_k),
        valid=valid.reshape(num_tokens, top_k),
    )


def to_half(
    x: Float32[Array, "tiles M K"], parts: int
) -> tuple[Float16[Array, "tiles rows K"], Float32[Array, "tiles M"]]:
    """Scales each token by a power of two into the range of fp16.

    Returns:
      One part: the rounded tokens. Two parts: below them what the rounding left over,
      2**11-fold. And the factors that undo the scaling. A token with a NaN or an
      infinity stays not finite.
    """
    largest = jnp.max(jnp.abs(x), axis=-1)
    exponent = lax.bitcast_convert_type(largest, jnp.int32) >> 23  # biased by 127
    exponent = jnp.clip(exponent, 15, 254)
    scale = lax.bitcast_convert_type((268 - exponent) << 23, jnp.float32)
    undo = lax.bitcast_convert_type((exponent - 14) << 23, jnp.float32)
    scaled = x * scale[..., None]
    # reduce_precision, since XLA's GPU compiler takes float32 -> float16 -> float32 for
    # no change at all (xla_allow_excess_precision), and the rest would be zero.
    rounded = lax.reduce_precision(scaled, exponent_bits=5, mantissa_bits=10)
    half = rounded.astype(jnp.float16)
    if parts == 2:
        rest = (scaled - rounded) * 2.0**_PART_BITS
        half = jnp.concatenate([half, rest.astype(jnp.float16)], axis=1)
    return half, undo


def fused_moe(
    x: Float[Array, "T D"],
    expert_ids: Int32[Array, "T top_k"],
    expert_weights: Float32[Array, "T top_k"],
    pool: UInt32[Array, "num_frames frame_words"],
    frames: Int32[Array, "L E 3 parent_bits frames_per_plane"],
    bits: Int32[Array, "L E 2"],
    gate_up: SideTables,
    down: SideTables,
    layer: Int32[Array, ""],
    *,
    activation: Activation = "silu",
    interpret: bool = False,
    config: Config | None = None,
) -> Float[Array, "T D"]:
    """Computes the routed experts; see `pallas_kernels.fused_moe.fused_moe`.

    Args:
      x: tokens.
      expert_ids: experts of each token; ``E`` for none.
      expert_weights: combine weights.
      pool: the paged pool; frame 0 is all zeros.
      frames: frames of gate, up and down.
      bits: committed bits of gate_up and down, from 1 (codebook: from the seed bits)
        to ``parent_bits``.
      gate_up: side tables of gate above up.
      down: side tables of down.
      activation: of the gate branch.
      interpret: whether to run on the CPU interpreter of Mosaic GPU.
      config: block sizes; None chooses them.
    Returns:
      The routed sum, in the type of ``x``.
    Raises:
      ValueError: if a frame does not hold whole 64-row tiles.
      NotImplementedError: if groups of columns are not made of 64-column tiles.
    """
    frames, bits = frames[layer], bits[layer]
    gate_up, down = jax.tree.map(lambda t: t[layer], (gate_up, down))
    num_experts, _, parent_bits, frames_per_plane = frames.shape
    width, expert_width = x.shape[1], gate_up.num_rows // 2
    for n, k, tables in ((expert_width, width, gate_up), (width, expert_width, down)):
        _check_frames(n, frames_per_plane)
        _tile_format(tables, parent_bits, k, interpret)
    parts = 2 if x.dtype == jnp.float32 else 1
    config = config or default_config(expert_ids.size, num_experts, parts)
    tokens = config.tokens_per_tile
    tiles = make_tiles(expert_ids, num_experts, tokens)

    def paged(h: Array, tables: SideTables, linears: Sequence[int]) -> Array:
        half, undo = to_half(h, parts)
        y = _paged_linear(
            half, tiles.experts, pool, frames, bits, tables, linears, interpret
        )
        if parts == 2:
            y = y[..., :tokens] + y[..., tokens:] * 2.0**-_PART_BITS
        return y * undo[:, None, :]

    # One more row of zeros is what an empty slot reads.
    padded = jnp.pad(x, ((0, 1), (0, 0)))
    h = paged(padded[tiles.tokens].astype(jnp.float32), gate_up, (0, 1))
    h = activation_function(activation)(h[:, :expert_width]) * h[:, expert_width:]
    y = paged(jnp.swapaxes(h, 1, 2), down, (2,))
    rows = jnp.swapaxes(y, 1, 2).reshape(-1, width)[tiles.slots]
    # A tile past the real count holds whatever the memory held: choose, don't multiply.
    rows = jnp.where(tiles.valid[..., None], rows * expert_weights[..., None], 0)
    return jnp.sum(rows, axis=1).astype(x.dtype)


def _check_frames(num_rows: int, frames_per_plane: int) -> None:
    if num_rows // TILE % frames_per_plane:
        raise ValueError(
            f"a linear of {num_rows} rows has {num_rows // TILE} tiles of {TILE} rows,"
            f" which cannot be cut into frames_per_plane={frames_per_plane} equal"
            " runs; choose a divisor"
        )


def _paged_linear(
    x: Float16[Array, "tiles M K"],
    experts: Int32[Array, "tiles"],
    pool: UInt32[Array, "num_frames frame_words"],
    frames: Int32[Array, "E 3 parent_bits frames_per_plane"],
    bits: Int32[Array, "E 2"],
    tables: SideTables,
    linears: Sequence[int],
    interpret: bool,
) -> Float32[Array, "tiles N M"]:
    """Multiplies each tile of tokens by its expert's linears, one above the other.

    Tiles without an expert are left as they are.
    """
    num_tiles, tokens, k = x.shape
    num_experts, _, parent_bits, frames_per_plane = frames.shape
    num_rows = tables.num_rows // len(linears)  # of one linear
    tiles_per_linear = num_rows // TILE
    tiles_per_frame = tiles_per_linear // frames_per_plane
    v = vector_width(k)
    chunks = k // (TILE * v)
    block = 0 if linears[0] == 0 else 1
    format_ = _tile_format(tables, parent_bits, k, interpret)

    def kernel(
        x_ref: Ref,
        sums_ref: Ref,
        experts_ref: Ref,
        pool_ref: Ref,
        frames_ref: Ref,
        bits_ref: Ref,
        *rest: Ref,
    ) -> None:
        *table_refs, out_ref = rest
        r, i = lax.axis_index("row_tile"), lax.axis_index("token_tile")
        e = experts_ref[i]

        def at_bits(b: int, e: Array, linear: Array, part: Array, first: Array) -> None:
            plane_frames = [frames_ref[e, linear, j, part] for j in range(b)]
            rows = pl.ds(r * TILE, TILE)

            def load(chunk: Array) -> tuple[Array, ...]:
                at = first + jnp.minimum(chunk, chunks - 1)
                return tuple(
                    plgpu.load(
                        pool_ref.at[frame, at],
                        layout=mosaic_tile.words_layout(v),
                        optimized=False,
                    )
                    for frame in plane_frames
                )

            def step(chunk: Array, carry: tuple[Array, tuple[Array, ...]]):
                y, words = carry
                ahead = load(chunk + 1)  # in flight while this chunk is multiplied
                for column in range(v):
                    c = chunk * v + column
                    y = y + format_.product(
                        [t.at[e] for t in table_refs],
                        x_ref.at[i, c],
                        sums_ref.at[i, c],
                        words,
                        rows=rows,
                        c=c,
                        column=column,
                    )
                return y, ahead

            zeros = plgpu.layout_cast(
                jnp.zeros((TILE, tokens), jnp.float32), mosaic_tile.ACCUMULATOR
            )
            y, _ = lax.fori_loop(0, chunks, step, (zeros, load(jnp.int32(0))))
            out_ref[i, rows, :] = y

        @pl.when(e < num_experts)
        def _():
            linear = linears[0] + lax.div(r, tiles_per_linear)
            in_linear = lax.rem(r, tiles_per_linear)
            part = lax.div(in_linear, tiles_per_frame)
            first_chunk = lax.rem(in_linear, tiles_per_frame) * chunks
            committed = bits_ref[e, block]
            for b in format_.bit_widths:
                pl.when(committed == b)(
                    lambda b=b: at_bits(b, e, linear, part, first_chunk)
                )

    sums = jnp.sum(
        x.astype(jnp.float32).reshape(num_tiles, tokens, k // TILE, TILE), axis=-1
    )
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(
            (num_tiles, tables.num_rows, tokens), jnp.float32
        ),
        grid=(tables.num_rows // TILE, num_tiles),
        grid_names=("row_tile", "token_tile"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(
        mosaic_tile.to_fragments(x),
        jnp.swapaxes(sums, 1, 2),
        experts,
        pool.reshape(pool.shape[0], tiles_per_frame * chunks, 128 * v),
        frames,
        bits,
        *[getattr(tables, part) for part in tables.parts],
    )


@dataclass(frozen=True, kw_only=True)
class _Affine:
    """Folds scale and zero into the sums of a column tile.

    ``(code + 1/2) 2**-b = (code - 2**(b-1)) 2**-b + 1/2 + 2**-(b+1)``, so with the
    integer product p and the sum s of the tokens over the tile's columns

        y += (scale 2**-b) p + (scale (1/2 + 2**-(b+1)) + zero) s
    """

    group_size: int
    bit_widths: range
    interpret: bool

    def product(
        self,
        table_refs: Sequence[Ref],
        x_ref: Ref,
        sum_ref: Ref,
        words: Sequence[UInt32[Array, "words"]],
        *,
        rows: Any,
        c: Array,
        column: int,
    ) -> Float32[Array, "64 M"]:
        """Returns what column tile ``c`` adds to the result."""
        b = len(words)
        group = lax.div(c * TILE, self.group_size)
        scale, zero = (
            _load(t.at[group, rows], mosaic_tile.ACCUMULATOR.reduce(1)).astype(
                jnp.float32
            )
            for t in table_refs
        )
        total = _load(sum_ref, mosaic_tile.ACCUMULATOR.reduce(0))
        product = mosaic_tile.affine_product(
            x_ref, words, column=column, interpret=self.interpret
        )
        shape = product.shape
        offset = scale * (0.5 + 2.0 ** -(b + 1)) + zero
        return product * lax.broadcast_in_dim(
            scale * 2.0**-b, shape, (0,)
        ) + lax.broadcast_in_dim(offset, shape, (0,)) * lax.broadcast_in_dim(
            total, shape, (1,)
        )


@dataclass(frozen=True, kw_only=True)
class _Codebook:
    """Looks weights up; the levels of a row stand one after the other."""

    seed_entries: int
    bit_widths: range
    interpret: bool

    def product(
        self,
        table_refs: Sequence[Ref],
        x_ref: Ref,
        sum_ref: Ref,
        words: Sequence[UInt32[Array, "words"]],
        *,
        rows: Any,
        c: Array,
        column: int,
    ) -> Float32[Array, "64 M"]:
        """Returns what column tile ``c`` adds to the result."""
        del sum_ref, c  # a looked-up weight needs no correction
        (lut_ref,) = table_refs
        return mosaic_tile.codebook_product(
            x_ref,
            lut_ref.at[rows],
            words,
            first=2 ** len(words) - self.seed_entries,
            column=column,
            interpret=self.interpret,
        )


def _load(ref: Ref, layout: Any) -> Array:
    return plgpu.load(ref, layout=layout, optimized=False)


def _tile_format(
    tables: SideTables, parent_bits: int, k: int, interpret: bool
) -> _Affine | _Codebook:
    """Chooses how tiles are computed; checks that the tables fit the tiles."""
    if isinstance(tables, CodebookTables):
        seed_entries = 2 ** (parent_bits + 1) - tables.lut.shape[-1]
        return _Codebook(
            seed_entries=seed_entries,
            bit_widths=range(seed_entries.bit_length() - 1, parent_bits + 1),
            interpret=interpret,
        )
    assert isinstance(tables, AffineTables)
    group_size = k // tables.num_groups
    if group_size % TILE:
        raise NotImplementedError(
            f"groups of {group_size} columns are not made of {TILE}-column tiles;"
            f" use a multiple of {TILE}, or implementation='reference'"
        )
    return _Affine(
        group_size=group_size,
        bit_widths=range(1, parent_bits + 1),
        interpret=interpret,
    )
