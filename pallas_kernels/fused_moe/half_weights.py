"""Plane words to fp16 weights, in registers: the left-hand side of a wgmma.

    plane words (b registers of a thread; one word holds its 32 weights of the tile)
      -> bit-matrix transposition: the codes of the weights lie side by side
      -> fp16 pairs in the order of the A fragments (m64k64 of wgmma)
           affine    0x6400 | code is 1024 + code; minus 1024 + 2**(b-1) exactly; then
                     one multiply-add with scale and zero, which rounds once
           codebook  lut[row, code], gathered from global memory (L1 holds it)
           refined   center and width by byte permutation: the first 3 bits of a code
                     select among 8 bytes in two registers; then one multiply-add with
                     the rest of the code, 0x3C00 | rest being 1 + rest

Affine weights are made ``2**b`` times too large, so that small scales keep their
precision in fp16; the caller takes that back from the product.

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
from jaxlib.mlir.dialects import arith, vector
from jaxtyping import Array, Float16, Float32, Int, Int32, UInt32

from pallas_kernels.bitplane import TILE, BitOrder
from pallas_kernels.fused_moe import registers as reg
from pallas_kernels.fused_moe.fragments import by_significance, nibbles, octets
from pallas_kernels.fused_moe.registers import SCALAR, Ref, Register

CLUSTER_BITS = 3
"""Bits of a code that select among the 8 bytes of a permutation."""

ROW_WORDS = plgpu.Layout.WG_STRIDED((256,), vec_size=2)
"""Layout of the side-table words of each thread's two rows."""

Words = Sequence[UInt32[Array, "words"]]
"""One load of each plane, most significant first."""


def load_plane(
    pool: Ref,
    row: Int32[Array, ""],
    chunk: Int32[Array, ""],
    *,
    width: int,
    part: Int32[Array, ""],
    interpret: bool,
) -> UInt32[Array, "words"]:
    """Loads ``width`` of the ``v`` neighbouring column tiles of a plane.

    Args:
      pool: ``[rows, 128 v]``.
      row: where the plane's row tile begins.
      chunk: which of the rows from there.
      width: column tiles to load, a divisor of ``v``.
      part: which of the ``v / width`` parts.
      interpret: whether to compute with jnp.
    """
    v = pool.shape[1] // 128
    if interpret:
        words = pool[row + chunk].reshape(128, v // width, width)
        return lax.dynamic_index_in_dim(words, part, 1, keepdims=False).reshape(-1)
    layout = plgpu.Layout.WG_STRIDED((128 * width,), vec_size=width)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[SCALAR] * 3),
        return_type=plgpu.ShapeDtypeStruct(
            (128 * width,), jnp.dtype(jnp.uint32), layout=layout
        ),
    )
    def inlined(_: Any, *args: Any) -> Any:
        pool, *scalars = args
        at = [s.registers.item() for s in scalars]
        words = _load(_plane_address(pool, *at, v=v, width=width), width)
        return _array((128 * width,), layout, [words], False)

    return inlined(pool, row, chunk, part)


def load_rows(table: Ref, *, interpret: bool) -> UInt32[Array, "256"]:
    """Loads the words of each thread's two rows, of 64 rows in their order."""
    if interpret:
        words = table[...].reshape(4, 8, 1, 2)
        return jnp.broadcast_to(words, (4, 8, 4, 2)).reshape(256)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct(
            (256,), jnp.dtype(jnp.uint32), layout=ROW_WORDS
        ),
    )
    def inlined(_: Any, *args: Any) -> Any:
        (table,) = args
        at = reg.left(reg.right(reg.thread(), 2), 3)
        address = reg.offset_address(reg.global_address(table), at)
        return _array((256,), ROW_WORDS, [_load(address, 2)], False)

    return inlined(table)


def affine_weights(
    words: Words, rows: UInt32[Array, "256"], *, column: int, interpret: bool
) -> Float16[Array, "64 64"]:
    """Computes ``(scale (code + 1/2) 2**-b + zero) 2**b`` for one tile.

    Args:
      words: of the planes; there are b.
      rows: scale (low half) and zero (high half) of the tile's rows.
      column: which column tile of the words.
      interpret: whether to compute with jnp.
    """
    if interpret:
        code = _codes(words, column, "split").astype(jnp.float32)
        scale, zero = _row_halves(rows)
        weights = scale * (code + 0.5) + zero * 2.0 ** len(words)
        return weights.astype(jnp.float16)

    def inlined(planes: list[Register], rows: list[Register]) -> list[Register]:
        lines = [_line(word, len(planes)) for word in rows]
        return [_fma(x, *lines[s % 2]) for s, x in enumerate(_integers(planes))]

    return _inlined(inlined, words, column, rows, ROW_WORDS)


