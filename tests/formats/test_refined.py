"""The refined format and its search against oracles that are obviously right."""

import numpy as np
import pytest
from format_cases import random_importance, random_weights, seeds
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight_jax.formats import RefinedFormat, clusters, kmeans

SHAPE = (64, 128)


def level_values(form: RefinedFormat, center, width, bits: int) -> np.ndarray:
    """Values [2**parent_bits] of all parent codes of a row at a level, one by one."""
    values = []
    for code in range(2**form.parent_bits):
        kept = code >> (form.parent_bits - bits)
        cells = 2 ** (bits - form.seed_bits)
        cluster, rest = kept // cells, (kept % cells + 0.5) / cells
        values.append(center[cluster] + width[cluster] * (rest - 0.5))
    return np.array(values)


def code_errors(form: RefinedFormat, w: np.ndarray, center, width) -> np.ndarray:
    """Errors [k, 2**parent_bits] of every weight of a row with every code."""
    total = np.zeros((len(w), 2**form.parent_bits))
    for bits in range(form.seed_bits, form.parent_bits + 1):
        values = level_values(form, center, width, bits)
        total += 2.0**bits * (w[:, None] - values) ** 2
    return total


def tables_of(form: RefinedFormat, w: np.ndarray, h: np.ndarray | None = None):
    """Codes, and centers and widths [rows, clusters] in float64."""
    codes, tables = form.quantize(w, h)
    parts = (np.asarray(t, np.float64).T for t in (tables.center, tables.width))
    return codes, *parts


@settings(max_examples=5)
@given(seed=seeds, seed_bits=st.sampled_from([3, 4]))
def test_levels_follow_the_formula(seed: int, seed_bits: int):
    form = RefinedFormat(seed_bits=seed_bits)
    codes, tables = form.quantize(random_weights(seed, SHAPE))
    center, width = (np.asarray(t, np.float64).T for t in (tables.center, tables.width))
    for bits in range(seed_bits, 7):
        came = np.asarray(form.dequantize(codes, tables, bits))
        for row in range(0, 64, 9):
            values = level_values(form, center[row], width[row], bits)
            wanted = values.astype(np.float16)[codes[row]]
            np.testing.assert_array_equal(came[row], wanted)


@settings(max_examples=5)
@given(seed=seeds)
def test_hardly_a_weight_has_a_better_code(seed: int):
    form = RefinedFormat()
    w, h = random_weights(seed, SHAPE), random_importance(seed, SHAPE)
    codes, center, width = tables_of(form, w, h)
    came, best, moved = 0.0, 0.0, 0
    for row in range(0, 64, 5):
        errors = code_errors(form, w[row].astype(np.float64), center[row], width[row])
        least = errors.min(axis=1)
        chosen = np.take_along_axis(errors, codes[row][:, None].astype(int), axis=1)
        came += (h[row] * chosen[:, 0]).sum()
        best += (h[row] * least).sum()
        moved += (chosen[:, 0] > least * (1 + 1e-6)).sum()
    # Only where the ranges of neighbours overlap is their crossing not exact.
    assert came <= 1.01 * best
    assert moved <= 0.02 * 13 * 128


