"""One 64 x 64 tile of weights times a tile of tokens, in the registers of a warpgroup.

    plane words (b registers of a thread; one word holds its 32 weights of the tile)
      -> bit-matrix transposition: the codes of the weights lie side by side
      -> fp16 pairs: the A fragments of four mma.sync.m16n8k16
           affine    code - 2**(b-1), an exact integer   (0x6400 | code is 1024 + code)
           codebook  lut[row, code], gathered from global memory (L1 holds it)
      -> mma.sync with the B fragments of the tokens (`to_fragments`), fp32 sums

This is the only module that touches the insides of Mosaic GPU (`inline_mgpu`, MLIR,
registers of a `FragmentedArray`); it was written against jax 0.11.2 and 0.12.0. Moved
between versions so far: `utils.memref_ptr` lost an argument before 0.11, `convergent`
of `utils.inline_ptx` needs jaxlib 0.11.2.

The interpreter cannot run inline code, so `interpret=True` does the same with jnp.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector
from jaxtyping import Array, Float16, Float32, Int, UInt32

from pallas_kernels.bitplane import TILE, BitOrder

TOKENS = 8
"""Tokens of one mma.sync; a tile of tokens is a multiple of it."""

ACCUMULATOR = plgpu.Layout.WGMMA
"""Layout of a product [64, M]; the sum of mma.sync and of wgmma lie alike."""

Ref = Any
"""A Pallas reference; its type has no public name."""

Register = Any
"""An MLIR value: a register of every thread, or a memref. Tests put arrays there."""


def words_layout(v: int) -> Any:
    """Returns the layout of ``128 v`` words of a plane: ``v`` for each thread."""
    return plgpu.Layout.WG_STRIDED((128 * v,), vec_size=v)


def to_fragments(
    x: Float16[Array, "tiles M K"],
) -> Float16[Array, "tiles column_tiles values"]:
    """Orders tiles of tokens as the B fragments of mma.sync.m16n8k16.

    Values of a column tile: by 8 tokens, column half, lane, and then the 8 values that
    a lane loads at once. Of each half, lane ``4 g + t`` holds token ``g``'s columns
    ``16 i + 8 j + 2 t`` and the next one, for ``i`` and ``j`` in 0..1.
    """
    num_tiles, tokens, k = x.shape
    cut = x.reshape(num_tiles, tokens // TOKENS, TOKENS, k // TILE, 2, 2, 2, 4, 2)
    cut = jnp.transpose(cut, (0, 3, 1, 4, 2, 7, 5, 6, 8))
    return cut.reshape(num_tiles, k // TILE, TILE * tokens)


def affine_product(
    x_ref: Ref,
    words: Sequence[UInt32[Array, "words"]],
    *,
    column: int,
    interpret: bool,
) -> Float32[Array, "64 M"]:
    """Computes ``(code - 2**(bits - 1)) @ x`` for one tile.

    Args:
      x_ref: the fragments of the tokens in the tile's 64 columns.
      words: one load of each plane, most significant first; there are ``bits``.
      column: which of the ``v`` column tiles of the words.
      interpret: whether to compute with jnp.
    """
    if interpret:
        codes = _codes(words, column, "split") - 2 ** (len(words) - 1)
        return _dot(codes.astype(jnp.float16), x_ref)

    def product(x: Register, planes: list[Register]) -> list[Register]:
        return _multiply(_integers(planes), x)

    return _inlined(product, [x_ref], words, column)


def codebook_product(
    x_ref: Ref,
    lut_ref: Ref,
    words: Sequence[UInt32[Array, "words"]],
    *,
    first: int,
    column: int,
    interpret: bool,
) -> Float32[Array, "64 M"]:
    """Computes ``lut[row, first + code] @ x`` for one tile.

    Args:
      x_ref: the fragments of the tokens in the tile's 64 columns.
      lut_ref: the lookup tables ``[64, entries]`` of the tile's rows.
      words: one load of each plane, most significant first; there are ``bits``.
      first: the entry of code 0.
      column: which of the ``v`` column tiles of the words.
      interpret: whether to compute with jnp.
    """
    if interpret:
        index = _codes(words, column, "pair") + first
        return _dot(jnp.take_along_axis(lut_ref[...], index, axis=1), x_ref)

    def product(x: Register, lut: Register, planes: list[Register]) -> list[Register]:
        return _multiply(_looked_up(planes, lut, first), x)

    return _inlined(product, [x_ref, lut_ref], words, column)


# ---- the interpreter's way ----------------------------------------------------------


def _codes(
    words: Sequence[UInt32[Array, "words"]], column: int, order: BitOrder
) -> Int[Array, "64 64"]:
    """Unpacks a tile; axes of the words: warp, 8 rows, 4 column pairs, v."""
    codes = jnp.zeros((4, 2, 8, 8, 4, 2), jnp.int32)  # warp half g octet t hi
    half, octet, hi = (
        lax.broadcasted_iota(jnp.uint32, codes.shape, a) for a in (1, 3, 5)
    )
    s = 2 * octet + half
    place = s + 16 * hi if order == "split" else 4 * (2 * (s // 4) + hi) + s % 4
    for plane in words:
        word = plane.reshape(4, 8, 4, -1)[:, :, :, column]
        word = lax.broadcast_in_dim(word, codes.shape, (0, 2, 4))
        codes = 2 * codes + ((word >> place) & jnp.uint32(1)).astype(jnp.int32)
    return codes.reshape(TILE, TILE)


def _dot(weights: Float16[Array, "64 64"], x_ref: Ref) -> Float32[Array, "64 M"]:
    """Multiplies by the tokens, which are looked up in their fragments.

    A lookup, since XLA's CPU compiler of jaxlib 0.11.2 takes minutes for the
    transposition with 7 axes that would do the same.
    """
    x = x_ref[...]
    shape = (TILE, x.size // TILE)
    k, token = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(2))
    lane = 4 * (token % TOKENS) + k % 8 // 2
    value = 4 * (k % 32 // 16) + 2 * (k % 16 // 8) + k % 2
    index = 512 * (token // TOKENS) + 256 * (k // 32) + 8 * lane + value
    return jnp.dot(weights.astype(jnp.float32), x[index].astype(jnp.float32))


# ---- the device's way: everything below runs per thread while a kernel is lowered ----


def _inlined(
    f: Callable[..., list[Register]],
    refs: Sequence[Ref],
    words: Sequence[UInt32[Array, "words"]],
    column: int,
) -> Float32[Array, "64 M"]:
    """Runs ``f(*refs, plane words of this thread)`` inside of the kernel.

    ``f`` returns the fp32 sums as pairs, in the order of `ACCUMULATOR`.
    """
    shape = (TILE, refs[0].shape[-1] // TILE)
    layout = words_layout(words[0].size // 128)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * len(refs) + (layout,) * len(words),
        return_type=plgpu.ShapeDtypeStruct(
            shape, jnp.dtype(jnp.float32), layout=ACCUMULATOR
        ),
    )
    def inlined(_: Any, *args: Any) -> Any:
        planes = [
            vector.extract(w.registers.flat[0], [], [column]) for w in args[len(refs) :]
        ]
        sums = np.empty(2 * shape[1] // TOKENS, dtype=object)
        sums[:] = f(*args[: len(refs)], planes)
        to = ACCUMULATOR.to_mgpu()
        return mgpu.FragmentedArray(
            _registers=sums.reshape(to.registers_shape(shape)),
            _layout=to,
            _is_signed=None,
        )

    return inlined(*refs, *words)


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _constant(value: int) -> Register:
    signed = (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), signed))


def _and(x: Register, mask: int) -> Register:
    return arith.andi(x, _constant(mask))


def _right(x: Register, places: int) -> Register:
    return arith.shrui(x, _constant(places)) if places else x


def _left(x: Register, places: int) -> Register:
    return arith.shli(x, _constant(places)) if places else x


def _select(mask: int, x: Register, y: Register) -> Register:
    """Bits of x where the mask is set, of y elsewhere; one instruction."""
    return utils.inline_ptx(
        "lop3.b32 $0, $1, $2, $3, 0xCA;", _constant(mask), x, y, result_types=_i32()
    )


def _low(
    x: Register | None, y: Register | None, mask: int, places: int
) -> Register | None:
    """``(x & mask) | ((y & mask) << places)``; None is zero."""
    if y is None:
        return None if x is None else _and(x, mask)
    if x is None:
        return _left(_and(y, mask), places)
    return _select(mask, x, _left(y, places))


def _high(
    x: Register | None, y: Register | None, mask: int, places: int
) -> Register | None:
    """``((x >> places) & mask) | (y & (mask << places))``; None is zero."""
    if y is None:
        return None if x is None else _and(_right(x, places), mask)
    if x is None:
        return _and(y, mask << places)
    return _select(mask, _right(x, places), y)


def _nibbles(planes: Sequence[Register | None]) -> list[Register | None]:
    """Transposes 4 planes, least significant first.

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
    ]


