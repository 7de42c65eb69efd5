"""Words for code that runs once per thread while a Mosaic GPU kernel is lowered.

Together with `fragments` and `thread_code` this is the only module that touches the
insides of Mosaic GPU (`inline_mgpu`, MLIR); written against jax 0.11.2 and 0.12.0. All
instructions exist from compute capability 8.0 on.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref

Ref = Any
"""A Pallas reference; its type has no public name."""

Register = Any
"""An MLIR value: a register of every thread, or a memref. Tests put arrays there."""

THREADS = 128
"""Threads of a warpgroup."""

SCALAR = plgpu.Layout.WG_SPLAT(())
"""Layout of a scalar argument of inline code."""


def inline(
    *, arg_types: Sequence[Any] = (), return_type: Any = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates code of this kind: it gets a launch context, then its arguments.

    Args:
      arg_types: a layout or `plgpu.RefType` for each argument.
      return_type: what it returns, as a `plgpu.ShapeDtypeStruct`.
    """
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def i32() -> ir.Type:
    """Returns the type of a 32-bit register."""
    return ir.IntegerType.get_signless(32)


def f32() -> ir.Type:
    """Returns the type of a float32 register."""
    return ir.F32Type.get()


def constant(value: int) -> Register:
    """Returns a 32-bit constant; negative and unsigned values are both welcome."""
    signed = (value & 0xFFFFFFFF ^ 0x80000000) - 0x80000000
    return arith.constant(i32(), ir.IntegerAttr.get(i32(), signed))


def real(value: float) -> Register:
    """Returns a float32 constant."""
    return arith.constant(f32(), ir.FloatAttr.get(f32(), value))


def add(x: Register, y: Register | int) -> Register:
    """Adds."""
    return arith.addi(x, constant(y) if isinstance(y, int) else y)


def multiply(x: Register, y: Register | int) -> Register:
    """Multiplies, the low 32 bits."""
    return arith.muli(x, constant(y) if isinstance(y, int) else y)


def bits_and(x: Register, mask: int) -> Register:
    """Keeps the bits of the mask."""
    return arith.andi(x, constant(mask))


def right(x: Register, places: int) -> Register:
    """Shifts right, filling with zeros."""
    return arith.shrui(x, constant(places)) if places else x


def left(x: Register, places: int) -> Register:
    """Shifts left."""
    return arith.shli(x, constant(places)) if places else x


def lop3(x: Register, y: Register, z: Register, table: int) -> Register:
    """Combines three words bit by bit; ``table`` is f(0xF0, 0xCC, 0xAA)."""
    return utils.inline_ptx(
        f"lop3.b32 $0, $1, $2, $3, {table:#x};", x, y, z, result_types=i32()
    )


def select(mask: int, x: Register, y: Register) -> Register:
    """Takes bits of x where the mask is set, of y elsewhere; one instruction."""
    return lop3(constant(mask), x, y, 0xCA)


def masked_or(x: Register, mask: int, y: int) -> Register:
    """Computes ``(x & mask) | y``; one instruction."""
    return lop3(x, constant(mask), constant(y), 0xEA)


def permute(x: Register, y: Register, selector: Register | int) -> Register:
    """Chooses 4 of the 8 bytes of x (0..3) and y (4..7)."""
    which = constant(selector) if isinstance(selector, int) else selector
    return utils.inline_ptx("prmt.b32 $0, $1, $2, $3;", x, y, which, result_types=i32())


def thread() -> Register:
    """Returns the number of this thread in its warpgroup."""
    index = arith.index_cast(i32(), gpu.thread_id(gpu.Dimension.x))
    return bits_and(index, THREADS - 1)


def index(x: Register | int) -> Register:
    """Casts a register to what `memref` operations take."""
    x = constant(x) if isinstance(x, int) else x
    return arith.index_cast(ir.IndexType.get(), x)


def load(ref: Register, *at: Register | int) -> Register:
    """Loads one element."""
    return memref.load(ref, [index(i) for i in at])


