"""A warpgroup of 128 threads in NumPy: runs the inline code of the kernels.

It stands in for the modules that emit MLIR, so the code that is lowered for the device
is executed instead, all threads in step, with every value an array over the threads.
What an instruction does is written from the PTX ISA manual (9.7: lop3, prmt, cvt, ld,
shfl, match, ldmatrix; mma.m16n8k16 and mma.m16n8k32 fragments). Loads and stores are
checked for bounds and alignment, what a warp does together for whole warps, and two
warps must not use one place between the same two barriers if one of them writes.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, math, memref, vector

THREADS = 128
_LANES = np.arange(THREADS)
_WARPS = _LANES // 32
_BASE = 4096  # of the first array, and the gap between arrays
_NOBODY, _SEVERAL = -1, -2

_ELEMENTS: dict[Any, Callable[[], ir.Type]] = {
    np.dtype(np.int8): lambda: ir.IntegerType.get_signless(8),
    np.dtype(np.int32): lambda: ir.IntegerType.get_signless(32),
    np.dtype(np.uint16): lambda: ir.IntegerType.get_signless(16),
    np.dtype(np.uint32): lambda: ir.IntegerType.get_signless(32),
    np.dtype(np.float16): ir.F16Type.get,
    np.dtype(np.float32): ir.F32Type.get,
    np.dtype(ml_dtypes.bfloat16): ir.BF16Type.get,
}


@dataclass(frozen=True)
class Memref:
    """A contiguous array in memory."""

    memory: np.ndarray
    base: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def values(self) -> np.ndarray:
        """What the array holds now."""
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        data = self.memory[self.base : self.base + size].view(self.dtype)
        return data.reshape(self.shape)

    @property
    def type(self) -> ir.Type:
        return ir.MemRefType.get(self.shape, _ELEMENTS[self.dtype]())


class Warpgroup:
    """Executes inline code for all threads at once.

    Global and shared memory are one here, and addresses of both are alike.
    """

    def __init__(self, *arrays: np.ndarray) -> None:
        data, places = b"\xff" * _BASE, []  # -1, or NaN
        for array in arrays:
            places.append(len(data))
            data += array.tobytes()
            data += b"\xff" * (-len(data) % 256 + _BASE)
        self.memory = np.frombuffer(data, np.uint8).copy()
        self.memrefs = [
            Memref(self.memory, base, array.shape, array.dtype)
            for base, array in zip(places, arrays, strict=True)
        ]
        self.active = np.ones(THREADS, bool)
        self.barrier()

    def patch(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Takes the place of what emits code in these modules."""
        fakes = self._fakes()
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, ModuleType) and value in fakes:
                    monkeypatch.setattr(module, name, fakes[value])

    def _fakes(self) -> dict[ModuleType, SimpleNamespace]:
        return {
            arith: _ARITH,
            gpu: SimpleNamespace(
                thread_id=lambda _: _LANES.astype(np.uint32),
                Dimension=SimpleNamespace(x=None),
            ),
            llvm: SimpleNamespace(ptrtoint=_address),
            math: SimpleNamespace(ctpop=lambda x: np.bitwise_count(x).astype(x.dtype)),
            memref: SimpleNamespace(load=self.load, store=self.store),
            utils: SimpleNamespace(
                memref_ptr=lambda ref: ref,
                bitwidth=lambda kind: kind.width,
                inline_ptx=self.ptx,
                shfl_bfly=lambda x, distance: self.shuffle(x, _LANES ^ distance),
                warp_barrier=self._check_warps,
                warpgroup_barrier=self.barrier,
                when=self.when,
            ),
            vector: SimpleNamespace(
                from_elements=lambda _, parts: list(parts),
                extract=lambda v, _, at: v[at[0]],
            ),
        }

    # ---- control ---------------------------------------------------------------------

    @contextmanager
    def when(self, condition: np.ndarray) -> Iterator[None]:
        outer, self.active = self.active, self.active & condition
        yield
        self.active = outer

    def barrier(self) -> None:
        assert self.active.all(), "a barrier that some threads do not reach"
        self._writer = np.full(self.memory.size, _NOBODY)
        self._reader = np.full(self.memory.size, _NOBODY)

    def shuffle(self, x: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        self._check_warps()
        return x[lanes]

    def _check_warps(self) -> None:
        warps = self.active.reshape(-1, 32)
        assert np.all(warps.any(1) == warps.all(1)), "a part of a warp is absent"

    # ---- memory ----------------------------------------------------------------------

    def load(self, ref: Memref, at: Sequence[np.ndarray]) -> np.ndarray:
        value = self._load(self._place(ref, at), ref.dtype, 1)[:, 0]
        return value.view(np.uint32) if ref.dtype == np.int32 else value

    def store(self, value: np.ndarray, ref: Memref, at: Sequence[np.ndarray]) -> None:
        value = value.view(ref.dtype) if value.dtype != ref.dtype else value
        self._store(self._place(ref, at), value[:, None])

    def _place(self, ref: Memref, at: Sequence[np.ndarray]) -> np.ndarray:
        offset = np.zeros(THREADS, np.int64)
        for index, size in zip(at, ref.shape, strict=True):
            index = index.view(np.int32)
            inside = (index >= 0) & (index < size)
            assert np.all(inside | ~self.active), f"{index} in {ref.shape}"
            offset = offset * size + index
        return ref.base + offset * ref.dtype.itemsize

    def _load(self, addresses: np.ndarray, dtype: Any, count: int) -> np.ndarray:
        """Loads; inactive threads get zeros."""
        at = self._bytes(addresses, np.dtype(dtype).itemsize * count)
        warps = _WARPS[self.active, None]
        writer = self._writer[at]
        assert np.all((writer == _NOBODY) | (writer == warps)), "read before a barrier"
        others = (self._reader[at] != _NOBODY) & (self._reader[at] != warps)
        self._reader[at] = np.where(others, _SEVERAL, warps)
        self._reader[at[self._reader[at] != warps]] = _SEVERAL
        out = np.zeros((THREADS, at.shape[1]), np.uint8)
        out[self.active] = self.memory[at]
        return out.view(dtype)

    def _store(self, addresses: np.ndarray, values: np.ndarray) -> None:
        values = np.ascontiguousarray(values).view(np.uint8)[self.active]
        at = self._bytes(addresses, values.shape[1])
        warps = _WARPS[self.active, None]
        for users in (self._writer[at], self._reader[at]):
            assert np.all((users == _NOBODY) | (users == warps)), "write before barrier"
        self._writer[at], self.memory[at] = warps, values
        self._writer[at[self._writer[at] != warps]] = _SEVERAL
        assert np.all(self.memory[at] == values), "two values for one place"

    def _bytes(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Returns the places of the bytes that the active threads use."""
        first = addresses[self.active].astype(np.int64)
        assert np.all(first % size == 0), "misaligned"
        inside = np.zeros(first.size, bool)
        for ref in self.memrefs:
            end = ref.base + ref.values.nbytes
            inside |= (first >= ref.base) & (first + size <= end)
        assert inside.all(), "out of bounds"
        return first[:, None] + np.arange(size)

    # ---- instructions ----------------------------------------------------------------

    def ptx(self, code: str, *args: Any, result_types: Any = (), **_: Any) -> Any:
        """Executes instructions; their operands are ``args`` in order of number."""
        name = " ".join(re.findall(r"(?:^|[;\n])\s*([a-z][\w.:]*)", code))
        if name == "ld.global.nc.b16 cvt.f32.f16":
            return self._load(args[0], np.float16, 1)[:, 0].astype(np.float32)
        if name == "ld.global.nc.b16":
            return self._load(args[0], np.uint16, 1)[:, 0]
        if name.startswith(("ld.", "st.", "cp.")):
            return self._memory_instruction(name, code, args, result_types)
        if name.startswith(("shfl", "match", "ldmatrix", "mma")):
            self._check_warps()
        if name.startswith("ldmatrix"):
            return _matrices(self._load(args[0], np.uint32, 4))
        if name.startswith("mma"):
            left, right, numbers = _PRODUCTS[name]
            return _mma(args[:4], args[4:6], args[6:], left, right, numbers)
        if name == "shfl.sync.up.b32":
            distance = args[1].astype(np.int64)
            return args[0][np.where(distance > _LANES % 32, _LANES, _LANES - distance)]
        if name == "lop3.b32":
            return _lop3(*args, int(code.rstrip(";").split()[-1], 16))
        if name == "mov.b32 cvt.f32.f16":
            return _half(args[0], int("$0, high" in code)).astype(np.float32)
        return _SIMPLE[name](*args)

    def _memory_instruction(
        self, name: str, code: str, args: Any, result_types: Any
    ) -> Any:
        if name == "cp.async.cg.shared.global":
            taken = args[2] > 0
            with self.when(taken):
                data = self._load(args[1], np.uint8, 16)
            self._store(args[0], data)
        elif name.startswith("st.shared.v4"):
            self._store(args[0], np.stack(args[1:], axis=1))
        elif name.startswith("ld.global"):
            offset = re.search(r"\[\$\d+\+(\d+)\]", code)
            address = args[0] + np.uint64(offset[1] if offset else 0)
            dtype = np.float32 if name.endswith("f32") else np.uint32
            return list(self._load(address, dtype, len(result_types)).T)
        else:
            assert name == "cp.async.wait_all", code


def matrix(registers: Sequence[np.ndarray]) -> np.ndarray:
    """Arranges 16 A registers of every thread as the 64 x 64 tile that they are of."""
    out = np.full((64, 64), np.nan)
    row, column = 16 * _WARPS + _LANES % 32 // 4, 2 * (_LANES % 4)
    for s, register in enumerate(registers):
        for hi, value in enumerate(_bfloat16s(register).T):
            out[row + 8 * (s % 2), 8 * (s // 2) + column + hi] = value
    return out


def accumulator(groups: Sequence[Sequence[np.ndarray]]) -> np.ndarray:
    """Arranges four sums a group as the matrix [64, M] that they stand for."""
    out = np.full((64, 8 * len(groups)), np.nan)
    for n, sums in enumerate(groups):
        for i, value in enumerate(sums):
            row = 16 * _WARPS + _LANES % 32 // 4 + 8 * (i // 2)
            out[row, 8 * n + 2 * (_LANES % 4) + i % 2] = value
    return out


# ---- what instructions do ------------------------------------------------------------


def _address(kind: ir.Type, ref: Memref) -> np.ndarray:
    dtype = np.uint64 if ir.IntegerType(kind).width == 64 else np.uint32
    return np.full(THREADS, ref.base, dtype)


def _constant(kind: ir.Type, attribute: Any) -> np.ndarray:
    if isinstance(kind, ir.F32Type):
        return np.full(THREADS, attribute.value, np.float32)
    if ir.IntegerType(kind).width == 64:
        return np.full(THREADS, attribute.value, np.uint64)
    return np.full(THREADS, attribute.value & 0xFFFFFFFF, np.uint32)


def _signed(x: np.ndarray) -> np.ndarray:
    return x.view(np.int32)


def _compare(predicate: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    if predicate == arith.CmpIPredicate.eq:
        return x == y
    assert predicate == arith.CmpIPredicate.slt
    return _signed(x) < _signed(y)


def _compare_floats(predicate: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    assert predicate == arith.CmpFPredicate.OLT
    return x < y


def _quiet(f: Callable[..., Any]) -> Callable[..., Any]:
    """Lets infinities and NaN arise, as threads do."""

    def quiet(*args: Any) -> Any:
        with np.errstate(all="ignore"):
            return f(*args)

    return quiet


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Multiplies exactly, and rounds the sum as good as once."""
    return (x.astype(np.float64) * y + z).astype(np.float32)


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            terms = [v if i >> p & 1 else ~v for v, p in ((a, 2), (b, 1), (c, 0))]
            out |= terms[0] & terms[1] & terms[2]
    return out


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        assert np.all(nibble < 8), "sign replication is not emulated"
        byte = both >> (np.uint64(8) * nibble.astype(np.uint64)) & np.uint64(255)
        out |= byte.astype(np.uint32) << np.uint32(8 * i)
    return out


def _half(x: np.ndarray, which: int) -> np.ndarray:
    return (x >> np.uint32(16 * which)).astype(np.uint16).view(np.float16)


def _halves(*args: np.ndarray, f: Any) -> list[np.ndarray]:
    """Computes both halves in float64 and rounds once, as one instruction does."""
    return [f(*(_half(x, i).astype(np.float64) for x in args)) for i in range(2)]


def _packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    low, high = (
        h.astype(np.float16).view(np.uint16).astype(np.uint32) for h in (low, high)
    )
    return low | high << 16


def _pair(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return low.astype(np.uint32) | high.astype(np.uint32) << 16


def _pack_bfloat16(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    pair = np.stack([low, high], axis=1).astype(ml_dtypes.bfloat16)
    return pair.view(np.uint32)[:, 0]


def _match(x: np.ndarray) -> np.ndarray:
    same = (x[:, None] == x) & (_WARPS[:, None] == _WARPS)
    bits = np.uint32(1) << (_LANES % 32).astype(np.uint32)
    return np.sum(np.where(same, bits, np.uint32(0)), axis=1, dtype=np.uint32)


def _matrices(rows: np.ndarray) -> list[np.ndarray]:
    """Gives lane l word ``l % 4`` of row ``l // 4`` of each of four matrices."""
    words = rows.reshape(4, 4, 8, 4)  # warp, matrix, row, word
    return [np.ascontiguousarray(words[:, i].reshape(THREADS)) for i in range(4)]


def _unsigned_bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8).reshape(THREADS, 4)


def _signed_bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.int8).reshape(THREADS, 4)


def _bfloat16s(x: np.ndarray) -> np.ndarray:
    values = np.ascontiguousarray(x).view(ml_dtypes.bfloat16).reshape(THREADS, 2)
    return values.astype(np.float64)


_PRODUCTS = {
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": (
        *(_bfloat16s, _bfloat16s),
        np.float32,
    ),
    "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32": (
        *(_unsigned_bytes, _signed_bytes),
        np.int32,
    ),
}


def _mma(
    a: Sequence[np.ndarray],
    b: Sequence[np.ndarray],
    c: Sequence[np.ndarray],
    left_of: Callable[[np.ndarray], np.ndarray],
    right_of: Callable[[np.ndarray], np.ndarray],
    numbers: Any,
) -> list[np.ndarray]:
    """Computes A B + C in each warp; a register holds 2 or 4 neighbours along k."""
    group, t = _LANES % 32 // 4, _LANES % 4
    n = left_of(a[0]).shape[1]
    left, right = np.zeros((4, 16, 8 * n)), np.zeros((4, 8 * n, 8))
    for hi in range(n):
        for i, register in enumerate(a):
            k = n * t + hi + 4 * n * (i // 2)
            left[_WARPS, group + 8 * (i % 2), k] = left_of(register)[:, hi]
        for i, register in enumerate(b):
            right[_WARPS, n * t + hi + 4 * n * i, group] = right_of(register)[:, hi]
    product = left @ right
    results = []
    for i, x in enumerate(c):
        value = product[_WARPS, group + 8 * (i // 2), 2 * t + i % 2]
        results.append((x.view(numbers) + value).astype(numbers))
    return results


_ARITH = SimpleNamespace(
    AtomicRMWKind=arith.AtomicRMWKind,
    CmpFPredicate=arith.CmpFPredicate,
    CmpIPredicate=arith.CmpIPredicate,
    constant=_constant,
    andi=lambda x, y: x & y,
    addi=lambda x, y: x + y,
    subi=lambda x, y: x - y,
    muli=lambda x, y: x * y,
    divui=lambda x, y: x // y,
    remui=lambda x, y: x % y,
    minsi=lambda x, y: np.minimum(_signed(x), _signed(y)).view(np.uint32),
    maxui=np.maximum,
    shrui=lambda x, y: x >> y,
    shli=lambda x, y: x << y,
    cmpi=_compare,
    cmpf=_compare_floats,
    select=np.where,
    addf=_quiet(lambda x, y: x + y),
    subf=_quiet(lambda x, y: x - y),
    mulf=_quiet(lambda x, y: x * y),
    divf=_quiet(lambda x, y: x / y),
    sitofp=lambda _, x: _signed(x).astype(np.float32),
    extui=lambda _, x: x.astype(np.uint64),
    bitcast=lambda kind, x: x.view(
        np.float32 if isinstance(kind, ir.F32Type) else np.uint32
    ),
    truncf=lambda _, x: x.astype(ml_dtypes.bfloat16),
    index_cast=lambda _, x: x,
)

_SIMPLE: dict[str, Callable[..., Any]] = {
    "add.rn.f16x2": lambda x, y: _packed(*_halves(x, y, f=lambda x, y: x + y)),
    "fma.rn.f16x2": lambda *xyz: _packed(*_halves(*xyz, f=lambda x, y, z: x * y + z)),
    "cvt.rn.bf16x2.f32": _quiet(_pack_bfloat16),
    "ex2.approx.ftz.f32": _quiet(np.exp2),
    "fma.rn.f32": _quiet(_fma),
    "match.any.sync.b32": _match,
    "mul.rn.f16x2": lambda x, y: _packed(*_halves(x, y, f=lambda x, y: x * y)),
    "mov.b32": lambda x, *high: _pair(x, *high) if high else x,
    "mov.u32": lambda: ((1 << _LANES % 32) - 1).astype(np.uint32),  # %lanemask_lt
    "prmt.b32": _prmt,
    "rcp.approx.ftz.f32": _quiet(lambda x: np.float32(1) / x),
}
