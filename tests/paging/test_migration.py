"""The migrator, with a NumPy array as the pool and transfers that obey the test."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from jaxtyping import Array
from paging_cases import random_host, random_sensitivity, table_with_bits

from pagedweight_jax.paging import planner, statistics
from pagedweight_jax.paging.allocator import FrameAllocator
from pagedweight_jax.paging.host_store import HostStore
from pagedweight_jax.paging.migration import Arrival, Migrator
from pagedweight_jax.paging.planner import Plan, PlannerLimits
from pagedweight_jax.paging.staging import PageableStaging
from pagedweight_jax.paging.table import (
    PlaneId,
    Residency,
    empty_table,
    plane_frames,
    residency,
)
from pagedweight_jax.sensitivity import Sensitivity

LAYERS, EXPERTS, PARENT_BITS = 2, 2, 4
FRAMES_PER_PLANE, FRAME_WORDS = 2, 4
FRAME_BYTES = 4 * FRAME_WORDS
STAGING_FRAMES = 10
LIMITS = PlannerLimits(floors=(2, 2, 3))


@dataclass
class FakeTransfer:
    """A transfer that is ready, or fails, when it is told to."""

    words: np.ndarray
    ready: bool = False
    error: Exception | None = None

    def is_ready(self) -> bool:
        return self.ready

    def result(self) -> Array:
        if self.error:
            raise self.error
        return jnp.asarray(self.words)


@dataclass
class World:
    """A migrator with its pool, and the engine's part of the protocol."""

    migrator: Migrator
    allocator: FrameAllocator
    transfers: list[FakeTransfer]
    pool: np.ndarray
    sensitivity: Sensitivity
    host: HostStore
    put_error: list[Exception] = field(default_factory=list)
    seconds: list[float] = field(default_factory=lambda: [0.0])

    def inputs(self) -> tuple:
        live = statistics.initial(self.sensitivity)
        return self.migrator.table, self.sensitivity, live, LIMITS

    def plan(self, make: Callable[..., Plan], **options) -> Plan:
        held = self.migrator.held
        return make(*self.inputs(), held=held, frame_bytes=FRAME_BYTES, **options)

    def exactly(self, bits: int | np.ndarray) -> Plan:
        pages = np.broadcast_to(np.int32(bits), (LAYERS, EXPERTS, 2)).copy()
        return self.plan(planner.plan_exactly, bits=pages)

    def write_and_commit(self, arrival: Arrival) -> None:
        keep = arrival.frames < len(self.pool)
        self.pool[arrival.frames[keep]] = np.asarray(arrival.words)[keep]
        self.migrator.commit(arrival)

    def run(self) -> None:
        """Lets all transfers arrive."""
        while not self.migrator.settled:
            self.migrator.start()
            for transfer in self.transfers:
                transfer.ready = True
            while arrival := self.migrator.poll():
                self.write_and_commit(arrival)


def make_world(
    seed: int = 0, num_frames: int | None = None, staging_frames: int = STAGING_FRAMES
) -> World:
    rng = np.random.default_rng(seed)
    words = FRAMES_PER_PLANE * FRAME_WORDS
    host = random_host(rng, LAYERS, EXPERTS, PARENT_BITS, words)
    all_planes = LAYERS * EXPERTS * 3 * PARENT_BITS * FRAMES_PER_PLANE
    allocator = FrameAllocator(num_frames or all_planes + 9)
    transfers: list[FakeTransfer] = []
    put_error: list[Exception] = []
    seconds = [0.0]

    def put(words: np.ndarray) -> FakeTransfer:
        if put_error:
            raise put_error.pop()
        transfers.append(FakeTransfer(words))
        return transfers[-1]

    migrator = Migrator(
        host,
        allocator,
        empty_table(LAYERS, EXPERTS, PARENT_BITS, FRAMES_PER_PLANE),
        staging_frames=staging_frames,
        staging=PageableStaging(put),
        clock=lambda: seconds[0],
    )
    sensitivity = random_sensitivity(
        rng, LAYERS, EXPERTS, seed_bits=2, parent_bits=PARENT_BITS
    )
    pool = np.zeros((allocator.num_frames, FRAME_WORDS), np.uint32)
    return World(
        migrator, allocator, transfers, pool, sensitivity, host, put_error, seconds
    )


