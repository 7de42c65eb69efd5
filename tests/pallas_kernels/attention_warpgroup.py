"""The CTAs of a cluster in NumPy: runs the code that attention kernels inline.

A `Cluster` takes the place of `paged_attention.instructions`, so that the code that is
lowered for the device is executed instead, all threads in step, every value an array
over them. What an instruction does is written from the PTX ISA manual (9.7: mma,
movmatrix, shfl, prmt, cp.async, cvt; 5.1.7: windows of shared memory). Loads and copies
are checked for bounds and alignment.
"""

from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    addresses,
    decode_threads,
    prefill_threads,
)

THREADS = 128
_SHARED_BYTES = 1 << 18
_WINDOW = 1 << 20  # shared memory of a CTA starts at its number times this
_GAP = 4096


class Memory:
    """An array in global memory."""

    def __init__(self, values: np.ndarray, base: int) -> None:
        self.values = values
        self.base = base


class Cluster:
    """Executes instructions for all threads of a cluster."""

    def __init__(self, ctas: int, warpgroups: int, *arrays: np.ndarray) -> None:
        self.threads = ctas * warpgroups * THREADS
        self.ctas = ctas
        lanes = np.arange(self.threads, dtype=np.int32)
        self.cta = lanes // (warpgroups * THREADS)
        self.warpgroup = lanes // THREADS % warpgroups
        self._thread = lanes % THREADS
        self.active = np.ones(self.threads, bool)
        self.refs: list[Memory] = []
        base, parts = _GAP, [np.full(_GAP, 255, np.uint8)]
        for array in arrays:
            self.refs.append(Memory(array, base))
            data = np.frombuffer(array.tobytes(), np.uint8)
            padding = np.full(-data.size % 256 + _GAP, 255, np.uint8)  # NaN
            parts += [data, padding]
            base += data.size + padding.size
        self.memory = np.concatenate(parts)
        self.limits = [(r.base, r.base + r.values.nbytes) for r in self.refs]
        self.shared = np.full((ctas, _SHARED_BYTES), 255, np.uint8)

    def take_the_place_of_instructions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Has the threads' code executed by this cluster."""
        for module in (addresses, decode_threads, prefill_threads):
            monkeypatch.setattr(module, "ins", self)

    def contents(self, which: int) -> np.ndarray:
        """Returns what an array holds now."""
        ref = self.refs[which]
        data = self.memory[ref.base : ref.base + ref.values.nbytes]
        return data.view(ref.values.dtype).reshape(ref.values.shape)

    def scalar(self, value: int) -> np.ndarray:
        """Returns a scalar in every thread."""
        return np.full(self.threads, value, np.int32)

    # ---- integers --------------------------------------------------------------

    def constant(self, value: int) -> np.ndarray:
        return np.full(self.threads, value, np.int64).astype(np.int32)

    def real(self, value: float) -> np.ndarray:
        return np.full(self.threads, value, np.float32)

    def _int(self, x: Any) -> Any:
        return self.constant(x) if isinstance(x, int) else x

    def add(self, x: Any, y: Any) -> Any:
        return x + self._int(y)

    def multiply(self, x: Any, y: Any) -> Any:
        return x * self._int(y)

    def bits_and(self, x: Any, mask: int) -> Any:
        return x & self.constant(mask)

    def right(self, x: Any, places: int) -> Any:
        return (x.view(np.uint32) >> np.uint32(places)).view(np.int32)

    def left(self, x: Any, places: int) -> Any:
        return x << np.int32(places)

    def permute(self, x: Any, y: Any, selector: int) -> Any:
        both = np.stack([x, y], 1).view(np.uint8)
        picked = [both[:, selector >> 4 * i & 7] for i in range(4)]
        return np.stack(picked, 1).view(np.int32)[:, 0]

    def thread(self) -> Any:
        return self._thread

    def less(self, x: Any, y: Any) -> Any:
        return x < self._int(y)

    def equal(self, x: Any, y: Any) -> Any:
        return x == y

    def choose(self, condition: Any, x: Any, y: Any) -> Any:
        return np.where(condition, x, y)

    def both(self, x: Any, y: Any) -> Any:
        return x & y

    def smaller(self, x: Any, y: Any) -> Any:
        return np.minimum(x, self._int(y))

    def larger(self, x: Any, y: Any) -> Any:
        return np.maximum(x, self._int(y))

    def exclusive_or(self, x: Any, y: Any) -> Any:
        return x ^ y

    def divide(self, x: Any, y: int) -> Any:
        return x // np.int32(y), x % np.int32(y)

    # ---- addresses and memory ---------------------------------------------------

    def load(self, ref: Memory, *at: Any) -> Any:
        return ref.values[at]  # raises where out of bounds

    def global_address(self, ref: Memory) -> Any:
        return np.full(self.threads, ref.base, np.uint64)

    def shared_address(self, ref: Any) -> Any:
        """A reference is an offset, perhaps another one for each warpgroup."""
        return (self.cta * _WINDOW + ref).astype(np.int32)

    def in_cta(self, address: Any, cta: int) -> Any:
        return address % np.int32(_WINDOW) + np.int32(cta * _WINDOW)

    def cta_in_cluster(self) -> Any:
        return self.cta

    def halves_of_address(self, address: Any) -> Any:
        return list(address.view(np.int32).reshape(-1, 2).T)

    def address_of_halves(self, low: Any, high: Any) -> Any:
        return np.stack([low, high], 1).view(np.uint64)[:, 0]

    def offset_address(self, address: Any, offset: Any) -> Any:
        return address + offset.view(np.uint32).astype(np.uint64)

    def row_address(self, base: Any, row: Any, row_bytes: int) -> Any:
        return base + row.view(np.uint32).astype(np.uint64) * np.uint64(row_bytes)

    def _check_global(self, address: Any, size: int, active: Any) -> Any:
        address = address.astype(np.int64)
        inside = np.zeros(self.threads, bool)
        for low, high in self.limits:
            inside |= (address >= low) & (address + size <= high)
        assert np.all(inside | ~active), "out of bounds"
        assert np.all((address % size == 0) | ~active), "misaligned"
        return np.where(active, address, _GAP)

    def _shared_at(self, address: Any, size: int) -> Any:
        cta, offset = address // _WINDOW, address % _WINDOW
        assert np.all(address % size == 0), "misaligned"
        assert np.all((cta < self.ctas) & (offset + size <= _SHARED_BYTES))
        return cta[:, None], offset[:, None] + np.arange(size)

    def begin_copy(self, to: Any, source: Any, size: int, taken: Any) -> None:
        source = self._check_global(source, size, taken > 0)
        data = self.memory[source[:, None] + np.arange(size)]
        data = np.where(np.arange(size) < taken[:, None], data, np.uint8(0))
        self.shared[self._shared_at(to, size)] = data

    def load_shared(self, address: Any, offset: int, words: int) -> Any:
        data = self.shared[self._shared_at(address + np.int32(offset), 4 * words)]
        return list(np.ascontiguousarray(data).view(np.int32).T)

    def load_cluster(self, address: Any, offset: int) -> Any:
        x = self.load_shared(address, offset, 2)
        return [np.ascontiguousarray(v).view(np.float32) for v in x]

    def load_constant(self, address: Any, offset: int, words: int) -> Any:
        address = address + np.uint64(offset)
        address = self._check_global(address, 4 * words, self.active)
        data = self.memory[address[:, None] + np.arange(4 * words)]
        return list(data.view(np.int32).T)

    def store_shared(self, address: Any, offset: int, x: Any, y: Any) -> None:
        data = np.stack([x, y], 1).astype(np.float32).view(np.uint8)
        self._store_shared(address, offset, data)

    def store_words(self, address: Any, offset: int, words: Any) -> None:
        self._store_shared(address, offset, np.stack(words, 1).view(np.uint8))

    def _store_shared(self, address: Any, offset: int, data: Any) -> None:
        cta, at = self._shared_at(address + np.int32(offset), data.shape[1])
        self.shared[cta[self.active], at[self.active]] = data[self.active]

    def store_global(self, address: Any, offset: int, word: Any) -> None:
        address = address + np.uint64(offset)
        address = self._check_global(address, 4, self.active)
        data = np.ascontiguousarray(word).view(np.uint8).reshape(-1, 4)
        at = address[:, None] + np.arange(4)
        self.memory[at[self.active]] = data[self.active]

    def synchronize(self, ctas: int) -> None:
        assert ctas in (1, self.ctas)

    @contextmanager
    def when(self, condition: Any) -> Any:
        outer, self.active = self.active, self.active & condition
        yield
        self.active = outer

    # ---- floats -----------------------------------------------------------------

    def real_multiply(self, x: Any, y: Any) -> Any:
        with np.errstate(invalid="ignore"):
            return x * y

    def real_add(self, x: Any, y: Any) -> Any:
        return x + y

    def real_subtract(self, x: Any, y: Any) -> Any:
        return x - y

    def real_larger(self, x: Any, y: Any) -> Any:
        return np.fmax(x, y)

    def positive(self, x: Any) -> Any:
        return ~(x <= 0)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return (x.astype(np.float64) * y + z).astype(np.float32)

    def exp2(self, x: Any) -> Any:
        return np.exp2(x)

    def reciprocal(self, x: Any) -> Any:
        with np.errstate(divide="ignore"):
            return np.float32(1) / x

    def from_lane(self, x: Any, lane: Any) -> Any:
        return x[np.arange(self.threads) // 32 * 32 + lane]

    def from_other_lane(self, x: Any, distance: int) -> Any:
        return x[np.arange(self.threads) ^ distance]

    def pack_bfloat16(self, low: Any, high: Any) -> Any:
        return _pack(low, high, ml_dtypes.bfloat16)

    def pack_halves(self, low: Any, high: Any) -> Any:
        low, high = (np.clip(v, -65504, 65504) for v in (low, high))
        return _pack(low, high, np.float16)

    def unpack_bfloat16(self, words: Any) -> Any:
        return [v for w in words for v in _unpack(w, ml_dtypes.bfloat16).T]

    def float8_to_halves(self, word: Any) -> Any:
        values = np.ascontiguousarray(word).view(ml_dtypes.float8_e4m3fn)
        values = values.reshape(-1, 4).astype(np.float16)
        return list(np.ascontiguousarray(values).view(np.int32).T)

    def transpose(self, x: Any) -> Any:
        halves = np.ascontiguousarray(x).view(np.uint16).reshape(-1, 8, 8)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.int32).reshape(-1)

    def multiply_accumulate(self, a: Any, b: Any, sums: Any) -> Any:
        return _mma(a, b, sums, ml_dtypes.bfloat16)

    def multiply_halves(self, a: Any, b: Any, sums: Any) -> Any:
        return _mma(a, b, sums, np.float16)


