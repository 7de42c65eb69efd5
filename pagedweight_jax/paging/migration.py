"""Planes on the move: lowering at once, loading beside serving.

A plane is in one of these places; the arrows are the calls that move it:

    host --- queue --- start ---> in flight --- poll ---> arrived --- commit ---> table
      ^                  |            |                                             |
      +---- cancelled or failed: its reserved frames are free again ----------------+
                                                            adopt (lowering)

In flight means: frames are reserved, and the words travel in a *staging array*, one
row a frame. The planes of a page that are in flight follow those in the table without
a gap. At a step boundary the engine calls

    adopt(plan)   if there is one; then it uploads ``table`` before the next step
    poll()        a staging array that is on the device; the engine writes its rows to
                  ``frames`` of the pool, rows of cancelled planes going nowhere
    commit()      the table has the planes; the next step reads them
    start()       the next staging arrays leave

so frames that a lowering frees are written only after the last step that reads them,
and a plane is read only after it is written.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from jaxtyping import Array, Int32, UInt32

from pagedweight_jax.paging import table as tables
from pagedweight_jax.paging.allocator import FrameAllocator
from pagedweight_jax.paging.host_store import HostStore
from pagedweight_jax.paging.planner import Plan
from pagedweight_jax.paging.staging import PageableStaging, Staging, Transfer
from pagedweight_jax.paging.table import PageTable, PlaneId

Outcome = Literal["loading", "committed", "superseded", "failed"]

MAX_IN_FLIGHT = 2
"""Staging arrays: one travels while the other arrives."""

_RECORDS_KEPT = 10_000
_TRANSFER_ERRORS = (RuntimeError, OSError)


@dataclass(frozen=True, eq=False)
class Arrival:
    """A staging array on the device, to be written to the pool.

    Attributes:
      words: rows to write.
      frames: where; ``num_frames`` (which no pool has) for rows to drop.
      planes: planes that are complete once the rows are written.
    """

    words: Array
    frames: Int32[np.ndarray, "staging_frames"]
    planes: tuple[PlaneId, ...]


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """What became of a plan.

    Attributes:
      freed_bytes: as planned; negative for a raise.
      mean_bits: bits of the average weight once the plan is carried out.
      seconds_to_commit: from `Migrator.adopt` to the commit of the last load; 0 if
        there was none, None while loads are out and if a newer plan took over.
      outcome: "superseded" means that a newer plan came before the last load; "failed"
        that loads were given up, and their pages kept their old bits.
    """

    plan_id: int
    step: int
    reason: str
    pages_down: int
    pages_up: int
    freed_bytes: int
    mean_bits: float
    predicted_damage: float
    feasible: bool
    seconds_to_commit: float | None
    outcome: Outcome


@dataclass(frozen=True, eq=False)
class _Flight:
    """A staging array on its way; cancelled planes leave ``frames``, rows stay."""

    transfer: Transfer
    frames: dict[PlaneId, Int32[np.ndarray, "k"]]
    first_rows: dict[PlaneId, int]


class Migrator:
    """Carries out plans. It owns the page table and the planes' frames.

    Args:
      host: where planes come from.
      allocator: of the pool; planes that ``table`` names are allocated already.
      table: the committed table to start from.
      staging_frames: rows of a staging array. Two exist at most.
      staging: fills staging arrays and starts their copies; None for the fastest of
        the default device.
      clock: seconds, for records.
      max_attempts: a plane whose transfers failed so often is given up.

    Raises:
      ValueError: if sizes of host, table and staging do not fit each other.
    """

    def __init__(
        self,
        host: HostStore,
        allocator: FrameAllocator,
        table: PageTable,
        *,
        staging_frames: int,
        staging: Staging | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_attempts: int = 3,
    ) -> None:
        _check_sizes(host, table, staging_frames)
        self._host = host
        self._allocator = allocator
        self._table = table
        self._staging_shape = (
            staging_frames,
            host.plane_words // table.frames_per_plane,
        )
        self._staging = staging or PageableStaging()
        self._clock = clock
        self._max_attempts = max_attempts
        self._queue: deque[PlaneId] = deque()
        self._flights: deque[_Flight] = deque()
        self._arrived: tuple[Arrival, _Flight] | None = None
        self._attempts: Counter[PlaneId] = Counter()
        self._records: deque[PlanRecord] = deque(maxlen=_RECORDS_KEPT)
        self._adopted_at = 0.0
        self._num_plans = 0
        self._num_failed = 0

    @property
    def table(self) -> PageTable:
        """The committed table."""
        return self._table

    @property
    def held(self) -> Int32[np.ndarray, "L E 2"]:
        """Bits of each page whose planes hold frames: committed or in flight."""
        held = self._table.bits.copy()
        for plane in self.in_flight:
            held[plane[:3]] += 1
        return held

    @property
    def in_flight(self) -> frozenset[PlaneId]:
        """Planes with reserved frames that are not in the table yet."""
        return frozenset(plane for f in self._reserving() for plane in f.frames)

    @property
    def bytes_in_transfer(self) -> int:
        """Bytes of the frames that planes in flight have reserved."""
        return self._num_reserved() * self._staging_shape[1] * 4

    @property
    def num_queued_frames(self) -> int:
        """Frames that wanted planes will take and have not reserved yet."""
        planes = np.maximum(self._table.desired - self.held, 0).sum(axis=(0, 1))
        return int(planes @ tables.BLOCK_PLANES) * self._table.frames_per_plane

    @property
    def settled(self) -> bool:
        """Whether nothing is queued, in flight or waiting for `commit`."""
        return not (self._queue or self._flights or self._arrived)

    @property
    def num_failed(self) -> int:
        """Transfers that failed so far."""
        return self._num_failed

    @property
    def records(self) -> list[PlanRecord]:
        """The latest plans, oldest first."""
        return list(self._records)

    def adopt(self, plan: Plan, step: int) -> PlanRecord:
        """Makes a plan the newest: lowers at once, cancels, and queues its loads.

        Args:
          plan: made from the current `table` and `held`.
          step: for the record.
        Raises:
          RuntimeError: if an arrival waits for its commit: its frames may be among
            those that this plan frees.
          ValueError: if the plan is for another table.
        """
        self._check_adoptable(plan)
        self._close_record("superseded", seconds=None)
        lowered, freed = tables.lower(self._table, plan.bits)
        self._allocator.free(freed)
        self._cancel(p for p in self.in_flight if p.plane >= plan.bits[p[:3]])
        self._table = tables.with_desired(lowered, plan.bits)
        self._queue = deque(self._missing_planes(plan))
        self._attempts = Counter(
            {p: n for p, n in self._attempts.items() if p.plane < plan.bits[p[:3]]}
        )
        self._adopted_at = self._clock()
        self._open_record(plan, step)
        return self._records[-1]

    def start(self) -> None:
        """Sends queued planes while staging arrays and frames are free.

        Does not wait: what finds no frame stays queued.
        """
        while self._queue and len(self._flights) < MAX_IN_FLIGHT:
            frames = self._reserve()
            if not frames or not self._send(frames):
                return

    def poll(self, block: bool = False) -> Arrival | None:
        """Returns the next staging array that is on the device, to be committed.

        Args:
          block: wait for the oldest one.
        Raises:
          RuntimeError: if the last arrival was not committed.
        """
        self._check_no_arrival()
        while self._flights:
            flight = self._flights[0]
            try:
                if not block and not flight.transfer.is_ready():
                    return None
                words = flight.transfer.result()
            except _TRANSFER_ERRORS:
                self._flights.popleft()
                self._fail(flight.frames)
                continue
            self._flights.popleft()
            if flight.frames:
                arrival = self._arrival(flight, words)
                self._arrived = (arrival, flight)
                return arrival
        return None

    def commit(self, arrival: Arrival) -> None:
        """Enters the planes of an arrival whose write to the pool is enqueued.

        Raises:
          ValueError: if it is not what `poll` returned last.
        """
        if self._arrived is None or self._arrived[0] is not arrival:
            raise ValueError("commit takes the arrival that poll returned last")
        frames = self._arrived[1].frames
        self._arrived = None
        self._table = tables.raise_planes(
            self._table, arrival.planes, np.concatenate(list(frames.values()))
        )
        self._finish_if_settled()

    def check_integrity(self) -> None:
        """Checks the laws that tie the table, the allocator and the loads together.

        Raises:
          RuntimeError: naming the law that is broken.
        """
        self._allocator.check_integrity()
        tables.check_integrity(self._table)
        named = self._table.frames[self._table.frames != 0]
        reserved = [f for flight in self._reserving() for f in flight.frames.values()]
        owned = np.sort(np.concatenate([named, *reserved]))
        if not np.array_equal(owned, self._allocator.frames_of("plane")):
            raise RuntimeError("the planes' frames are not those of table and loads")
        in_flight, held = self.in_flight, self.held
        wrong = [
            plane
            for plane in in_flight
            if not self._table.bits[plane[:3]] <= plane.plane < held[plane[:3]]
        ]
        if wrong:
            raise RuntimeError(f"{wrong} do not follow the planes of their pages")
        if (held > self._table.desired).any():
            raise RuntimeError("a page holds more planes than are wanted")
        wanted = np.maximum(self._table.desired - held, 0).sum()
        if len(set(self._queue)) != len(self._queue) or len(self._queue) != wanted:
            raise RuntimeError(
                f"{len(self._queue)} planes are queued but {wanted} are wanted"
            )

    # Adopting.

    def _check_adoptable(self, plan: Plan) -> None:
        self._check_no_arrival()
        if plan.bits.shape != self._table.desired.shape:
            raise ValueError(
                f"the plan is for pages {plan.bits.shape} but the table has"
                f" {self._table.desired.shape}"
            )
        if plan.bits.min() < 0 or plan.bits.max() > self._table.parent_bits:
            raise ValueError(
                f"the plan wants {plan.bits.min()} to {plan.bits.max()} bits but"
                f" {self._table.parent_bits} planes are stored"
            )

    def _check_no_arrival(self) -> None:
        if self._arrived is not None:
            raise RuntimeError(
                "an arrival waits for its commit; write it to the pool and commit it"
            )

    def _missing_planes(self, plan: Plan) -> list[PlaneId]:
        """Returns the planes that hold no frames yet, in the order of the plan.

        Planes that failed after the plan was made are not in its loads. They lie
        below those that are, so they come first.
        """
        held = self.held
        level = np.arange(self._table.parent_bits)
        missing = (held[..., None] <= level) & (level < plan.bits[..., None])
        planned = plan.loads[missing[tuple(plan.loads.T)]]
        missing[tuple(planned.T)] = False
        unplanned = np.argwhere(missing)
        return [PlaneId(*row) for row in np.concatenate([unplanned, planned]).tolist()]

    # Loading.

    def _reserve(self) -> dict[PlaneId, np.ndarray]:
        """Takes planes off the queue that fit a staging array and the free frames."""
        room = min(self._staging_shape[0], self._allocator.num_free)
        planes, ends = [], [0]
        while self._queue:
            end = ends[-1] + tables.plane_frames(self._table, self._queue[0].block)
            if end > room:
                break
            planes.append(self._queue.popleft())
            ends.append(end)
        ids = self._allocator.allocate(ends[-1], "plane")
        parts = [ids[start:end] for start, end in pairwise(ends)]
        return dict(zip(planes, parts, strict=True))

    def _send(self, frames: dict[PlaneId, np.ndarray]) -> bool:
        """Starts one transfer; False if that failed."""
        ends = list(accumulate(map(len, frames.values()), initial=0))
        fills = [
            partial(self._fill, plane, start, end)
            for plane, (start, end) in zip(frames, pairwise(ends), strict=True)
        ]
        try:
            transfer = self._staging.send(self._staging_shape, fills)
        except _TRANSFER_ERRORS:
            self._fail(frames)
            return False
        first_rows = dict(zip(frames, ends[:-1], strict=True))
        self._flights.append(_Flight(transfer, frames, first_rows))
        return True

    def _fill(
        self,
        plane: PlaneId,
        start: int,
        end: int,
        words: UInt32[np.ndarray, "staging_frames frame_words"],
    ) -> None:
        """Reads a plane into its rows; may run in another thread."""
        self._host.read(plane, words[start:end])

    def _arrival(self, flight: _Flight, words: Array) -> Arrival:
        frames = np.full(self._staging_shape[0], self._allocator.num_frames, np.int32)
        for plane, ids in flight.frames.items():
            row = flight.first_rows[plane]
            frames[row : row + len(ids)] = ids
        return Arrival(words, frames, tuple(flight.frames))

    def _cancel(self, planes: Iterable[PlaneId]) -> list[PlaneId]:
        """Frees the frames of planes in flight; their rows will be dropped."""
        cancelled = set(planes)
        in_order = []
        for flight in self._flights:
            for plane in [p for p in flight.frames if p in cancelled]:
                self._allocator.free(flight.frames.pop(plane))
                in_order.append(plane)
        return in_order

    def _fail(self, frames: dict[PlaneId, np.ndarray]) -> None:
        """Sends the planes of a failed transfer back to the queue, or gives them up."""
        self._num_failed += 1
        for ids in frames.values():
            self._allocator.free(ids)
        self._attempts.update(frames.keys())
        # What follows them on the same pages could not be committed: no gaps.
        first = {p[:3]: p.plane for p in reversed(frames)}
        followers = self._cancel(
            p for p in self.in_flight if p.plane > first.get(p[:3], p.plane)
        )
        self._queue.extendleft(reversed([*frames, *followers]))
        self._give_up(p for p in frames if self._attempts[p] >= self._max_attempts)
        self._finish_if_settled()

    def _give_up(self, planes: Iterable[PlaneId]) -> None:
        """Stops wanting planes and what follows them on their pages."""
        desired = self._table.desired.copy()
        for plane in planes:
            desired[plane[:3]] = min(desired[plane[:3]], plane.plane)
            del self._attempts[plane]
        if (desired == self._table.desired).all():
            return
        self._table = tables.with_desired(self._table, desired)
        self._queue = deque(p for p in self._queue if p.plane < desired[p[:3]])
        if self._records:
            self._records[-1] = replace(self._records[-1], outcome="failed")

    def _reserving(self) -> list[_Flight]:
        return [*self._flights, *([self._arrived[1]] if self._arrived else [])]

    def _num_reserved(self) -> int:
        return sum(len(i) for f in self._reserving() for i in f.frames.values())

    # Records: the newest plan owns all loads.

    def _open_record(self, plan: Plan, step: int) -> None:
        self._num_plans += 1
        self._records.append(
            PlanRecord(
                plan_id=self._num_plans,
                step=step,
                reason=plan.reason,
                pages_down=plan.pages_down,
                pages_up=plan.pages_up,
                freed_bytes=plan.freed_bytes,
                mean_bits=tables.average_bits(plan.bits),
                predicted_damage=plan.predicted_damage,
                feasible=plan.feasible,
                seconds_to_commit=None,
                outcome="loading",
            )
        )
        if self._arrived is None and not self._queue and not self.in_flight:
            self._close_record("committed", seconds=0.0)

    def _finish_if_settled(self) -> None:
        if not self._queue and not self.in_flight:
            self._close_record("committed", self._clock() - self._adopted_at)

    def _close_record(self, outcome: Outcome, seconds: float | None) -> None:
        """Closes the newest record, unless it is closed."""
        if not self._records or self._records[-1].seconds_to_commit is not None:
            return
        last = self._records[-1]
        if last.outcome == "loading":
            last = replace(last, outcome=outcome)
        bits = tables.mean_bits(self._table)
        self._records[-1] = replace(last, seconds_to_commit=seconds, mean_bits=bits)


def _check_sizes(host: HostStore, table: PageTable, staging_frames: int) -> None:
    stored = (host.num_layers, host.num_experts, host.parent_bits)
    paged = (*table.frames.shape[:2], table.parent_bits)
    if stored != paged:
        raise ValueError(
            f"the host store has (layers, experts, planes) {stored} but the table"
            f" {paged}; build both from one checkpoint"
        )
    if host.plane_words % table.frames_per_plane:
        raise ValueError(
            f"a plane of {host.plane_words} words cannot be cut into"
            f" {table.frames_per_plane} equal frames"
        )
    if staging_frames < tables.plane_frames(table, block=0):
        raise ValueError(
            f"staging_frames={staging_frames} is less than one gate_up plane; choose"
            f" at least {tables.plane_frames(table, block=0)}"
        )
