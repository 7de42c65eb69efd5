"""The loop: commit what arrived, plan, schedule, enqueue a step, land an older one."""

import time
from collections import deque
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
from pagedweight_jax.engine.in_flight import LandedStep, StepInFlight
from pagedweight_jax.engine.packing import pack
from pagedweight_jax.engine.precision import PrecisionControl, make_plan
from pagedweight_jax.engine.programs import Programs
from pagedweight_jax.engine.request import FinishReason, Request
from pagedweight_jax.engine.results import (
    lacks_prompt_logprobs,
    predicted_prompt_tokens,
    take_prompt_logprobs,
    take_token,
)
from pagedweight_jax.engine.sampling import TokenLogprobs, sampling_kind
from pagedweight_jax.engine.scheduler import Chunk, Schedule, Scheduler
from pagedweight_jax.engine.step import ForwardOutput, Params, StepShape
from pagedweight_jax.models.interface import Pages
from pagedweight_jax.paging.allocator import FrameAllocator
from pagedweight_jax.paging.migration import Migrator
from pagedweight_jax.paging.planner import Plan
from pagedweight_jax.paging.statistics import RoutingStatistics, update
from pagedweight_jax.paging.table import PageTable, mean_bits

DENSE_BITS = 16.0
"""What `Precision.mean_bits` says of experts that are not quantised."""

_MAX_FAILED_PLANS = 3
"""Failed plans that `Engine.settle` bears; a fixed precision bears none."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one call of `Engine.step` did, for logs and displays.

    Attributes:
      decode_tokens: of the step that it enqueued, like ``prefill_tokens``.
      finished: requests whose end it found, in that step or an older one.
      steps_in_flight: enqueued steps whose results are still to be taken.
    """

    step: int
    decode_tokens: int
    prefill_tokens: int
    running: int
    waiting: int
    finished: tuple[Request, ...]
    preempted: tuple[Request, ...]
    steps_in_flight: int
    kv_blocks_used: int
    kv_blocks_free: int
    mean_bits: float
    bytes_in_transfer: int