def codebook_weights(
    words: Words, lut: Ref, *, first: int, column: int, interpret: bool
) -> Float16[Array, "64 64"]:
    """Looks up ``lut[row, first + code]`` for one tile.

    Args:
      words: of the planes.
      lut: the lookup tables ``[64, entries]`` of the tile's rows.
      first: the entry of code 0.
      column: which column tile of the words.
      interpret: whether to compute with jnp.
    """
    if interpret:
        index = _codes(words, column, "pair") + first
        return jnp.take_along_axis(lut[...], index, axis=1)

    def inlined(planes: list[Register], lut: Register) -> list[Register]:
        return _looked_up(planes, lut, first)

    return _inlined(inlined, words, column, lut, plgpu.RefType())


def refined_weights(
    words: Words, clusters: Ref, *, column: int, interpret: bool
) -> Float16[Array, "64 64"]:
    """Computes ``center + width (rest - 1/2)`` for one tile.

    Args:
      words: of the planes, at least `CLUSTER_BITS`.
      clusters: ``[64, 8]``, from `cluster_bytes`.
      column: which column tile of the words.
      interpret: whether to compute with jnp.
    """
    if interpret:
        codes, rest_bits = _codes(words, column, "split"), len(words) - CLUSTER_BITS
        cluster, rest = codes >> rest_bits, codes & (2**rest_bits - 1)
        center, width = _cluster_halves(clusters[...], cluster)
        offset = (rest.astype(jnp.float32) + 0.5) * 2.0**-rest_bits - 0.5
        return (center + width * offset).astype(jnp.float16)

    def inlined(planes: list[Register], clusters: Register) -> list[Register]:
        return _refined(planes, clusters)

    return _inlined(inlined, words, column, clusters, plgpu.RefType())


def cluster_bytes(
    words: UInt32[Array, "*batch tiles clusters 64"],
) -> UInt32[Array, "*batch tiles 64 8"]:
    """Orders the clusters of a row as byte tables for a permutation.

    Args:
      words: center (low half) and width (high half) of 8 clusters, rows in the order
        of `side_tables.rows_to_fragments`.
    Returns:
      For each row of a tile, in the same order, the bytes of the 8 clusters: the low
      bytes of the centers (2 words), their high bytes, and those of the widths.
    """
    clusters = [words[..., i, :] for i in range(2**CLUSTER_BITS)]
    tables = []
    for byte, half in np.ndindex(4, 2):
        table = jnp.zeros_like(clusters[0])
        for place, word in enumerate(clusters[4 * half :][:4]):
            value = (word >> jnp.uint32(8 * byte)) & jnp.uint32(0xFF)
            table |= value << jnp.uint32(8 * place)
        tables.append(table)
    return jnp.stack(tables, axis=-1)


# ---- the interpreter's way ----------------------------------------------------------


def _codes(words: Words, column: int, order: BitOrder) -> Int[Array, "64 64"]:
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


def _cluster_halves(
    clusters: UInt32[Array, "64 8"], cluster: Int[Array, "64 64"]
) -> list[Float32[Array, "64 64"]]:
    """Looks centers and widths up; undoes `cluster_bytes` and the order of rows."""
    rows = jnp.swapaxes(clusters.reshape(4, 8, 2, 4, 2), 1, 2).reshape(TILE, 4, 2)
    place = (8 * (cluster % 4)).astype(jnp.uint32)
    values = []
    for part in range(4):
        word = jnp.take_along_axis(rows[:, part], cluster // 4, axis=1)
        values.append((word >> place) & jnp.uint32(0xFF))
    return [
        lax.bitcast_convert_type(
            (low | high << jnp.uint32(8)).astype(jnp.uint16), jnp.float16
        ).astype(jnp.float32)
        for low, high in (values[:2], values[2:])
    ]


def _row_halves(rows: UInt32[Array, "256"]) -> list[Array]:
    """Returns the low and the high half of the words of each row."""
    words = jnp.swapaxes(rows.reshape(4, 8, 4, 2)[:, :, 0], 1, 2).reshape(TILE, 1)
    return [
        lax.bitcast_convert_type((words >> shift).astype(jnp.uint16), jnp.float16)
        .astype(jnp.float32)
        for shift in (jnp.uint32(0), jnp.uint32(16))
    ]  # fmt: skip


# ---- the device's way: everything below runs per thread while a kernel is lowered ----


def _inlined(
    f: Callable[[list[Register], Any], list[Register]],
    words: Words,
    column: int,
    tables: Any,
    table_type: Any,
) -> Float16[Array, "64 64"]:
    """Runs ``f(plane words, table words or reference)`` inside of the kernel."""
    layout = plgpu.Layout.WG_STRIDED(words[0].shape, vec_size=words[0].size // 128)
    shape, wgmma = (TILE, TILE), plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(table_type, *[layout] * len(words)),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.dtype(jnp.float16), layout=wgmma),
    )
    def inlined(_: Any, tables: Any, *words: Any) -> Any:
        if isinstance(tables, mgpu.FragmentedArray):
            tables = [vector.extract(tables.registers.item(), [], [i]) for i in (0, 1)]
        planes = [vector.extract(w.registers.item(), [], [column]) for w in words]
        pair = ir.VectorType.get((2,), ir.F16Type.get())
        registers = [utils.bitcast(x, pair) for x in f(planes, tables)]
        return _array(shape, wgmma, registers, None)

    return inlined(tables, *words)


