"""Sensitivity: the loss that each page is predicted to cost at each number of bits."""

import numpy as np
from jaxtyping import Float32

from checkpoints_tools.quantize import LayerWeights, QuantizedLayer
from pagedweight_jax.formats import Format


def layer_loss(
    weights: LayerWeights, layer: QuantizedLayer, fisher: LayerWeights, form: Format
) -> Float32[np.ndarray, "E 2 levels"]:
    """Predicts the rise of the mean loss for every page of a layer at every level.

        loss[b] = 1/2 sum_w fisher_w (w - w_b)**2, less the same at parent bits

    A level of more bits that fits a page worse by chance is given the loss of the
    next better one, so that the loss never rises with the bits.

    Returns:
      Nats per token; 0 at parent bits, infinite below seed bits.
    """
    loss = np.full((len(weights.down), 2, form.parent_bits + 1), np.inf, np.float32)
    for bits in range(form.seed_bits, form.parent_bits + 1):
        level = layer.weights(form, bits)
        for block in ("gate_up", "down"):
            delta = getattr(weights, block) - getattr(level, block)
            loss[:, int(block == "down"), bits] = 0.5 * np.einsum(
                "enk,enk,enk->e", getattr(fisher, block), delta, delta
            )
    levels = loss[..., form.seed_bits :]
    levels -= levels[..., -1:].copy()
    levels[:] = np.maximum.accumulate(levels[..., ::-1], axis=-1)[..., ::-1]
    return loss
