"""The loop: commit what arrived, plan, schedule, compute, take the tokens."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from tokenizers import Tokenizer

from pagedweight_jax.engine.batch import (
    build_batch,
    choose_shape,
    first_token,
    rows_of_chunks,
)
from pagedweight_jax.engine.block_manager import BlockManager
from pagedweight_jax.engine.outputs import hits_stop_text
from pagedweight_jax.engine.request import (
    FinishReason,
    Logprob,
    PositionLogprobs,
    Request,
)
from pagedweight_jax.engine.sampling import TokenLogprobs
from pagedweight_jax.engine.scheduler import Chunk, Schedule, Scheduler
from pagedweight_jax.engine.step import Params, Programs, StepOutput, StepShape
from pagedweight_jax.models.interface import Pages
from pagedweight_jax.paging.allocator import FrameAllocator
from pagedweight_jax.paging.migration import Migrator
from pagedweight_jax.paging.planner import (
    Plan,
    PlannerLimits,
    Watermarks,
    plan_lower,
    plan_raise,
)
from pagedweight_jax.paging.statistics import RoutingStatistics, update
from pagedweight_jax.paging.table import PageTable, mean_bits
from pagedweight_jax.sensitivity import Sensitivity

DENSE_BITS = 16.0
"""What `Precision.mean_bits` says of experts that are not quantised."""

_MAX_FAILED_PLANS = 3
"""Failed plans that `Engine.settle` bears; a fixed precision bears none."""


@dataclass(frozen=True, kw_only=True)
class PrecisionControl:
    """How the engine changes precision; without one it never does.

    Attributes:
      half_life_tokens: memory of the routing statistics.
    """

    sensitivity: Sensitivity
    limits: PlannerLimits
    watermarks: Watermarks
    half_life_tokens: float = 2048.0


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one call of `Engine.step` did, for logs and displays."""

    step: int
    decode_tokens: int
    prefill_tokens: int
    running: int
    waiting: int
    finished: tuple[Request, ...]
    preempted: tuple[Request, ...]
    kv_blocks_used: int
    kv_blocks_free: int
    mean_bits: float
    bytes_in_transfer: int


