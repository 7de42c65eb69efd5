"""A warpgroup of 128 threads in NumPy: runs the inline code of `mosaic_tile`.

It stands in for the modules that emit MLIR, so the code that is lowered for the device
is executed instead, with every value an array over the threads. What an instruction
does is written from the PTX ISA manual (9.7: lop3, prmt, ld; mma.m16n8k16 fragments),
so the layout of the fragments is checked without a GPU. Loads are checked for bounds
and alignment.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from jaxlib.mlir import ir

from pallas_kernels.fused_moe import mosaic_tile

THREADS = 128
_BASE = 4096  # of the one buffer in memory; not 0, so that a lost base is noticed


@dataclass(frozen=True)
class Memref:
    """A contiguous array in global memory."""

    values: np.ndarray
    base: int

    @property
    def type(self) -> ir.Type:
        element = ir.F16Type.get()
        return ir.MemRefType.get(self.values.shape, element)


class Warpgroup:
    """Executes one call of inline code for all threads at once."""

    def __init__(self, *arrays: np.ndarray) -> None:
        self.memrefs: list[Memref] = []
        memory = b"\xff" * _BASE
        for array in arrays:
            self.memrefs.append(Memref(array, len(memory)))
            memory += array.tobytes()
            memory += b"\xff" * (-len(memory) % 256)  # NaN
        self.memory = np.frombuffer(memory, np.uint8)

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts this warpgroup in the place of the modules that emit code."""
        thread = np.arange(THREADS, dtype=np.uint32)
        modules = {
            "arith": SimpleNamespace(
                constant=_constant,
                andi=lambda x, y: x & y,
                addi=lambda x, y: x + y,
                muli=lambda x, y: x * y,
                shrui=lambda x, y: x >> y,
                shli=lambda x, y: x << y,
                extui=lambda _, x: x.astype(np.uint64),
                index_cast=lambda _, x: x,
            ),
            "gpu": SimpleNamespace(
                thread_id=lambda _: thread, Dimension=SimpleNamespace(x=None)
            ),
            "llvm": SimpleNamespace(
                ptrtoint=lambda _, ref: np.full(THREADS, ref.base, np.uint64)
            ),
            "vector": SimpleNamespace(from_elements=lambda _, parts: np.stack(parts)),
            "utils": SimpleNamespace(memref_ptr=lambda ref: ref, inline_ptx=self.ptx),
        }
        for name, module in modules.items():
            monkeypatch.setattr(mosaic_tile, name, module)

    def ptx(self, code: str, *args: Any, result_types: Any, **_: Any) -> Any:
        """Executes one instruction; its operands are ``args`` in order of number."""
        name = code.split()[0]
        if name == "lop3.b32":
            return _lop3(*args, int(code.rstrip(";").split()[-1], 16))
        if name == "prmt.b32":
            return _prmt(*args)
        if name == "add.rn.f16x2":
            return _packed(*_halves(args[0], args[1], f=lambda x, y: x + y))
        if name == "fma.rn.f16x2":
            return _packed(*_halves(*args, f=lambda x, y, z: x * y + z))
        if name == "mov.b32":
            return args[0].astype(np.uint32) | args[1].astype(np.uint32) << 16
        if name == "ld.global.u16":
            return self._load(args[0], np.uint16, 1)[:, 0]
        if name == "ld.global.v4.b32":
            offset = re.search(r"\[\$4\+(\d+)\]", code)
            assert offset is not None, code
            words = self._load(args[0] + np.uint64(offset[1]), np.uint32, 4)
            return list(words.T)
        assert name == "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", code
        return _mma(args[:4], args[4:6], args[6:])

    def _load(self, addresses: np.ndarray, dtype: type, count: int) -> np.ndarray:
        size = np.dtype(dtype).itemsize * count
        assert np.all(addresses % np.uint64(size) == 0), "misaligned"
        assert np.all(addresses >= _BASE) and np.all(
            addresses + np.uint64(size) <= self.memory.size
        ), "out of bounds"
        at = addresses.astype(np.int64)[:, None] + np.arange(size)
        return self.memory[at].view(dtype)


def accumulator(pairs: Sequence[np.ndarray]) -> np.ndarray:
    """Arranges the pairs of every thread as the matrix [64, M] that they stand for."""
    lane, warp = np.arange(THREADS) % 32, np.arange(THREADS) // 32
    out = np.full((64, 8 * len(pairs) // 2), np.nan, np.float32)
    for i, pair in enumerate(pairs):
        row = 16 * warp + lane // 4 + 8 * (i % 2)
        for j in range(2):
            out[row, 8 * (i // 2) + 2 * (lane % 4) + j] = pair[j]
    return out


def _constant(kind: ir.Type, attribute: Any) -> np.ndarray:
    if isinstance(kind, ir.F32Type):
        return np.full(THREADS, attribute.value, np.float32)
    return np.full(THREADS, attribute.value & 0xFFFFFFFF, np.uint32)


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


def _mma(
    a: Sequence[np.ndarray], b: Sequence[np.ndarray], c: Sequence[np.ndarray]
) -> list[np.ndarray]:
    thread = np.arange(THREADS)
    warp, group, t = thread // 32, thread % 32 // 4, thread % 4
    lhs, rhs = np.zeros((4, 16, 16)), np.zeros((4, 16, 8))
    for hi in range(2):
        for i, register in enumerate(a):
            k = 2 * t + hi + 8 * (i // 2)
            lhs[warp, group + 8 * (i % 2), k] = _half(register, hi)
        for i, register in enumerate(b):
            rhs[warp, 2 * t + hi + 8 * i, group] = _half(register, hi)
    product = lhs @ rhs
    return [
        (x + product[warp, group + 8 * (i // 2), 2 * t + i % 2]).astype(np.float32)
        for i, x in enumerate(c)
    ]
