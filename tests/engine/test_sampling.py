"""Sampling against NumPy and SciPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pagedweight_jax.engine.request import SamplingParams
from pagedweight_jax.engine.sampling import (
    SAMPLING_KINDS,
    Sampled,
    SamplingInputs,
    SamplingKind,
    keep_likely,
    sample,
    sampling_kind,
    token_logprobs,
)

ROWS, VOCAB = 4, 12

jit_kind = jax.jit(sample, static_argnames="kind")
jit_keep_likely = jax.jit(keep_likely)
jit_logprobs = jax.jit(token_logprobs)


def inputs(
    rows: int,
    *,
    temperature: float | np.ndarray = 1.0,
    top_p: float | np.ndarray = 1.0,
    top_k: int | np.ndarray = 0,
    seed: int | np.ndarray = 0,
    position: int | np.ndarray = 0,
) -> SamplingInputs:
    def full(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (rows,)))

    return SamplingInputs(
        token_index=full(0, np.int32),
        temperature=full(temperature, np.float32),
        top_p=full(top_p, np.float32),
        top_k=full(top_k, np.int32),
        seed=full(seed, np.uint32),
        position=full(position, np.int32),
        slots=full(0, np.int32),
    )


def jit_sample(logits: jax.Array, inputs: SamplingInputs) -> Sampled:
    """By the kind that serves whatever is asked for."""
    return jit_kind(logits, inputs, "filtered")


def kept_by_numpy(logits: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """One row, in float64: sort, cut at top_k, add up until top_p is reached."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[:top_k] if top_k > 0 else order
    shares = scipy.special.softmax(logits[order].astype(np.float64))
    kept, total = set(), 0.0
    for token, share in zip(order, shares, strict=True):
        if kept and total >= top_p:
            break
        kept.add(token)
        total += share
    return kept


# A coarse grid makes ties frequent.
LOGITS = arrays.arrays(
    np.float32,
    (ROWS, VOCAB),
    elements=st.integers(-12, 12).map(lambda i: i / 4),
)


@given(
    logits=LOGITS,
    top_k=st.lists(st.integers(0, VOCAB + 3), min_size=ROWS, max_size=ROWS),
    top_p=st.lists(
        st.sampled_from([1e-6, 0.1, 0.35, 0.5, 0.77, 0.9, 0.999, 1.0]),
        min_size=ROWS,
        max_size=ROWS,
    ),
)
@settings(max_examples=200)
def test_top_k_and_top_p_keep_what_numpy_keeps(logits, top_k, top_p):
    got = np.asarray(
        jit_keep_likely(
            jnp.asarray(logits),
            jnp.asarray(top_k, jnp.int32),
            jnp.asarray(top_p, jnp.float32),
        )
    )
    for row in range(ROWS):
        # Sums that meet top_p within rounding may go either way.
        wanted = [
            kept_by_numpy(logits[row], top_k[row], top_p[row] * (1 + sign * 1e-5))
            for sign in (-1, 1)
        ]
        kept = set(np.flatnonzero(np.isfinite(got[row])).tolist())
        assert kept in wanted, f"row {row}: {logits[row]}, {top_k[row]}, {top_p[row]}"
        for token in kept:
            assert got[row, token] == logits[row, token]


def test_top_p_of_one_keeps_all_of_a_large_vocabulary():
    """Shares of many tokens add up to 1, in float32, before the last ones came.

    They were cut off, but only if another row of the batch had a restriction.
    """
    logits = np.random.default_rng(6).normal(0, 4, (8, 50_000)).astype(np.float32)
    kept = jit_keep_likely(
        jnp.asarray(logits), jnp.zeros(8, jnp.int32), jnp.ones(8, jnp.float32)
    )
    np.testing.assert_array_equal(kept, logits)


def test_equal_logits_are_kept_lowest_id_first():
    logits = jnp.asarray(np.zeros((1, 6), np.float32))
    kept = jit_keep_likely(logits, jnp.asarray([4]), jnp.asarray([0.5], jnp.float32))
    # Four of six stay by top_k; two of the four reach one half.
    assert np.isfinite(np.asarray(kept))[0].tolist() == [True, True] + [False] * 4


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 2e-38}],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()),
)
def test_each_way_to_be_greedy_takes_the_best_token(options):
    rng = np.random.default_rng(1)
    logits = rng.normal(0, 4, (64, VOCAB)).astype(np.float32)
    chosen = jit_sample(
        jnp.asarray(logits), inputs(64, seed=np.arange(64), **options)
    ).tokens
    np.testing.assert_array_equal(chosen, logits.argmax(axis=1))


DRAWS = 20_000