@settings(max_examples=10)
@given(seed=seeds, cluster_bits=st.integers(1, 3), rest_bits=st.integers(1, 3))
def test_a_fit_is_the_line_of_weighted_least_squares(seed, cluster_bits, rest_bits):
    parent_bits = cluster_bits + rest_bits
    w, h = random_weights(seed, (1, 64)), random_importance(seed, (1, 64))
    rows = kmeans.sort_rows(w, kmeans.positive(h))
    levels = clusters.Levels(cluster_bits=cluster_bits, parent_bits=parent_bits)
    old = clusters.equal_parts(rows, 2**cluster_bits)
    bounds = levels.bounds(rows, old)
    moments = levels.moments(rows, bounds)
    fitted = moments.fit(old)
    codes = kmeans.cluster_codes(rows, bounds)[0].astype(int)
    total = 0.0
    for cluster in range(2**cluster_bits):
        points = []  # (root of what it counts, place, value)
        for x, importance, code in zip(w[0], h[0], codes, strict=True):
            if code >> rest_bits != cluster:
                continue
            for bits in range(cluster_bits, parent_bits + 1):
                cells = 2 ** (bits - cluster_bits)
                rest = code % 2**rest_bits >> (parent_bits - bits)
                share = 2.0**bits / sum(2.0 ** np.arange(cluster_bits, parent_bits + 1))
                points.append(
                    ((importance * share) ** 0.5, (rest + 0.5) / cells - 0.5, x)
                )
        if not points:
            assert fitted.width[0, cluster] == 0
            continue
        root, place, value = np.array(points).T
        matrix = np.stack([root, root * place], axis=1)
        (c, width), *_ = np.linalg.lstsq(matrix, root * value, rcond=None)
        came = fitted.center[0, cluster], fitted.width[0, cluster]
        np.testing.assert_allclose(came, (c, width), rtol=1e-7, atol=1e-7 * np.ptp(w))
        total += (root**2 * (value - c - width * place) ** 2).sum()
    squares = (kmeans.positive(h) * w.astype(np.float64) ** 2).sum()
    assert moments.error(fitted)[0] + squares == pytest.approx(total, rel=1e-4)


@settings(max_examples=10)
@given(seed=seeds)
def test_no_start_is_worse_than_equal_parts_and_turns_cost_nothing(seed: int):
    w, h = random_weights(seed, SHAPE), random_importance(seed, SHAPE)
    rows = kmeans.sort_rows(w, kmeans.positive(h))
    levels = clusters.Levels(cluster_bits=3, parent_bits=6)
    equal = clusters.equal_parts(rows, 8)

    def error(found: clusters.Clusters) -> np.ndarray:
        return levels.moments(rows, levels.bounds(rows, found)).error(found)

    points = clusters.Clusters(center=equal.center, width=0 * equal.width)
    before = error(equal)
    for turns in (0, 1, 4, 12):
        found = clusters.improve(rows, levels, points, equal, turns)
        assert (np.diff(found.center, axis=1) >= 0).all()
        assert (found.width >= 0).all()
        after = error(found)
        assert (after <= before).all()
        before = after


@settings(max_examples=10)
@given(seed=seeds, count=st.integers(1, 8))
def test_rows_of_few_values_are_exact_at_every_level(seed: int, count: int):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(64, count)).astype(np.float16).astype(np.float32)
    w = np.take_along_axis(values, rng.integers(0, count, SHAPE), axis=1)
    form = RefinedFormat()
    codes, tables = form.quantize(w, random_importance(seed, w.shape))
    for bits in range(3, 7):
        np.testing.assert_array_equal(form.dequantize(codes, tables, bits), w)


def test_a_weight_that_alone_matters_is_kept():
    w = random_weights(0, SHAPE)
    h = np.zeros(SHAPE, np.float32)
    h[:, 0] = 1.0
    form = RefinedFormat()
    codes, tables = form.quantize(w, h)
    error = np.abs(np.asarray(form.dequantize(codes, tables, 6)) - w)[:, 0]
    assert (error <= 2.0**-10 * np.abs(w).max(axis=1)).all()


def test_side_tables_do_not_grow_with_the_bits():
    few, many = RefinedFormat(parent_bits=4), RefinedFormat(parent_bits=8)
    assert few.side_table_bytes(64, 128) == many.side_table_bytes(64, 128) == 64 * 32
    assert RefinedFormat(seed_bits=4).side_table_bytes(64, 128) == 64 * 64


@pytest.mark.parametrize("seed_bits", [2, 5])
def test_other_numbers_of_clusters_are_refused(seed_bits: int):
    with pytest.raises(ValueError, match=f"seed_bits={seed_bits} .* must be 3 or 4"):
        RefinedFormat(seed_bits=seed_bits)
