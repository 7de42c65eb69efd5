"""What the calibration measures, against what it must add up to."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_tools import calibrate, huggingface, regress
from checkpoints_tools.calibrate import DifferentiableModel, Experts

NUM_SEQUENCES, LENGTH = 4, 32


@pytest.fixture(scope="module")
def model(hf_dir) -> DifferentiableModel:
    return calibrate.load_model(huggingface.open_model(hf_dir))


@pytest.fixture(scope="module")
def sequences() -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(1, 250, (NUM_SEQUENCES, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module")
def result(model, sequences) -> calibrate.Calibration:
    return calibrate.calibrate(model, sequences)


@pytest.fixture(scope="module")
def gradients(model, sequences) -> list[Experts]:
    found = calibrate.sequence_gradients(model, sequences)
    return [jax.tree.map(np.asarray, g) for g in found]


def test_fisher_is_the_mean_square_gradient_times_the_targets(result, gradients):
    for block in ("gate_up", "down"):
        squares = np.mean([getattr(g, block) ** 2 for g in gradients], axis=0)
        came = np.stack([getattr(layer, f"{block}_fisher") for layer in result.layers])
        assert came.max() > 0
        wanted = (LENGTH - 1) * squares
        np.testing.assert_allclose(came, wanted, rtol=1e-4, atol=1e-7 * wanted.max())


def test_the_gradient_is_the_slope_of_the_loss(model, sequences, gradients):
    rng = np.random.default_rng(1)
    step = jax.tree.map(
        lambda w: jnp.asarray(0.01 * rng.standard_normal(w.shape), jnp.float32),
        model.experts,
    )
    loss = jax.jit(model.loss)

    def moved(sign: float) -> float:
        experts = jax.tree.map(
            lambda w, d: w + np.float32(sign) * d, model.experts, step
        )
        return float(loss(experts, model.dense, sequences[0])[0])

    slope = sum(
        float((np.asarray(getattr(step, b)) * getattr(gradients[0], b)).sum())
        for b in ("gate_up", "down")
    )
    assert (moved(1) - moved(-1)) / 2 == pytest.approx(slope, rel=0.05, abs=1e-4)


def test_every_token_is_counted_top_k_times(model, result):
    for layer in result.layers:
        total = NUM_SEQUENCES * LENGTH * model.config.experts_per_token
        assert layer.tokens.sum() == total


def test_input_moments_agree_with_the_norms(model, result):
    config = model.config
    for i, layer in enumerate(result.layers):
        squares = (result.features[:, i, 1] ** 2).sum() * LENGTH * config.hidden_size
        came = layer.gate_up_moments.sum()
        assert came == pytest.approx(config.experts_per_token * squares, rel=1e-4)


def test_features_are_mean_rms_and_maximum(result):
    mean, rms, largest = np.moveaxis(result.features, -1, 0)
    assert (mean > 0).all()
    assert (mean <= rms * (1 + 1e-6)).all()
    assert (rms <= largest * (1 + 1e-6)).all()


def test_damage_of_sequences_averages_to_the_loss_of_pages(
    model, sequences, result, gradients
):
    errors = jax.tree.map(
        lambda w: np.asarray(w) ** 2 * np.float32(0.01), model.experts
    )
    damage = regress.sequence_damage(model, errors, sequences)
    assert damage.shape == (NUM_SEQUENCES, 2, 2)
    for layer, statistics in enumerate(result.layers):
        for block, name in enumerate(("gate_up", "down")):
            fisher = getattr(statistics, f"{name}_fisher")
            loss = 0.5 * (fisher * getattr(errors, name)[layer]).sum()
            assert damage[:, layer, block].mean() == pytest.approx(loss, rel=1e-3)


def test_progress_counts_every_token(model, sequences):
    seen = []
    errors = jax.tree.map(np.zeros_like, model.experts)
    regress.sequence_damage(model, errors, sequences, seen.append)
    calibrate.calibrate(model, sequences, seen.append)
    assert sum(seen) == 2 * sequences.size


def test_calibration_twice_is_the_same(model, sequences, result):
    again = calibrate.calibrate(model, sequences)
    for a, b in zip(again.layers, result.layers, strict=True):
        for field in dataclasses.fields(a):
            np.testing.assert_array_equal(
                getattr(a, field.name), getattr(b, field.name)
            )