def _bytes(planes: Sequence[Register | None]) -> list[list[Register]]:
    """Transposes 8 planes, least significant first.

    Byte ``n`` of result ``[odd][m]`` is the code of the weight at bit
    ``4 (2 n + odd) + m``.
    """
    low, high = _nibbles(planes[:4]), _nibbles(planes[4:])
    results = []
    for combine in (_low, _high):
        pairs = [combine(x, y, 0x0F0F0F0F, 4) for x, y in zip(low, high, strict=True)]
        results.append([_present(x) for x in pairs])
    return results


def _present(x: Register | None) -> Register:
    assert x is not None  # the least significant plane is never absent
    return x


def _by_significance(planes: Sequence[Register]) -> list[Register | None]:
    """Least significant first, absent planes as None, 4 or 8 in all."""
    size = 4 if len(planes) <= 4 else 8
    return [*reversed(planes), *[None] * (size - len(planes))]


def _integers(planes: Sequence[Register]) -> list[Register]:
    """Returns the 16 A registers of ``code - 2**(bits-1)``; bits in order "split".

    With 0x6400 (1024.0 in fp16, whose last place is 1) the code becomes a float
    without a conversion. A code 4 bits higher counts 16-fold.
    """
    bits = len(planes)
    middle = 2 ** (bits - 1)
    significance = _by_significance(planes)
    registers: list[Register] = [None] * 16  # pyright: ignore[reportAssignmentType]
    if bits <= 4:
        for m, nibbles in enumerate(_nibbles(significance)):
            for n in range(4):
                x = _right(_present(nibbles), 8 * (n // 2))
                mask = 0x00F000F0 if n % 2 else 0x000F000F
                x = utils.inline_ptx(
                    "lop3.b32 $0, $1, $2, $3, 0xEA;",  # (x & mask) | 1024.0
                    *(x, _constant(mask), _constant(0x64006400)),
                    result_types=_i32(),
                )
                registers[4 * n + m] = (
                    _multiply_add(x, 1 / 16, -64 - middle)
                    if n % 2
                    else _add(x, -1024 - middle)
                )
        return registers
    for odd, row in enumerate(_bytes(significance)):
        for m, codes in enumerate(row):
            for k, selector in enumerate((0x4240, 0x4341)):
                x = utils.inline_ptx(
                    "prmt.b32 $0, $1, $2, $3;",
                    *(codes, _constant(0x64646464), _constant(selector)),
                    result_types=_i32(),
                )
                registers[8 * k + 4 * odd + m] = _add(x, -1024 - middle)
    return registers


def _half2(value: float | int) -> Register:
    return _constant(int(np.float16(value).view(np.uint16)) * 0x10001)


def _add(x: Register, value: float | int) -> Register:
    return utils.inline_ptx(
        "add.rn.f16x2 $0, $1, $2;", x, _half2(value), result_types=_i32()
    )


def _multiply_add(x: Register, factor: float, value: float | int) -> Register:
    return utils.inline_ptx(
        "fma.rn.f16x2 $0, $1, $2, $3;",
        *(x, _half2(factor), _half2(value)),
        result_types=_i32(),
    )


def _looked_up(planes: Sequence[Register], lut: Register, first: int) -> list[Register]:
    """Returns the 16 A registers of ``lut[row, first + code]``; order "pair"."""
    entries = ir.MemRefType(lut.type).shape[1]
    thread = _thread()
    warp, lane = _and(_right(thread, 5), 3), _and(thread, 31)
    row = arith.addi(_left(warp, 4), _right(lane, 2))
    start = arith.muli(row, _constant(2 * entries))
    rows = [
        _address(lut, arith.addi(start, _constant(2 * (first + 8 * half * entries))))
        for half in range(2)
    ]
    significance = _by_significance(planes)
    wide = len(planes) > 4
    if wide:
        fields = _bytes(significance)
    else:
        fields = [[_present(x) for x in _nibbles(significance)]] * 2
    registers = []
    for s in range(16):
        pair = []
        for hi in range(2):
            place = 8 * (s // 4) if wide else 8 * (s // 4) + 4 * hi
            code = _and(_right(fields[hi][s % 4], place), 0xFF if wide else 0xF)
            offset = arith.extui(_i64(), _left(code, 1))
            pair.append(
                utils.inline_ptx(
                    "ld.global.u16 $0, [$1];",
                    arith.addi(rows[s % 2], offset),
                    result_types=ir.IntegerType.get_signless(16),
                )
            )
        registers.append(
            utils.inline_ptx("mov.b32 $0, {$1, $2};", *pair, result_types=_i32())
        )
    return registers


def _thread() -> Register:
    return arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x))


def _address(ref: Register, offset_bytes: Register) -> Register:
    base = llvm.ptrtoint(_i64(), utils.memref_ptr(ref))
    return arith.addi(base, arith.extui(_i64(), offset_bytes))


def _multiply(weights: Sequence[Register], x: Register) -> list[Register]:
    """Multiplies 16 A registers with all token groups of the fragments ``x``."""
    f32 = ir.F32Type.get()
    zero = arith.constant(f32, ir.FloatAttr.get(f32, 0.0))
    pair = ir.VectorType.get((2,), f32)
    address = _address(x, _left(_and(_thread(), 31), 4))
    results = []
    for group in range(ir.MemRefType(x.type).shape[0] // (TILE * TOKENS)):
        sums: Sequence[Register] = [zero] * 4
        for half in range(2):
            offset = 512 * (2 * group + half)
            fragments = utils.inline_ptx(
                f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];",
                address,
                result_types=[_i32()] * 4,
            )
            for i in range(2):
                a = weights[8 * half + 4 * i :][:4]
                sums = utils.inline_ptx(
                    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
                    " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9},"
                    " {$10, $11, $12, $13};",
                    *(*a, *fragments[2 * i :][:2], *sums),
                    result_types=[f32] * 4,
                    convergent=True,
                )
        results += [
            vector.from_elements(pair, list(sums[:2])),
            vector.from_elements(pair, list(sums[2:])),
        ]
    return results