def check_pool(world: World) -> None:
    """Checks that each committed plane in the pool is the host's, word for word."""
    table = world.migrator.table
    for page in np.ndindex(table.bits.shape):
        for plane in range(table.bits[page]):
            id_ = PlaneId(*page, plane)
            expected = np.empty(
                (plane_frames(table, id_.block), FRAME_WORDS), np.uint32
            )
            world.host.read(id_, expected)
            layer, expert, block = page
            linears = slice(0, 2) if block == 0 else slice(2, 3)
            frames = table.frames[layer, expert, linears, plane].ravel()
            np.testing.assert_array_equal(
                world.pool[frames], expected, err_msg=str(id_)
            )


@pytest.fixture
def world() -> World:
    return make_world()


def test_planes_arrive_with_the_words_of_the_host(world: World):
    record = world.migrator.adopt(world.exactly(PARENT_BITS), step=3)
    assert (record.outcome, record.seconds_to_commit) == ("loading", None)
    world.seconds[0] = 2.5
    world.run()
    assert (world.migrator.table.bits == PARENT_BITS).all()
    check_pool(world)
    record = world.migrator.records[-1]
    assert (record.outcome, record.seconds_to_commit) == ("committed", 2.5)
    assert (record.step, record.pages_up, record.mean_bits) == (3, 8, PARENT_BITS)


def test_lowering_frees_its_frames_at_once(world: World):
    world.migrator.adopt(world.exactly(PARENT_BITS), step=0)
    world.run()
    before = world.allocator.num_free
    plan = world.plan(planner.plan_lower, demand_bytes=5 * FRAME_BYTES)
    record = world.migrator.adopt(plan, step=1)
    assert plan.feasible
    assert (world.allocator.num_free - before) * FRAME_BYTES == plan.freed_bytes
    assert (record.outcome, record.seconds_to_commit) == ("committed", 0.0)
    np.testing.assert_array_equal(world.migrator.table.bits, plan.bits)


def test_at_most_two_staging_arrays_travel(world: World):
    world.migrator.adopt(world.exactly(PARENT_BITS), step=0)
    for _ in range(3):
        world.migrator.start()
    assert len(world.transfers) == 2
    # A gate_up plane of four frames and a down plane of two, and so on: the ten rows
    # of the first array take three planes, the second ends before a gate_up plane.
    assert world.migrator.bytes_in_transfer == (10 + 8) * FRAME_BYTES
    assert len(world.migrator.in_flight) == 3 + 3


def test_nothing_waits_for_a_transfer(world: World):
    world.migrator.adopt(world.exactly(1), step=0)
    world.migrator.start()
    assert world.migrator.poll() is None
    arrival = world.migrator.poll(block=True)
    assert arrival is not None and arrival.planes


def test_most_significant_planes_come_first(world: World):
    world.migrator.adopt(world.exactly(2), step=0)
    seen = []
    while not world.migrator.settled:
        world.migrator.start()
        arrival = world.migrator.poll(block=True)
        seen += [plane.plane for plane in arrival.planes]
        world.write_and_commit(arrival)
    assert seen == sorted(seen) and len(seen) == 16


def test_what_finds_no_frame_stays_queued():
    world = make_world(num_frames=1 + 11)
    world.migrator.adopt(world.exactly(1), step=0)
    for _ in range(5):
        world.migrator.start()
        world.migrator.check_integrity()
    # Eleven frames hold two gate_up planes and the down plane between them.
    assert len(world.migrator.in_flight) == 3
    assert world.migrator.num_queued_frames == 24 - 10
    world.transfers[0].ready = True
    world.write_and_commit(world.migrator.poll())
    assert not world.migrator.settled


def test_a_cancelled_row_is_written_nowhere(world: World):
    world.migrator.adopt(world.exactly(1), step=0)
    world.migrator.start()
    used = world.allocator.num_used("plane")
    in_flight = world.migrator.in_flight
    first = min(in_flight)
    bits = np.ones((LAYERS, EXPERTS, 2), np.int32)
    bits[first[:3]] = 0
    plan = world.exactly(bits)
    world.migrator.adopt(plan, step=1)
    freed = plane_frames(world.migrator.table, first.block)
    assert world.allocator.num_used("plane") == used - freed
    assert plan.freed_bytes == freed * FRAME_BYTES
    arrival = world.migrator.poll(block=True)
    assert first not in arrival.planes
    dropped = arrival.frames == world.allocator.num_frames
    rows = STAGING_FRAMES - sum(
        plane_frames(world.migrator.table, p.block) for p in arrival.planes
    )
    assert dropped.sum() == rows
    world.write_and_commit(arrival)
    check_pool(world)


