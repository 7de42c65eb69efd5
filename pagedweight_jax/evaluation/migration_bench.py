"""What a step costs while planes arrive at the full rate of the bus.

The engine's loop at a step boundary, without scheduling: planes that have arrived are
written to the pool and named by the page table, the next ones leave, a step is
enqueued. Two steps are in flight, as in the engine. Layer after layer drops to 3 bits
and comes back to 6, so that there are always planes to bring.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Array, Float64

from pagedweight_jax.evaluation.decode_loop import DecodeLoop, Memory
from pagedweight_jax.models.interface import Pages
from pagedweight_jax.paging.host_store import HostStore
from pagedweight_jax.paging.migration import Migrator
from pagedweight_jax.paging.planner import Plan
from pagedweight_jax.paging.table import PageTable

_LOW_BITS = 3
_HOST_BYTES = 2**30  # of distinct planes: more than the caches of a processor hold
_WARMUP_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class MigrationRow:
    """Milliseconds of single steps, with and without planes on the move.

    Attributes:
      bytes_per_second: of planes that were committed in the meantime.
    """

    batch: int
    context: int
    p50_ms: float
    p99_ms: float
    p50_ms_migrating: float
    p99_ms_migrating: float
    bytes_per_second: float

    @property
    def p99_ratio(self) -> float:
        """With planes on the move over without."""
        return self.p99_ms_migrating / self.p99_ms


def measure_migration(
    loop: DecodeLoop,
    memory: Memory,
    *,
    batch: int,
    context: int,
    steps: int,
    staging_frames: int,
) -> MigrationRow:
    """Times steps without migration, then with it; all planes must be in the pool."""
    still = step_seconds(loop.step, steps)
    shuttle = Shuttle(loop, memory, staging_frames)
    start = time.perf_counter()
    moving = step_seconds(shuttle.step, steps)
    seconds = time.perf_counter() - start
    shuttle.finish()
    times = [1e3 * np.percentile(t, q) for t in (still, moving) for q in (50, 99)]
    return MigrationRow(
        batch=batch,
        context=context,
        p50_ms=float(times[0]),
        p99_ms=float(times[1]),
        p50_ms_migrating=float(times[2]),
        p99_ms_migrating=float(times[3]),
        bytes_per_second=shuttle.bytes_committed / seconds,
    )


def step_seconds(step: Callable[[], Array], steps: int) -> Float64[np.ndarray, "n"]:
    """Returns the times between the ends of steps, the next one being enqueued."""
    ends = []
    last = step()
    for _ in range(_WARMUP_STEPS + steps):
        following = step()
        jax.block_until_ready(last)
        ends.append(time.perf_counter())
        last = following
    jax.block_until_ready(last)
    return np.diff(ends)[_WARMUP_STEPS - 1 :]


class Shuttle:
    """Steps with planes on the move: layer after layer gives planes up and gets them.

    The words that arrive are not those that were there, which does not matter here.
    """

    def __init__(self, loop: DecodeLoop, memory: Memory, staging_frames: int) -> None:
        """Starts with all planes in the pool."""
        frames = memory.plane_frames
        assert frames is not None, "planes move only with paged experts"
        layers, experts, _, parent_bits, _ = frames.shape
        desired = np.full((layers, experts, 2), parent_bits, np.int32)
        words = memory.layout.frame_words
        self._loop = loop
        self._migrator = Migrator(
            _host_store(layers, experts, parent_bits, words),
            memory.allocator,
            PageTable(frames.copy(), desired),
            staging_frames=staging_frames,
        )
        self._uploaded = self._migrator.table
        self._frame_bytes = memory.layout.frame_bytes
        self._num_plans = 0
        self.bytes_committed = 0

    def step(self) -> Array:
        """Does what the engine does at a step boundary, then enqueues the step."""
        self._commit_arrivals()
        if self._migrator.settled:
            self._adopt(low_layer=self._num_plans % len(self._uploaded.bits))
        self._migrator.start()
        self._upload()
        return self._loop.step()

    def finish(self) -> None:
        """Brings all planes back."""
        while not self._migrator.settled:
            self._migrator.start()
            self._commit_arrivals(block=True)
        self._adopt(low_layer=None)
        while not self._migrator.settled:
            self._migrator.start()
            self._commit_arrivals(block=True)
        self._upload()

    def _commit_arrivals(self, block: bool = False) -> None:
        while (arrival := self._migrator.poll(block=block)) is not None:
            self._loop.commit_planes(arrival.words, arrival.frames)
            self._migrator.commit(arrival)
            count = int((arrival.frames < len(self._loop.pool)).sum())
            self.bytes_committed += count * self._frame_bytes

    def _adopt(self, low_layer: int | None) -> None:
        """Lowers one layer, and brings what the plan before this one lowered."""
        table = self._migrator.table
        bits = np.full_like(table.desired, table.parent_bits)
        if low_layer is not None:
            bits[low_layer] = _LOW_BITS
        missing = np.arange(table.parent_bits) >= table.bits[..., None]
        missing &= np.arange(table.parent_bits) < bits[..., None]
        plan = Plan(
            bits=bits,
            loads=np.argwhere(missing).astype(np.int32),
            reason="bench",
            demand_bytes=0,
            freed_bytes=0,
            cancelled_bytes=0,
            predicted_damage=0.0,
            feasible=True,
            pages_down=0,
            pages_up=0,
        )
        self._migrator.adopt(plan, step=self._num_plans)
        self._num_plans += 1

    def _upload(self) -> None:
        table = self._migrator.table
        if table is not self._uploaded:
            self._uploaded = table
            pages = Pages(bits=table.bits, frames=table.frames)  # pyright: ignore
            self._loop.pages = jax.device_put(pages)


def _host_store(layers: int, experts: int, parent_bits: int, words: int) -> HostStore:
    """Makes a store whose planes are a few arrays, used again and again."""
    shape = (experts, 3, words)
    count = max(1, _HOST_BYTES // (4 * int(np.prod(shape))))
    count = min(count, layers * parent_bits)
    arrays = [np.full(shape, i, np.uint32) for i in range(count)]
    numbers = np.arange(layers * parent_bits).reshape(layers, parent_bits) % count
    return HostStore([[arrays[i] for i in row] for row in numbers.tolist()])
