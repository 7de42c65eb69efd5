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
    """A run of a request's tokens that the step computes: one row."""

    request: Request
    start: int
    length: int

    @property
    def completes(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.start + self.length == len(self.request.token_ids)


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
    """

    def __init__(self, blocks: BlockManager, limits: SchedulerLimits) -> None:
        self._blocks = blocks
        self._limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def requests(self) -> Iterator[Request]:
        """Yields all unfinished requests, the running ones first."""
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
            self._blocks.num_missing(r.request_id, len(r.token_ids) + 1)
            for r in (*self.running, *list(self.waiting)[:places])
        ]
        return sum(wanted)

    def schedule(self) -> Schedule:
        """Chooses the rows of the next step and gives them their blocks."""
        preempted: list[Request] = []
        decode: list[Chunk] = []
        for request in [r for r in self.running if r.decodes]:
            if request in self.running and self._make_room(request, preempted):
                decode.append(Chunk(request, request.num_computed, 1))
        decode = [chunk for chunk in decode if chunk.request in self.running]
        if not preempted:
            self._admit()
        return Schedule(
            decode=tuple(decode),
            prefill=tuple(self._prefill_chunks()),
            preempted=tuple(preempted),
        )

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request and frees its blocks."""
        request.finish_reason = reason
        self._blocks.release(request.request_id)
        if request in self.running:
            self.running.remove(request)
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
            assert request.num_computed == 0, f"{request.request_id} waits with state"
        self._blocks.check_integrity()

    def _make_room(self, request: Request, preempted: list[Request]) -> bool:
        """Gets blocks for a request's next token, from the youngest if need be."""
        while not self._blocks.grow(request.request_id, len(request.token_ids)):
            victim = self.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self._blocks.release(request.request_id)
        self.running.remove(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self) -> None:
        """Lets waiting requests run, oldest first, while their tokens have room."""
        while self.waiting and len(self.running) < self._limits.max_num_seqs:
            request = self.waiting[0]
            if not self._blocks.grow(request.request_id, len(request.token_ids)):
                return
            self.running.append(self.waiting.popleft())

    def _prefill_chunks(self) -> Iterator[Chunk]:
        rows_left = self._limits.prefill_rows
        for request in self.running:
            if request.decodes:
                continue
            start, end = request.num_computed, len(request.token_ids)
            while start < end and rows_left:
                length = min(self._limits.prefill_queries, end - start)
                yield Chunk(request, start, length)
                start += length
                rows_left -= 1
