"""How long the device works: the sum of the times of its kernels.

On an NVIDIA GPU the times come from CUPTI, which Mosaic GPU carries with jaxlib: each
kernel's own time, without the gaps between kernels and without copies. So a call of
many small kernels looks better here than on the wall; `wall_seconds` of a long chain
tells the rest. On a machine without a GPU both are the wall clock, and `source` says
so.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

Source = Literal["cupti", "wall clock"]

_RETRIES = 2


class Kernel(NamedTuple):
    """How long and how often a kernel runs in a call."""

    seconds: float
    launches: float


@dataclass(frozen=True, kw_only=True)
class DeviceTimes:
    """Times of some calls of one program.

    Attributes:
      seconds: of each call.
      by_name: kernels of a call, the longest first; empty by the wall clock.
    """

    seconds: tuple[float, ...]
    source: Source
    by_name: dict[str, Kernel]

    @property
    def kernels(self) -> float:
        """Launches of a call; 0 by the wall clock."""
        return sum(kernel.launches for kernel in self.by_name.values())

    @property
    def median(self) -> float:
        """Seconds of the median call."""
        return float(np.median(self.seconds))


def time_calls(
    call: Callable[[int], Any], repeats: int, *, warmup: int = 3
) -> DeviceTimes:
    """Times ``call(0)``, ``call(1)``, ..., after calls that do not count.

    Args:
      call: enqueues work and returns its arrays; compiled already. It gets the number
        of the call, so that it can take other inputs each time: what an earlier call
        left in the caches should not make the next one faster.
      repeats: calls to time.
      warmup: calls before, numbered downwards from -1.
    """
    for i in range(warmup):
        jax.block_until_ready(call(-1 - i))
    if jax.default_backend() != "gpu":
        seconds = [_wall(call, i) for i in range(repeats)]
        return DeviceTimes(seconds=tuple(seconds), source="wall clock", by_name={})
    times = _kernel_times(call, repeats)
    for _ in range(_RETRIES):
        if len(times) % repeats == 0:
            break
        # A program may change its form at its first calls (it becomes a CUDA graph),
        # and CUPTI may lose kernels meanwhile. Some programs are never regular.
        times = max(times, _kernel_times(call, repeats), key=len)
    return _summary(times, repeats)


def wall_seconds(run: Callable[[], Any], repeats: int = 3) -> float:
    """Returns the wall time of the median run, after one that does not count."""
    jax.block_until_ready(run())
    return float(np.median([_wall(lambda _: run(), i) for i in range(repeats)]))


def _wall(call: Callable[[int], Any], i: int) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call(i))
    return time.perf_counter() - start


def _kernel_times(
    call: Callable[[int], Any], repeats: int
) -> Sequence[tuple[str, float]]:
    """Returns name and milliseconds of every kernel, in order.

    The extension that the public `profiler.measure` uses, because that takes the same
    arguments for every call.
    """
    from jax.experimental.mosaic.gpu import profiler  # loads a library of the GPU

    # Set by the module, or None where jaxlib has no GPU part.
    cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # pyright: ignore
    cupti._cupti_init()
    try:
        jax.block_until_ready([call(i) for i in range(repeats)])
    finally:
        times = cupti._cupti_get_timings(True)
    return times


def _summary(times: Sequence[tuple[str, float]], repeats: int) -> DeviceTimes:
    """Splits the kernels between the calls: equally many each, or else on average."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, milliseconds in times:
        by_name[name].append(milliseconds / 1e3)
    kernels = {
        name: Kernel(sum(own) / repeats, len(own) / repeats)
        for name, own in by_name.items()
    }
    seconds = np.array([milliseconds for _, milliseconds in times]) / 1e3
    if len(seconds) % repeats:
        calls = [float(seconds.sum()) / repeats] * repeats
    else:
        calls = seconds.reshape(repeats, -1).sum(axis=1).tolist()
    return DeviceTimes(
        seconds=tuple(calls),
        source="cupti",
        by_name=dict(sorted(kernels.items(), key=lambda item: -item[1].seconds)),
    )