class Engine:
    """Serves requests; owns the pool and everything that changes between steps.

    A step only reads the pool. Between steps, in this order: planes that have arrived
    are written and only then raise the page table; a plan may lower pages, whose
    frames are free at once; the scheduler hands frames to requests; after the step,
    its fresh keys and values are written.
    """

    def __init__(
        self,
        *,
        programs: Programs,
        params: Params,
        pool: Array,
        allocator: FrameAllocator,
        blocks: BlockManager,
        scheduler: Scheduler,
        max_blocks: int,
        migrator: Migrator | None = None,
        control: PrecisionControl | None = None,
        statistics: RoutingStatistics | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Joins the parts; see `pagedweight_jax.serving.build` for how they are made.

        Args:
          programs: the compiled steps.
          params: parameters of the model.
          pool: the paged pool, donated through every commit.
          allocator: frames of the pool.
          blocks: key-value blocks over the allocator.
          scheduler: over the blocks.
          max_blocks: blocks of the longest sequence.
          migrator: moves planes; None for experts that are not paged.
          control: lets precision change; None keeps what was loaded.
          statistics: of the routing, at the start.
          tokenizer: for stop texts and decoded logprobs.
        """
        self._programs = programs
        self._params = params
        self._pool = pool
        self._allocator = allocator
        self._blocks = blocks
        self._max_blocks = max_blocks
        self._migrator = migrator
        self._control = control
        self._tokenizer = tokenizer
        self._table: PageTable | None = None
        self._pages: Pages | None = None
        self._last_raise: int | None = None  # step of the plan, whatever it changed
        self._last_change: int | None = None
        self.statistics = statistics
        self.scheduler = scheduler
        self.steps = 0

    # Requests

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """Ends a request between steps; returns whether it was there."""
        for request in self.scheduler.requests():
            if request.request_id == request_id:
                self._finish(request, "abort")
                return True
        return False

    # The loop

    def step(self) -> StepReport:
        """Does one round; with nothing to compute it still plans and migrates."""
        self.steps += 1
        self._commit_arrivals()
        self._plan()
        if self._migrator is not None:
            self._migrator.start()
        schedule = self.scheduler.schedule()
        finished: list[Request] = []
        if schedule.chunks:
            finished = self._run(schedule)
        elif self._stuck():
            head = self.scheduler.waiting[0]
            self._finish(head, "error")
            finished = [head]
        return self._report(schedule, finished)

    def settle(self) -> None:
        """Runs idle steps until no plan is open and none would be made.

        Raises:
          RuntimeError: if requests are unfinished, or plan after plan fails because
            planes do not get to the device.
        """
        if self.has_work:
            raise RuntimeError(
                "settle() waits for idle; finish or abort requests first"
            )
        failed: set[int] = set()
        while True:
            # An idle engine has nothing to dwell for.
            self._last_change = self._last_raise = None
            self.step()
            self._commit_arrivals(block=True)
            news = self._failed_plan() - failed
            failed |= news
            if len(failed) >= (1 if self._control is None else _MAX_FAILED_PLANS):
                raise RuntimeError(
                    f"planes do not get to the device: {len(failed)} plans failed one"
                    f" after the other; experts have {self.mean_bits:.2f} bits"
                )
            still = self._migrator is None or self._migrator.settled
            if still and self._last_change is None and not news:
                return

    def _failed_plan(self) -> set[int]:
        """Returns the id of the newest plan if loads of it were given up."""
        records = self._migrator.records[-1:] if self._migrator is not None else []
        return {r.plan_id for r in records if r.outcome == "failed"}

    def _stuck(self) -> bool:
        """Whether the oldest request can never have its blocks."""
        idle = bool(self.scheduler.waiting) and not self.scheduler.running
        return idle and (self._migrator is None or self._migrator.settled)

    # Precision

    def _commit_arrivals(self, block: bool = False) -> None:
        """Writes planes that are on the device, then lets the table name them."""
        if self._migrator is None:
            return
        while (arrival := self._migrator.poll(block=block)) is not None:
            self._pool = self._programs.commit_planes(
                self._pool, arrival.words, arrival.frames
            )
            self._migrator.commit(arrival)

    def _plan(self) -> None:
        if self._control is None or self._migrator is None or self.statistics is None:
            return
        marks, block_bytes = self._control.watermarks, self._blocks.layout.block_bytes
        per_block = self._blocks.layout.frames_per_block
        free = (
            self._allocator.num_free - self._migrator.num_queued_frames
        ) // per_block
        wanted = self.scheduler.blocks_wanted()
        action = marks.decide(free, wanted, self.steps, self._last_change)
        if action == "lower":
            demand = marks.demand_bytes(free, wanted, block_bytes)
            self._adopt(self._make_plan(demand_bytes=demand))
        elif action == "raise" and self._may_raise(marks.dwell_steps):
            self._last_raise = self.steps
            slack = marks.slack_bytes(free, wanted, block_bytes)
            self._adopt(self._make_plan(slack_bytes=slack))

    def _may_raise(self, dwell_steps: int) -> bool:
        """Whether a raise is due: a plan that found nothing to raise dwells as well."""
        return self._last_raise is None or self.steps - self._last_raise >= dwell_steps

    def _make_plan(
        self, *, demand_bytes: int | None = None, slack_bytes: int = 0
    ) -> Plan:
        assert self._control and self._migrator and self.statistics
        inputs = (
            self._migrator.table,
            self._control.sensitivity,
            self.statistics,
            self._control.limits,
        )
        frame_bytes, held = 4 * self._pool.shape[1], self._migrator.held
        if demand_bytes is None:
            return plan_raise(
                *inputs, slack_bytes=slack_bytes, frame_bytes=frame_bytes, held=held
            )
        return plan_lower(
            *inputs, demand_bytes=demand_bytes, frame_bytes=frame_bytes, held=held
        )

    def _adopt(self, plan: Plan) -> None:
        assert self._migrator is not None
        if not plan.changes:
            return
        record = self._migrator.adopt(plan, self.steps)
        self._last_change = self.steps
        for request in self.scheduler.running:
            request.plan_ids.add(record.plan_id)

    def _device_pages(self) -> Pages | None:
        """Returns the page table on the device, sent again only when it changed."""
        if self._migrator is None:
            return None
        if self._table is not self._migrator.table:
            self._table = self._migrator.table
            self._pages = Pages(
                bits=jnp.asarray(self._table.bits),
                frames=jnp.asarray(self._table.frames),
            )
        return self._pages

    @property
    def mean_bits(self) -> float:
        """Committed bits of the average expert weight."""
        if self._migrator is None:
            return DENSE_BITS
        return mean_bits(self._migrator.table)

    # Computing

    def _run(self, schedule: Schedule) -> list[Request]:
        shape = choose_shape(schedule, self._programs.shapes)
        batch = build_batch(schedule, shape, self._blocks, self._max_blocks)
        output: StepOutput = self._programs.forward[shape](
            self._params, self._pool, self._device_pages(), batch
        )
        self._pool = self._programs.commit_kv[shape](
            self._pool, output.fresh_kv, batch.rows
        )
        self._take_prompt_logprobs(schedule, shape, output)
        sampled, routing = jax.device_get((output.sampled, output.routing))
        self._observe(routing.tokens, routing.norms, schedule)
        finished = []
        for row, chunk in rows_of_chunks(schedule, shape):
            request = chunk.request
            request.num_computed = chunk.start + chunk.length
            request.num_steps += 1
            request.bits_times_steps += self.mean_bits
            if not chunk.completes:
                continue
            if not sampled.finite[row]:
                self._finish(request, "error")
            else:
                token = int(sampled.tokens[row])
                self._take_token(request, token, sampled.logprobs, row)
            if request.finished:
                finished.append(request)
        return finished

    def _observe(
        self, tokens: np.ndarray, norms: np.ndarray, schedule: Schedule
    ) -> None:
        if self.statistics is None or self._control is None:
            return
        self.statistics = update(
            self.statistics,
            tokens,
            norms,
            sum(chunk.length for chunk in schedule.chunks),
            half_life_tokens=self._control.half_life_tokens,
        )

    def _take_token(
        self, request: Request, token: int, logprobs: TokenLogprobs, row: int
    ) -> None:
        request.token_ids.append(token)
        if request.first_token_seconds is None:
            request.first_token_seconds = time.monotonic()
        request.cumulative_logprob += float(logprobs.logprob[row])
        if request.params.logprobs is not None:
            count = request.params.logprobs
            request.logprobs.append(self._position(logprobs, row, token, count))
        reason = self._finish_reason(request, token)
        if reason is not None:
            self._finish(request, reason)

    def _finish_reason(self, request: Request, token: int) -> FinishReason | None:
        if token in request.stop_token_ids:
            given = tuple(request.params.stop_token_ids or ())
            request.stop_reason = token if token in given else None
            return "stop"
        if self._tokenizer is not None:
            text = hits_stop_text(request, self._tokenizer)
            if text is not None:
                request.stop_reason = text
                return "stop"
        full = len(request.output_token_ids) >= request.max_tokens
        return "length" if full else None

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self.scheduler.finish(request, reason)
        request.finished_seconds = time.monotonic()

    def _take_prompt_logprobs(
        self, schedule: Schedule, shape: StepShape, output: StepOutput
    ) -> None:
        """Computes them where asked for, from the hidden states of the prompt."""
        chunks = [
            (row, chunk)
            for row, chunk in rows_of_chunks(schedule, shape)
            if row >= shape.decode_rows and _lacks_prompt_logprobs(chunk)
        ]
        if not chunks:
            return
        start = shape.decode_rows
        targets = np.zeros(shape.num_tokens - start, np.int32)
        for row, chunk in chunks:
            at = first_token(shape, row) - start
            following = _following(chunk)
            targets[at : at + len(following)] = following
        logprobs = jax.device_get(
            self._programs.prompt_logprobs[shape](self._params, output.hidden, targets)
        )
        for row, chunk in chunks:
            self._append_prompt_logprobs(
                chunk, logprobs, first_token(shape, row) - start
            )

    def _append_prompt_logprobs(
        self, chunk: Chunk, logprobs: TokenLogprobs, at: int
    ) -> None:
        request = chunk.request
        count = request.params.prompt_logprobs
        assert count is not None
        for i, token in enumerate(_following(chunk)):
            if len(request.prompt_logprobs) == chunk.start + i + 1:
                position = self._position(logprobs, at + i, token, count)
                request.prompt_logprobs.append(position)

    def _position(
        self, logprobs: TokenLogprobs, row: int, token: int, count: int
    ) -> PositionLogprobs:
        """Builds the logprobs of one position: the token itself and the best ones."""
        ids = [int(i) for i in logprobs.top_ids[row, :count]]
        values = [float(v) for v in logprobs.top_logprobs[row, :count]]
        position = {
            i: Logprob(value, rank + 1, self._decoded(i))
            for rank, (i, value) in enumerate(zip(ids, values, strict=True))
        }
        own = Logprob(
            float(logprobs.logprob[row]), int(logprobs.rank[row]), self._decoded(token)
        )
        return {**position, token: own}

    def _decoded(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token], skip_special_tokens=False)

    # Looking in

    def _report(self, schedule: Schedule, finished: Sequence[Request]) -> StepReport:
        migrator = self._migrator
        return StepReport(
            step=self.steps,
            decode_tokens=len(schedule.decode),
            prefill_tokens=sum(chunk.length for chunk in schedule.prefill),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            finished=tuple(finished),
            preempted=schedule.preempted,
            kv_blocks_used=self._blocks.num_used,
            kv_blocks_free=self._blocks.num_free,
            mean_bits=self.mean_bits,
            bytes_in_transfer=migrator.bytes_in_transfer if migrator else 0,
        )

    def close(self) -> None:
        """Ends all requests and deletes the pool."""
        for request in list(self.scheduler.requests()):
            self._finish(request, "abort")
        self._commit_arrivals(block=True)
        self._pool.delete()
        for leaf in jax.tree.leaves(self._pages):
            leaf.delete()

    def check_integrity(self) -> None:
        """Raises unless allocator, blocks, scheduler and page table agree."""
        self._allocator.check_integrity()
        self.scheduler.check_integrity()
        if self._migrator is not None:
            self._migrator.check_integrity()


def _lacks_prompt_logprobs(chunk: Chunk) -> bool:
    request = chunk.request
    wanted = request.params.prompt_logprobs is not None
    return wanted and len(request.prompt_logprobs) < request.num_prompt_tokens


def _following(chunk: Chunk) -> list[int]:
    """Returns the prompt tokens that the chunk's positions predict."""
    stop = min(chunk.start + chunk.length, chunk.request.num_prompt_tokens - 1)
    return chunk.request.prompt_token_ids[chunk.start + 1 : stop + 1]
