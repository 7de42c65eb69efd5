"""Who computes what in the next step."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from pagedweight_jax.engine.block_manager import BlockManager
from pagedweight_jax.engine.request import FinishReason, Request


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Sizes of a step.

    Attributes:
      max_num_seqs: requests that run at once; each may take one decode row.
      prefill_rows: rows of the prefill group.
      prefill_queries: tokens of a prefill row; a prompt is cut into such chunks.
    """

    max_num_seqs: int
    prefill_rows: int
    prefill_queries: int


@dataclass(frozen=True)
class Chunk:
    """A run of a request's tokens that the step computes: one row.

    Attributes:
      samples: whether the run ends with the request's newest token, so that the next
        one is sampled after it.
    """

    request: Request
    start: int
    length: int
    samples: bool

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + self.length

    @property
    def slot(self) -> int:
        """Slot of the request, until its step is enqueued."""
        assert self.request.slot is not None
        return self.request.slot


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Rows of the next step, and whom it cost their place."""

    decode: tuple[Chunk, ...]
    prefill: tuple[Chunk, ...]
    preempted: tuple[Request, ...]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """All rows, decode first, as the step numbers them."""
        return self.decode + self.prefill


class Scheduler:
    """Continuous batching with chunked prefill and preemption by recompute.

    Requests run in the order of arrival. A running request never waits for blocks
    while a younger one holds some: the youngest gives up its place, loses its keys and
    values, and starts again at the head of the queue with all tokens it has.

    A schedule is made before the tokens of the last one are seen, so a request goes
        waiting -> running -> landing -> finished
    where a landing one has all its steps enqueued, and only tokens to wait for: it
    holds neither slot nor blocks. Only a running or a landing request has tokens in
    flight, so whoever may have to preempt (`lacks_blocks`) takes them in first.
    """

    def __init__(self, blocks: BlockManager, limits: SchedulerLimits) -> None:
        self._blocks = blocks
        self._limits = limits
        self._free_slots = list(reversed(range(limits.max_num_seqs)))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.landing: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running or self.landing)

    def requests(self) -> Iterator[Request]:
        """Yields all unfinished requests, the waiting ones last."""
        yield from self.landing
        yield from self.running
        yield from self.waiting

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.waiting.append(request)

    def blocks_wanted(self) -> int:
        """Blocks beyond those held that would let every request go on at once.

        That is one token more for each running request and the whole of each waiting
        one that has a place to run in.
        """
        places = self._limits.max_num_seqs - len(self.running)
        wanted = [
            self._blocks.num_missing(r.request_id, r.num_tokens + 1)
            for r in (*self.running, *list(self.waiting)[:places])
        ]
        return sum(wanted)

    def blocks_landing(self) -> int:
        """Blocks that requests had which the host does not know to be finished."""
        return sum(self._blocks.blocks_for(r.num_computed) for r in self.landing)

    def lacks_blocks(self) -> bool:
        """Whether the next schedule would preempt."""
        missing = [
            self._blocks.num_missing(r.request_id, r.num_tokens)
            for r in self.running
            if r.decodes
        ]
        return sum(missing) > self._blocks.num_free

    def schedule(self) -> Schedule:
        """Chooses the rows of the next step and gives them their blocks."""
        preempted: list[Request] = []
        decode: list[Chunk] = []
        for request in [r for r in self.running if r.decodes]:
            if request in self.running and self._make_room(request, preempted):
                decode.append(Chunk(request, request.num_computed, 1, samples=True))
        decode = [chunk for chunk in decode if chunk.request in self.running]
        if not preempted:
            self._admit()
        return Schedule(
            decode=tuple(decode),
            prefill=tuple(self._prefill_chunks()),
            preempted=tuple(preempted),
        )

    def advance(self, schedule: Schedule) -> None:
        """Counts the tokens of a schedule whose step is enqueued.

        What is enqueued later may have the slots and blocks of a request that needs
        nothing more.
        """
        for chunk in schedule.chunks:
            request = chunk.request
            request.num_computed = chunk.stop
            request.num_in_flight += chunk.samples
            if request.all_in_flight:
                self.running.remove(request)
                self.landing.append(request)
                self._vacate(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request and frees what it holds."""
        request.finish_reason = reason
        if request in self.running:
            self.running.remove(request)
            self._vacate(request)
        elif request in self.landing:
            self.landing.remove(request)
        else:
            self.waiting.remove(request)

    def check_integrity(self) -> None:
        """Raises AssertionError unless places, blocks and progress agree."""
        assert len(self.running) <= self._limits.max_num_seqs, "too many running"
        for request in self.running:
            assert not request.finished, f"{request.request_id} is finished, yet runs"
            missing = self._blocks.num_missing(request.request_id, request.num_computed)
            assert not missing, f"{request.request_id} computed more than it has"
        for request in self.waiting:
            idle = request.num_computed == 0 and request.num_in_flight == 0
            assert idle, f"{request.request_id} waits with state"
        for request in self.landing:
            assert request.num_in_flight, f"{request.request_id} waits for nothing"
        slots = [r.slot for r in self.running if r.slot is not None]
        everyone = sorted([*self._free_slots, *slots])
        assert everyone == list(range(self._limits.max_num_seqs)), "a slot is lost"
        self._blocks.check_integrity()

    def _make_room(self, request: Request, preempted: list[Request]) -> bool:
        """Gets blocks for a request's next token, from the youngest if need be."""
        while not self._blocks.grow(request.request_id, request.num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        assert not request.num_in_flight, f"{request.request_id} has tokens to come"
        self.running.remove(request)
        self._vacate(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _vacate(self, request: Request) -> None:
        """Frees the slot and the blocks of a request."""
        assert request.slot is not None
        self._free_slots.append(request.slot)
        request.slot = None
        self._blocks.release(request.request_id)

    def _admit(self) -> None:
        """Lets waiting requests run, oldest first, while their tokens have room."""
        while self.waiting and self._free_slots:
            request = self.waiting[0]
            if not self._blocks.grow(request.request_id, request.num_tokens):
                return
            request.slot = self._free_slots.pop()
            self.running.append(self.waiting.popleft())

    def _prefill_chunks(self) -> Iterator[Chunk]:
        rows_left = self._limits.prefill_rows
        for request in self.running:
            if request.decodes:
                continue
            start, end = request.num_computed, request.num_tokens
            while start < end and rows_left:
                length = min(self._limits.prefill_queries, end - start)
                yield Chunk(request, start, length, samples=start + length == end)
                start += length
                rows_left -= 1
