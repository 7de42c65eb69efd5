"""Tokens of a segment as fixed point in shared memory, for the integer tensor cores.

A token is cut in spans of columns, and each span has its own scale:

    x = scale * q      q = round(x / scale),  scale = max |x| / largest
    q = part_0 + 256 part_1 (+ 65536 part_2)          signed bytes, one row each

Two parts (16 bits) hold bfloat16 tokens, three (23 bits) float32 ones. The error of
a value is half a unit (with three parts 3/4, since 1 / scale is rounded) of its span's
largest value; for bfloat16 that is less than the rounding of the largest value itself.
A span whose scale is below 1e-37 counts as zeros.

The order of bytes within 64 columns is that of the weights: byte n of thread t's k-th
word is column ``8 (k + 4 (n % 2)) + 2 t + n // 2`` (`fragments.bytes_of`), so a thread
that converts octets k and k + 4 writes one block of 16 bytes a part. Rows are 16 bytes
longer than their columns, so that `ldmatrix` meets every bank once.
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
from jaxtyping import Array, Int32

from pallas_kernels.fused_moe import registers as reg
from pallas_kernels.fused_moe.registers import SCALAR, THREADS, Ref, Register

PADDING = 16
"""Bytes after each row in shared memory."""

_UNIT = 16  # columns that one thread converts at a time
_LARGEST = {2: 32512, 3: 2**22 - 1}  # so that rounding the parts carries nowhere
_ROUND = 12582912.0  # 1.5 * 2**23: adding it leaves the integer in the low bits
_ROUND_BITS = 0x4B400000


@dataclass(frozen=True, kw_only=True)
class FixedPointTile:
    """Static description of a tile of tokens in shared memory."""

    tokens: int  # M
    columns: int
    parts: int
    span: int  # columns that share a scale
    pairs_per_row: int  # pairs that share a row of the source
    warpgroups: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the bytes."""
        return self.tokens * self.parts, self.columns + PADDING

    @property
    def scales_shape(self) -> tuple[int, int, int]:
        """Shape of the scale of each span and token, and of the sum of its values."""
        return self.columns // self.span, self.tokens, 2


def convert(
    tile: FixedPointTile,
    source: Ref,
    order: Ref,
    to: Ref,
    scales: Ref,
    *,
    first_pair: Int32[Array, ""],
    num_tokens: Int32[Array, ""],
    column: Int32[Array, ""],
    warpgroup: Int32[Array, ""],
    interpret: bool,
) -> None:
    """Gathers and converts the tokens of a tile; all warpgroups call it.

    Args:
      tile: static sizes.
      source: ``[rows, K]``, bfloat16 or float32.
      order: pairs sorted by expert.
      to: the bytes in shared memory.
      scales: scale and sum of each span, in shared memory.
      first_pair: place in ``order`` of the tile's first pair.
      num_tokens: slots that hold a token; the others become zeros.
      column: first column of the tile; columns past K become zeros.
      warpgroup: number of the caller.
      interpret: whether to compute with jnp.
    """
    scalars = (first_pair, num_tokens, column, warpgroup)
    if interpret:

        @pl.when(warpgroup == 0)
        def _() -> None:
            _convert_with_jnp(tile, source, order, to, scales, *scalars[:3])

        return

    @reg.inline(arg_types=(plgpu.RefType(),) * 4 + (SCALAR,) * 4)
    def inlined(_: Any, source, order, to, scales, *scalars) -> None:
        scalars = [s.registers.item() for s in scalars]
        _convert_with_threads(tile, source, order, to, scales, *scalars)

    inlined(source, order, to, scales, *scalars)


