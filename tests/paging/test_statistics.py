import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paging_cases import random_sensitivity

from pagedweight_jax.paging import statistics
from pagedweight_jax.paging.statistics import RoutingStatistics

HALF_LIFE = 64.0


def seen(counts: np.ndarray, norms: np.ndarray) -> dict:
    """Arguments of `update` for tokens with these norms in every layer."""
    norms = np.asarray(norms, np.float32)
    sums = np.array([norms.sum(), (norms**2).sum(), norms.max()], np.float32)
    return {
        "counts": counts,
        "norm_sums": np.tile(sums, (len(counts), 1)),
        "num_tokens": len(norms),
        "half_life_tokens": HALF_LIFE,
    }


@pytest.fixture
def start() -> RoutingStatistics:
    return statistics.initial(random_sensitivity(np.random.default_rng(0)))


def test_statistics_start_from_the_shares_of_calibration(start):
    sensitivity = random_sensitivity(np.random.default_rng(0))
    np.testing.assert_array_equal(start.share, sensitivity.expert_share)
    assert np.isnan(start.features).all()


def test_no_token_changes_nothing(start):
    nothing = np.zeros((2, 4), np.int32), np.zeros((2, 3), np.float32)
    same = statistics.update(start, *nothing, 0, half_life_tokens=HALF_LIFE)
    assert same is start


@given(st.lists(st.integers(1, 200), min_size=1, max_size=5), st.integers(0, 99))
def test_rows_sum_to_one(num_tokens: list[int], seed: int):
    rng = np.random.default_rng(seed)
    now = statistics.initial(random_sensitivity(rng))
    for n in num_tokens:
        counts = rng.multinomial(2 * n, np.full(4, 0.25), size=2)
        now = statistics.update(now, **seen(counts, rng.exponential(1, n)))
    np.testing.assert_allclose(now.share.sum(axis=1), 1, rtol=1e-6)


def test_an_expert_that_no_token_visits_halves_in_a_half_life(start):
    counts = np.tile(np.int32([0, 1, 1, 1]), (2, 1)) * 64
    now = statistics.update(start, **seen(counts, np.ones(64)))
    np.testing.assert_allclose(now.share[:, 0], start.share[:, 0] / 2, rtol=1e-5)


@given(st.integers(1, 99), st.integers(1, 99))
def test_cutting_tokens_into_steps_makes_no_difference(first: int, second: int):
    # Equal tokens, so that their order within the window does not matter.
    rng = np.random.default_rng(first)
    start = statistics.initial(random_sensitivity(rng))
    share = np.array([[8, 4, 2, 2], [1, 0, 0, 15]])
    start = statistics.update(start, **seen(share, [3.0, 4.0]))
    once = statistics.update(
        start, **seen(share * (first + second), np.full(first + second, 2.0))
    )
    twice = start
    for n in (first, second):
        twice = statistics.update(twice, **seen(share * n, np.full(n, 2.0)))
    np.testing.assert_allclose(once.share, twice.share, rtol=1e-5)
    np.testing.assert_allclose(once.features, twice.features, rtol=1e-5)


def test_first_tokens_replace_the_unknown_features(start):
    now = statistics.update(start, **seen(np.ones((2, 4), int), [1.0, 2.0, 3.0]))
    expected = [2, np.sqrt(14 / 3), 3]
    np.testing.assert_allclose(now.features, [expected, expected], rtol=1e-6)


def test_the_maximum_rises_at_once_and_is_forgotten_slowly(start):
    counts = np.ones((2, 4), int)
    now = statistics.update(start, **seen(counts, [1.0]))
    now = statistics.update(now, **seen(counts, [9.0]))
    np.testing.assert_allclose(now.features[:, 2], 9)
    now = statistics.update(now, **seen(counts, np.ones(64)))
    np.testing.assert_allclose(now.features[:, 2], 5, rtol=1e-6)


def test_norms_that_are_not_finite_leave_the_features(start):
    counts = np.ones((2, 4), int)
    now = statistics.update(start, **seen(counts, [1.0, 2.0]))
    broken = seen(counts, [1.0, 2.0])
    broken["norm_sums"][0, 1] = np.nan
    later = statistics.update(now, **broken)
    np.testing.assert_array_equal(later.features[0], now.features[0])
    assert np.isfinite(later.features).all()


def test_wrong_arguments_are_refused(start):
    arguments = seen(np.ones((2, 4), int), [1.0])
    with pytest.raises(ValueError, match="half_life_tokens=0"):
        statistics.update(start, **{**arguments, "half_life_tokens": 0.0})
    with pytest.raises(ValueError, match="num_tokens=-1"):
        statistics.update(start, **{**arguments, "num_tokens": -1})