def _pack(low: Any, high: Any, dtype: Any) -> Any:
    pair = np.stack([low, high], 1).astype(dtype)
    return np.ascontiguousarray(pair).view(np.int32)[:, 0]


def _unpack(word: Any, dtype: Any) -> Any:
    return np.ascontiguousarray(word).view(dtype).reshape(-1, 2).astype(np.float32)


def _mma(a: Any, b: Any, c: Any, dtype: Any) -> Any:
    """D = A B + C of m16n8k16, for every warp."""
    lanes = np.arange(len(c[0]))
    warp, group, t = lanes // 32, lanes % 32 // 4, lanes % 4
    left = np.zeros((warp[-1] + 1, 16, 16))
    right = np.zeros((warp[-1] + 1, 16, 8))
    for i, word in enumerate(a):
        for half in range(2):
            k = 2 * t + half + 8 * (i // 2)
            left[warp, group + 8 * (i % 2), k] = _unpack(word, dtype)[:, half]
    for i, word in enumerate(b):
        for half in range(2):
            right[warp, 2 * t + half + 8 * i, group] = _unpack(word, dtype)[:, half]
    product = left @ right
    return [
        (x + product[warp, group + 8 * (i // 2), 2 * t + i % 2]).astype(np.float32)
        for i, x in enumerate(c)
    ]