def test_a_staging_array_with_nothing_left_is_forgotten(world: World):
    world.migrator.adopt(world.exactly(1), step=0)
    world.migrator.start()
    world.migrator.adopt(world.exactly(0), step=1)
    assert world.migrator.bytes_in_transfer == 0
    assert world.allocator.num_used("plane") == 0
    for transfer in world.transfers:
        transfer.ready = True
    assert world.migrator.poll() is None
    assert world.migrator.settled


def test_a_newer_plan_supersedes_the_loads_of_an_older(world: World):
    world.migrator.adopt(world.exactly(2), step=0)
    world.migrator.start()
    world.migrator.adopt(world.exactly(1), step=1)
    world.run()
    older, newer = world.migrator.records
    assert (older.outcome, older.seconds_to_commit) == ("superseded", None)
    assert (newer.outcome, newer.plan_id) == ("committed", 2)


@pytest.mark.parametrize("where", ["put", "result"])
@pytest.mark.parametrize("error", [RuntimeError("device"), OSError("host")])
def test_a_failed_transfer_is_tried_again(world: World, where: str, error: Exception):
    world.migrator.adopt(world.exactly(2), step=0)
    if where == "put":
        world.put_error.append(error)
        world.migrator.start()
    else:
        world.migrator.start()
        world.transfers[0].error, world.transfers[0].ready = error, True
        world.migrator.poll()
    assert world.migrator.num_failed == 1
    world.migrator.check_integrity()
    world.run()
    assert (world.migrator.table.bits == 2).all()
    check_pool(world)
    assert world.migrator.records[-1].outcome == "committed"


def test_a_bug_in_put_is_not_swallowed(world: World):
    world.migrator.adopt(world.exactly(1), step=0)
    world.put_error.append(TypeError("not a transfer error"))
    with pytest.raises(TypeError):
        world.migrator.start()


def test_a_transfer_that_fails_too_often_is_given_up_and_old_bits_stay(world: World):
    world.migrator.adopt(world.exactly(1), step=0)
    world.run()
    world.migrator.adopt(world.exactly(3), step=1)
    for _ in range(3):
        world.put_error.append(RuntimeError("device"))
        world.migrator.start()
        world.migrator.check_integrity()
    assert world.migrator.num_failed == 3
    given_up = world.migrator.table.desired == 1
    assert given_up.any() and not given_up.all()
    world.run()
    np.testing.assert_array_equal(world.migrator.table.bits, np.where(given_up, 1, 3))
    check_pool(world)
    record = world.migrator.records[-1]
    assert record.outcome == "failed" and record.mean_bits < 3


@pytest.mark.parametrize("between", ["arrives", "is cancelled"])
def test_failures_of_a_plane_are_forgotten_once_it(world: World, between: str):
    bits = np.zeros((LAYERS, EXPERTS, 2), np.int32)
    bits[0, 0, 1] = 1
    for _ in range(2):
        world.migrator.adopt(world.exactly(bits), step=0)
        for _ in range(2):
            world.put_error.append(RuntimeError("device"))
            world.migrator.start()
        assert (world.migrator.table.desired == bits).all(), "given up too early"
        if between == "arrives":
            world.run()
        world.migrator.adopt(world.exactly(0), step=1)


def test_a_failure_takes_the_planes_that_follow_with_it():
    # One page after the other: plane 1 of a page travels behind its plane 0.
    world = make_world(staging_frames=4)
    bits = np.zeros((LAYERS, EXPERTS, 2), np.int32)
    bits[0, 0, 0] = 2
    world.migrator.adopt(world.exactly(bits), step=0)
    world.migrator.start()
    first, second = world.transfers
    first.ready, first.error, second.ready = True, RuntimeError("device"), True
    assert world.migrator.poll() is None
    assert world.allocator.num_used("plane") == 0
    world.migrator.check_integrity()
    world.run()
    np.testing.assert_array_equal(world.migrator.table.bits, bits)
    check_pool(world)


