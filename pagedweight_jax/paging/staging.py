"""Staging arrays: planes are put together here, then travel to the device as one.

One large copy is far faster than many small ones, and faster again from page-locked
memory, which the device reads by itself (H200: 44 GB/s, against 4 to 9 GB/s from
pageable memory, which a thread copies once more). So there are two kinds:

    PageableStaging   fills a new NumPy array, then calls `put`
    PinnedStaging     threads fill a page-locked array that is used again and again, and
                      start its copy; the caller, who feeds the device, does not wait
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array, UInt32

Fill = Callable[[UInt32[np.ndarray, "staging_frames frame_words"]], None]
"""Fills some rows of a staging array; no two fills of one array share a row."""

_READERS = 4  # a few threads read memory as fast as the bus carries it away


@runtime_checkable
class Transfer(Protocol):
    """A copy of a staging array to the device."""

    def is_ready(self) -> bool:
        """Tells whether `result` would return at once."""
        ...

    def result(self) -> Array:
        """Waits for the array, or raises what made the copy fail."""
        ...


@runtime_checkable
class Staging(Protocol):
    """Makes, fills and sends staging arrays."""

    def send(self, shape: tuple[int, int], fills: Sequence[Fill]) -> Transfer:
        """Fills an array of a shape and starts its copy to the device.

        Rows that no fill writes hold anything.
        """
        ...


@dataclass(frozen=True)
class DevicePut:
    """The transfer that `jax.device_put` makes."""

    array: Array

    def is_ready(self) -> bool:
        """Tells whether the array is on the device."""
        # jax.Array has the method since 0.4 but does not declare it (0.12).
        return self.array.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def result(self) -> Array:
        """Waits for the array."""
        self.array.block_until_ready()
        return self.array


def device_put_transfer(
    words: UInt32[np.ndarray, "staging_frames frame_words"],
    sharding: Sharding | None = None,
) -> Transfer:
    """Starts to copy a staging array; nobody may change ``words`` afterwards."""
    return DevicePut(jax.device_put(words, sharding))


@dataclass(frozen=True)
class PageableStaging:
    """A new NumPy array for each transfer, filled before `send` returns."""

    put: Callable[[np.ndarray], Transfer] = device_put_transfer

    def send(self, shape: tuple[int, int], fills: Sequence[Fill]) -> Transfer:
        """Fills an array, then calls ``put``; raises what either raises."""
        # New each time: on the CPU device_put may keep it instead of a copy.
        words = np.empty(shape, np.uint32)
        for fill in fills:
            fill(words)
        return self.put(words)


class PinnedStaging:
    """Page-locked arrays that are used in turn, filled and sent by threads.

    JAX calls arrays immutable, and these are written all the same, through their
    address. That is safe because nothing but the copy to the device ever reads them,
    and an array is filled again only when somebody has waited for that copy.
    """

    def __init__(self) -> None:
        """Sends to the default device; makes no array yet."""
        device = jax.devices()[0]
        self._sharding = SingleDeviceSharding(device)
        self._pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
        self._slots: list[_Slot] = []
        self._sender = ThreadPoolExecutor(1, "staging")
        self._num_readers = min(_READERS, os.cpu_count() or 1)
        self._readers = ThreadPoolExecutor(self._num_readers, "staging-read")

    def send(self, shape: tuple[int, int], fills: Sequence[Fill]) -> Transfer:
        """Lets threads fill and send an array; its transfer raises what they raise."""
        slot = self._free_slot(shape)
        return _Sent(slot, self._sender.submit(self._fill_and_put, slot, fills))

    def _free_slot(self, shape: tuple[int, int]) -> "_Slot":
        for slot in self._slots:
            if slot.words.shape == shape and not slot.busy:
                slot.busy = True
                return slot
        self._slots.append(_Slot(shape, self._pinned))
        return self._slots[-1]

    def _fill_and_put(self, slot: "_Slot", fills: Sequence[Fill]) -> Array:
        # A share of the fills each: handing over one by one costs more than a fill.
        shares = [fills[i :: self._num_readers] for i in range(self._num_readers)]
        reads = [self._readers.submit(_fill_all, s, slot.words) for s in shares]
        wait(reads)  # all of them: the array may be filled again after an error
        for read in reads:
            read.result()
        return jax.device_put(slot.pinned, self._sharding)


def _fill_all(
    fills: Sequence[Fill], words: UInt32[np.ndarray, "staging_frames frame_words"]
) -> None:
    for fill in fills:
        fill(words)


class _Slot:
    """A page-locked array; busy until its copy is done."""

    def __init__(self, shape: tuple[int, int], sharding: Sharding) -> None:
        self.pinned: Array = jax.device_put(np.zeros(shape, np.uint32), sharding)
        self.pinned.block_until_ready()
        words = (ctypes.c_uint32 * self.pinned.size).from_address(
            self.pinned.unsafe_buffer_pointer()
        )
        self.words: np.ndarray = np.ctypeslib.as_array(words).reshape(shape)
        self.busy = True


@dataclass(frozen=True)
class _Sent:
    """A transfer whose array a thread is still to fill and send."""

    slot: _Slot
    future: Future[Array]

    def is_ready(self) -> bool:
        if not self.future.done():
            return False
        failed = self.future.exception() is not None
        return failed or DevicePut(self.future.result()).is_ready()

    def result(self) -> Array:
        try:
            return DevicePut(self.future.result()).result()
        finally:
            self.slot.busy = False
