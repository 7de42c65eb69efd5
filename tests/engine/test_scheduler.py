"""Laws of the scheduler, with a model without arrays that answers a few steps late."""

from collections import deque
from dataclasses import dataclass, field

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight_jax.engine.block_manager import BlockManager
from pagedweight_jax.engine.request import Request, SamplingParams
from pagedweight_jax.engine.scheduler import Schedule, Scheduler, SchedulerLimits
from pagedweight_jax.paging.allocator import FrameAllocator
from pallas_kernels.paged_attention import KvLayout

BLOCK = 4
LAYOUT = KvLayout(
    num_layers=1,
    num_kv_heads=1,
    head_dim=8,
    block_size=BLOCK,
    dtype="float32",
    frame_words=64,
)


def make(
    num_blocks: int, *, seqs: int = 4, rows: int = 2, queries: int = 8
) -> tuple[Scheduler, BlockManager]:
    blocks = BlockManager(FrameAllocator(num_blocks + 1), LAYOUT)
    limits = SchedulerLimits(
        max_num_seqs=seqs, prefill_rows=rows, prefill_queries=queries
    )
    return Scheduler(blocks, limits), blocks


def request(name: str, prompt_tokens: int, max_tokens: int) -> Request:
    return tiny.request(
        name, range(prompt_tokens), SamplingParams(max_tokens=max_tokens)
    )