def test_planes_that_fail_before_a_plan_is_adopted_still_come_first(world: World):
    bits = np.zeros((LAYERS, EXPERTS, 2), np.int32)
    bits[0, 0, 1] = 2
    world.migrator.adopt(world.exactly(bits), step=0)
    world.migrator.start()
    bits[0, 0, 1] = 4
    plan = world.exactly(bits)
    assert plan.loads[:, 3].tolist() == [2, 3], "planes 0 and 1 are on their way"
    world.transfers[0].ready, world.transfers[0].error = True, RuntimeError("device")
    world.migrator.poll()
    world.migrator.adopt(plan, step=1)
    world.run()
    np.testing.assert_array_equal(world.migrator.table.bits, bits)
    check_pool(world)


def test_an_arrival_must_be_committed_before_anything_else(world: World):
    world.migrator.adopt(world.exactly(1), step=0)
    world.migrator.start()
    arrival = world.migrator.poll(block=True)
    with pytest.raises(RuntimeError, match="waits for its commit"):
        world.migrator.adopt(world.exactly(0), step=1)
    with pytest.raises(RuntimeError, match="waits for its commit"):
        world.migrator.poll()
    with pytest.raises(ValueError, match="that poll returned last"):
        world.migrator.commit(replace(arrival))
    world.write_and_commit(arrival)
    with pytest.raises(ValueError, match="that poll returned last"):
        world.migrator.commit(arrival)


def test_a_plan_of_another_model_is_refused(world: World):
    plan = world.exactly(1)
    with pytest.raises(ValueError, match=r"for pages \(2, 1, 2\)"):
        world.migrator.adopt(replace(plan, bits=plan.bits[:, :1]), step=0)
    with pytest.raises(ValueError, match="wants 9 to 9 bits but 4 planes"):
        world.migrator.adopt(replace(plan, bits=np.full_like(plan.bits, 9)), step=0)


def test_sizes_that_do_not_fit_are_refused(world: World):
    table = empty_table(LAYERS, EXPERTS, PARENT_BITS, FRAMES_PER_PLANE)
    rest = {"host": world.host, "allocator": world.allocator}
    with pytest.raises(ValueError, match="choose at least 4"):
        Migrator(**rest, table=table, staging_frames=3)
    with pytest.raises(ValueError, match="cannot be cut into 3"):
        Migrator(**rest, table=empty_table(2, 2, 4, 3), staging_frames=9)
    with pytest.raises(ValueError, match=r"\(2, 2, 4\) but the table \(2, 2, 5\)"):
        Migrator(**rest, table=empty_table(2, 2, 5, 2), staging_frames=9)


def test_residency_shows_planes_in_flight(world: World):
    world.migrator.adopt(world.exactly(1), step=0)
    world.migrator.start()
    where = residency(world.migrator.table, world.migrator.in_flight)
    assert (where == Residency.TRANSFER).sum() == len(world.migrator.in_flight) == 6


def test_a_table_with_planes_can_be_the_start():
    table, allocator = table_with_bits(np.full((LAYERS, EXPERTS, 2), 2), PARENT_BITS, 2)
    host = random_host(np.random.default_rng(0), LAYERS, EXPERTS, PARENT_BITS, 8)
    migrator = Migrator(host, allocator, table, staging_frames=STAGING_FRAMES)
    migrator.check_integrity()
    assert migrator.settled


