"""Laws of the line of units, and the threads that build it, executed in NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jaxlib.mlir import ir
from warpgroup import Warpgroup

from pallas_kernels.fused_moe import registers, routing
from pallas_kernels.fused_moe.routing import RoutingRefs, Share, Work, unit_cost

WORKS = {
    "few": Work(
        num_pairs=8, num_experts=4, tokens_per_tile=8, column_parts=1, row_steps=3
    ),
    "small tiles": Work(
        num_pairs=60, num_experts=7, tokens_per_tile=8, column_parts=2, row_steps=5
    ),
    "fewer pairs than experts": Work(
        num_pairs=5, num_experts=60, tokens_per_tile=16, column_parts=3, row_steps=2
    ),
    "more than threads": Work(
        num_pairs=300, num_experts=200, tokens_per_tile=8, column_parts=1, row_steps=4
    ),
}
every_work = pytest.mark.parametrize("name", WORKS)
NUM_CTAS = 5


@st.composite
def routings(draw, work):
    """Draws the expert of each pair, and bits, in one of several manners."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    allowed = draw(st.sampled_from([1, 2, work.num_experts, work.num_experts + 1]))
    experts = rng.permutation(work.num_experts + 1)[:allowed]
    ids = rng.choice(experts, work.num_pairs).astype(np.int32)
    ids[rng.random(work.num_pairs) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = (
        work.num_experts + rng.integers(0, 3)
    )
    bits = rng.integers(1, 9, work.num_experts).astype(np.int32)
    return ids, bits


def empty(work):
    """Returns shared memory that holds anything."""
    return RoutingRefs(*(np.full(ref.shape, -7, np.int32) for ref in work.scratch()))


@functools.partial(jax.jit, static_argnums=0)
def route_with_jnp(work, ids, bits):
    refs = RoutingRefs(*map(jax.new_ref, empty(work)))
    routing.route(work, ids, bits, refs, interpret=True)
    return RoutingRefs(*(ref[...] for ref in refs))


@functools.cache
def walk(work):
    """Returns a function that lists the segments of every CTA."""
    most = min(work.num_pairs, work.num_experts + work.num_pairs // 2)
    most = most * work.column_parts + 1  # tiles of tokens, times parts, and the end

    def of_cta(refs, cta):
        share = Share.of(work, refs, cta, NUM_CTAS)

        def step(position, _):
            return share.next(position), (share.holds(position), share_of(position))

        def share_of(position):
            return vars(share.segment(position))

        return lax.scan(step, share.first(), length=most)[1]

    def of_all(refs):
        ctas = jnp.arange(NUM_CTAS, dtype=jnp.int32)
        return jax.vmap(of_cta, in_axes=(None, 0))(refs, ctas)

    return jax.jit(of_all)


def segments(work, refs):
    """Lists the segments of each CTA, as dictionaries of integers."""
    held, fields = jax.tree.map(np.asarray, walk(work)(refs))
    for row in held:
        last = int(row.sum())
        assert row[:last].all() and last < len(row), "a share with holes, or no end"
    return [
        [
            {name: int(values[cta, i]) for name, values in fields.items()}
            for i in range(held[cta].sum())
        ]
        for cta in range(NUM_CTAS)
    ]


def expected_units(work, ids):
    """Lists (expert, pairs of the tile, column part, row step) of all the work."""
    units = []
    for e in range(work.num_experts):
        (pairs,) = np.nonzero(ids == e)
        for start in range(0, len(pairs), work.tokens_per_tile):
            tile = tuple(pairs[start : start + work.tokens_per_tile].tolist())
            for part in range(work.column_parts):
                units += [(e, tile, part, row) for row in range(work.row_steps)]
    return units


@every_work
@settings(max_examples=30)
@given(data=st.data())
def test_every_unit_is_in_the_share_of_one_cta(name, data):
    work = WORKS[name]
    ids, bits = data.draw(routings(work))
    refs = route_with_jnp(work, ids, bits)
    order, units = np.asarray(refs.order), []
    for segment in itertools.chain(*segments(work, refs)):
        first, count = segment["first_pair"], segment["num_tokens"]
        tile = tuple(order[first : first + count].tolist())
        assert segment["bits"] == bits[segment["expert"]]
        assert segment["start"] < segment["stop"] <= work.row_steps
        units += [
            (segment["expert"], tile, segment["column_part"], row)
            for row in range(segment["start"], segment["stop"])
        ]
    assert units == expected_units(work, ids)  # in the order of the line, too


@every_work
@settings(max_examples=30)
@given(data=st.data())
def test_shares_cost_the_same_to_within_one_unit(name, data):
    work = WORKS[name]
    ids, bits = data.draw(routings(work))
    cost = {b: int(unit_cost(jnp.int32(b))) for b in range(1, 9)}
    costs, dearest = [], cost[8]
    for share in segments(work, route_with_jnp(work, ids, bits)):
        costs.append(sum((s["stop"] - s["start"]) * cost[s["bits"]] for s in share))
    quota = -(-sum(costs) // NUM_CTAS)
    assert max(costs) < quota + dearest, costs
    full = sum(costs) // quota if quota else 0  # the last shares may be cut short
    assert all(cost > quota - dearest for cost in costs[:full]), costs


def route_with_threads(work, ids, bits):
    with (
        ir.Context(),
        ir.Location.unknown(),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        warpgroup = Warpgroup(ids, bits, *empty(work))
        warpgroup.patch(monkeypatch, registers, routing)
        routing._route_with_threads(work, *warpgroup.memrefs)
    return RoutingRefs(*(ref.values for ref in warpgroup.memrefs[2:]))


@every_work
@settings(max_examples=20)
@given(data=st.data())
def test_threads_build_the_same_line(name, data):
    work = WORKS[name]
    ids, bits = data.draw(routings(work))
    actual = route_with_threads(work, ids, bits)
    expected = route_with_jnp(work, ids, bits)
    for field in ("order", "experts", "pairs", "costs", "bits"):
        np.testing.assert_array_equal(
            getattr(actual, field), getattr(expected, field), field
        )


def test_sums_that_other_warps_have_still_to_read_are_not_overwritten(monkeypatch):
    """So it once was, and no result showed it; the warpgroup notices."""
    work = WORKS["small tiles"]
    ids = np.arange(work.num_pairs, dtype=np.int32) % work.num_experts
    bits = np.full(work.num_experts, 4, np.int32)
    route_with_threads(work, ids, bits)
    monkeypatch.setattr(routing, "_SUMS", 0)
    with pytest.raises(AssertionError, match="write before barrier"):
        route_with_threads(work, ids, bits)


def test_one_expert_with_all_tokens_is_spread_over_all_ctas():
    work = WORKS["small tiles"]
    ids = np.full(work.num_pairs, 3, np.int32)
    refs = route_with_jnp(work, ids, np.full(work.num_experts, 4, np.int32))
    shares = segments(work, refs)
    assert all(shares)
    assert {s["expert"] for share in shares for s in share} == {3}


@every_work
def test_pairs_without_an_expert_are_nobodys_work(name):
    work = WORKS[name]
    ids = np.full(work.num_pairs, work.num_experts, np.int32)
    refs = route_with_jnp(work, ids, np.full(work.num_experts, 4, np.int32))
    assert segments(work, refs) == [[]] * NUM_CTAS
    assert np.all(refs.experts == work.num_experts)
