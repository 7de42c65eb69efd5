"""The prompt residual finds what is there, and one where there is nothing."""

import numpy as np
import pytest

from checkpoints_tools import regress


def features(num_sequences: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mean = rng.uniform(1, 2, (num_sequences, 1, 1))
    parts = [mean, mean * 1.1 + rng.normal(0, 0.02, mean.shape), mean * 4]
    return np.concatenate(parts, axis=-1).astype(np.float32)


def eta(fit: regress.PromptResidual, x: np.ndarray) -> np.ndarray:
    return fit.bias + np.einsum("lbf,slf->slb", fit.weights, x)


def test_a_linear_dependence_is_found():
    x = features(200)
    ratio = 0.25 + 0.5 * x[:, 0, 0]
    damage = np.stack([ratio, 3e-6 * ratio], axis=1)[:, None].astype(np.float32)
    fit = regress.fit(x, damage)
    wanted = damage / damage.mean(axis=0)
    np.testing.assert_allclose(eta(fit, x), wanted, atol=0.02)
    assert (fit.r2 > 0.99).all()
    assert (fit.r2_left_out > 0.99).all()


def test_the_mean_over_the_sequences_is_one():
    x = features(50)
    damage = np.random.default_rng(1).exponential(size=(50, 1, 2)).astype(np.float32)
    fit = regress.fit(x, damage)
    np.testing.assert_allclose(eta(fit, x).mean(axis=0), 1, rtol=1e-4)
    assert (fit.r2_left_out < fit.r2).all()
    assert np.abs(eta(fit, x) - 1).max() < 0.3  # noise is not learnt


@pytest.mark.parametrize(
    "damage",
    [np.zeros((5, 1, 2)), np.full((5, 1, 2), 0.5), np.full((1, 1, 2), 0.5)],
    ids=["none", "equal", "one sequence"],
)
def test_nothing_to_learn_gives_one(damage: np.ndarray):
    x = features(len(damage))
    fit = regress.fit(x, damage.astype(np.float32))
    np.testing.assert_array_equal(eta(fit, x), np.ones((len(damage), 1, 2)))
    assert (fit.r2 == 0).all()