class Engine:
    """Serves requests; owns the pool and everything that changes between steps.

    The host runs ahead: it enqueues a step before it has seen the tokens of the one
    before, so that scheduling, planning and detokenising happen while the device
    computes. With ``max_steps_in_flight`` = 2:

        device    step n           | step n + 1       | step n + 2       |
        host      land n - 1,      | land n,          | land n + 1,      |
                  enqueue n + 1    | enqueue n + 2    | enqueue n + 3    |

    That is safe because of one law: *there is one order, that of enqueueing*. All
    programs run in it, each pool is made from the one before, and a frame or a slot
    that the host gives away at some point of it has been read by everything before that
    point and will be written only by what comes after. So the host's ledgers speak of
    the point where the next program will be enqueued, not of what the device does now,
    and need no notion of time:

    - Planes that have arrived are written, and only then the table names them; a plan
      that lowers pages frees their frames at once; then the scheduler hands frames to
      requests; then a step is enqueued that reads this pool by this table; then the
      writing of its keys and values.
    - A decode row's token is what the request's last step left in its slot; the host
      need not know it. How many tokens a request has is known without them, so the
      step of its last one (``max_tokens``, which the longest sequence bounds) is known
      as well, and frees its slot and blocks as soon as it is enqueued.
    - A stop token, a stop text and logits that are not numbers are found late, when the
      step lands. What newer steps in flight compute for that request is surplus: it is
      written to blocks that were the request's at that point, and dropped as it lands.
    - Nobody is preempted on stale news: if blocks are short, all steps land first.

    Hence tokens, log probabilities and finish reasons do not depend on how many steps
    are in flight, as long as precision does not change: the planner sees routing counts
    when they land, so its plans may come a step later.
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
        max_steps_in_flight: int = 2,
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
          max_steps_in_flight: steps that may be enqueued and not taken; with 1 each
            call of `step` waits for its own.
          migrator: moves planes; None for experts that are not paged.
          control: lets precision change; None keeps what was loaded.
          statistics: of the routing, at the start.
          tokenizer: for stop texts and decoded logprobs.
        """
        self._programs = programs
        self._params = params
        self._pool = pool
        self._slots = programs.empty_slots()
        self._allocator = allocator
        self._blocks = blocks
        self._max_steps_in_flight = max_steps_in_flight
        self._in_flight: deque[StepInFlight] = deque()
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
        finished = self._land_down_to(0) if self.scheduler.lacks_blocks() else []
        schedule = self.scheduler.schedule()
        if schedule.chunks:
            self._enqueue(schedule)
            finished += self._land_down_to(self._max_steps_in_flight - 1)
        elif self._in_flight:
            finished += self._land()
        elif self._stuck():
            finished += [self._finish(self.scheduler.waiting[0], "error")]
        if not self.has_work:
            self._land_down_to(0)  # surplus only
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
        frame_bytes = 4 * self._pool.shape[1]
        inputs = (self._control, self.statistics, self._migrator, frame_bytes)
        action = marks.decide(free, wanted, self.steps, self._last_change)
        if action == "lower":
            demand = marks.demand_bytes(free, wanted, block_bytes)
            self._adopt(make_plan(*inputs, demand_bytes=demand))
        elif action == "raise" and self._may_raise(marks.dwell_steps):
            # Who waits for a landing request may send the next one as it lands.
            wanted += self.scheduler.blocks_landing()
            slack = marks.slack_bytes(free, wanted, block_bytes)
            if not slack:
                return
            self._last_raise = self.steps
            self._adopt(make_plan(*inputs, slack_bytes=slack))

    def _may_raise(self, dwell_steps: int) -> bool:
        """Whether a raise is due: a plan that found nothing to raise dwells as well."""
        return self._last_raise is None or self.steps - self._last_raise >= dwell_steps

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

    def _enqueue(self, schedule: Schedule) -> None:
        """Enqueues a step; its results leave for the host as soon as it has run."""
        shape = choose_shape(schedule, self._programs.shapes)
        output = self._forward(schedule, shape)
        results, logprobs = self._sample(schedule, shape, output)
        self._in_flight.append(
            StepInFlight(
                schedule=schedule,
                shape=shape,
                mean_bits=self.mean_bits,
                results=results,
                like=self._programs.results[shape.num_rows],
                logprobs=logprobs,
                prompt_logprobs=self._prompt_logprobs(schedule, shape, output),
            )
        )
        self.scheduler.advance(schedule)

    def _forward(self, schedule: Schedule, shape: StepShape) -> ForwardOutput:
        num_slots = len(self._slots.tokens)
        batch = build_batch(schedule, shape, self._blocks, num_slots)
        words = jax.device_put(pack(batch))
        output, self._slots = self._programs.forward[shape](
            self._params, self._pool, self._device_pages(), self._slots, words
        )
        self._pool = self._programs.commit_kv[shape](
            self._pool, output.fresh_kv, self._slots, words
        )
        return output

    def _sample(
        self, schedule: Schedule, shape: StepShape, output: ForwardOutput
    ) -> tuple[Array, TokenLogprobs | None]:
        """Computes the next tokens, and no more about them than rows ask for."""
        rows = shape.num_rows
        params = [c.request.params for c in schedule.chunks if c.samples]
        results, tokens, self._slots = self._programs.sample[
            rows, sampling_kind(params)
        ](output.logits, output.sampling, output.routing, self._slots)
        if all(p.logprobs is None for p in params):
            return results, None
        return results, self._programs.token_logprobs[rows](output.logits, tokens)

    def _prompt_logprobs(
        self, schedule: Schedule, shape: StepShape, output: ForwardOutput
    ) -> TokenLogprobs | None:
        """Enqueues them where asked for, from the hidden states of the prompt."""
        start = shape.decode_rows
        targets = np.zeros(shape.num_tokens - start, np.int32)
        wanted = False
        for row, chunk in rows_of_chunks(schedule, shape):
            if row >= start and lacks_prompt_logprobs(chunk):
                wanted, at = True, first_token(shape, row) - start
                following = predicted_prompt_tokens(chunk)
                targets[at : at + len(following)] = following
        if not wanted:
            return None
        return self._programs.prompt_logprobs[shape](
            self._params, output.hidden, targets
        )

    def _land_down_to(self, count: int) -> list[Request]:
        """Takes steps, oldest first, until so many are left in flight."""
        finished = []
        while len(self._in_flight) > count:
            finished += self._land()
        return finished

    def _land(self) -> list[Request]:
        """Waits for the oldest step in flight; returns the requests that it ends."""
        step = self._in_flight.popleft()
        landed = step.land()
        self._observe(step, landed)
        finished = []
        for row, chunk in step.rows:
            if chunk.request.finished:
                continue  # surplus: the end was found, or asked for, since
            reason = self._take(step, landed, row, chunk)
            if reason is not None:
                finished.append(self._finish(chunk.request, reason))
        return finished

    def _observe(self, step: StepInFlight, landed: LandedStep) -> None:
        if self.statistics is None or self._control is None:
            return
        routing = landed.results.routing
        self.statistics = update(
            self.statistics,
            routing.tokens,  # pyright: ignore[reportArgumentType]
            routing.norms,  # pyright: ignore[reportArgumentType]
            step.num_tokens,
            half_life_tokens=self._control.half_life_tokens,
        )

    def _take(
        self, step: StepInFlight, landed: LandedStep, row: int, chunk: Chunk
    ) -> FinishReason | None:
        """Gives a request what a row computed; returns why it ends, if it does."""
        request = chunk.request
        request.num_steps += 1
        request.bits_times_steps += step.mean_bits
        if landed.prompt_logprobs is not None and lacks_prompt_logprobs(chunk):
            first = step.prompt_position(row)
            take_prompt_logprobs(chunk, landed.prompt_logprobs, first, self._tokenizer)
        if not chunk.samples:
            return None
        sampled = landed.results.sampled
        if not sampled.finite[row]:
            return "error"
        token = int(sampled.tokens[row])
        return take_token(request, token, landed.logprobs, row, self._tokenizer)

    def _finish(self, request: Request, reason: FinishReason) -> Request:
        self.scheduler.finish(request, reason)
        request.finished_seconds = time.monotonic()
        return request

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
            steps_in_flight=len(self._in_flight),
            kv_blocks_used=self._blocks.num_used,
            kv_blocks_free=self._blocks.num_free,
            mean_bits=self.mean_bits,
            bytes_in_transfer=migrator.bytes_in_transfer if migrator else 0,
        )

    def close(self) -> None:
        """Ends all requests and deletes what the engine holds on the device."""
        for request in list(self.scheduler.requests()):
            self._finish(request, "abort")
        self._in_flight.clear()
        self._commit_arrivals(block=True)
        for leaf in jax.tree.leaves((self._pool, self._slots, self._pages)):
            leaf.delete()

    def check_integrity(self) -> None:
        """Raises unless allocator, blocks, scheduler and page table agree."""
        self._allocator.check_integrity()
        self.scheduler.check_integrity()
        if self._migrator is not None:
            self._migrator.check_integrity()
