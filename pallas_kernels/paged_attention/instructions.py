"""Words for code that runs once per thread while an attention kernel is lowered.

Each is one instruction, or a few, of every thread. Tests put arrays over the threads in
the place of this module.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref

Register = Any
"""An MLIR value: a register of every thread, or a memref. Tests put arrays there."""

THREADS = 128
"""Threads of a warpgroup."""


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


def permute(x: Register, y: Register, selector: int) -> Register:
    """Chooses 4 of the 8 bytes of x (0..3) and y (4..7)."""
    return utils.inline_ptx(
        "prmt.b32 $0, $1, $2, $3;", x, y, constant(selector), result_types=i32()
    )


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


def fma(x: Register, y: Register, z: Register) -> Register:
    """Computes ``x * y + z`` in float32, rounded once."""
    return utils.inline_ptx("fma.rn.f32 $0, $1, $2, $3;", x, y, z, result_types=f32())


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


def choose(condition: Register, x: Register, y: Register) -> Register:
    """Returns x where the predicate holds, y elsewhere."""
    return arith.select(condition, x, y)


def both(x: Register, y: Register) -> Register:
    """Whether both predicates hold."""
    return arith.andi(x, y)


def equal(x: Register, y: Register) -> Register:
    """Compares integers; a predicate."""
    return arith.cmpi(arith.CmpIPredicate.eq, x, y)


def smaller(x: Register, y: Register | int) -> Register:
    """Returns the smaller of two signed integers."""
    return arith.minsi(x, constant(y) if isinstance(y, int) else y)


def larger(x: Register, y: Register | int) -> Register:
    """Returns the larger of two signed integers."""
    return arith.maxsi(x, constant(y) if isinstance(y, int) else y)


def exclusive_or(x: Register, y: Register) -> Register:
    """Combines the bits of two words."""
    return arith.xori(x, y)


def divide(x: Register, y: int) -> tuple[Register, Register]:
    """Divides a number that is not negative; quotient and remainder."""
    quotient = arith.divui(x, constant(y))
    return quotient, arith.subi(x, multiply(quotient, y))


def row_address(base: Register, row: Register, row_bytes: int) -> Register:
    """Returns ``base + row * row_bytes`` in 64 bits."""
    wide = ir.IntegerType.get_signless(64)
    size = arith.constant(wide, ir.IntegerAttr.get(wide, row_bytes))
    return arith.addi(base, arith.muli(arith.extui(wide, row), size))


def halves_of_address(address: Register) -> list[Register]:
    """Returns the low and the high word of an address."""
    wide = ir.IntegerType.get_signless(64)
    high = arith.shrui(address, arith.constant(wide, ir.IntegerAttr.get(wide, 32)))
    return [arith.trunci(i32(), x) for x in (address, high)]


def address_of_halves(low: Register, high: Register) -> Register:
    """Returns the address of two words."""
    wide = ir.IntegerType.get_signless(64)
    places = arith.constant(wide, ir.IntegerAttr.get(wide, 32))
    low, high = (arith.extui(wide, x) for x in (low, high))
    return arith.ori(low, arith.shli(high, places))


def real_multiply(x: Register, y: Register) -> Register:
    """Multiplies float32."""
    return arith.mulf(x, y)


def real_add(x: Register, y: Register) -> Register:
    """Adds float32."""
    return arith.addf(x, y)


def real_subtract(x: Register, y: Register) -> Register:
    """Subtracts float32."""
    return arith.subf(x, y)


def real_larger(x: Register, y: Register) -> Register:
    """Returns the larger of two float32; a NaN only if both are."""
    return utils.inline_ptx("max.f32 $0, $1, $2;", x, y, result_types=f32())


def positive(x: Register) -> Register:
    """Whether a float32 is above zero or a NaN."""
    return arith.cmpf(arith.CmpFPredicate.UGT, x, real(0.0))


def from_other_lane(x: Register, distance: int) -> Register:
    """Returns the float32 of the lane whose number differs in one bit."""
    return utils.inline_ptx(
        f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;",
        x,
        result_types=f32(),
        has_side_effects=True,
        convergent=True,
    )


def from_lane(x: Register, lane: Register) -> Register:
    """Returns the word of another lane of the warp."""
    return utils.inline_ptx(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
        *(x, lane),
        result_types=i32(),
        has_side_effects=True,
        convergent=True,
    )


def transpose(x: Register) -> Register:
    """Transposes an 8 x 8 matrix of 16-bit values that a warp holds."""
    return utils.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        x,
        result_types=i32(),
        has_side_effects=True,
        convergent=True,
    )


def begin_copy(to: Register, source: Register, size: int, taken: Register) -> None:
    """Begins to copy to shared memory: ``taken`` bytes, zeros up to ``size``."""
    how = "cg.shared.global.L2::128B" if size == 16 else "ca.shared.global"
    utils.inline_ptx(
        f"cp.async.{how} [$0], [$1], {size}, $2;",
        *(to, source, taken),
        has_side_effects=True,
    )


def commit_copies() -> None:
    """Closes a group of copies."""
    utils.inline_ptx("cp.async.commit_group;", has_side_effects=True)


def wait_for_copies(newest: int) -> None:
    """Waits until at most ``newest`` groups of this thread are on their way."""
    utils.inline_ptx(f"cp.async.wait_group {newest};", has_side_effects=True)


def load_shared(address: Register, offset: int, words: int) -> Sequence[Register]:
    """Loads 2 or 4 adjacent words from shared memory."""
    return _load(f"ld.shared.v{words}.b32", address, offset, words, True)


def load_constant(address: Register, offset: int, words: int) -> Sequence[Register]:
    """Loads 4 words that nobody writes while the kernel runs."""
    return _load(f"ld.global.nc.v{words}.b32", address, offset, words, False)


def _load(
    name: str, address: Register, offset: int, words: int, ordered: bool
) -> Sequence[Register]:
    to = ", ".join(f"${i}" for i in range(words))
    return utils.inline_ptx(
        f"{name} {{{to}}}, [${words}+{offset}];",
        address,
        result_types=[i32()] * words,
        has_side_effects=ordered,
    )


def store_shared(address: Register, offset: int, x: Register, y: Register) -> None:
    """Stores two adjacent float32 in shared memory."""
    utils.inline_ptx(
        f"st.shared.v2.f32 [$0+{offset}], {{$1, $2}};",
        *(address, x, y),
        has_side_effects=True,
    )


def store_words(address: Register, offset: int, words: Sequence[Register]) -> None:
    """Stores four adjacent words in shared memory."""
    utils.inline_ptx(
        f"st.shared.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};",
        *(address, *words),
        has_side_effects=True,
    )


def publish_shared() -> None:
    """Lets TMA and wgmma see what this thread has written to shared memory."""
    utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)


def store_global(address: Register, offset: int, word: Register) -> None:
    """Stores a word in global memory."""
    utils.inline_ptx(
        f"st.global.b32 [$0+{offset}], $1;", address, word, has_side_effects=True
    )


def synchronize(ctas: int) -> None:
    """Waits for all threads of the cluster, which may then read what they wrote."""
    code = "barrier.sync 0;"
    if ctas > 1:
        code = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;"
    utils.inline_ptx(code, has_side_effects=True, convergent=True)


def cta_in_cluster() -> Register:
    """Returns the number of this CTA in its cluster."""
    return utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=i32())


def when(condition: Register) -> AbstractContextManager[None]:
    """Runs what follows only in the threads where the predicate holds."""
    return utils.when(condition)


def in_cta(address: Register, cta: int) -> Register:
    """Returns where another CTA of the cluster has the same shared memory."""
    return utils.inline_ptx(
        f"mapa.shared::cluster.u32 $0, $1, {cta};", address, result_types=i32()
    )


def load_cluster(address: Register, offset: int) -> Sequence[Register]:
    """Loads two adjacent float32 from the shared memory of a CTA of the cluster."""
    return utils.inline_ptx(
        f"ld.shared::cluster.v2.f32 {{$0, $1}}, [$2+{offset}];",
        address,
        result_types=[f32()] * 2,
        has_side_effects=True,
    )


def multiply_halves(
    a: Sequence[Register], b: Sequence[Register], sums: Sequence[Register]
) -> list[Register]:
    """Adds a 16 x 16 by 16 x 8 product of fp16 to float32 sums."""
    return list(
        utils.inline_ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
            " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            *(*a, *b, *sums),
            result_types=[f32()] * 4,
            convergent=True,
        )
    )


def pack_halves(low: Register, high: Register) -> Register:
    """Rounds two float32 to fp16 and packs them; what is too large becomes 65504."""
    return utils.inline_ptx(
        "{\n.reg .f32 low, high;\n"
        "min.NaN.f32 low, $1, 0f477FE000;\nmax.NaN.f32 low, low, 0fC77FE000;\n"
        "min.NaN.f32 high, $2, 0f477FE000;\nmax.NaN.f32 high, high, 0fC77FE000;\n"
        "cvt.rn.f16x2.f32 $0, high, low;\n}",
        *(low, high),
        result_types=i32(),
    )


def float8_to_halves(word: Register) -> Sequence[Register]:
    """Converts four float8 (e4m3) to two words of two fp16, exactly."""
    return utils.inline_ptx(
        "{\n.reg .b16 low, high;\nmov.b32 {low, high}, $2;\n"
        "cvt.rn.f16x2.e4m3x2 $0, low;\ncvt.rn.f16x2.e4m3x2 $1, high;\n}",
        word,
        result_types=[i32()] * 2,
    )