@functools.cache
def base_logits() -> np.ndarray:
    return np.random.default_rng(2).normal(0, 1.5, VOCAB).astype(np.float32)


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.8)],
)
def test_draws_follow_the_softmax(vary, temperature, top_k, top_p):
    """Chi-square with fixed seeds; p is the same in every run."""
    logits = base_logits()
    chosen = jit_sample(
        jnp.asarray(np.tile(logits, (DRAWS, 1))),
        inputs(
            DRAWS,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            **{vary: np.arange(DRAWS)},
        ),
    ).tokens
    kept = sorted(kept_by_numpy(logits / temperature, top_k, top_p))
    shares = scipy.special.softmax(logits[kept].astype(np.float64) / temperature)
    counts = np.bincount(np.asarray(chosen), minlength=VOCAB)
    assert counts[kept].sum() == DRAWS, f"drew what is cut off: {counts}, {kept}"
    p = scipy.stats.chisquare(counts[kept], DRAWS * shares).pvalue
    assert p > 1e-4, f"p={p}: counts {counts[kept]}, wanted {DRAWS * shares}"


def test_draws_of_one_request_are_independent_of_each_other():
    """Tokens at neighbouring positions: the table of pairs against the product."""
    logits = jnp.asarray(np.zeros((DRAWS, 4), np.float32))
    positions = np.arange(DRAWS)
    drawn = [
        np.asarray(jit_sample(logits, inputs(DRAWS, seed=9, position=p)).tokens)
        for p in (positions, positions + 1)
    ]
    table = np.zeros((4, 4))
    np.add.at(table, tuple(drawn), 1)
    assert scipy.stats.chi2_contingency(table).pvalue > 1e-4, table
    np.testing.assert_array_equal(drawn[0][1:], drawn[1][:-1])


def test_a_seed_decides_whatever_else_is_in_the_batch():
    rng = np.random.default_rng(3)
    own = rng.normal(size=VOCAB).astype(np.float32)
    tokens = set()
    for case in range(20):
        logits = rng.normal(size=(ROWS, VOCAB)).astype(np.float32)
        row = case % ROWS
        logits[row] = own
        temperature = rng.random(ROWS).astype(np.float32)
        temperature[row] = 1.0
        top_k = rng.integers(0, 3, ROWS)
        top_k[row] = 0
        seeds, positions = rng.integers(0, 99, (2, ROWS))
        seeds[row], positions[row] = 2**32 - 1, 17
        chosen = jit_sample(
            jnp.asarray(logits),
            inputs(
                ROWS,
                temperature=temperature,
                top_k=top_k,
                seed=seeds,
                position=positions,
            ),
        ).tokens
        tokens.add(int(chosen[row]))
    assert len(tokens) == 1, tokens


def test_logprobs_and_ranks_equal_scipy():
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 3, (16, 64)).astype(np.float32)
    tokens = rng.integers(0, 64, 16).astype(np.int32)
    got = jit_logprobs(jnp.asarray(logits), jnp.asarray(tokens))
    wanted = scipy.special.log_softmax(logits.astype(np.float64), axis=1)
    own = wanted[np.arange(16), tokens]
    np.testing.assert_allclose(got.logprob, own, atol=1e-5)
    # Rank by descending value, "min" for ties: 1 is the most likely.
    ranks = scipy.stats.rankdata(-logits, axis=1, method="min")
    np.testing.assert_array_equal(got.rank, ranks[np.arange(16), tokens])
    order = np.argsort(-logits, axis=1)[:, :20]
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(
        got.top_logprobs, np.take_along_axis(wanted, order, axis=1), atol=1e-5
    )


ROW_OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 2]),
        "top_p": st.sampled_from([0.5, 1.0]),
        "seed": st.integers(0, 99),
    }
)


@given(options=st.lists(ROW_OPTIONS, min_size=ROWS, max_size=ROWS), logits=LOGITS)
@settings(max_examples=60)
def test_every_kind_that_serves_all_rows_gives_the_same_tokens(options, logits):
    """So a neighbour that asks for more changes nothing."""
    params = [SamplingParams(**o) for o in options]
    rows = inputs(
        ROWS,
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([max(0, p.top_k) for p in params]),
        top_p=np.array([p.top_p for p in params], np.float32),
        seed=np.array([p.seed for p in params]),
    )
    cheapest = SAMPLING_KINDS.index(sampling_kind(params))
    kinds: tuple[SamplingKind, ...] = SAMPLING_KINDS[cheapest:]
    chosen = [
        np.asarray(jit_kind(jnp.asarray(logits), rows, k).tokens).tolist()
        for k in kinds
    ]
    assert all(tokens == chosen[-1] for tokens in chosen), kinds


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ([], "greedy"),
        ([{"temperature": 0.0, "top_k": 3}, {"temperature": 0.0}], "greedy"),
        ([{"temperature": 0.0}, {"temperature": 0.5, "top_k": -1}], "drawn"),
        ([{}, {"top_p": 0.9}], "filtered"),
        ([{"top_k": 1}], "filtered"),
    ],
)
def test_nobody_pays_for_what_no_row_asks_for(options, kind):
    assert sampling_kind([SamplingParams(**o) for o in options]) == kind


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rows_without_numbers_are_told_apart(value):
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[2, 5] = value
    logits[:, 3] = 9
    got: Sampled = jit_sample(jnp.asarray(logits), inputs(ROWS, temperature=0.0))
    assert np.asarray(got.finite).tolist() == [True, True, False, True]
    assert np.asarray(got.tokens)[[0, 1, 3]].tolist() == [3, 3, 3]