def _array(
    shape: tuple[int, ...], layout: Any, registers: list[Register], signed: bool | None
) -> Any:
    to = layout.to_mgpu()
    values = np.empty(len(registers), dtype=object)
    values[:] = registers
    return mgpu.FragmentedArray(
        _registers=values.reshape(to.registers_shape(shape)),
        _layout=to,
        _is_signed=signed,
    )


def _plane_address(
    pool: Register,
    row: Register,
    chunk: Register,
    part: Register,
    *,
    v: int,
    width: int,
) -> Register:
    """Returns the address of this thread's words; see `load_plane`."""
    row = reg.add(_opaque(row), chunk)
    column = reg.add(reg.multiply(reg.thread(), v), reg.multiply(part, width))
    offset = reg.wide_offset(row, 128 * v, column, 4)
    return arith.addi(reg.global_address(pool), offset)


def _opaque(x: Register) -> Register:
    """Copies a register so that the compiler cannot see through.

    What is loaded or computed from it belongs to its place. Else the compiler keeps
    what does not change (64-bit addresses of all planes, clusters of all rows) in
    registers, of which there are none to spare.
    """
    return utils.inline_ptx(
        "mov.b32 $0, $1;", x, result_types=reg.i32(), has_side_effects=True
    )


def _load(address: Register, width: int) -> Register:
    """Loads a vector of words that no one writes while the kernel runs."""
    results = ", ".join(f"${i}" for i in range(width))
    vector_of = f".v{width}.b32 {{{results}}}" if width > 1 else ".b32 $0"
    words = utils.inline_ptx(
        f"ld.global.nc{vector_of}, [${width}];",
        address,
        result_types=[reg.i32()] * width,
    )
    return vector.from_elements(ir.VectorType.get((width,), reg.i32()), list(words))


def _half2(value: float) -> Register:
    return reg.constant(int(np.float16(value).view(np.uint16)) * 0x10001)


def _fma(x: Register, y: Register, z: Register) -> Register:
    return utils.inline_ptx(
        "fma.rn.f16x2 $0, $1, $2, $3;", x, y, z, result_types=reg.i32()
    )


def _multiply(x: Register, y: Register) -> Register:
    return utils.inline_ptx("mul.rn.f16x2 $0, $1, $2;", x, y, result_types=reg.i32())


def _add(x: Register, value: float) -> Register:
    return utils.inline_ptx(
        "add.rn.f16x2 $0, $1, $2;", x, _half2(value), result_types=reg.i32()
    )


def _line(word: Register, bits: int) -> tuple[Register, Register]:
    """Returns slope and offset of ``2**b`` weights over ``code - 2**(b-1)``."""
    scale = reg.permute(word, word, 0x1010)
    zero = _multiply(reg.permute(word, word, 0x3232), _half2(2.0**bits))
    return scale, _fma(scale, _half2(2.0 ** (bits - 1) + 0.5), zero)


