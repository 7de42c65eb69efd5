"""Formats and weights that the tests of formats share."""

import numpy as np
from hypothesis import strategies as st

from pagedweight_jax.formats import AffineFormat, CodebookFormat, Format, RefinedFormat

FORMATS: tuple[Format, ...] = (
    AffineFormat(),
    AffineFormat(seed_bits=2, parent_bits=8, group_size=64),
    CodebookFormat(),
    CodebookFormat(seed_bits=2, parent_bits=5),
    RefinedFormat(),
    RefinedFormat(seed_bits=4, parent_bits=8),
)

SHAPE = (2, 64, 128)  # experts, rows, columns

seeds = st.integers(0, 2**32 - 1)


def random_weights(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Weights as models have them: around zero, each row of a width of its own."""
    rng = np.random.default_rng(seed)
    width = 0.02 * np.exp(rng.normal(size=(*shape[:-1], 1)))
    return (width * rng.standard_t(6, size=shape)).astype(np.float32)


def random_importance(seed: int, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Importance as squared gradients have it: over many orders of magnitude."""
    rng = np.random.default_rng([seed, 1])
    return np.exp(2 * rng.normal(size=shape)).astype(np.float32)


def levels(form: Format) -> range:
    return range(form.seed_bits, form.parent_bits + 1)


def weighted_error(
    w: np.ndarray, value: np.ndarray, h: np.ndarray, size: int
) -> np.ndarray:
    """Weighted mean square error of each run of ``size`` columns."""
    square = (h * (w - np.asarray(value)) ** 2).astype(np.float64)
    weight = h.astype(np.float64).reshape(-1, size).sum(axis=1)
    return square.reshape(-1, size).sum(axis=1) / weight
