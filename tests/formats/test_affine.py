"""The affine format against a loop, and its exact cases."""

import itertools

import numpy as np
import pytest
from format_cases import random_importance, random_weights, seeds
from hypothesis import given, settings

from pagedweight_jax.formats import AffineFormat, affine

SHAPE = (64, 128)


def cell(w: float, scale: float, zero: float, bits: int) -> int:
    return int(np.clip(np.floor((w - zero) / scale * 2**bits), 0, 2**bits - 1))


def loop_error(w, h, scale: float, zero: float, form: AffineFormat) -> float:
    """Weighted error of one group over all levels, one weight after the other."""
    total = 0.0
    for x, importance in zip(w, h, strict=True):
        code = cell(x, scale, zero, form.parent_bits)
        for bits in range(form.seed_bits, form.parent_bits + 1):
            level = code >> (form.parent_bits - bits)
            value = scale * (level + 0.5) * 2.0**-bits + zero
            total += 2.0**bits * importance * (x - value) ** 2
    return total / sum(h)


def loop_ranges(w, form: AffineFormat):
    """All ranges of the grid, as float16 holds them."""
    low, high = float(min(w)), float(max(w))
    scale = (high - low) / (1 - 2.0**-form.parent_bits)
    zero = low - (scale - (high - low)) / 2
    for a, b in itertools.product(affine._CUTS, repeat=2):
        yield np.float16(scale * (1 - a - b)), np.float16(zero + a * scale)


@settings(max_examples=3)
@given(seed=seeds)
def test_no_range_of_the_grid_is_better(seed: int):
    form = AffineFormat(seed_bits=2, parent_bits=5, group_size=64)
    w, h = random_weights(seed, (64, 64)), random_importance(seed, (64, 64))
    codes, tables = form.quantize(w, h)
    chosen = float(tables.scale[0, 0]), float(tables.zero[0, 0])
    came = loop_error(w[0], h[0], *chosen, form)
    best = min(
        loop_error(w[0], h[0], float(s), float(z), form)
        for s, z in loop_ranges(w[0], form)
    )
    assert came <= best * (1 + 1e-4)
    wanted = [cell(x, *chosen, form.parent_bits) for x in w[0].astype(np.float64)]
    # float32 may put a weight on the edge of two cells into the other one.
    assert np.abs(codes[0].astype(int) - wanted).max() <= 1
    assert (codes[0] == wanted).mean() > 0.95


@settings(max_examples=10)
@given(seed=seeds)
def test_values_on_the_levels_are_kept(seed: int):
    form = AffineFormat(seed_bits=5, parent_bits=5)
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 32, SHAPE)
    codes[:, 0], codes[:, -1] = 0, 31  # the whole range is used
    scale = np.float16(rng.uniform(0.01, 1, (64, 1))).astype(np.float32)
    w = scale * ((codes + 0.5) / 32 - 0.5).astype(np.float32)
    came, tables = form.quantize(w)
    np.testing.assert_array_equal(came, codes)
    again = np.asarray(form.dequantize(came, tables, 5))
    np.testing.assert_allclose(again, w, atol=2**-11 * float(scale.max()))


@pytest.mark.parametrize(("k", "size"), [(384, 128), (704, 64), (1408, 128)])
def test_the_largest_group_size_that_divides_the_columns_is_taken(k: int, size: int):
    assert AffineFormat().group_size_for(k) == size


def test_columns_that_no_group_size_divides_are_refused():
    with pytest.raises(ValueError, match="100 columns are not a multiple"):
        AffineFormat().group_size_for(100)
    with pytest.raises(ValueError, match=r"704 columns .* group_size=128"):
        AffineFormat(group_size=128).quantize(np.zeros((64, 704), np.float32))
