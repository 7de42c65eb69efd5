"""From plane words to the A fragments of mma.sync, in registers.

A word of a plane holds one bit of each of the 32 weights that a thread owns in a
64 x 64 tile (`pallas_kernels.bitplane`). A bit-matrix transposition over the planes
puts the bits of a code side by side, one instruction for a word of the result:

    affine     codes as bytes, four to a register: the integer tensor cores take them
    codebook   16-bit loads from the rows' tables, rounded to pairs of bfloat16

Nothing is rounded or scaled on the way of an affine code.
"""

from collections.abc import Sequence

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.fused_moe import registers as reg
from pallas_kernels.fused_moe.registers import (
    Register,
    bits_and,
    left,
    right,
    select,
)


def _low(
    x: Register | None, y: Register | None, mask: int, places: int
) -> Register | None:
    """``(x & mask) | ((y & mask) << places)``; None is zero."""
    if y is None:
        return None if x is None else bits_and(x, mask)
    if x is None:
        return left(bits_and(y, mask), places)
    return select(mask, x, left(y, places))


def _high(
    x: Register | None, y: Register | None, mask: int, places: int
) -> Register | None:
    """``((x >> places) & mask) | (y & (mask << places))``; None is zero."""
    if y is None:
        return None if x is None else bits_and(right(x, places), mask)
    if x is None:
        return bits_and(y, mask << places)
    return select(mask, right(x, places), y)


def nibbles(planes: Sequence[Register | None]) -> list[Register]:
    """Transposes 4 planes, least significant first; the first is never absent.

    Nibble ``n`` of result ``m`` is the code of the weight at bit ``4 n + m``.
    """
    p0, p1, p2, p3 = planes
    even, odd = _low(p0, p1, 0x55555555, 1), _high(p0, p1, 0x55555555, 1)
    even2, odd2 = _low(p2, p3, 0x55555555, 1), _high(p2, p3, 0x55555555, 1)
    return [
        _low(even, even2, 0x33333333, 2),
        _low(odd, odd2, 0x33333333, 2),
        _high(even, even2, 0x33333333, 2),
        _high(odd, odd2, 0x33333333, 2),
    ]  # pyright: ignore[reportReturnType]


def octets(planes: Sequence[Register | None]) -> list[list[Register]]:
    """Transposes 8 planes, least significant first.

    Byte ``n`` of result ``[odd][m]`` is the code of the weight at bit
    ``4 (2 n + odd) + m``.
    """
    low, high = nibbles(planes[:4]), nibbles(planes[4:])
    return [
        [combine(x, y, 0x0F0F0F0F, 4) for x, y in zip(low, high, strict=True)]
        for combine in (_low, _high)
    ]  # pyright: ignore[reportReturnType]


def by_significance(planes: Sequence[Register]) -> list[Register | None]:
    """Returns planes least significant first, absent ones as None, 4 or 8 in all."""
    size = 4 if len(planes) <= 4 else 8
    return [*reversed(planes), *[None] * (size - len(planes))]


def bytes_of(planes: Sequence[Register]) -> list[list[Register]]:
    """Returns the codes of a tile as the A fragments of two mma.m16n8k32.

    Args:
      planes: the words of one tile, most significant first; bits in order "split".
    Returns:
      Twice four registers. Byte n of register m of fragment i is the weight of row
      half ``m % 2`` and column ``8 (2 i + m // 2 + 4 (n % 2)) + 2 t + n // 2``.
    """
    significance = by_significance(planes)
    if len(planes) > 4:
        return octets(significance)
    words, mask = nibbles(significance), 0x0F0F0F0F
    return [[bits_and(right(w, shift), mask) for w in words] for shift in (0, 4)]


def lookup_rows(lut: Register, first: int) -> tuple[Register, Register]:
    """Returns the addresses of entry ``first`` of the two rows of this thread.

    Args:
      lut: fp16 tables ``[64, entries]`` in global memory.
      first: the entry that code 0 means.
    """
    entries = ir.MemRefType(lut.type).shape[1]
    thread, base = reg.thread(), reg.global_address(lut)
    warp, lane = reg.right(thread, 5), reg.bits_and(thread, 31)
    row = reg.add(reg.left(warp, 4), reg.right(lane, 2))
    start = reg.multiply(row, 2 * entries)
    return tuple(
        reg.offset_address(base, reg.add(start, 2 * (first + 8 * half * entries)))
        for half in range(2)
    )


def looked_up(
    planes: Sequence[Register], rows: tuple[Register, Register], *, exact: bool
) -> list[tuple[float, list[Register]]]:
    """Returns looked-up weights as sums of bfloat16; bits in order "pair".

    Args:
      planes: the words of one tile, most significant first.
      rows: from `lookup_rows`.
      exact: whether a second part holds what the rounding to bfloat16 left over.
    """
    significance = by_significance(planes)
    wide = len(planes) > 4
    fields = octets(significance) if wide else [nibbles(significance)] * 2
    rounded, rest = [], []
    for s in range(16):
        pair = []
        for hi in range(2):
            place = 8 * (s // 4) if wide else 8 * (s // 4) + 4 * hi
            code = bits_and(right(fields[hi][s % 4], place), 0xFF if wide else 0xF)
            pair.append(_load_half(rows[s % 2], code))
        word = reg.pack_bfloat16(*pair)
        rounded.append(word)
        if exact:
            left_over = zip(pair, reg.unpack_bfloat16([word]), strict=True)
            rest.append(reg.pack_bfloat16(*[arith.subf(a, b) for a, b in left_over]))
    return [(1, rounded), (1, rest)] if exact else [(1, rounded)]


def _load_half(address: Register, entry: Register) -> Register:
    """Loads an fp16 of global memory as a float32."""
    return utils.inline_ptx(
        "{\n.reg .b16 half;\nld.global.nc.b16 half, [$1];\ncvt.f32.f16 $0, half;\n}",
        reg.offset_address(address, left(entry, 1)),
        result_types=reg.f32(),
    )
