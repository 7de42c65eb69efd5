"""Which planes leave for the KV cache, and which come back: pure functions of values.

Three signals meet in the predicted damage of a page (`damage_table`): its offline
sensitivity, the live routing share of its expert, and the prompt residual. `floors`
says how far it may be lowered. `plan_lower` and `plan_raise` then take planes in the
order of damage per byte that `ladder` gives, and `Watermarks` says when.

All of it is NumPy on flat arrays and takes a few milliseconds for ten thousand pages.
Nothing here waits for the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float32, Int, Int8, Int32

from pagedweight_jax.paging.ladder import Ladders
from pagedweight_jax.paging.statistics import RoutingStatistics
from pagedweight_jax.paging.table import BLOCK_PLANES, PageTable
from pagedweight_jax.sensitivity import Sensitivity

COLD, WARM, HOT = 0, 1, 2
"""Buckets of `hotness`, and the order of floors and multipliers in `PlannerLimits`."""


@dataclass(frozen=True, kw_only=True)
class PlannerLimits:
    """What the planner may do, and how it weighs live traffic.

    Attributes:
      floors: fewest bits of a cold, a warm and a hot expert; clipped to the bits that
        are stored.
      multipliers: of the damage of a cold, a warm and a hot expert.
      hot_mass: the fewest experts of a layer that carry this share of its routed
        tokens are hot.
      cold_mass: the rarest experts of a layer that together carry at most this share
        are cold.
      residual_range: the prompt residual is clamped to it.
      share_ratio_limit: live over calibration share moves the damage of an expert by
        less than this factor, up or down.
      share_prior: tokens' worth of doubt in shares, as a share spread evenly over the
        experts of a layer; keeps the ratio of rare experts near 1.
      min_bits: no floor is lower; None leaves the floors as they are.
      max_bits: no page is raised beyond; None means parent bits.
    """

    floors: tuple[int, int, int] = (3, 4, 5)
    multipliers: tuple[float, float, float] = (1.0, 1.25, 2.0)
    hot_mass: float = 0.40
    cold_mass: float = 0.15
    residual_range: tuple[float, float] = (0.5, 2.0)
    share_ratio_limit: float = 4.0
    share_prior: float = 0.1
    min_bits: int | None = None
    max_bits: int | None = None

    def __post_init__(self) -> None:
        low, high = self.residual_range
        laws = {
            "floors must be positive and not fall": _rises_from_above_0(self.floors),
            "multipliers must be positive and not fall": _rises_from_above_0(
                self.multipliers
            ),
            "hot_mass and cold_mass must be 0 to 1 and together at most 1": (
                min(self.hot_mass, self.cold_mass) >= 0
                and self.hot_mass + self.cold_mass <= 1
            ),
            "residual_range must be positive, low to high": 0 < low <= high,
            "share_ratio_limit must be above 1": self.share_ratio_limit > 1,
            "share_prior must be positive": self.share_prior > 0,
            "min_bits must be at least 1": self.min_bits is None or self.min_bits >= 1,
            "max_bits must be at least min_bits": (
                self.max_bits is None or self.max_bits >= (self.min_bits or 1)
            ),
        }
        for law, holds in laws.items():
            if not holds:
                raise ValueError(f"{law}; got {self}")

    def range(self, sensitivity: Sensitivity) -> tuple[int, int]:
        """Returns the fewest and the most bits that a page may be given."""
        seed, parent = sensitivity.seed_bits, sensitivity.parent_bits
        low = min(max(self.min_bits or seed, seed), parent)
        return low, max(low, min(self.max_bits or parent, parent))


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """New desired bits of every page, and what they are expected to do.

    Attributes:
      bits: the new desired bits.
      loads: planes to bring to the device as (layer, expert, block, plane), in the
        order to bring them; those of older plans that are still wanted included.
      demand_bytes: bytes that had to be freed; for a raise, that could be taken.
      freed_bytes: bytes of frames that are free once the plan is adopted; negative
        for the bytes that its new loads will take.
      cancelled_bytes: bytes that loads without frames, given up, will not take.
      predicted_damage: change of the loss in nats a token, once all is loaded. Bits
        below the seed, where no loss is defined, count as seed bits.
      feasible: whether the demand was met; for a raise, whether all pages reach their
        floors. An infeasible plan is the largest change that was allowed.
    """

    bits: Int32[np.ndarray, "L E 2"]
    loads: Int32[np.ndarray, "n 4"]
    reason: str
    demand_bytes: int
    freed_bytes: int
    cancelled_bytes: int
    predicted_damage: float
    feasible: bool
    pages_down: int
    pages_up: int

    @property
    def changes(self) -> bool:
        """Whether the plan changes the desired bits of any page."""
        return self.pages_down + self.pages_up > 0


@dataclass(frozen=True, kw_only=True)
class Watermarks:
    """When to change precision: a dead band in free blocks, and a minimum dwell.

    Blocks that are wanted soon count as taken. Lowering starts at ``low_blocks`` and
    raising above ``high_blocks``, and a raise leaves ``high_blocks`` free, so neither
    calls for the other under a constant load. After any change nothing happens for
    ``dwell_steps``, except lowering when wanted blocks are missing altogether: there
    the alternative is to preempt a request.
    """

    low_blocks: int
    high_blocks: int
    dwell_steps: int

    def __post_init__(self) -> None:
        if not 0 <= self.low_blocks < self.high_blocks or self.dwell_steps < 0:
            raise ValueError(
                f"low_blocks={self.low_blocks} must be at least 0 and below"
                f" high_blocks={self.high_blocks}, and dwell_steps={self.dwell_steps}"
                " at least 0"
            )

    def decide(
        self,
        free_blocks: int,
        wanted_blocks: int,
        step: int,
        last_change_step: int | None,
    ) -> Literal["lower", "raise"] | None:
        """Decides what to plan at a step boundary.

        Args:
          free_blocks: KV blocks that free frames make; frames that queued loads are
            going to take do not count.
          wanted_blocks: blocks that scheduled requests are about to take.
          step: the current step.
          last_change_step: when a plan was last adopted, None if never.
        """
        spare = free_blocks - wanted_blocks
        if spare < 0:
            return "lower"
        if last_change_step is not None and step - last_change_step < self.dwell_steps:
            return None
        if spare <= self.low_blocks:
            return "lower"
        return "raise" if spare > self.high_blocks else None

    def demand_bytes(
        self, free_blocks: int, wanted_blocks: int, block_bytes: int
    ) -> int:
        """Returns what a lowering has to free."""
        return kv_demand(free_blocks - wanted_blocks, self.low_blocks, block_bytes)

    def slack_bytes(
        self, free_blocks: int, wanted_blocks: int, block_bytes: int
    ) -> int:
        """Returns what a raise may take."""
        return max(0, free_blocks - wanted_blocks - self.high_blocks) * block_bytes


def _rises_from_above_0(values: Sequence[int] | Sequence[float]) -> bool:
    return values[0] > 0 and list(values) == sorted(values)


def kv_demand(free_blocks: int, threshold_blocks: int, block_bytes: int) -> int:
    """Returns the bytes that the KV cache lacks: ``max(0, T + 1 - F) * B``.

    After arXiv 2607.16184: with ``F`` free blocks of ``B`` bytes, more than a
    threshold of ``T`` blocks is to be free.
    """
    return max(0, threshold_blocks + 1 - free_blocks) * block_bytes


def hotness(
    share: Float32[np.ndarray, "L E"], limits: PlannerLimits
) -> Int8[np.ndarray, "L E"]:
    """Sorts the experts of each layer into `COLD`, `WARM` and `HOT`.

    An expert that could be hot and cold is hot; of equal experts the first is hotter.
    """
    order = np.argsort(-share, axis=1, kind="stable")
    sorted_share = np.take_along_axis(share, order, axis=1).astype(np.float64)
    before = np.cumsum(sorted_share, axis=1) - sorted_share
    tail = np.cumsum(sorted_share[:, ::-1], axis=1)[:, ::-1]
    # float32 shares of a row sum to 1 within a few 1e-7.
    bucket = np.where(tail <= limits.cold_mass + 1e-6, COLD, WARM)
    bucket = np.where(before < limits.hot_mass - 1e-6, HOT, bucket)
    result = np.empty(share.shape, np.int8)
    np.put_along_axis(result, order, bucket.astype(np.int8), axis=1)
    return result


def floors(
    sensitivity: Sensitivity, statistics: RoutingStatistics, limits: PlannerLimits
) -> Int32[np.ndarray, "L E 2"]:
    """Returns the fewest bits that each page may be lowered to now."""
    by_bucket = np.clip(limits.floors, *limits.range(sensitivity)).astype(np.int32)
    return np.repeat(by_bucket[hotness(statistics.share, limits)][..., None], 2, -1)


def damage_table(
    sensitivity: Sensitivity, statistics: RoutingStatistics, limits: PlannerLimits
) -> Float32[np.ndarray, "L E 2 levels"]:
    """Predicts what each page costs at each number of bits under live traffic.

        damage[p, b] = mu(bucket) * traffic * eta * loss[p, b]

    ``loss`` was measured on calibration tokens, so it holds the calibration share
    ``c`` of the expert already; what counts now is how the live share ``s`` differs:

        q = (s + prior / E) / (c + prior / E)       the prior calms rare experts
        traffic = R ** tanh(log q / log R)          q near 1, never beyond 1/R .. R

    ``mu`` is the multiplier of the expert's bucket, ``eta`` the prompt residual of
    `Sensitivity`, clamped. A loss that rises with more bits is noise of its
    measurement: the ladder is made monotone from the parent bits down.

    Returns:
      Nats per token above parent bits; infinite below the seed bits.
    """
    multipliers = np.array(limits.multipliers, np.float32)
    mu = multipliers[hotness(statistics.share, limits)]
    traffic = _traffic(sensitivity.expert_share, statistics.share, limits)
    eta = _prompt_residual(sensitivity, statistics, limits)
    factor = (mu * traffic)[..., None] * eta[:, None]
    table = factor[..., None] * np.maximum(sensitivity.loss, 0)
    for bits in range(sensitivity.parent_bits, 0, -1):
        np.maximum(table[..., bits - 1], table[..., bits], out=table[..., bits - 1])
    return table


def _traffic(
    calibration: Float32[np.ndarray, "L E"],
    live: Float32[np.ndarray, "L E"],
    limits: PlannerLimits,
) -> Float32[np.ndarray, "L E"]:
    doubt = np.float32(limits.share_prior / live.shape[1])
    limit = np.float32(np.log(limits.share_ratio_limit))
    ratio = np.log((live + doubt) / (calibration + doubt))
    return np.exp(limit * np.tanh(ratio / limit))


def _prompt_residual(
    sensitivity: Sensitivity, statistics: RoutingStatistics, limits: PlannerLimits
) -> Float32[np.ndarray, "L 2"]:
    eta = sensitivity.residual_bias + np.einsum(
        "lbf,lf->lb", sensitivity.residual_weights, statistics.features
    )
    eta = np.where(np.isnan(eta), np.float32(1), eta)
    low, high = limits.residual_range
    return np.clip(eta, np.float32(low), np.float32(high))


def plan_lower(
    table: PageTable,
    sensitivity: Sensitivity,
    statistics: RoutingStatistics,
    limits: PlannerLimits,
    *,
    demand_bytes: int,
    frame_bytes: int,
    held: Int32[np.ndarray, "L E 2"] | None = None,
    frozen: Bool[np.ndarray, "L E 2"] | None = None,
    reason: str = "kv_demand",
) -> Plan:
    """Frees at least ``demand_bytes`` at the least predicted damage.

    First, all loads that hold no frames yet are given up, but those towards a floor:
    they would take what is freed. Then, for what is still lacking, pages lose plane
    after plane, loads in flight before committed planes, cheapest damage per byte
    first and none below its floor.

    Args:
      demand_bytes: bytes that lack once loads that are wanted but hold no frames yet
        (`Migrator.num_queued_frames`) have taken theirs.
      held: bits of each page whose planes hold frames, committed or reserved for a
        load in flight (`Migrator.held`); None means the committed bits.
      frozen: pages that must stay as they are.
    Returns:
      A plan; feasible if freed and cancelled bytes meet the demand.
    """
    ladders = _ladders(table, sensitivity, statistics, limits, held, frozen)
    need = -(-max(0, demand_bytes) // _price_bytes(table, frame_bytes))
    start = _without_queued(ladders) if need else ladders.desired
    need -= int((ladders.desired - start) @ ladders.price)
    taken, feasible = _cheapest_steps(ladders, start, need)
    bits = start - np.bincount(taken, minlength=len(start))
    return _plan(table, ladders, bits, frame_bytes, reason, demand_bytes, feasible)


def plan_raise(
    table: PageTable,
    sensitivity: Sensitivity,
    statistics: RoutingStatistics,
    limits: PlannerLimits,
    *,
    slack_bytes: int,
    frame_bytes: int,
    held: Int32[np.ndarray, "L E 2"] | None = None,
    frozen: Bool[np.ndarray, "L E 2"] | None = None,
    reason: str = "slack",
) -> Plan:
    """Spends at most ``slack_bytes`` where it removes most predicted damage.

    Planes below the seed bits come first (a page is of no use without them), most
    significant planes of all pages before the next; then planes up to the floors;
    then what removes most damage per byte, up to the parent bits.

    Args:
      slack_bytes: free bytes beyond those that loads of older plans, wanted but
        without frames yet, are going to take.
      held: as in `plan_lower`; here it only decides what still has to be loaded.
      frozen: pages that must stay as they are.
    Returns:
      A plan; feasible if all pages that are not frozen reach their floors.
    """
    ladders = _ladders(table, sensitivity, statistics, limits, held, frozen)
    _, most_bits = limits.range(sensitivity)
    end = np.where(ladders.frozen, ladders.desired, most_bits)
    steps, _ = ladders.steps_up(ladders.desired, end)
    slack = max(0, slack_bytes) // _price_bytes(table, frame_bytes)
    cost = np.cumsum(ladders.price[steps])
    count = int(np.searchsorted(cost, slack, side="right"))
    taken, rest = steps[:count], steps[count:]
    if slack > (cost[count - 1] if count else 0):
        # A gate_up plane is next and there is room for half of it: take the first
        # down plane that follows, which is the next of its page.
        taken = np.append(taken, rest[ladders.price[rest] == 1][:1])
    bits = ladders.desired + np.bincount(taken, minlength=len(end))
    feasible = bool((ladders.frozen | (bits >= ladders.floor)).all())
    return _plan(table, ladders, bits, frame_bytes, reason, slack_bytes, feasible)


def plan_exactly(
    table: PageTable,
    sensitivity: Sensitivity,
    statistics: RoutingStatistics,
    limits: PlannerLimits,
    *,
    bits: Int32[np.ndarray, "L E 2"],
    frame_bytes: int,
    held: Int32[np.ndarray, "L E 2"] | None = None,
    reason: str = "pin_bits",
) -> Plan:
    """Returns the plan to given bits, whatever the floors say (`pin_bits`)."""
    ladders = _ladders(table, sensitivity, statistics, limits, held, None)
    return _plan(table, ladders, bits.ravel(), frame_bytes, reason, 0, feasible=True)


def _ladders(
    table: PageTable,
    sensitivity: Sensitivity,
    statistics: RoutingStatistics,
    limits: PlannerLimits,
    held: Int32[np.ndarray, "L E 2"] | None,
    frozen: Bool[np.ndarray, "L E 2"] | None,
) -> Ladders:
    if table.parent_bits != sensitivity.parent_bits:
        raise ValueError(
            f"the table has {table.parent_bits} planes a page but the sensitivity"
            f" goes up to {sensitivity.parent_bits} bits; both come from one checkpoint"
        )
    damage = damage_table(sensitivity, statistics, limits)[..., sensitivity.seed_bits :]
    desired = table.desired.ravel()
    return Ladders(
        desired=desired,
        held=(table.bits if held is None else held).ravel(),
        floor=floors(sensitivity, statistics, limits).ravel(),
        frozen=np.zeros(len(desired), bool) if frozen is None else frozen.ravel(),
        price=np.tile(BLOCK_PLANES, len(desired) // 2),
        damage=np.ascontiguousarray(damage.reshape(len(desired), -1).T),
        parent_bits=table.parent_bits,
    )


def _price_bytes(table: PageTable, frame_bytes: int) -> int:
    """Returns the bytes that one unit of `Ladders.price` stands for."""
    return table.frames_per_plane * frame_bytes


def _without_queued(ladders: Ladders) -> Int32[np.ndarray, "pages"]:
    """Returns the desired bits less what holds no frames, unless a floor wants it."""
    needed = np.maximum(ladders.held, ladders.floor)
    return np.where(
        ladders.frozen, ladders.desired, np.minimum(ladders.desired, needed)
    )


def _cheapest_steps(
    ladders: Ladders, start: Int32[np.ndarray, "pages"], need: int
) -> tuple[Int[np.ndarray, "n"], bool]:
    """Returns the pages to lower by one bit each, and whether they free the need."""
    if need <= 0:
        return np.empty(0, np.int64), True
    steps = ladders.steps_down(start)
    freed = np.cumsum(ladders.price[steps])
    count = int(np.searchsorted(freed, need)) + 1
    if count > len(steps):
        return steps, False
    if freed[count - 1] > need:
        return _without_excess(ladders, start, steps, count), True
    return steps[:count], True


def _without_excess(
    ladders: Ladders,
    start: Int32[np.ndarray, "pages"],
    steps: Int[np.ndarray, "n"],
    count: int,
) -> Int[np.ndarray, "m"]:
    """Mends a choice of the first ``count`` steps that frees one down plane too many.

    The last step is then a gate_up plane of which half would do. Either the dearest
    down plane stays after all, or the next down plane goes in place of the gate_up
    plane: what spares more.
    """
    taken, rest = steps[:count], steps[count:]
    down_taken = np.flatnonzero(ladders.price[taken] == 1)[-1:]
    down_next = rest[ladders.price[rest] == 1][:1]
    bits = start - np.bincount(taken, minlength=len(start))
    page = taken[down_taken]
    kept = _value(ladders, bits[page] + 1, page)
    last = taken[-1:]
    swapped = _value(ladders, bits[last] + 1, last) - _value(
        ladders, bits[down_next], down_next
    )
    if kept.size and not (swapped > kept).any():
        return np.delete(taken, down_taken)
    if (swapped > 0).any():
        return np.append(taken[:-1], down_next)
    return taken


def _value(
    ladders: Ladders, bits: Int[np.ndarray, "n"], pages: Int[np.ndarray, "n"]
) -> Float32[np.ndarray, "n"]:
    """Returns the damage that the step up to ``bits`` spares."""
    return ladders.damage_at(bits - 1, pages) - ladders.damage_at(bits, pages)


def _plan(
    table: PageTable,
    ladders: Ladders,
    bits: Int[np.ndarray, "pages"],
    frame_bytes: int,
    reason: str,
    demand_bytes: int,
    feasible: bool,
) -> Plan:
    freed = np.maximum(ladders.held - bits, 0) - np.maximum(bits - ladders.desired, 0)
    cancelled = np.maximum(ladders.desired - np.maximum(bits, ladders.held), 0)
    unit = _price_bytes(table, frame_bytes)
    changed = np.flatnonzero(bits != ladders.desired)
    damage = ladders.damage_at(bits[changed], changed).astype(np.float64)
    damage -= ladders.damage_at(ladders.desired[changed], changed)
    return Plan(
        bits=bits.astype(np.int32).reshape(table.desired.shape),
        loads=_loads(table, ladders, bits),
        reason=reason,
        demand_bytes=demand_bytes,
        freed_bytes=int(freed @ ladders.price) * unit,
        cancelled_bytes=int(cancelled @ ladders.price) * unit,
        predicted_damage=float(damage.sum()),
        feasible=feasible,
        pages_down=int(np.count_nonzero(bits < ladders.desired)),
        pages_up=int(np.count_nonzero(bits > ladders.desired)),
    )


def _loads(
    table: PageTable, ladders: Ladders, bits: Int[np.ndarray, "pages"]
) -> Int32[np.ndarray, "n 4"]:
    """Returns the planes between held and desired bits, most urgent first."""
    pages, steps = ladders.steps_up(ladders.held, bits)
    page_ids = np.unravel_index(pages, table.desired.shape)
    return np.stack([*page_ids, steps - 1], axis=1).astype(np.int32)