def store(value: Register, ref: Register, *at: Register | int) -> None:
    """Stores one element."""
    memref.store(value, ref, [index(i) for i in at])


def less(x: Register, y: Register | int) -> Register:
    """Compares signed integers; a predicate."""
    y = constant(y) if isinstance(y, int) else y
    return arith.cmpi(arith.CmpIPredicate.slt, x, y)


def global_address(ref: Register) -> Register:
    """Returns the 64-bit address of a reference in global memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def shared_address(ref: Register) -> Register:
    """Returns the 32-bit address of a reference in shared memory."""
    return llvm.ptrtoint(i32(), utils.memref_ptr(ref))


def offset_address(address: Register, offset_bytes: Register) -> Register:
    """Adds an unsigned 32-bit offset to a 64-bit address."""
    wide = arith.extui(ir.IntegerType.get_signless(64), offset_bytes)
    return arith.addi(address, wide)


def wide_offset(row: Register, width: int, column: Register, size: int) -> Register:
    """Returns the 64-bit offset of ``[row, column]`` in bytes."""
    i64 = ir.IntegerType.get_signless(64)

    def times(x: Register, factor: int) -> Register:
        return arith.muli(x, arith.constant(i64, ir.IntegerAttr.get(i64, factor)))

    at = times(arith.extui(i64, row), width)
    return times(arith.addi(at, arith.extui(i64, column)), size)


def load_matrices(address: Register) -> Sequence[Register]:
    """Loads four 8 x 8 matrices of 16-bit values; lane l gives row l % 8 of l // 8."""
    return utils.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
        address,
        result_types=[i32()] * 4,
        has_side_effects=True,
        convergent=True,
    )


def multiply_accumulate(
    a: Sequence[Register], b: Sequence[Register], sums: Sequence[Register]
) -> list[Register]:
    """Adds a 16 x 16 by 16 x 8 product of bfloat16 to float32 sums."""
    return list(
        utils.inline_ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            *(*a, *b, *sums),
            result_types=[f32()] * 4,
            convergent=True,
        )
    )


def multiply_accumulate_bytes(
    a: Sequence[Register], b: Sequence[Register], sums: Sequence[Register]
) -> list[Register]:
    """Adds a 16 x 32 by 32 x 8 product, unsigned by signed bytes, to int32 sums."""
    return list(
        utils.inline_ptx(
            "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            *(*a, *b, *sums),
            result_types=[i32()] * 4,
            convergent=True,
        )
    )


def fma(x: Register, y: Register, z: Register) -> Register:
    """Computes ``x * y + z`` in float32, rounded once."""
    return utils.inline_ptx("fma.rn.f32 $0, $1, $2, $3;", x, y, z, result_types=f32())


def halves_to_float(word: Register) -> tuple[Register, Register]:
    """Converts the low and the high fp16 of a word to float32."""
    low, high = (
        utils.inline_ptx(
            "{\n.reg .b16 low, high;\nmov.b32 {low, high}, $1;\n"
            f"cvt.f32.f16 $0, {part};\n}}",
            word,
            result_types=f32(),
        )
        for part in ("low", "high")
    )
    return low, high


def pack_bfloat16(low: Register, high: Register) -> Register:
    """Rounds two float32 to bfloat16 and packs them into a word."""
    return utils.inline_ptx(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", low, high, result_types=i32()
    )


def unpack_bfloat16(words: Sequence[Register]) -> list[Register]:
    """Converts pairs of bfloat16 to float32."""
    floats = []
    for word in words:
        for bits in (left(word, 16), bits_and(word, 0xFFFF0000)):
            floats.append(arith.bitcast(f32(), bits))
    return floats


def exp2(x: Register) -> Register:
    """Computes 2**x, to 2 units of the last place."""
    return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", x, result_types=f32())


def reciprocal(x: Register) -> Register:
    """Computes 1 / x, to 1 unit of the last place."""
    return utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", x, result_types=f32())
