"""Tokens of a segment into shared memory, as bfloat16 and ready for `ldmatrix`.

A tile of M tokens is gathered row by row out of the tokens (or out of the hidden
activations of pairs). bfloat16 rows are copied asynchronously, 16 bytes at a time. A
float32 token becomes three bfloat16 rows, M apart, whose sum is the token to 24 bits.
Rows are 16 bytes longer than their columns, so that the 8 rows of a matrix that
`ldmatrix` reads lie in different banks. Slots without a token are zero.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float32, Int32

from pallas_kernels.fused_moe import registers as reg
from pallas_kernels.fused_moe.registers import SCALAR, THREADS, Ref, Register

PADDING = 8
"""Values after each row in shared memory."""

_CHUNK = 8  # values of 16 bytes


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Static description of a tile in shared memory."""

    tokens: int  # M
    columns: int
    parts: int  # rows of a token: 1, or 3 for float32
    pairs_per_row: int  # pairs that share a row of the source
    warpgroups: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the tile in shared memory."""
        return self.tokens * self.parts, self.columns + PADDING


def stage(
    tile: Tile,
    source: Ref,
    order: Ref,
    to: Ref,
    *,
    first_pair: Int32[Array, ""],
    num_tokens: Int32[Array, ""],
    column: Int32[Array, ""],
    warpgroup: Int32[Array, ""],
    interpret: bool,
) -> None:
    """Copies the rows of a tile; all warpgroups call it.

    Args:
      tile: static sizes.
      source: ``[rows, K]``, bfloat16 or float32.
      order: pairs sorted by expert.
      to: the tile in shared memory.
      first_pair: place in ``order`` of the tile's first pair.
      num_tokens: slots that hold a token.
      column: first column of the tile; columns past K become zeros.
      warpgroup: number of the caller.
      interpret: whether to compute with jnp.
    """
    if interpret:

        @pl.when(warpgroup == 0)
        def _() -> None:
            _stage_with_jnp(tile, source, order, to, first_pair, num_tokens, column)

        return

    @reg.inline(arg_types=(plgpu.RefType(),) * 3 + (SCALAR,) * 4)
    def inlined(_: Any, source, order, to, *scalars) -> None:
        scalars = [s.registers.item() for s in scalars]
        _stage_with_threads(tile, source, order, to, *scalars)

    inlined(source, order, to, first_pair, num_tokens, column, warpgroup)


def split(x: Float32[Array, "*shape"], parts: int) -> list[Array]:
    """Splits float32 into bfloat16 parts whose sum it is."""
    results = []
    for _ in range(parts):
        # XLA would take float32 -> bfloat16 -> float32 for no change at all.
        rounded = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        results.append(rounded.astype(jnp.bfloat16))
        x = x - rounded
    return results


def _stage_with_jnp(
    tile: Tile,
    source: Ref,
    order: Ref,
    to: Ref,
    first_pair: Array,
    num_tokens: Array,
    column: Array,
) -> None:
    last, width = order.shape[0] - 1, source.shape[1]
    columns = column + jnp.arange(tile.columns, dtype=jnp.int32)
    for m in range(tile.tokens):
        filled = m < num_tokens
        pair = order[jnp.minimum(first_pair + m, last)]
        row = jnp.where(filled, lax.div(pair, tile.pairs_per_row), 0)
        x = source[row, :].astype(jnp.float32)[jnp.minimum(columns, width - 1)]
        x = jnp.where(filled & (columns < width), x, 0.0)
        for part, values in enumerate(split(x, tile.parts)):
            to[part * tile.tokens + m, pl.ds(0, tile.columns)] = values


def _stage_with_threads(
    tile: Tile,
    source: Register,
    order: Register,
    to: Register,
    first_pair: Register,
    num_tokens: Register,
    column: Register,
    warpgroup: Register,
) -> None:
    threads = THREADS * tile.warpgroups
    thread = reg.add(reg.thread(), reg.multiply(warpgroup, THREADS))
    chunks = tile.columns // _CHUNK
    total = tile.tokens * chunks
    source_address = reg.global_address(source)
    to_address = reg.shared_address(to)
    width = ir.MemRefType(source.type).shape[1]
    size = 2 if tile.parts == 1 else 4
    copy = _copy_chunk if tile.parts == 1 else _split_chunk
    for i in range(-(-total // threads)):
        number = reg.add(thread, i * threads)
        slot = arith.divui(number, reg.constant(chunks))
        chunk = arith.remui(number, reg.constant(chunks))
        inside = reg.less(number, total)
        with utils.when(inside):
            at = reg.add(column, reg.multiply(chunk, _CHUNK))
            filled = arith.andi(reg.less(slot, num_tokens), reg.less(at, width))
            place = reg.add(first_pair, slot)
            pair = reg.load(order, arith.select(filled, place, reg.constant(0)))
            row = arith.divui(pair, reg.constant(tile.pairs_per_row))
            row = arith.select(filled, row, reg.constant(0))
            at = arith.select(filled, at, reg.constant(0))
            offset = reg.wide_offset(row, width, at, size)
            copy(
                tile,
                arith.addi(source_address, offset),
                to_address,
                slot,
                chunk,
                filled,
            )
    utils.inline_ptx("cp.async.wait_all;", has_side_effects=True)


def _tile_address(
    tile: Tile, to: Register, slot: Register, chunk: Register, part: int
) -> Register:
    row_bytes = 2 * tile.shape[1]
    offset = reg.add(
        reg.multiply(reg.add(slot, part * tile.tokens), row_bytes),
        reg.multiply(chunk, 2 * _CHUNK),
    )
    return reg.add(to, offset)


def _copy_chunk(
    tile: Tile,
    source: Register,
    to: Register,
    slot: Register,
    chunk: Register,
    filled: Register,
) -> None:
    """Copies 16 bytes asynchronously; no bytes, and zeros, for an empty slot."""
    size = arith.select(filled, reg.constant(2 * _CHUNK), reg.constant(0))
    utils.inline_ptx(
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        *(_tile_address(tile, to, slot, chunk, 0), source, size),
        has_side_effects=True,
    )


def _split_chunk(
    tile: Tile,
    source: Register,
    to: Register,
    slot: Register,
    chunk: Register,
    filled: Register,
) -> None:
    """Splits 8 float32 into bfloat16 parts; zeros for an empty slot."""
    zero = reg.real(0.0)
    values = []
    for half in range(2):
        loaded = utils.inline_ptx(
            f"ld.global.v4.f32 {{$0, $1, $2, $3}}, [$4+{16 * half}];",
            source,
            result_types=[reg.f32()] * 4,
            has_side_effects=True,
        )
        values += [arith.select(filled, v, zero) for v in loaded]
    for part in range(tile.parts):
        words = [
            reg.pack_bfloat16(values[i], values[i + 1]) for i in range(0, _CHUNK, 2)
        ]
        utils.inline_ptx(
            "st.shared.v4.b32 [$0], {$1, $2, $3, $4};",
            *(_tile_address(tile, to, slot, chunk, part), *words),
            has_side_effects=True,
        )
        values = [
            arith.subf(value, part_of)
            for value, part_of in zip(values, reg.unpack_bfloat16(words), strict=True)
        ]
