"""One chunk of weights times a tile of tokens, in the registers of a warpgroup.

plane words --(fragments)--> A          tokens in SMEM --(ldmatrix)--> B
affine     codes and fixed-point parts are bytes: mma.m16n8k32, int32 sums;
           per span of columns  sums += scale * (A q) * token scale + zero * sum x
codebook   A is a looked-up weight, B bfloat16: mma.m16n8k16, float32 sums
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
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, Float32, Int, UInt32

from pallas_kernels.bitplane import TILE, BitOrder
from pallas_kernels.fused_moe import fragments
from pallas_kernels.fused_moe import registers as reg
from pallas_kernels.fused_moe.registers import Ref, Register

TOKENS = 8
"""Tokens of one mma.sync."""

ACCUMULATOR = plgpu.Layout.WGMMA
"""Layout of a product [64, tokens]; the sums of mma.sync and of wgmma lie alike."""

PAIR = plgpu.Layout.WG_STRIDED((256,), vec_size=2)
"""Layout of two words for each thread: the side-table words of its two rows."""


def words_layout(v: int) -> Any:
    """Returns the layout of ``128 v`` words of a plane: ``v`` for each thread."""
    return plgpu.Layout.WG_STRIDED((128 * v,), vec_size=v)


def row_words(table: Ref, *, interpret: bool) -> UInt32[Array, "256"]:
    """Loads the words of the two rows of each thread, out of 64 in order."""
    if interpret:
        words = table[...].reshape(4, 8, 1, 2)
        return jnp.broadcast_to(words, (4, 8, 4, 2)).reshape(256)

    @reg.inline(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((256,), jnp.dtype(jnp.uint32), layout=PAIR),
    )
    def inlined(_: Any, ref: Register) -> Any:
        offset = reg.left(reg.right(reg.thread(), 2), 3)
        pair = utils.inline_ptx(
            "ld.global.nc.v2.b32 {$0, $1}, [$2];",
            reg.offset_address(reg.global_address(ref), offset),
            result_types=[reg.i32()] * 2,
        )
        both = vector.from_elements(ir.VectorType.get((2,), reg.i32()), list(pair))
        return _array((256,), PAIR, [both], signed=False)

    return inlined(table)


def affine_product(
    sums: Float32[Array, "64 M"],
    x_ref: Ref,
    scales_ref: Ref,
    words: Sequence[UInt32[Array, "words"]],
    tables: Sequence[UInt32[Array, "256"]],
    *,
    interpret: bool,
) -> Float32[Array, "64 M"]:
    """Adds a chunk of affine weights times tokens.

    Args:
      sums: what the chunks before gave.
      x_ref: the tokens' bytes of the chunk, in shared memory (`fixed_point`).
      scales_ref: their scale and sum in each span of the chunk.
      words: one load of each plane, most significant first.
      tables: scale and zero of each span, for the rows of each thread.
      interpret: whether to compute with jnp.
    """
    if interpret:
        return sums + _affine_with_jnp(x_ref, scales_ref, words, tables)
    bits = len(words)

    def inlined(
        x: Register, sums: list, words: list, tables: list, scales: Register
    ) -> None:
        v = len(words[0])
        parts = ir.MemRefType(x.type).shape[0] // (TOKENS * len(sums))
        for span, table in enumerate(tables):
            columns = range(span * v // len(tables), (span + 1) * v // len(tables))
            tiles = [fragments.bytes_of([w[c] for w in words]) for c in columns]
            of_rows = [_scale_and_zero(word, bits) for word in table]
            for n, total in enumerate(sums):
                of_tokens = _token_scales(scales, span, n)
                product = _multiply_bytes(x, tiles, columns, n, len(sums), parts)
                for i in range(4):
                    (scale, zero), (unit, x_sum, half_sum) = (
                        of_rows[i // 2],
                        of_tokens[i % 2],
                    )
                    level = reg.fma(product[i], unit, half_sum)
                    total[i] = reg.fma(zero, x_sum, reg.fma(scale, level, total[i]))

    return _inline(inlined, sums, x_ref, words, tables, scales_ref)


def codebook_product(
    sums: Float32[Array, "64 rows"],
    x_ref: Ref,
    words: Sequence[UInt32[Array, "words"]],
    lut_ref: Ref,
    *,
    first: int,
    exact: bool,
    interpret: bool,
) -> Float32[Array, "64 rows"]:
    """Adds a chunk of looked-up weights times tokens.

    Args:
      sums: what the chunks before gave.
      x_ref: the tokens' columns of the chunk, in shared memory.
      words: one load of each plane, most significant first.
      lut_ref: the lookup tables ``[64, entries]`` of the rows, in global memory.
      first: the entry of code 0.
      exact: whether weights keep all 11 bits of fp16; else they are rounded to
        bfloat16.
      interpret: whether to compute with jnp.
    """
    if interpret:
        return sums + _codebook_with_jnp(x_ref, words, lut_ref, first, exact)

    def inlined(x: Register, sums: list, words: list, _: list, lut: Register) -> None:
        v = len(words[0])
        rows = fragments.lookup_rows(lut, first)
        tiles = [
            fragments.looked_up([w[c] for w in words], rows, exact=exact)
            for c in range(v)
        ]
        products = _multiply(x, tiles, range(v), len(sums))
        for total, product in zip(sums, products, strict=True):
            total[:] = _add(total, product)

    return _inline(inlined, sums, x_ref, words, (), lut_ref)


# ---- the interpreter's way ----------------------------------------------------------


def _codes(
    words: Sequence[UInt32[Array, "words"]], order: BitOrder
) -> Int[Array, "64 columns"]:
    """Unpacks a chunk; axes of the words: warp, 8 rows, 4 column pairs, v."""
    v = words[0].size // 128
    codes = jnp.zeros((4, 2, 8, v, 8, 4, 2), jnp.int32)  # warp half g v octet t hi
    half, octet, hi = (
        lax.broadcasted_iota(jnp.uint32, codes.shape, a) for a in (1, 4, 6)
    )
    s = 2 * octet + half
    place = s + 16 * hi if order == "split" else 4 * (2 * (s // 4) + hi) + s % 4
    for plane in words:
        word = jnp.swapaxes(plane.reshape(4, 8, 4, v), 2, 3)
        word = lax.broadcast_in_dim(word, codes.shape, (0, 2, 3, 5))
        codes = 2 * codes + ((word >> place) & jnp.uint32(1)).astype(jnp.int32)
    return codes.reshape(TILE, v * TILE)


def _tokens(x_ref: Ref) -> Float32[Array, "columns rows"]:
    return x_ref[...].astype(jnp.float32).T


def _affine_with_jnp(
    x_ref: Ref,
    scales_ref: Ref,
    words: Sequence[UInt32[Array, "words"]],
    tables: Sequence[UInt32[Array, "256"]],
) -> Float32[Array, "64 M"]:
    codes, scales = _codes(words, "split").astype(jnp.float32) + 0.5, scales_ref[...]
    q = x_ref[...].astype(jnp.float32).reshape(-1, scales.shape[1], codes.shape[1])
    place = 256.0 ** jnp.arange(q.shape[0], dtype=jnp.float32)
    q = jnp.sum(q * place[:, None, None], axis=0)
    size = codes.shape[1] // len(tables)
    total = jnp.zeros((TILE, scales.shape[1]), jnp.float32)
    for i, table in enumerate(tables):
        part = slice(i * size, (i + 1) * size)
        rows = jnp.swapaxes(table.reshape(4, 8, 4, 2)[:, :, 0], 1, 2).reshape(TILE)
        scale, zero = (
            lax.bitcast_convert_type(
                (rows >> shift).astype(jnp.uint16), jnp.float16
            ).astype(jnp.float32)[:, None]
            for shift in (jnp.uint32(0), jnp.uint32(16))
        )
        product = jnp.dot(codes[:, part], q[:, part].T) * scales[i, :, 0][None]
        total += scale * 2.0 ** -len(words) * product
        total += zero * scales[i, :, 1][None]
    return total


def _codebook_with_jnp(
    x_ref: Ref,
    words: Sequence[UInt32[Array, "words"]],
    lut_ref: Ref,
    first: int,
    exact: bool,
) -> Float32[Array, "64 rows"]:
    weights = jnp.take_along_axis(lut_ref[...], _codes(words, "pair") + first, axis=1)
    if not exact:
        weights = weights.astype(jnp.bfloat16)
    return jnp.dot(weights.astype(jnp.float32), _tokens(x_ref))


# ---- the device's way: everything below runs per thread while a kernel is lowered ----


def _scale_and_zero(word: Register, bits: int) -> tuple[Register, Register]:
    """Returns ``scale 2**-bits`` and ``zero``."""
    scale, zero = reg.halves_to_float(word)
    return arith.mulf(scale, reg.real(2.0**-bits)), zero


def _token_scales(
    scales: Register, span: int, n: int
) -> list[tuple[Register, Register, Register]]:
    """Returns scale, sum and half of the sum of this thread's two tokens."""
    token = reg.left(reg.bits_and(reg.thread(), 3), 1)
    results = []
    for i in range(2):
        at = reg.add(token, TOKENS * n + i)
        unit, x_sum = (reg.load(scales, span, at, j) for j in range(2))
        results.append((unit, x_sum, arith.mulf(x_sum, reg.real(0.5))))
    return results