class Migration(RuleBasedStateMachine):
    """Plans, KV blocks and transfers that are late, cancelled or fail, at random."""

    @initialize(
        seed=st.integers(0, 99),
        num_frames=st.integers(30, 110),
        staging_frames=st.integers(4, 14),
    )
    def start_world(self, seed: int, num_frames: int, staging_frames: int) -> None:
        self.world = make_world(seed, num_frames, staging_frames)
        self.kv: list[tuple[np.ndarray, np.ndarray]] = []
        self.stale: Plan | None = None
        self.step = 0

    # The engine's calls.

    def adopt(self, plan: Plan, fresh: bool = True) -> None:
        world, before = self.world, self.world.allocator.num_free
        self.step += 1
        world.migrator.adopt(plan, self.step)
        freed = (world.allocator.num_free - before) * FRAME_BYTES
        if fresh and not plan.pages_up:
            assert freed == plan.freed_bytes
        np.testing.assert_array_equal(world.migrator.table.desired, plan.bits)

    @rule(planes=st.integers(0, 30))
    def lower(self, planes: int) -> None:
        demand = planes * FRAMES_PER_PLANE * FRAME_BYTES
        plan = self.world.plan(planner.plan_lower, demand_bytes=demand)
        queued = self.world.migrator.num_queued_frames
        self.adopt(plan)
        cancelled = queued - self.world.migrator.num_queued_frames
        assert plan.cancelled_bytes == cancelled * FRAME_BYTES
        assert plan.feasible == (plan.freed_bytes + plan.cancelled_bytes >= demand)

    @rule(planes=st.integers(0, 30))
    def raise_(self, planes: int) -> None:
        slack = planes * FRAMES_PER_PLANE * FRAME_BYTES
        self.adopt(self.world.plan(planner.plan_raise, slack_bytes=slack))

    @rule(seed=st.integers(0, 9999))
    def pin(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        bits = rng.integers(0, PARENT_BITS + 1, (LAYERS, EXPERTS, 2), dtype=np.int32)
        self.adopt(self.world.exactly(bits))

    @rule(planes=st.integers(1, 30))
    def think(self, planes: int) -> None:
        slack = planes * FRAMES_PER_PLANE * FRAME_BYTES
        self.stale = self.world.plan(planner.plan_raise, slack_bytes=slack)

    @precondition(lambda self: self.stale is not None)
    @rule()
    def adopt_a_stale_plan(self) -> None:
        self.adopt(self.stale, fresh=False)
        self.stale = None

    @rule()
    def start(self) -> None:
        self.world.migrator.start()

    @rule()
    def poll(self) -> None:
        arrival = self.world.migrator.poll()
        if arrival is not None:
            self.world.write_and_commit(arrival)

    # What the device and the requests do.

    @rule(index=st.integers(0, 5))
    def arrive(self, index: int) -> None:
        waiting = [t for t in self.world.transfers if not t.ready]
        if index < len(waiting):
            waiting[index].ready = True

    @rule(index=st.integers(0, 5), error=st.sampled_from([RuntimeError, OSError]))
    def fail(self, index: int, error: type[Exception]) -> None:
        waiting = [t for t in self.world.transfers if not t.ready]
        if index < len(waiting):
            waiting[index].ready, waiting[index].error = True, error("lost")

    @rule()
    def fail_the_next_put(self) -> None:
        self.world.put_error[:] = [RuntimeError("no memory")]

    @rule(count=st.integers(1, 8))
    def take_kv_block(self, count: int) -> None:
        if count > self.world.allocator.num_free:
            return
        frames = self.world.allocator.allocate(count, "kv")
        words = np.full((count, FRAME_WORDS), 0xC0FFEE, np.uint32)
        self.world.pool[frames] = words
        self.kv.append((frames, words))

    @precondition(lambda self: self.kv)
    @rule()
    def free_kv_block(self) -> None:
        frames, _ = self.kv.pop(0)
        self.world.allocator.free(frames)

    # What always holds.

    @invariant()
    def committed_planes_are_those_of_the_host(self) -> None:
        if hasattr(self, "world"):
            check_pool(self.world)

    @invariant()
    def the_ledgers_agree(self) -> None:
        if hasattr(self, "world"):
            self.world.migrator.check_integrity()

    @invariant()
    def nobody_writes_to_kv_blocks_or_the_null_frame(self) -> None:
        if hasattr(self, "world"):
            assert not self.world.pool[0].any()
            for frames, words in self.kv:
                np.testing.assert_array_equal(self.world.pool[frames], words)

    @invariant()
    def only_the_newest_record_is_open(self) -> None:
        if hasattr(self, "world"):
            records = self.world.migrator.records
            assert all(record.outcome != "loading" for record in records[:-1])
            if records and not self.world.migrator.in_flight:
                queued = self.world.migrator.num_queued_frames
                assert (records[-1].seconds_to_commit is None) == bool(queued)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for frames, _ in self.kv:
            self.world.allocator.free(frames)
        self.adopt(self.world.exactly(1))
        self.world.run()
        check_pool(self.world)
        self.adopt(self.world.exactly(0))
        assert self.world.allocator.num_used("plane") == 0


TestMigration = Migration.TestCase
TestMigration.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