def _convert_with_jnp(
    tile: FixedPointTile,
    source: Ref,
    order: Ref,
    to: Ref,
    scales: Ref,
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
        x = jnp.where(filled & (columns < width), x, 0.0).reshape(-1, tile.span)
        scale = jnp.max(jnp.abs(x), axis=1) / _LARGEST[tile.parts]
        scales[:, m, 0] = scale
        scales[:, m, 1] = jnp.sum(x, axis=1)
        safe = jnp.where(scale > 0, scale, 1.0)[:, None]
        q = jnp.round(x / safe).astype(jnp.int32).reshape(-1)
        for part in range(tile.parts):
            byte = ((q + 128) & 255) - 128
            to[part * tile.tokens + m, pl.ds(0, tile.columns)] = byte.astype(jnp.int8)
            q = (q - byte) >> 8


def _convert_with_threads(
    tile: FixedPointTile,
    source: Register,
    order: Register,
    to: Register,
    scales: Register,
    first_pair: Register,
    num_tokens: Register,
    column: Register,
    warpgroup: Register,
) -> None:
    threads = THREADS * tile.warpgroups
    thread = reg.add(reg.thread(), reg.multiply(warpgroup, THREADS))
    per_token = tile.columns // _UNIT
    total = tile.tokens * per_token
    source_type = ir.MemRefType(source.type)
    width = source_type.shape[1]
    load = _load_floats if source_type.element_type == reg.f32() else _load_bfloat16
    address, to_address = reg.global_address(source), reg.shared_address(to)
    for first in range(0, total, threads):
        number = reg.add(thread, first)
        with utils.when(reg.less(number, total)):
            slot = arith.divui(number, reg.constant(per_token))
            unit = arith.remui(number, reg.constant(per_token))
            octet = reg.bits_and(unit, 3)
            at = reg.add(reg.left(reg.right(unit, 2), 6), reg.left(octet, 3))
            filled = arith.andi(
                reg.less(slot, num_tokens), reg.less(reg.add(column, at), width)
            )
            place = arith.select(filled, reg.add(first_pair, slot), reg.constant(0))
            pair = reg.load(order, place)
            row = arith.divui(pair, reg.constant(tile.pairs_per_row))
            start = arith.select(filled, reg.add(column, at), reg.constant(0))
            row = arith.select(filled, row, reg.constant(0))
            values = load(address, row, width, start)
            zero = reg.real(0.0)
            values = [arith.select(filled, v, zero) for v in values]
            inverse = _store_scale(tile, values, scales, slot, unit)
            words = [
                arith.bitcast(reg.i32(), reg.fma(v, inverse, reg.real(_ROUND)))
                for v in values
            ]
            if tile.parts == 3:  # the third byte holds some of the constant
                words = [reg.add(word, -_ROUND_BITS) for word in words]
            offset = reg.multiply(slot, tile.shape[1])
            offset = reg.add(offset, reg.multiply(unit, _UNIT))
            _store_parts(tile, words, reg.add(to_address, offset))


def _load_bfloat16(
    address: Register, row: Register, width: int, start: Register
) -> list[Register]:
    """Loads two octets, 32 columns apart, of a row."""
    values = []
    for octet in range(2):
        words = utils.inline_ptx(
            f"ld.global.nc.v4.b32 {{$0, $1, $2, $3}}, [$4+{64 * octet}];",
            arith.addi(address, reg.wide_offset(row, width, start, 2)),
            result_types=[reg.i32()] * 4,
        )
        values += reg.unpack_bfloat16(words)
    return values


def _load_floats(
    address: Register, row: Register, width: int, start: Register
) -> list[Register]:
    """Loads two octets, 32 columns apart, of a row."""
    values = []
    for offset in (0, 16, 128, 144):
        values += utils.inline_ptx(
            f"ld.global.nc.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];",
            arith.addi(address, reg.wide_offset(row, width, start, 4)),
            result_types=[reg.f32()] * 4,
        )
    return values


def _store_scale(
    tile: FixedPointTile,
    values: list[Register],
    scales: Register,
    slot: Register,
    unit: Register,
) -> Register:
    """Finds the scale of the span with the threads that share it; returns 1 / scale.

    The largest value is found among the bits as integers, where NaN is the largest.
    """
    lanes = tile.span // _UNIT
    bits = [reg.bits_and(arith.bitcast(reg.i32(), v), 0x7FFFFFFF) for v in values]
    largest, total = bits[0], values[0]
    for b, v in zip(bits[1:], values[1:], strict=True):
        largest, total = arith.maxui(largest, b), arith.addf(total, v)
    distance = 1
    while distance < lanes:
        largest = arith.maxui(largest, utils.shfl_bfly(largest, distance))
        total = arith.addf(total, utils.shfl_bfly(total, distance))
        distance *= 2
    scale = arith.mulf(
        arith.bitcast(reg.f32(), largest), reg.real(1 / _LARGEST[tile.parts])
    )
    first = arith.cmpi(
        arith.CmpIPredicate.eq, reg.bits_and(unit, lanes - 1), reg.constant(0)
    )
    with utils.when(first):
        span = arith.divui(unit, reg.constant(lanes))
        reg.store(scale, scales, span, slot, 0)
        reg.store(total, scales, span, slot, 1)
    smallest = reg.real(1e-37)
    nothing = arith.cmpf(arith.CmpFPredicate.OLT, scale, smallest)
    inverse = arith.divf(reg.real(1.0), scale)
    return arith.select(nothing, reg.real(0.0), inverse)


def _store_parts(
    tile: FixedPointTile, words: list[Register], address: Register
) -> None:
    """Stores byte ``part`` of each integer, blocks of 16 bytes."""
    for part in range(tile.parts):
        selector = 0x11 * part | 0x40
        block = []
        for t in range(4):
            low, high = (
                reg.permute(words[2 * t + hi], words[8 + 2 * t + hi], selector)
                for hi in range(2)
            )
            block.append(reg.permute(low, high, 0x5410))
        offset = part * tile.tokens * tile.shape[1]
        utils.inline_ptx(
            "st.shared.v4.b32 [$0], {$1, $2, $3, $4};",
            *(reg.add(address, offset), *block),
            has_side_effects=True,
        )
        # A byte counts as signed: what is 128 and more takes one from the next.
        words = [reg.add(word, 128 << 8 * part) for word in words]