def _integers(planes: Sequence[Register]) -> list[Register]:
    """Returns the 16 A registers of ``code - 2**(bits-1)``; bits in order "split".

    With 0x6400 (1024.0 in fp16, whose last place is 1) a code becomes a float without
    a conversion. A code 4 bits higher counts 16-fold.
    """
    middle = 2 ** (len(planes) - 1)
    significance = by_significance(planes)
    registers: list[Register] = [None] * 16
    if len(planes) <= 4:
        for m, word in enumerate(nibbles(significance)):
            for n in range(4):
                x = reg.right(word, 8 * (n // 2))
                if n % 2:
                    x = reg.masked_or(x, 0x00F000F0, 0x64006400)
                    x = _fma(x, _half2(1 / 16), _half2(-64 - middle))
                else:
                    x = _add(reg.masked_or(x, 0x000F000F, 0x64006400), -1024 - middle)
                registers[4 * n + m] = x
        return registers
    exponent = reg.constant(0x64646464)
    for odd, row in enumerate(octets(significance)):
        for m, codes in enumerate(row):
            for k, selector in enumerate((0x4240, 0x4341)):
                x = reg.permute(codes, exponent, selector)
                registers[8 * k + 4 * odd + m] = _add(x, -1024 - middle)
    return registers


def _cluster_registers(clusters: Register, half: int) -> list[Register]:
    """Loads the 8 words of this thread's first or second row."""
    row = reg.add(reg.left(_opaque(reg.right(reg.thread(), 2)), 1), half)
    words = []
    for part in range(2):
        at = reg.add(reg.left(row, 5), 16 * part)
        address = reg.offset_address(reg.global_address(clusters), at)
        loaded = _load(address, 4)
        words += [vector.extract(loaded, [], [i]) for i in range(4)]
    return words


def _refined(planes: Sequence[Register], clusters: Register) -> list[Register]:
    """Returns the 16 A registers; bits in order "split".

    Nibble ``n`` of word ``i`` of the transposed first planes selects the cluster of
    the weight at bit ``4 n + i``. With its bytes 1 and 2 exchanged the low half of the
    word holds nibbles 0, 1, 4, 5: both weights of registers ``i`` and ``4 + i``.
    """
    first, rest = planes[:CLUSTER_BITS], planes[CLUSTER_BITS:]
    parts = [rest[i : i + 4] for i in range(0, len(rest), 4)]
    fractions = [nibbles(by_significance(part)) for part in parts]
    registers: list[Register] = [None] * 16
    selectors = nibbles(by_significance(first))
    for half in range(2):
        tables = _cluster_registers(clusters, half)
        for i in (half, half + 2):
            exchanged = reg.permute(selectors[i], selectors[i], 0x3120)
            for upper in range(2):
                selector = reg.right(exchanged, 16 * upper)
                places = [4 * (2 * upper + n) + i for n in range(2)]
                values = _both_bytes(tables[:4], selector)
                if rest:
                    offsets = [_offset(fractions, len(rest), s) for s in places]
                    widths = _both_bytes(tables[4:], selector)
                    values = map(_fma, offsets, widths, values)
                for s, value in zip(places, values, strict=True):
                    registers[s] = value
    return registers


def _both_bytes(tables: Sequence[Register], selector: Register) -> list[Register]:
    """Looks fp16 pairs up: of nibbles 0 and 2, and of nibbles 1 and 3."""
    low = reg.permute(tables[0], tables[1], selector)
    high = reg.permute(tables[2], tables[3], selector)
    return [reg.permute(low, high, which) for which in (0x6240, 0x7351)]


def _offset(fractions: Sequence[Sequence[Register]], bits: int, s: int) -> Register:
    """Returns ``(rest + 1/2) 2**-bits - 1/2`` of the pair in register s, exactly.

    The rest of a code stands behind the binary point of 1.0, and a half behind it.
    """
    x = reg.constant(0x3C003C00 | (1 << (9 - bits)) * 0x10001)
    for part, words in enumerate(fractions):
        size = min(4, bits - 4 * part)
        last = 10 - 4 * part - size  # place of the least significant bit
        mask = ((1 << size) - 1 << last) * 0x10001
        word = _shifted(words[s % 4], 4 * (s // 4) - last)
        x = reg.lop3(word, reg.constant(mask), x, 0xEA)
    return _add(x, -1.5)


def _shifted(x: Register, places: int) -> Register:
    return reg.right(x, places) if places >= 0 else reg.left(x, -places)


def _looked_up(planes: Sequence[Register], lut: Register, first: int) -> list[Register]:
    """Returns the 16 A registers of ``lut[row, first + code]``; order "pair"."""
    entries = ir.MemRefType(lut.type).shape[1]
    thread, base = reg.thread(), reg.global_address(lut)
    row = reg.add(
        reg.left(reg.right(thread, 5), 4), reg.right(reg.bits_and(thread, 31), 2)
    )
    start = reg.multiply(row, 2 * entries)
    rows = [
        reg.offset_address(base, reg.add(start, 2 * (first + 8 * half * entries)))
        for half in range(2)
    ]
    significance = by_significance(planes)
    wide = len(planes) > 4
    fields = octets(significance) if wide else [nibbles(significance)] * 2
    registers = []
    for s in range(16):
        pair = []
        for hi in range(2):
            place = 8 * (s // 4) if wide else 8 * (s // 4) + 4 * hi
            code = reg.bits_and(
                reg.right(fields[hi][s % 4], place), 0xFF if wide else 0xF
            )
            pair.append(
                utils.inline_ptx(
                    "ld.global.nc.b16 $0, [$1];",
                    reg.offset_address(rows[s % 2], reg.left(code, 1)),
                    result_types=ir.IntegerType.get_signless(16),
                )
            )
        registers.append(
            utils.inline_ptx("mov.b32 $0, {$1, $2};", *pair, result_types=reg.i32())
        )
    return registers