def _matrix_address(x: Register) -> tuple[Register, int]:
    """Returns where this thread's row of four matrices lies, and a row's bytes."""
    kind = ir.MemRefType(x.type)
    strides, _ = kind.get_strides_and_offset()
    row_bytes = strides[0] * utils.bitwidth(kind.element_type) // 8
    lane = reg.bits_and(reg.thread(), 31)
    row = reg.multiply(reg.bits_and(lane, 7), row_bytes)
    block = reg.left(reg.right(lane, 3), 4)
    return reg.add(reg.add(reg.shared_address(x), row), block), row_bytes


def _multiply_bytes(
    x: Register,
    tiles: Sequence[Sequence[Sequence[Register]]],
    columns: Sequence[int],
    n: int,
    token_groups: int,
    parts: int,
) -> list[Register]:
    """Multiplies column tiles with 8 fixed-point tokens; four sums, as float32."""
    address, row_bytes = _matrix_address(x)
    sums = [[reg.constant(0)] * 4 for _ in range(parts)]
    for fragments_of_tile, column in zip(tiles, columns, strict=True):
        for part in range(parts):
            row = TOKENS * (part * token_groups + n)
            b = reg.load_matrices(reg.add(address, row * row_bytes + TILE * column))
            for i, a in enumerate(fragments_of_tile):
                sums[part] = reg.multiply_accumulate_bytes(
                    a, b[2 * i :][:2], sums[part]
                )
    total = [arith.sitofp(reg.f32(), value) for value in sums[-1]]
    for part in reversed(sums[:-1]):
        lower = [arith.sitofp(reg.f32(), value) for value in part]
        factor = reg.real(256.0)
        total = [reg.fma(factor, a, b) for a, b in zip(total, lower, strict=True)]
    return total


