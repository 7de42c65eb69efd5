"""The planner against an exact solver, and the laws of its plans."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from paging_cases import random_sensitivity, table_with_bits
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from pagedweight_jax.paging import planner, statistics, table
from pagedweight_jax.paging.planner import Plan, PlannerLimits, Watermarks
from pagedweight_jax.paging.statistics import RoutingStatistics
from pagedweight_jax.paging.table import PageTable
from pagedweight_jax.sensitivity import Sensitivity

FRAME_BYTES = 64
PRICE = np.array([2, 1])
LIMITS = PlannerLimits()


@dataclass(frozen=True)
class Case:
    """What a planner sees."""

    table: PageTable
    sensitivity: Sensitivity
    statistics: RoutingStatistics
    limits: PlannerLimits = LIMITS

    @property
    def plane_bytes(self) -> int:
        return self.table.frames_per_plane * FRAME_BYTES

    @property
    def floor(self) -> np.ndarray:
        return planner.floors(self.sensitivity, self.statistics, self.limits)

    @property
    def damage(self) -> np.ndarray:
        return planner.damage_table(self.sensitivity, self.statistics, self.limits)

    @property
    def reducible(self) -> int:
        """Planes of down pages' size that floors allow to drop."""
        return int((np.maximum(self.table.bits - self.floor, 0) * PRICE).sum())

    def lower(self, planes: int, **options) -> Plan:
        return planner.plan_lower(
            *vars(self).values(),
            demand_bytes=planes * self.plane_bytes,
            frame_bytes=FRAME_BYTES,
            **options,
        )

    def raise_(self, planes: int, **options) -> Plan:
        return planner.plan_raise(
            *vars(self).values(),
            slack_bytes=planes * self.plane_bytes,
            frame_bytes=FRAME_BYTES,
            **options,
        )

    def adopted(self, plan: Plan) -> "Case":
        """The case once the plan is carried out."""
        tabled, _ = table_with_bits(
            plan.bits, self.table.parent_bits, self.table.frames_per_plane
        )
        return replace(self, table=tabled)


def make_case(
    seed: int, *, convex: bool = True, parent_bits: int = 6, **sizes: int
) -> Case:
    """A case with random losses, shares and bits (at or above the seed)."""
    rng = np.random.default_rng(seed)
    sensitivity = random_sensitivity(
        rng, convex=convex, parent_bits=parent_bits, **sizes
    )
    share = rng.dirichlet(
        np.ones(sensitivity.expert_share.shape[1]), len(sensitivity.expert_share)
    )
    live = replace(statistics.initial(sensitivity), share=share.astype(np.float32))
    bits = rng.integers(3, parent_bits + 1, (*share.shape, 2))
    tabled, _ = table_with_bits(bits, parent_bits, int(rng.integers(1, 3)))
    return Case(tabled, sensitivity, live)


# Cases are made in the tests: beartype draws random numbers, which hypothesis does
# not allow while it draws its own.
recipes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "convex": st.booleans(),
        "parent_bits": st.integers(3, 8),
    }
)


def at_parent_bits(case: Case) -> Case:
    full, _ = table_with_bits(
        np.full(case.floor.shape, case.table.parent_bits), case.table.parent_bits
    )
    return replace(case, table=full)


# Against exact solvers.


