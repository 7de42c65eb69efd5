"""Importance, planes and page losses of one layer."""

import numpy as np
import pytest

from checkpoints_tools import sensitivity
from checkpoints_tools.calibrate import LayerStatistics
from checkpoints_tools.quantize import (
    LayerWeights,
    layer_fisher,
    pack_layer,
    quantize_layer,
    unpack_layer,
)
from pagedweight_jax.formats import AffineFormat, CodebookFormat, Format, RefinedFormat

EXPERTS, WIDTH, INNER = 3, 128, 64
FORMATS = (
    AffineFormat(parent_bits=5),
    CodebookFormat(parent_bits=4),
    RefinedFormat(parent_bits=5),
)


def layer_weights(seed: int) -> LayerWeights:
    rng = np.random.default_rng(seed)
    return LayerWeights(
        gate_up=rng.normal(size=(EXPERTS, 2 * INNER, WIDTH)).astype(np.float32),
        down=rng.normal(size=(EXPERTS, WIDTH, INNER)).astype(np.float32),
    )


def statistics(tokens: list[int]) -> LayerStatistics:
    """Statistics that are zero for experts without tokens."""
    rng = np.random.default_rng(5)
    seen = np.array(tokens) > 0
    fisher = [
        rng.exponential(size=shape).astype(np.float32) * seen[:, None, None]
        for shape in ((EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER))
    ]
    moments = [
        rng.exponential(size=(EXPERTS, k)).astype(np.float32) * seen[:, None]
        for k in (WIDTH, INNER)
    ]
    return LayerStatistics(
        gate_up_fisher=fisher[0],
        down_fisher=fisher[1],
        gate_up_moments=moments[0],
        down_moments=moments[1],
        tokens=np.array(tokens, np.int32),
    )


def test_experts_that_saw_tokens_keep_their_fisher():
    given = statistics([5, 0, 7])
    came = layer_fisher(given)
    for expert in (0, 2):
        np.testing.assert_array_equal(
            came.gate_up[expert], given.gate_up_fisher[expert]
        )
        np.testing.assert_array_equal(came.down[expert], given.down_fisher[expert])


def test_an_expert_without_tokens_follows_the_inputs_of_its_layer():
    given = statistics([5, 0, 7])
    came = layer_fisher(given)
    for fisher, moments in (
        (came.gate_up, given.gate_up_moments),
        (came.down, given.down_moments),
    ):
        profile = moments.sum(axis=0)
        for row in fisher[1]:
            np.testing.assert_allclose(
                row / row.mean(), profile / profile.mean(), rtol=1e-5
            )
        assert 0 < fisher[1].mean() < 0.2 * fisher[0].mean()


def test_a_layer_without_any_token_is_sane():
    came = layer_fisher(statistics([0, 0, 0]))
    assert (came.gate_up > 0).all()
    assert np.ptp(came.down) == 0


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_an_expert_without_tokens_gets_planes_and_a_loss(form: Format):
    weights = layer_weights(0)
    fisher = layer_fisher(statistics([5, 0, 7]))
    layer = quantize_layer(weights, fisher, form)
    loss = sensitivity.layer_loss(weights, layer, fisher, form)
    assert (loss[:, :, form.seed_bits] > 0).all()
    assert (loss[1] <= loss[[0, 2]].min(axis=0))[:, form.seed_bits].all()
    seed = layer.weights(form, form.seed_bits)
    error = ((seed.gate_up - weights.gate_up)[1] ** 2).mean()
    assert error < 0.06 * (weights.gate_up[1] ** 2).mean()


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_unpacking_undoes_packing(form: Format):
    weights = layer_weights(1)
    layer = quantize_layer(weights, weights_like(weights, 1.0), form)
    pages = pack_layer(layer, form.parent_bits)
    assert len(pages.planes) == form.parent_bits
    assert pages.planes[0].shape == (EXPERTS, 3, WIDTH * INNER // 32)
    came = unpack_layer(pages)
    np.testing.assert_array_equal(came.gate_up_codes, layer.gate_up_codes)
    np.testing.assert_array_equal(came.down_codes, layer.down_codes)


def test_quantising_in_parts_is_quantising_at_once(monkeypatch):
    weights, form = layer_weights(2), FORMATS[0]
    importance = layer_fisher(statistics([5, 0, 7]))
    whole = quantize_layer(weights, importance, form)
    monkeypatch.setattr("checkpoints_tools.quantize._WEIGHTS_AT_ONCE", 1)
    seen = []
    parts = quantize_layer(weights, importance, form, seen.append)
    assert len(seen) == 2 * EXPERTS
    assert sum(seen) == weights.size
    np.testing.assert_array_equal(parts.gate_up_codes, whole.gate_up_codes)
    np.testing.assert_array_equal(parts.down.scale, whole.down.scale)


def weights_like(weights: LayerWeights, value: float) -> LayerWeights:
    return LayerWeights(
        gate_up=np.full_like(weights.gate_up, value),
        down=np.full_like(weights.down, value),
    )


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_loss_is_half_the_weighted_square_error(form: Format):
    weights = layer_weights(3)
    fisher = layer_fisher(statistics([5, 4, 7]))
    layer = quantize_layer(weights, fisher, form)
    loss = sensitivity.layer_loss(weights, layer, fisher, form)
    assert loss.shape == (EXPERTS, 2, form.parent_bits + 1)
    assert np.isinf(loss[..., : form.seed_bits]).all()
    assert (loss[..., form.parent_bits] == 0).all()

    def error(bits: int) -> float:
        delta = (weights.down - layer.weights(form, bits).down)[2]
        return 0.5 * float((fisher.down[2] * delta**2).sum())

    for bits in range(form.seed_bits, form.parent_bits):
        wanted = error(bits) - error(form.parent_bits)
        assert loss[2, 1, bits] == pytest.approx(wanted, rel=1e-3)


def test_the_loss_never_rises_with_the_bits():
    # One weight in the middle of a 3-bit cell is worse at 4 bits.
    form = AffineFormat(seed_bits=3, parent_bits=5)
    weights = layer_weights(4)
    layer = quantize_layer(weights, weights_like(weights, 1.0), form)
    middles = layer.weights(form, 3)
    loss = sensitivity.layer_loss(middles, layer, weights_like(weights, 1.0), form)
    levels = loss[..., 3:]
    assert (np.diff(levels, axis=-1) <= 0).all()
    assert (levels >= 0).all()
