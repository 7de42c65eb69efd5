"""The codebook format and its k-means against oracles that are obviously right."""

import itertools

import numpy as np
import pytest
from format_cases import random_importance, random_weights, seeds
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans

from pagedweight_jax.formats import CodebookFormat, kmeans

small = st.integers(-8, 8).map(float)


def interval_error(x: np.ndarray, h: np.ndarray) -> float:
    return float((h * (x - np.average(x, weights=h)) ** 2).sum()) if len(x) else 0.0


def best_error(x: np.ndarray, h: np.ndarray, clusters: int) -> float:
    """The least weighted error of any clustering: all cuts of the sorted row."""
    order = np.argsort(x)
    x, h = x[order].astype(np.float64), h[order].astype(np.float64)
    return min(
        sum(map(interval_error, np.split(x, cuts), np.split(h, cuts)))
        for cuts in itertools.combinations(range(1, len(x)), clusters - 1)
    )


def errors(w: np.ndarray, value: np.ndarray, h: np.ndarray) -> np.ndarray:
    return (h * (w - np.asarray(value)) ** 2).astype(np.float64).sum(axis=-1)


@settings(max_examples=50)
@given(values=st.lists(st.tuples(small, st.floats(0.01, 100)), min_size=2, max_size=12))
def test_the_best_split_is_the_best_of_all_splits(values):
    x, h = np.array(sorted(values)).T
    rows = kmeans.sort_rows(x[None], h[None])
    zero, k = np.array([0]), np.array([len(x)])
    split, gain = kmeans.best_splits(rows, zero, zero, k)
    wanted = [
        interval_error(x[:s], h[:s]) + interval_error(x[s:], h[s:])
        for s in range(1, len(x) + 1)
    ]
    came = wanted[split[0] - 1]
    whole = interval_error(x, h)
    rounding = 1e-9 * float((h * x * x).sum())
    assert came <= min(wanted) + rounding
    np.testing.assert_allclose(whole - came, gain[0], atol=rounding)


def test_the_seed_level_is_near_the_best_clustering_of_tiny_rows():
    rng = np.random.default_rng(0)
    w = rng.normal(size=(40, 12)).astype(np.float32)
    h = rng.exponential(size=w.shape).astype(np.float32)
    form = CodebookFormat(seed_bits=2, parent_bits=3)
    codes, tables = form.quantize(w, h)
    came = errors(w, form.dequantize(codes, tables, 2), h)
    best = np.array([best_error(x, g, 4) for x, g in zip(w, h, strict=True)])
    assert (came >= best * (1 - 1e-3)).all()
    assert came.sum() <= 1.05 * best.sum()
    assert (came < 1.001 * best).mean() > 0.6


def test_the_seed_level_is_no_worse_than_scikit_learn():
    w, h = random_weights(3, (16, 128)), random_importance(3, (16, 128))
    form = CodebookFormat()
    codes, tables = form.quantize(w, h)
    came = errors(w, form.dequantize(codes, tables, 3), h)
    model = KMeans(n_clusters=8, n_init=4, random_state=0)
    theirs = [
        -model.fit(x[:, None], sample_weight=g).score(x[:, None], sample_weight=g)
        for x, g in zip(w.astype(np.float64), h.astype(np.float64), strict=True)
    ]
    assert came.sum() <= 1.05 * sum(theirs), (came / theirs).round(3)


@settings(max_examples=20)
@given(seed=seeds)
def test_lloyd_only_lowers_the_error(seed: int):
    w, h = random_weights(seed, (8, 64)), random_importance(seed, (8, 64))
    rows = kmeans.sort_rows(w, h)
    rng = np.random.default_rng(seed)
    cuts = np.tile(np.arange(1, 64), (8, 1))
    inner = np.sort(rng.permuted(cuts, axis=1)[:, :7], axis=1)
    start = np.concatenate([np.zeros((8, 1), int), inner, np.full((8, 1), 64)], axis=1)

    def error(bounds: np.ndarray) -> np.ndarray:
        means = kmeans.cluster_means(rows, bounds, empty=np.zeros((8, 8)))
        codes = kmeans.cluster_codes(rows, bounds)
        return errors(w, np.take_along_axis(means, codes.astype(int), axis=1), h)

    before = error(start)
    for iterations in (1, 2, 50):
        after = error(kmeans.lloyd(rows, start, iterations))
        assert (after <= before * (1 + 1e-6)).all()
        before = after


@settings(max_examples=20)
@given(seed=seeds, count=st.integers(1, 8))
def test_rows_of_few_values_are_exact_at_every_level(seed: int, count: int):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(6, count)).astype(np.float16).astype(np.float32)
    w = np.take_along_axis(values, rng.integers(0, count, (6, 128)), axis=1)
    form = CodebookFormat()
    codes, tables = form.quantize(w, random_importance(seed, w.shape))
    for bits in range(3, 7):
        np.testing.assert_array_equal(form.dequantize(codes, tables, bits), w)


@settings(max_examples=10)
@given(seed=seeds)
def test_every_level_holds_the_weighted_means_of_its_clusters(seed: int):
    w, h = random_weights(seed, (4, 128)), random_importance(seed, (4, 128))
    form = CodebookFormat()
    codes, tables = form.quantize(w, h)
    for bits in range(3, 7):
        for row, code in itertools.product(range(4), range(2**bits)):
            members = codes[row] >> (6 - bits) == code
            if members.any():
                mean = np.average(w[row, members], weights=h[row, members])
                came = float(tables.lut[row, 2**bits - 8 + code])
                assert came == pytest.approx(mean, rel=2**-10, abs=1e-6)