def cheapest_damage(case: Case, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The least damage at each total weight of planes, by dynamic programming.

    Entry ``w`` is the optimum with pages between ``low`` and ``high`` bits that weigh
    exactly ``w`` planes beyond ``low``.
    """
    best = np.zeros(1)
    for page in np.ndindex(low.shape):
        span = int(high[page] - low[page])
        width = span * PRICE[page[2]]
        longer = np.full(len(best) + width, np.inf)
        for b in range(span + 1):
            start = b * PRICE[page[2]]
            part = best + float(case.damage[page][low[page] + b])
            view = longer[start : start + len(best)]
            np.minimum(view, part, out=view)
        best = longer
    return best


def total_damage(case: Case, bits: np.ndarray) -> float:
    return float(np.take_along_axis(case.damage, bits[..., None], -1).sum(dtype=float))


def largest_move(case: Case, low: np.ndarray, high: np.ndarray, convex: bool) -> float:
    """The bound on the gap: one step of a convex ladder, else one whole ladder."""
    moves = [0.0]
    for page in np.ndindex(low.shape):
        ladder = case.damage[page][low[page] : high[page] + 1]
        moves.append(float(ladder[0] - ladder[-1]))
        if convex and len(ladder) > 1:
            moves[-1] = float((ladder[:-1] - ladder[1:]).max())
    return max(moves)


@given(st.integers(0, 10**6), st.booleans(), st.floats(0, 1))
def test_lowering_is_within_one_move_of_the_optimum(
    seed: int, convex: bool, fraction: float
):
    case = make_case(seed, convex=convex)
    need = round(fraction * case.reducible)
    plan = case.lower(need)
    low = np.minimum(case.floor, case.table.bits)
    best = cheapest_damage(case, low, case.table.bits)
    optimum = best[: len(best) - need].min()
    found = total_damage(case, plan.bits)
    assert found >= optimum - 1e-4
    assert found - optimum <= largest_move(case, low, case.table.bits, convex) + 1e-4


@given(st.integers(0, 10**6), st.booleans(), st.floats(0, 1))
def test_raising_is_within_one_move_of_the_optimum(
    seed: int, convex: bool, fraction: float
):
    # Floors at the seed: a floor above it would come before the optimum.
    case = make_case(seed, convex=convex)
    case = replace(case, limits=PlannerLimits(floors=(3, 3, 3)))
    high = np.full_like(case.floor, case.table.parent_bits)
    slack = round(fraction * int(((high - case.table.bits) * PRICE).sum()))
    plan = case.raise_(slack)
    optimum = cheapest_damage(case, case.table.bits, high)[: slack + 1].min()
    found = total_damage(case, plan.bits)
    assert found >= optimum - 1e-4
    assert found - optimum <= largest_move(case, case.table.bits, high, convex) + 1e-4


def relaxed_and_exact(case: Case, need: int) -> tuple[float, float]:
    """Optima of lowering as a mixed-integer program, and of its relaxation."""
    pages = list(np.ndindex(case.floor.shape))
    choices = [
        (i, page, b)
        for i, page in enumerate(pages)
        for b in range(
            min(case.floor[page], case.table.bits[page]), case.table.bits[page] + 1
        )
    ]
    cost = np.array([case.damage[page][b] for _, page, b in choices], float)
    freed = np.array(
        [PRICE[page[2]] * (case.table.bits[page] - b) for _, page, b in choices], float
    )
    one_each = np.zeros((len(pages), len(choices)))
    one_each[[i for i, _, _ in choices], range(len(choices))] = 1
    relaxed = linprog(
        cost, A_ub=-freed[None], b_ub=[-need], A_eq=one_each, b_eq=np.ones(len(pages))
    )
    exact = milp(
        cost,
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(freed[None], need, np.inf),
        ],
        integrality=np.ones(len(choices)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    return relaxed.fun, exact.fun


@pytest.mark.parametrize(("convex", "gap"), [(True, 1e-2), (False, 2e-2)])
@pytest.mark.parametrize("fraction", [0.1, 0.35, 0.8])
def test_lowering_many_pages_is_near_the_optimum(
    convex: bool, gap: float, fraction: float
):
    case = at_parent_bits(make_case(3, convex=convex, num_layers=4, num_experts=16))
    need = round(fraction * case.reducible)
    plan = case.lower(need)
    relaxed, exact = relaxed_and_exact(case, need)
    assert relaxed - 1e-4 <= exact <= plan.predicted_damage + 1e-4
    assert plan.predicted_damage <= (1 + gap) * exact


@pytest.mark.parametrize(
    ("second", "bits"),
    [
        # gate_up and down of two experts, worth 2.0 and `second`, 9.0 and 0.1.
        (1.5, [[3, 2], [3, 2]]),  # the other down plane goes in place of gate_up
        (1.95, [[2, 3], [3, 3]]),  # the down plane of 0.1 stays after all
    ],
)
def test_half_a_gate_up_plane_too_many_is_mended(second: float, bits: list):
    loss = np.full((1, 2, 2, 4), np.inf, np.float32)
    loss[..., 2] = [[[2.0, second], [9.0, 0.1]]]
    loss[..., 3] = 0
    even = np.full((1, 2), 0.5, np.float32)
    full, _ = table_with_bits(np.full((1, 2, 2), 3), 3)
    sensitivity = Sensitivity(
        loss=loss,
        residual_weights=np.zeros((1, 2, 3), np.float32),
        residual_bias=np.ones((1, 2), np.float32),
        expert_share=even,
    )
    limits = PlannerLimits(floors=(2, 2, 2), multipliers=(1.0, 1.0, 1.0))
    case = Case(full, sensitivity, statistics.initial(sensitivity), limits)
    plan = case.lower(2)
    assert plan.bits[0].tolist() == bits
    assert plan.freed_bytes == 2 * case.plane_bytes


# Laws of lowering.


@given(recipes, st.integers(0, 60))
def test_lowering_never_breaks_a_floor(recipe: dict, need: int):
    case = make_case(**recipe)
    plan = case.lower(need)
    assert (plan.bits >= np.minimum(case.floor, case.table.desired)).all()
    assert (plan.bits <= case.table.desired).all()


@given(recipes, st.integers(0, 80))
def test_lowering_is_feasible_exactly_if_the_floors_allow(recipe: dict, need: int):
    case = make_case(**recipe)
    plan = case.lower(need)
    assert plan.feasible == (need <= case.reducible)
    if plan.feasible:
        assert plan.freed_bytes >= need * case.plane_bytes
        assert plan.freed_bytes <= (need + 1) * case.plane_bytes
    else:
        assert plan.freed_bytes == case.reducible * case.plane_bytes


@given(recipes, st.integers(0, 60))
def test_freed_bytes_are_those_of_the_frames(recipe: dict, need: int):
    case = make_case(**recipe)
    plan = case.lower(need)
    _, freed = table.lower(case.table, plan.bits)
    assert plan.freed_bytes == len(freed) * FRAME_BYTES


@settings(max_examples=30)
@given(recipes)
def test_more_demand_never_frees_less(recipe: dict):
    case = make_case(**recipe)
    freed = [case.lower(need).freed_bytes for need in range(case.reducible + 2)]
    assert freed == sorted(freed)


@given(recipes)
def test_a_demand_below_one_plane_frees_one(recipe: dict):
    case = make_case(**recipe)
    assume(case.reducible)
    plan = planner.plan_lower(
        *vars(case).values(), demand_bytes=1, frame_bytes=FRAME_BYTES
    )
    assert plan.feasible and plan.freed_bytes >= 1


@given(recipes)
def test_no_demand_changes_nothing(recipe: dict):
    case = make_case(**recipe)
    for plan in (case.lower(0), case.raise_(0)):
        np.testing.assert_array_equal(plan.bits, case.table.desired)
        assert not plan.changes and plan.freed_bytes == plan.predicted_damage == 0


@given(recipes, st.integers(1, 60))
def test_predicted_damage_is_that_of_the_table(recipe: dict, need: int):
    case = make_case(**recipe)
    for plan in (case.lower(need), case.raise_(need)):
        change = total_damage(case, plan.bits) - total_damage(case, case.table.desired)
        assert plan.predicted_damage == pytest.approx(change, abs=1e-3)


@given(recipes, st.integers(0, 60))
def test_pages_up_and_down_are_counted(recipe: dict, need: int):
    case = make_case(**recipe)
    for plan in (case.lower(need), case.raise_(need)):
        assert plan.pages_down == (plan.bits < case.table.desired).sum()
        assert plan.pages_up == (plan.bits > case.table.desired).sum()


@given(recipes, st.integers(1, 60), st.integers(0, 99))
def test_frozen_pages_stay(recipe: dict, amount: int, seed: int):
    case = make_case(**recipe)
    frozen = np.random.default_rng(seed).random(case.floor.shape) < 0.5
    for plan in (case.lower(amount, frozen=frozen), case.raise_(amount, frozen=frozen)):
        np.testing.assert_array_equal(plan.bits[frozen], case.table.desired[frozen])


def test_equal_pages_go_down_evenly_and_always_alike():
    case = make_case(0)
    even = np.full((2, 4), 0.25, np.float32)
    flat = np.broadcast_to(np.float32([3, 2, 1, 0]), (2, 4, 2, 4))
    loss = np.concatenate([np.full((2, 4, 2, 3), np.inf, np.float32), flat], axis=-1)
    case = replace(
        at_parent_bits(case),
        sensitivity=replace(case.sensitivity, loss=loss, expert_share=even),
        statistics=replace(case.statistics, share=even),
        limits=PlannerLimits(floors=(3, 3, 3), multipliers=(1.0, 1.0, 1.0)),
    )
    for need in range(case.reducible):
        plan = case.lower(need)
        np.testing.assert_array_equal(plan.bits, case.lower(need).bits)
        for block in range(2):
            assert np.ptp(plan.bits[..., block]) <= 1


# Laws of raising.


@given(recipes, st.integers(0, 80))
def test_raising_stays_within_the_slack_and_wastes_none(recipe: dict, slack: int):
    case = make_case(**recipe)
    plan = case.raise_(slack)
    left = slack * case.plane_bytes + plan.freed_bytes
    assert left >= 0
    missing = case.table.parent_bits - plan.bits
    if missing.any():
        smallest = PRICE[missing.any(axis=(0, 1))].min()
        assert left < smallest * case.plane_bytes


@given(recipes, st.integers(0, 80))
def test_raising_lifts_pages_to_their_floors_first(recipe: dict, slack: int):
    case = make_case(**recipe)
    plan = case.raise_(slack)
    assert plan.feasible == (plan.bits >= case.floor).all()
    below = plan.bits < case.floor
    if below[..., 1].any():
        # A down page that waits leaves no plane for a page above its floor.
        assert (plan.bits <= np.maximum(case.floor, case.table.desired)).all()


@given(recipes, st.integers(0, 60))
def test_lowering_then_raising_returns(recipe: dict, need: int):
    case = make_case(**recipe)
    case = at_parent_bits(case)
    lowered = case.lower(need)
    back = case.adopted(lowered).raise_(lowered.freed_bytes // case.plane_bytes)
    np.testing.assert_array_equal(back.bits, case.table.desired)
    assert back.predicted_damage == pytest.approx(-lowered.predicted_damage, abs=1e-4)


@given(st.integers(0, 10**6), st.integers(0, 60))
def test_raising_then_lowering_returns(seed: int, slack: int):
    case = make_case(seed)
    case = case.adopted(replace(case.lower(0), bits=case.floor))
    raised = case.raise_(slack)
    back = case.adopted(raised).lower(-raised.freed_bytes // case.plane_bytes)
    np.testing.assert_array_equal(back.bits, case.table.desired)


def test_a_start_from_nothing_loads_seeds_of_all_pages_first():
    case = make_case(1)
    case = replace(case, table=table.empty_table(2, 4, 6, 1))
    seeds = 3 * 8 * 3
    plan = case.raise_(seeds)
    assert (plan.bits == 3).all()
    assert np.isfinite(plan.predicted_damage)
    planes = plan.loads[:, 3]
    assert (np.diff(planes) >= 0).all(), "most significant planes come first"
    assert not case.raise_(seeds - 1).feasible


def test_max_bits_and_min_bits_bound_the_plans():
    case = at_parent_bits(make_case(2))
    case = replace(case, limits=PlannerLimits(min_bits=4, max_bits=5))
    assert case.lower(10**4).bits.min() == 4
    low = case.adopted(case.lower(10**4))
    assert low.raise_(10**4).bits.max() == 5


# Loads.


@given(recipes, st.integers(0, 60), st.integers(0, 99))
def test_loads_are_the_wanted_planes_without_frames_in_order(
    recipe: dict, slack: int, seed: int
):
    case = make_case(**recipe)
    rng = np.random.default_rng(seed)
    desired = rng.integers(case.table.bits, case.table.parent_bits, endpoint=True)
    held = rng.integers(case.table.bits, desired, endpoint=True).astype(np.int32)
    case = replace(case, table=table.with_desired(case.table, desired.astype(np.int32)))
    for plan in (case.raise_(slack, held=held), case.lower(slack, held=held)):
        next_plane = held.copy()
        for *page, plane in plan.loads.tolist():
            assert plane == next_plane[tuple(page)]
            next_plane[tuple(page)] += 1
        np.testing.assert_array_equal(next_plane, np.maximum(held, plan.bits))


def test_loads_in_flight_are_given_up_before_committed_planes_and_count_as_freed():
    case = make_case(4)
    floor = case.floor
    tabled, _ = table_with_bits(floor, 6, 1)
    wanted = np.minimum(floor + 2, 6)
    case = replace(case, table=table.with_desired(tabled, wanted))
    held = np.minimum(floor + 1, 6)
    queued = int(((wanted - held) * PRICE).sum())
    for need in (1, queued):
        plan = case.lower(need, held=held)
        # Loads without frames are all given up, and that is enough.
        np.testing.assert_array_equal(plan.bits, held)
        assert plan.feasible and plan.freed_bytes == 0
        assert plan.cancelled_bytes == queued * FRAME_BYTES
    plan = case.lower(queued + 1, held=held)
    freed = ((held - plan.bits) * PRICE).sum()
    assert freed >= 1 and plan.freed_bytes == freed * FRAME_BYTES
    most = case.lower(10**4, held=held)
    assert not most.feasible
    assert most.freed_bytes == ((held - floor) * PRICE).sum() * FRAME_BYTES


def test_loads_towards_a_floor_survive_a_lowering():
    case = make_case(5)
    seeds, _ = table_with_bits(np.full((2, 4, 2), 3), 6, 1)
    case = replace(case, table=table.with_desired(seeds, np.full_like(case.floor, 6)))
    plan = case.lower(10**4)
    np.testing.assert_array_equal(plan.bits, case.floor)
    assert not plan.feasible and plan.freed_bytes == 0
    assert plan.cancelled_bytes == ((6 - case.floor) * PRICE).sum() * FRAME_BYTES


def test_plan_exactly_gives_the_bits_asked_for():
    case = make_case(6)
    bits = np.full_like(case.floor, 4)
    plan = planner.plan_exactly(*vars(case).values(), bits=bits, frame_bytes=64)
    np.testing.assert_array_equal(plan.bits, bits)
    planes = ((case.table.bits - bits) * PRICE).sum() * case.table.frames_per_plane
    assert plan.freed_bytes == planes * 64 and plan.reason == "pin_bits"


# Signals.


def test_hot_experts_are_the_fewest_that_carry_the_mass_and_cold_ones_the_tail():
    share = np.float32([[0.05, 0.30, 0.10, 0.15, 0.40], [0.2, 0.2, 0.2, 0.2, 0.2]])
    bucket = planner.hotness(share, LIMITS)
    cold, warm, hot = planner.COLD, planner.WARM, planner.HOT
    assert bucket[0].tolist() == [cold, warm, cold, warm, hot]
    assert bucket[1].tolist() == [hot, hot, warm, warm, warm]


@given(st.integers(0, 10**6), st.floats(0, 1), st.floats(0, 1))
def test_buckets_follow_the_shares(seed: int, hot_mass: float, cold_mass: float):
    assume(hot_mass + cold_mass <= 1)
    limits = PlannerLimits(hot_mass=hot_mass, cold_mass=cold_mass)
    share = np.random.default_rng(seed).dirichlet(np.ones(9), 3).astype(np.float32)
    bucket = planner.hotness(share, limits)
    for row, name in zip(share, bucket, strict=True):
        assert (np.diff(name[np.argsort(row, kind="stable")]) >= 0).all()
        hot = row[name == planner.HOT]
        assert hot.sum() >= hot_mass - 1e-5
        assert not hot.size or hot.sum() - hot.min() <= hot_mass
        assert row[name == planner.COLD].sum() <= cold_mass + 1e-5


def test_hot_experts_have_higher_floors_and_dearer_planes():
    case = make_case(7)
    share = np.tile(np.float32([0.5, 0.3, 0.1, 0.1]), (2, 1))
    calibrated = replace(case.sensitivity, expert_share=share)
    live = replace(case.statistics, share=share)
    floor = planner.floors(calibrated, live, LIMITS)
    assert floor[0].tolist() == [[5, 5], [4, 4], [4, 4], [3, 3]]
    damage = planner.damage_table(calibrated, live, LIMITS)
    usable = case.sensitivity.loss[..., 3:]
    ratio = damage[..., 3:6] / usable[..., :3]
    np.testing.assert_allclose(ratio[0, :, 0, 0], [2, 1.25, 1.25, 1], rtol=1e-5)


@given(recipes)
def test_floors_are_clipped_to_what_is_stored(recipe: dict):
    case = make_case(**recipe)
    assert case.floor.min() >= 3
    assert case.floor.max() <= case.table.parent_bits


def test_damage_grows_with_the_live_share_but_not_without_bound():
    case = make_case(8)
    even = np.full((2, 4), 0.25, np.float32)
    calibrated = replace(case.sensitivity, expert_share=even)
    neutral = PlannerLimits(multipliers=(1.0, 1.0, 1.0))

    def factor(share: float) -> float:
        rest = (1 - share) / 3
        live = np.tile(np.float32([share, rest, rest, rest]), (2, 1))
        damage = planner.damage_table(
            calibrated, replace(case.statistics, share=live), neutral
        )
        return float(damage[0, 0, 0, 3] / calibrated.loss[0, 0, 0, 3])

    factors = [factor(share) for share in (0.0, 0.1, 0.25, 0.4, 1.0)]
    assert factors == sorted(factors)
    assert factors[2] == pytest.approx(1, rel=1e-5)
    assert factors[0] > 1 / 4 and factors[-1] < 4
    # Near the calibration share, damage is proportional to the live share.
    assert factor(0.275) == pytest.approx((0.275 + 0.025) / (0.25 + 0.025), rel=1e-2)


def test_the_prompt_residual_is_linear_clamped_and_one_before_the_first_token():
    case = make_case(9)
    weights = np.zeros((2, 2, 3), np.float32)
    weights[:, 0, 1] = 1  # gate_up follows the root mean square
    sensitivity = replace(
        case.sensitivity,
        residual_weights=weights,
        residual_bias=np.zeros((2, 2), np.float32),
    )

    def eta(features: list[float]) -> np.ndarray:
        live = replace(case.statistics, features=np.tile(np.float32(features), (2, 1)))
        base = planner.damage_table(case.sensitivity, case.statistics, LIMITS)
        damage = planner.damage_table(sensitivity, live, LIMITS)
        return damage[0, 0, :, 3] / base[0, 0, :, 3]

    np.testing.assert_allclose(eta([9, 1.5, 9]), [1.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(eta([9, 9, 9]), [2, 0.5], rtol=1e-6)
    np.testing.assert_allclose(eta([np.nan, np.nan, np.nan]), [1, 1], rtol=1e-6)


@given(recipes, st.integers(0, 99))
def test_damage_never_rises_with_bits(recipe: dict, seed: int):
    case = make_case(**recipe)
    noise = np.random.default_rng(seed).normal(0, 1, case.sensitivity.loss.shape)
    noisy = replace(
        case.sensitivity, loss=(case.sensitivity.loss + noise).astype(np.float32)
    )
    damage = planner.damage_table(noisy, case.statistics, LIMITS)
    assert np.isinf(damage[..., :3]).all()
    assert (damage[..., 3:-1] >= damage[..., 4:]).all()
    assert (damage[..., 3:] >= 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"floors": (4, 3, 5)}, "floors must be positive and not fall"),
        ({"floors": (0, 3, 5)}, "floors must be positive"),
        ({"multipliers": (1.0, 0.5, 2.0)}, "multipliers must"),
        ({"hot_mass": 0.9, "cold_mass": 0.2}, "together at most 1"),
        ({"cold_mass": -0.1}, "must be 0 to 1"),
        ({"residual_range": (2.0, 0.5)}, "residual_range"),
        ({"share_ratio_limit": 1.0}, "share_ratio_limit"),
        ({"share_prior": 0.0}, "share_prior"),
        ({"min_bits": 0}, "min_bits"),
        ({"min_bits": 5, "max_bits": 4}, "max_bits"),
    ],
)
def test_limits_that_make_no_sense_are_refused(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        PlannerLimits(**changes)


def test_a_table_of_another_checkpoint_is_refused():
    case = make_case(0)
    with pytest.raises(ValueError, match=r"5 planes a page but .* up to 6 bits"):
        replace(case, table=table.empty_table(2, 4, 5, 1)).lower(1)


# When to plan.


@pytest.mark.parametrize(("free", "demand"), [(0, 600), (4, 200), (5, 100), (6, 0)])
def test_kv_demand_is_the_formula_of_the_paper(free: int, demand: int):
    assert planner.kv_demand(free, 5, 100) == demand


WATERMARKS = Watermarks(low_blocks=4, high_blocks=12, dwell_steps=10)


@dataclass
class Pool:
    """Blocks that move at once: lowering frees what is missing, raising takes slack."""

    capacity: int
    floor: int = 40
    precise: int = 0
    last_change: int | None = None

    def run(self, loads: list[int], plane_blocks: int = 3) -> list[tuple[int, str]]:
        """Serves loads (blocks in use at each step); returns changes."""
        changes = []
        for step, used in enumerate(loads):
            free = self.capacity - self.precise - used
            change = WATERMARKS.decide(
                max(free, 0), max(-free, 0), step, self.last_change
            )
            free_wanted = (max(free, 0), max(-free, 0), 1)
            if change == "lower":
                planes = -(-WATERMARKS.demand_bytes(*free_wanted) // plane_blocks)
                moved = -min(self.precise, planes * plane_blocks)
            elif change == "raise":
                moved = (
                    WATERMARKS.slack_bytes(*free_wanted) // plane_blocks * plane_blocks
                )
            if change and moved:
                self.precise += moved
                self.last_change = step
                changes.append((step, change))
        return changes


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 20))
def test_a_constant_load_does_not_oscillate(load: int, precise: int, plane: int):
    changes = Pool(capacity=150, precise=min(precise, 150 - load)).run(
        [load] * 60, plane
    )
    directions = [direction for _, direction in changes]
    assert len(directions) <= 2 and directions in (
        [],
        ["lower"],
        ["raise"],
        ["lower", "raise"],
    ), changes


@given(st.lists(st.integers(20, 28), min_size=50, max_size=120))
def test_an_alternating_load_changes_at_most_once_per_dwell(loads: list[int]):
    # Its swings are smaller than what a raise leaves free.
    changes = Pool(capacity=100).run(loads)
    steps = [step for step, _ in changes]
    assert all(np.diff(steps) >= WATERMARKS.dwell_steps), changes


@settings(max_examples=50)
@given(st.lists(st.integers(0, 100), min_size=50, max_size=120))
def test_any_load_raises_at_most_once_per_dwell_and_never_after_a_recent_change(
    loads: list[int],
):
    changes = Pool(capacity=100).run(loads)
    for (before, _), (step, direction) in pairwise(changes):
        assert direction == "lower" or step - before >= WATERMARKS.dwell_steps


def test_missing_blocks_do_not_wait_for_the_dwell():
    assert WATERMARKS.decide(3, 5, step=1, last_change_step=0) == "lower"
    assert WATERMARKS.decide(5, 3, step=1, last_change_step=0) is None
    assert WATERMARKS.decide(5, 3, step=10, last_change_step=0) == "lower"
    assert WATERMARKS.decide(30, 3, step=9, last_change_step=0) is None
    assert WATERMARKS.decide(30, 3, step=10, last_change_step=0) == "raise"
    assert WATERMARKS.decide(12, 0, step=99, last_change_step=None) is None


@pytest.mark.parametrize("spare", range(-2, 16))
def test_there_is_demand_or_slack_exactly_when_a_change_is_due(spare: int):
    change = WATERMARKS.decide(max(spare, 0), max(-spare, 0), 0, None)
    blocks = spare, 0, 1
    assert (change == "lower") == (WATERMARKS.demand_bytes(*blocks) > 0)
    assert (change == "raise") == (WATERMARKS.slack_bytes(*blocks) > 0)


def test_a_raise_leaves_the_high_watermark_and_a_lowering_passes_the_low_one():
    free, wanted = 30, 3
    raised = free - WATERMARKS.slack_bytes(free, wanted, block_bytes=1)
    assert raised - wanted == WATERMARKS.high_blocks
    lowered = 5 + WATERMARKS.demand_bytes(5, wanted, block_bytes=1)
    assert lowered - wanted == WATERMARKS.low_blocks + 1


@pytest.mark.parametrize(("low", "high", "dwell"), [(4, 4, 1), (-1, 4, 1), (1, 4, -1)])
def test_watermarks_without_a_dead_band_are_refused(low: int, high: int, dwell: int):
    with pytest.raises(ValueError, match=f"low_blocks={low}"):
        Watermarks(low_blocks=low, high_blocks=high, dwell_steps=dwell)