@dataclass
class Served:
    """Runs schedules as an engine would; token k of a request is 1000 + k.

    Attributes:
      late: steps between a schedule and its tokens.
      ends: outputs of requests that end before ``max_tokens``, by a stop token.
    """

    scheduler: Scheduler
    blocks: BlockManager
    seqs: int
    rows: int
    queries: int
    late: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    in_flight: deque[Schedule] = field(default_factory=deque)
    surplus: int = 0  # tokens of finished requests
    order: list[str] = field(default_factory=list)  # of arrival
    computed: dict[str, int] = field(default_factory=dict)

    def add(self, request: Request) -> None:
        self.order.append(request.request_id)
        self.computed[request.request_id] = 0
        self.scheduler.add(request)

    def step(self) -> Schedule:
        if self.scheduler.lacks_blocks():
            self.land_down_to(0)
            self.scheduler.check_integrity()
        before = {r.request_id: list(r.token_ids) for r in self.scheduler.requests()}
        ran_before = [r.request_id for r in self.scheduler.running]
        schedule = self.scheduler.schedule()
        self._check(schedule, before, ran_before)
        self.scheduler.advance(schedule)
        self.scheduler.check_integrity()
        self.in_flight.append(schedule)
        for chunk in schedule.chunks:
            self.computed[chunk.request.request_id] = chunk.request.num_computed
        self.land_down_to(self.late if schedule.chunks else 0)
        self.scheduler.check_integrity()
        return schedule

    def land_down_to(self, count: int) -> None:
        while len(self.in_flight) > count:
            for chunk in self.in_flight.popleft().chunks:
                if chunk.samples and not chunk.request.finished:
                    self._take(chunk.request)
                elif chunk.samples:
                    self.surplus += 1

    def _take(self, request: Request) -> None:
        request.token_ids.append(1000 + len(request.output_token_ids))
        request.num_in_flight -= 1
        count = len(request.output_token_ids)
        if count == self.ends.get(request.request_id):
            self.scheduler.finish(request, "stop")
        elif count == request.max_tokens:
            self.scheduler.finish(request, "length")

    def _check(
        self,
        schedule: Schedule,
        before: dict[str, list[int]],
        ran_before: list[str],
    ) -> None:
        running = [r.request_id for r in self.scheduler.running]
        waiting = [r.request_id for r in self.scheduler.waiting]
        slots = [r.slot for r in self.scheduler.running]
        assert len(set(slots)) == len(slots) and None not in slots, slots
        arrivals = [self.order.index(name) for name in running + waiting]
        assert arrivals == sorted(arrivals), "requests overtook each other"
        assert len(running) <= self.seqs
        for each in self.scheduler.requests():
            assert each.token_ids == before[each.request_id], "a token was lost"
        gone = [r.request_id for r in schedule.preempted]
        for name in gone:
            self.computed[name] = 0
        assert set(gone) <= set(waiting)
        # The youngest of those that ran, and no more than that.
        assert sorted(gone) == sorted(ran_before[len(ran_before) - len(gone) :])
        assert len(schedule.prefill) <= self.rows
        assert len(schedule.decode) <= self.seqs
        for chunk in schedule.chunks:
            name = chunk.request.request_id
            assert name in running, f"{name} computes without a place"
            assert chunk.start == self.computed[name], f"{name}: a gap or a repeat"
            assert 1 <= chunk.length <= self.queries
            self.computed[name] += chunk.length
            held = len(self.blocks.frames(name)) * BLOCK
            assert self.computed[name] <= held, f"{name} has no room for its keys"
        for chunk in schedule.decode:
            assert chunk.length == 1 and chunk.samples and chunk.start > 0
        names = [chunk.request.request_id for chunk in schedule.decode]
        assert len(set(names)) == len(names), "two tokens of a request at once"


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8
    ),
    ends=st.lists(st.integers(1, 24), min_size=8, max_size=8),
    spare_blocks=st.integers(0, 12),
    seqs=st.integers(1, 4),
    rows=st.integers(1, 3),
    queries=st.integers(1, 9),
    gaps=st.lists(st.integers(0, 3), min_size=8, max_size=8),
    late=st.integers(0, 3),
)
@settings(max_examples=200)
def test_every_request_ends_with_all_its_tokens(
    lengths, ends, spare_blocks, seqs, rows, queries, gaps, late
):
    longest = max(prompt + more for prompt, more in lengths)
    num_blocks = -(-longest // BLOCK) + spare_blocks
    scheduler, blocks = make(num_blocks, seqs=seqs, rows=rows, queries=queries)
    stops = {str(i): end for i, end in enumerate(ends)}
    served = Served(scheduler, blocks, seqs, rows, queries, late, stops)
    requests = [request(str(i), *sizes) for i, sizes in enumerate(lengths)]
    for each, gap in zip(requests, gaps, strict=False):
        served.add(each)
        for _ in range(gap):
            served.step()
    for _ in range(3000):
        if not scheduler.has_work:
            break
        finished = sum(r.finished for r in requests)
        schedule = served.step()
        progress = sum(r.finished for r in requests) > finished
        assert progress or schedule.chunks or schedule.preempted, "nothing happened"
    served.land_down_to(0)
    for each, (prompt, more), end in zip(requests, lengths, ends, strict=False):
        wanted = [*range(prompt), *range(1000, 1000 + min(more, end))]
        reason = "stop" if end <= more else "length"
        assert (each.token_ids, each.finish_reason) == (wanted, reason)
    assert blocks.num_used == 0
    stopped = sum(r.finish_reason == "stop" for r in requests)
    assert served.surplus <= late * stopped, "computed more than could be unknown"


@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=8
    ),
    spare_blocks=st.integers(0, 12),
)
@settings(max_examples=50)
def test_what_is_known_ahead_is_scheduled_as_if_tokens_came_at_once(
    lengths, spare_blocks
):
    """Without stop tokens, late tokens change no schedule and preempt nobody else."""
    num_blocks = -(-max(map(sum, lengths)) // BLOCK) + spare_blocks
    schedules = []
    for late in (0, 1, 3):
        scheduler, blocks = make(num_blocks)
        served = Served(scheduler, blocks, 4, 2, 8, late)
        for i, sizes in enumerate(lengths):
            served.add(request(str(i), *sizes))
        made = []
        while scheduler.has_work:
            schedule = served.step()
            rows = [(c.request.request_id, c.start, c.length) for c in schedule.chunks]
            made += [(rows, [r.request_id for r in schedule.preempted])]
        schedules.append([step for step in made if step != ([], [])])
    assert schedules[0] == schedules[1] == schedules[2]


def test_the_youngest_gives_way_and_comes_back_first():
    scheduler, blocks = make(6, rows=4)
    served = Served(scheduler, blocks, 4, 4, 8)
    old, young, late = (request(n, 8, 8) for n in ("old", "young", "late"))
    for each in (old, young, late):
        served.add(each)
    served.step()  # three prompts of two blocks each fill the pool
    schedule = served.step()
    assert [r.request_id for r in schedule.preempted] == ["late"]
    assert old.num_preemptions == 0 and late.num_preemptions == 1
    assert late.num_computed == 0 and len(late.token_ids) == 9
    assert scheduler.waiting[-1] is late
    while scheduler.has_work:
        served.step()
    assert old.num_preemptions == 0, "the oldest never gives way"


def test_a_preempted_request_computes_prompt_and_output_again():
    scheduler, blocks = make(5)
    served = Served(scheduler, blocks, 4, 2, 8)
    old, young = request("old", 6, 9), request("young", 6, 4)
    served.add(old)
    served.add(young)
    while not young.num_preemptions:
        served.step()
    kept = list(young.token_ids)
    while young.num_computed == 0:
        served.step()
    assert young.token_ids[: len(kept)] == kept and len(kept) > 6
    while scheduler.has_work:
        served.step()


def test_a_prompt_is_cut_into_rows_of_one_step():
    scheduler, blocks = make(10, rows=3, queries=4)
    served = Served(scheduler, blocks, 4, 3, 4)
    served.add(request("a", 10, 2))
    served.add(request("b", 3, 2))
    first = served.step()
    chunks = [(c.request.request_id, c.start, c.length) for c in first.prefill]
    assert chunks == [("a", 0, 4), ("a", 4, 4), ("a", 8, 2)]
    second = served.step()
    assert [c.request.request_id for c in second.decode] == ["a"]
    assert [(c.request.request_id, c.length) for c in second.prefill] == [("b", 3)]


def test_blocks_wanted_counts_one_token_more_and_those_who_may_start():
    scheduler, _ = make(10, seqs=2)
    for name, tokens in (("a", 8), ("b", 5), ("c", 30)):
        scheduler.add(request(name, tokens, 4))
    # Two places: a needs ceil(9 / 4) = 3 blocks, b ceil(6 / 4) = 2, c has no place.
    assert scheduler.blocks_wanted() == 5
    scheduler.schedule()
    assert scheduler.blocks_wanted() == 1  # a's ninth token; b has room for its sixth


def test_a_prompt_of_one_token_that_waits_for_a_row_is_computed_once():
    """Admitted without a free prefill row, it was a decode and a prefill at once."""
    scheduler, blocks = make(8, rows=1, queries=4)
    served = Served(scheduler, blocks, 4, 1, 4)
    first, single = request("first", 4, 3), request("single", 1, 2)
    served.add(first)
    served.add(single)
    while scheduler.has_work:
        served.step()
    assert single.output_token_ids == [1000, 1001]


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_finishing_frees_the_blocks_in_every_state(steps):
    scheduler, blocks = make(4)
    first, second = request("first", 12, 9), request("second", 12, 9)
    served = Served(scheduler, blocks, 4, 2, 8)
    served.add(first)
    served.add(second)
    for _ in range(steps):
        served.step()
    for each in (second, first):
        scheduler.finish(each, "abort")
        scheduler.check_integrity()
    assert blocks.num_used == 0 and not scheduler.has_work
