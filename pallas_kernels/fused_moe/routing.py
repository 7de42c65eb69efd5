"""Who computes what: every CTA finds its share of the work from the routing alone.

A *pair* is a token and one of its experts. The pairs of an expert are cut in tiles of M
tokens; a tile, a part of the columns and 64 or 128 rows make a *unit*:

    units of an expert = tiles x column parts x row steps        (row steps innermost)

Units cost what their planes weigh, so a unit's cost is a function of its expert's bits.
The units of all active experts stand in one line of costs, and CTA i of n takes the
units that begin in [total i / n, total (i + 1) / n): mixed precision is balanced by
bytes, a hot expert is spread over many CTAs, an expert without tokens does not exist.

`route` builds the line in shared memory, in one warpgroup; nothing is launched for it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, math
from jaxtyping import Array, Int32

from pallas_kernels.fused_moe import registers as reg
from pallas_kernels.fused_moe.registers import THREADS, Ref, Register

WARP = 32

_SUMS = 3 * THREADS // WARP
"""Where the sums over all experts stand among ``totals``."""

COST_PER_BIT = 4
COST_PER_UNIT = 4
"""Cost of a unit at b bits: its planes, and what every unit costs besides."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The static sizes that the line of units is made of."""

    num_pairs: int
    num_experts: int
    tokens_per_tile: int  # M
    column_parts: int
    row_steps: int

    @property
    def units_per_tile(self) -> int:
        """Units of one tile of tokens."""
        return self.column_parts * self.row_steps

    @property
    def padded_pairs(self) -> int:
        """Pairs, rounded up to whole rounds of a warp."""
        return -(-self.num_pairs // WARP) * WARP

    @property
    def experts_per_thread(self) -> int:
        """Experts that one thread of the warpgroup looks after."""
        return -(-self.num_experts // THREADS)

    def scratch(self) -> "RoutingRefs":
        """Returns the shared memory that `route` fills."""
        entries = min(self.num_experts, self.num_pairs) + 1
        return RoutingRefs(
            order=plgpu.SMEM((self.padded_pairs,), jnp.int32),
            ranks=plgpu.SMEM((self.padded_pairs,), jnp.int32),
            counts=plgpu.SMEM((self.experts_per_thread * THREADS + 1,), jnp.int32),
            experts=plgpu.SMEM((entries,), jnp.int32),
            pairs=plgpu.SMEM((entries,), jnp.int32),
            costs=plgpu.SMEM((entries,), jnp.int32),
            bits=plgpu.SMEM((entries,), jnp.int32),
            totals=plgpu.SMEM((3 * THREADS // WARP + 3,), jnp.int32),
        )


def unit_cost(bits: Int32[Array, "*n"]) -> Int32[Array, "*n"]:
    """Returns what a unit costs."""
    return COST_PER_BIT * bits + COST_PER_UNIT


class RoutingRefs(NamedTuple):
    """References (or their shapes) to the line of units in shared memory.

    Attributes:
      order: pairs sorted by expert; those without an expert come last.
      ranks: scratch; place of each pair among those of its expert.
      counts: scratch; pairs of each expert, then where they begin in ``order``.
      experts: the active experts in order of number, then ``num_experts``.
      pairs: where the pairs of each active expert begin in ``order``, then the total.
      costs: where the units of each active expert begin in the line, then the total.
      bits: of each active expert, then 1.
      totals: scratch; sums of each warp, then those of all.
    """

    order: Ref
    ranks: Ref
    counts: Ref
    experts: Ref
    pairs: Ref
    costs: Ref
    bits: Ref
    totals: Ref


def route(
    work: Work, ids_ref: Ref, bits_ref: Ref, refs: RoutingRefs, *, interpret: bool
) -> None:
    """Fills ``refs``; one warpgroup calls it, the others wait for it.

    Args:
      work: static sizes.
      ids_ref: expert of each pair, ``num_experts`` or more for none.
      bits_ref: committed bits of each expert's block.
      refs: shared memory.
      interpret: whether to compute with jnp.
    """
    if interpret:
        _route_with_jnp(work, ids_ref, bits_ref, refs)
        return

    @reg.inline(arg_types=(plgpu.RefType(),) * 10)
    def inlined(_: Any, ids: Register, bits: Register, *smem: Register) -> None:
        _route_with_threads(work, ids, bits, *smem)

    inlined(ids_ref, bits_ref, *refs)


def _route_with_jnp(work: Work, ids_ref: Ref, bits_ref: Ref, refs: RoutingRefs) -> None:
    num_experts, m = work.num_experts, work.tokens_per_tile
    ids = jnp.minimum(ids_ref[...], num_experts)
    padding = (0, work.padded_pairs - work.num_pairs)
    ids = jnp.pad(ids, padding, constant_values=num_experts)
    refs.order[...] = jnp.argsort(ids, stable=True).astype(jnp.int32)
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    counts = jnp.sum(ids[None] == experts[:, None], axis=1, dtype=jnp.int32)
    costs = (counts + (m - 1)) // m * work.units_per_tile * unit_cost(bits_ref[...])
    entries = refs.experts.shape[0]
    place = jnp.cumsum(counts > 0, dtype=jnp.int32) - 1
    place = jnp.where(counts > 0, place, entries)
    rows = jnp.arange(entries, dtype=jnp.int32)
    at = place[None] == rows[:, None]
    before = place[None] < rows[:, None]
    used = jnp.any(at, axis=1)

    refs.experts[...] = jnp.where(
        used, jnp.sum(jnp.where(at, experts[None], 0), axis=1), num_experts
    )
    refs.bits[...] = jnp.where(
        used, jnp.sum(jnp.where(at, bits_ref[...][None], 0), axis=1), 1
    )
    for ref, values in ((refs.pairs, counts), (refs.costs, costs)):
        ref[...] = jnp.sum(jnp.where(before, values[None], 0), axis=1, dtype=jnp.int32)


def _route_with_threads(
    work: Work,
    ids: Register,
    bits: Register,
    order: Register,
    ranks: Register,
    counts: Register,
    experts: Register,
    pairs: Register,
    costs: Register,
    bits_of_active: Register,
    totals: Register,
) -> None:
    """Counting sort of the pairs, and prefix sums over the experts."""
    thread, per_thread = reg.thread(), work.experts_per_thread
    none = reg.constant(work.num_experts)
    lane = reg.bits_and(thread, WARP - 1)
    is_first_warp = reg.less(thread, WARP)
    rounds = range(0, work.padded_pairs, WARP)

    # All loads from global memory come first, so that they wait together.
    experts_of = [_expert_of(work, ids, reg.add(lane, first)) for first in rounds]
    mine = [reg.add(reg.multiply(thread, per_thread), i) for i in range(per_thread)]
    widths = [reg.load(bits, _clamped(e, work.num_experts)) for e in mine]

    for i in range(per_thread):
        reg.store(reg.constant(0), counts, reg.add(thread, i * THREADS))
    reg.store(reg.constant(0), counts, per_thread * THREADS)
    utils.warpgroup_barrier()

    # One warp numbers the pairs of each expert in order, so that all CTAs agree.
    with utils.when(is_first_warp):
        for first, e in zip(rounds, experts_of, strict=True):
            reg.store(_count(e, counts), ranks, reg.add(lane, first))
    utils.warpgroup_barrier()

    values = [
        (*_expert_values(work, width, counts, e), width)
        for e, width in zip(mine, widths, strict=True)
    ]
    before = _sums_before(_add_up([v[:3] for v in values]), totals, thread)
    for e, (active, count, cost, width) in zip(mine, values, strict=True):
        place, first_pair, first_cost = before
        with utils.when(reg.less(reg.constant(0), active)):
            _store_entry(
                place,
                (e, first_pair, first_cost, width),
                (experts, pairs, costs, bits_of_active),
            )
        reg.store(first_pair, counts, e)
        before = _add_up([before, (active, count, cost)])
    with utils.when(reg.less(reg.constant(THREADS - 2), thread)):
        for i, total in enumerate(before):
            reg.store(total, totals, _SUMS + i)
    utils.warpgroup_barrier()

    num_active, all_pairs, all_costs = (reg.load(totals, _SUMS + i) for i in range(3))
    entries = min(work.num_experts, work.num_pairs) + 1
    for i in range(-(-entries // THREADS)):
        place = reg.add(reg.add(num_active, thread), i * THREADS)
        with utils.when(reg.less(place, entries)):
            _store_entry(
                place,
                (none, all_pairs, all_costs, reg.constant(1)),
                (experts, pairs, costs, bits_of_active),
            )
    with utils.when(is_first_warp):
        for first, e in zip(rounds, experts_of, strict=True):
            pair = reg.add(lane, first)
            is_none = arith.cmpi(arith.CmpIPredicate.eq, e, none)
            start = arith.select(is_none, all_pairs, reg.load(counts, e))
            reg.store(pair, order, reg.add(start, reg.load(ranks, pair)))


def _count(e: Register, counts: Register) -> Register:
    """Counts the experts of a warp; returns how many were the same before each lane."""
    before = reg.load(counts, e)
    same = utils.inline_ptx(
        "match.any.sync.b32 $0, $1, 0xffffffff;",
        e,
        result_types=reg.i32(),
        has_side_effects=True,
        convergent=True,
    )
    lower = utils.inline_ptx("mov.u32 $0, %lanemask_lt;", result_types=reg.i32())
    place = math.ctpop(arith.andi(same, lower))
    utils.warp_barrier()
    reg.store(reg.add(before, math.ctpop(same)), counts, e)  # all lanes the same value
    utils.warp_barrier()
    return reg.add(before, place)


def _store_entry(
    place: Register, values: tuple[Register, ...], refs: tuple[Register, ...]
) -> None:
    for value, ref in zip(values, refs, strict=True):
        reg.store(value, ref, place)


def _expert_of(work: Work, ids: Register, pair: Register) -> Register:
    """Returns the expert of a pair, ``num_experts`` for none."""
    none = reg.constant(work.num_experts)
    e = arith.minsi(reg.load(ids, _clamped(pair, work.num_pairs)), none)
    return arith.select(reg.less(pair, work.num_pairs), e, none)


def _clamped(index: Register, size: int) -> Register:
    return arith.minsi(index, reg.constant(size - 1))


def _expert_values(
    work: Work, bits: Register, counts: Register, e: Register
) -> tuple[Register, Register, Register]:
    """Returns whether an expert is active, its pairs and its cost."""
    zero = reg.constant(0)
    count = reg.load(counts, _clamped(e, work.num_experts))
    count = arith.select(reg.less(e, work.num_experts), count, zero)
    active = arith.minsi(count, reg.constant(1))
    m = work.tokens_per_tile
    tiles = arith.divui(reg.add(count, m - 1), reg.constant(m))
    cost = reg.add(reg.multiply(bits, COST_PER_BIT), COST_PER_UNIT)
    units = reg.multiply(tiles, work.units_per_tile)
    return active, count, reg.multiply(units, cost)


def _add_up(
    values: list[tuple[Register, Register, Register]],
) -> tuple[Register, Register, Register]:
    first, *rest = values
    for value in rest:
        first = tuple(arith.addi(x, y) for x, y in zip(first, value, strict=True))
    return first


def _sums_before(
    values: tuple[Register, Register, Register], totals: Register, thread: Register
) -> tuple[Register, Register, Register]:
    """Returns the sums over all threads before this one."""
    lane, warp = reg.bits_and(thread, WARP - 1), reg.right(thread, 5)
    inclusive = []
    for value in values:
        for distance in (1, 2, 4, 8, 16):
            other = utils.inline_ptx(
                "shfl.sync.up.b32 $0, $1, $2, 0, 0xffffffff;",
                *(value, reg.constant(distance)),
                result_types=reg.i32(),
                has_side_effects=True,
                convergent=True,
            )
            far = reg.less(lane, distance)
            value = arith.addi(value, arith.select(far, reg.constant(0), other))
        inclusive.append(value)
    warps = THREADS // WARP
    with utils.when(arith.cmpi(arith.CmpIPredicate.eq, lane, reg.constant(31))):
        for i, value in enumerate(inclusive):
            reg.store(value, totals, reg.add(warp, i * warps))
    utils.warpgroup_barrier()
    results = []
    for i, (value, own) in enumerate(zip(inclusive, values, strict=True)):
        total = arith.subi(value, own)
        for w in range(warps - 1):
            earlier = reg.less(reg.constant(w), warp)
            of_warp = reg.load(totals, i * warps + w)
            total = arith.addi(total, arith.select(earlier, of_warp, reg.constant(0)))
        results.append(total)
    return tuple(results)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Units of one CTA that share an expert, a tile of tokens and a column part.

    Attributes:
      expert: number of the expert.
      bits: its committed bits.
      first_pair: place in ``order`` of the tile's first pair.
      num_tokens: tokens of the tile, at most M.
      column_part: which part of the columns.
      start: first row step.
      stop: one past the last row step.
    """

    expert: Int32[Array, ""]
    bits: Int32[Array, ""]
    first_pair: Int32[Array, ""]
    num_tokens: Int32[Array, ""]
    column_part: Int32[Array, ""]
    start: Int32[Array, ""]
    stop: Int32[Array, ""]


Position = tuple[Int32[Array, ""], Int32[Array, ""]]
"""An active expert (its place in the line) and one of its units."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one CTA does: a walk over the segments of its part of the line."""

    work: Work
    refs: RoutingRefs
    low: Int32[Array, ""]
    high: Int32[Array, ""]

    @classmethod
    def of(cls, work: Work, refs: RoutingRefs, cta: Array, num_ctas: int) -> "Share":
        """Returns the share of CTA ``cta``."""
        total = refs.costs[refs.costs.shape[0] - 1]
        quota = lax.div(total + (num_ctas - 1), jnp.int32(num_ctas))
        low = cta * quota
        high = jnp.minimum(low + quota, total)
        return cls(work=work, refs=refs, low=low, high=high)

    @property
    def _last(self) -> int:
        return self.refs.costs.shape[0] - 1

    def first(self) -> Position:
        """Returns the first position, which may be past the end."""
        steps = self._last.bit_length()

        def halve(i: Array, place: Array) -> Array:
            middle = place + lax.shift_left(jnp.int32(1), steps - 1 - i)
            begin = self.refs.costs[jnp.minimum(middle, self._last)]
            inside = (middle <= self._last) & (begin <= self.low)
            return jnp.where(inside, middle, place)

        place = lax.fori_loop(0, steps, halve, jnp.int32(0))
        cost = self._unit_cost(place)
        unit = lax.div(self.low - self.refs.costs[place] + cost - 1, cost)
        return self._settle(place, unit)

    def holds(self, position: Position) -> Array:
        """Whether a position belongs to the share."""
        place, unit = position
        begin = self.refs.costs[place] + unit * self._unit_cost(place)
        return begin < self.high

    def segment(self, position: Position) -> Segment:
        """Returns the segment that begins at a position of the share."""
        place, unit = position
        work, refs = self.work, self.refs
        group = lax.div(unit, jnp.int32(work.row_steps))
        tile = lax.div(group, jnp.int32(work.column_parts))
        first_pair = refs.pairs[place] + tile * work.tokens_per_tile
        num_tokens = refs.pairs[self._after(place)] - first_pair
        return Segment(
            expert=refs.experts[place],
            bits=refs.bits[place],
            first_pair=first_pair,
            num_tokens=jnp.minimum(num_tokens, work.tokens_per_tile),
            column_part=group - tile * work.column_parts,
            start=unit - group * work.row_steps,
            stop=self._end(place, group) - group * work.row_steps,
        )

    def next(self, position: Position) -> Position:
        """Returns where the segment after that of ``position`` begins."""
        place, unit = position
        group = lax.div(unit, jnp.int32(self.work.row_steps))
        return self._settle(place, self._end(place, group))

    def _after(self, place: Array) -> Array:
        return jnp.minimum(place + 1, self._last)

    def _end(self, place: Array, group: Array) -> Array:
        cost = self._unit_cost(place)
        mine = lax.div(self.high - self.refs.costs[place] + cost - 1, cost)
        end = jnp.minimum(self._num_units(place), mine)
        return jnp.minimum(end, (group + 1) * self.work.row_steps)

    def _settle(self, place: Array, unit: Array) -> Position:
        past = unit >= self._num_units(place)
        return jnp.where(past, self._after(place), place), jnp.where(past, 0, unit)

    def _unit_cost(self, place: Array) -> Array:
        return unit_cost(self.refs.bits[place])

    def _num_units(self, place: Array) -> Array:
        span = self.refs.costs[self._after(place)] - self.refs.costs[place]
        return lax.div(span, self._unit_cost(place))