def _multiply(
    x: Register,
    tiles: Sequence[Sequence[tuple[float, Sequence[Register]]]],
    columns: Sequence[int],
    token_groups: int,
) -> list[list[Register]]:
    """Multiplies column tiles with all groups of 8 tokens.

    Args:
      x: the tokens in shared memory.
      tiles: each tile as a sum of ``factor * A``; the same factors in all tiles.
      columns: place of each tile in the chunk.
      token_groups: how many.
    Returns:
      Four sums for each group, in the order of `ACCUMULATOR`.
    """
    address, row_bytes = _matrix_address(x)
    results = []
    for n in range(token_groups):
        # Two chains for each part, since a sum waits long for the one before it.
        chains = [[[reg.real(0.0)] * 4 for _ in range(2)] for _ in tiles[0]]
        for parts, column in zip(tiles, columns, strict=True):
            for half in range(2):
                offset = n * TOKENS * row_bytes + 128 * column + 64 * half
                b = reg.load_matrices(reg.add(address, offset))
                for i in range(2):
                    for chain, (_, a) in zip(chains, parts, strict=True):
                        chain[i] = reg.multiply_accumulate(
                            a[8 * half + 4 * i :][:4], b[2 * i :][:2], chain[i]
                        )
        factors = [factor for factor, _ in tiles[0]]
        results.append(_weighted_sum(factors, [_add(*chain) for chain in chains]))
    return results


def _add(x: Sequence[Register], y: Sequence[Register]) -> list[Register]:
    return [arith.addf(a, b) for a, b in zip(x, y, strict=True)]


def _weighted_sum(
    factors: Sequence[float], sums: Sequence[list[Register]]
) -> list[Register]:
    *others, total = sums
    for factor, part in zip(factors, others, strict=False):
        total = [
            reg.fma(reg.real(factor), a, b) for a, b in zip(part, total, strict=True)
        ]
    return total


def elements(register: Register) -> list[Register]:
    """Returns the elements of a vector register."""
    size = ir.VectorType(register.type).shape[0]
    return [vector.extract(register, [], [i]) for i in range(size)]


def _inline(
    f: Callable[..., None],
    sums: Float32[Array, "64 rows"],
    x_ref: Ref,
    words: Sequence[UInt32[Array, "words"]],
    tables: Sequence[UInt32[Array, "256"]],
    more_ref: Ref,
) -> Float32[Array, "64 rows"]:
    """Runs ``f(x, sums, words, tables, more)`` in the kernel; it changes the sums."""
    layout = words_layout(words[0].size // 128)
    shape = tuple(sums.shape)
    ref = plgpu.RefType()

    @reg.inline(
        arg_types=(
            ref,
            ref,
            ACCUMULATOR,
            (layout,) * len(words),
            (PAIR,) * len(tables),
        ),
        return_type=plgpu.ShapeDtypeStruct(
            shape, jnp.dtype(jnp.float32), layout=ACCUMULATOR
        ),
    )
    def inlined(
        _: Any, x: Register, more: Register, sums: Any, words: Any, tables: Any
    ) -> Any:
        pairs = [elements(r) for r in sums.registers.flat]
        groups = [a + b for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
        words, tables = (
            [elements(array.registers.flat[0]) for array in arrays]
            for arrays in (words, tables)
        )
        f(x, groups, words, tables, more)
        pair = ir.VectorType.get((2,), reg.f32())
        registers = [
            vector.from_elements(pair, group[i : i + 2])
            for group in groups
            for i in (0, 2)
        ]
        return _array(shape, ACCUMULATOR, registers, signed=None)

    return inlined(x_ref, more_ref, sums, tuple(words), tuple(tables))


def _array(
    shape: tuple[int, ...], layout: Any, registers: list[Register], signed: bool | None
) -> Any:
    values = np.empty(len(registers), dtype=object)
    values[:] = registers
    to = layout.to_mgpu()
    return mgpu.FragmentedArray(
        _registers=values.reshape(to.registers_shape(shape)),
        _layout=to,
        _is_signed=signed,
    )
