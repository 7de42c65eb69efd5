"""Prompt residual: how the damage of low bits depends on the prompt.

For sequence i, with g_i the gradient of its mean loss over T tokens, the damage of a
block of layer l read at seed bits is

    damage_i = T / 2 * sum over experts and weights of g_i**2 * (w - w_seed)**2

which averages to the page losses of `sensitivity` over all sequences. Its ratio to
the mean is fitted on the features of the sequence by ridge regression (their mean and
root mean square are nearly collinear). How strongly the slopes are held back is chosen
by leaving out each sequence in turn: where the features tell nothing, eta stays near 1.
Standardisation is folded into the result:

    eta = bias + weights @ features
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Float64, Int32
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import LeaveOneOut, cross_val_predict

from checkpoints_tools.calibrate import (
    DifferentiableModel,
    Experts,
    sequence_gradients,
)
from pagedweight_jax.formats.common import host_array, on_host

_RIDGES = np.logspace(-1, 4, 11)
"""Penalties to choose from; standard deviations of the features are 1."""

_LEAST_SEQUENCES = 4


@dataclass(frozen=True, kw_only=True)
class PromptResidual:
    """The fitted regression of every layer and block (0 gate_up, 1 down).

    Attributes:
      r2: share of the variance that the fit explains.
      r2_left_out: the same, each sequence predicted from all others; honest, and
        negative where the features tell nothing.
    """

    weights: Float32[np.ndarray, "L 2 3"]
    bias: Float32[np.ndarray, "L 2"]
    r2: Float32[np.ndarray, "L 2"]
    r2_left_out: Float32[np.ndarray, "L 2"]


def sequence_damage(
    model: DifferentiableModel,
    squared_errors: Experts,
    sequences: Int32[np.ndarray, "S T"],
    advance: Callable[[int], None] = lambda tokens: None,
) -> Float32[np.ndarray, "S L 2"]:
    """Computes the damage of seed bits for every sequence, layer and block.

    Args:
      squared_errors: squared difference of each weight and its seed level.
      advance: is told the tokens of each sequence when it is done.
    """
    num_targets = sequences.shape[1] - 1
    squared_errors = jax.tree.map(host_array, squared_errors)
    damage = []
    for gradient in sequence_gradients(model, sequences):
        blocks = _weighted_squares(gradient, squared_errors)
        damage.append(0.5 * num_targets * np.asarray(blocks))
        advance(sequences.shape[1])
    return np.stack(damage).astype(np.float32)


@on_host
@jax.jit
def _weighted_squares(
    gradient: Experts, squared_errors: Experts
) -> Float32[Array, "L 2"]:
    def one_block(gradient: Array, errors: Array) -> Array:
        return jnp.sum(gradient**2 * errors, axis=(1, 2, 3))

    blocks = jax.tree.map(one_block, gradient, squared_errors)
    return jnp.stack([blocks.gate_up, blocks.down], axis=1)


def fit(
    features: Float32[np.ndarray, "S L 3"], damage: Float32[np.ndarray, "S L 2"]
) -> PromptResidual:
    """Fits the ratio of damage to mean damage for every layer and block.

    A block without damage, or with too few sequences, gets eta = 1.
    """
    _, num_layers, num_features = features.shape
    weights = np.zeros((num_layers, 2, num_features), np.float32)
    bias = np.ones((num_layers, 2), np.float32)
    r2, left_out = np.zeros((2, num_layers, 2), np.float32)
    for place in np.ndindex(num_layers, 2):
        x, y = features[:, place[0]].astype(np.float64), damage[:, *place]
        if len(y) >= _LEAST_SEQUENCES and y.std() > 0:
            ratio = y.astype(np.float64) / y.mean(dtype=np.float64)
            weights[place], bias[place], r2[place], left_out[place] = _fit_one(x, ratio)
    return PromptResidual(weights=weights, bias=bias, r2=r2, r2_left_out=left_out)


def _fit_one(
    x: Float64[np.ndarray, "S 3"], y: Float64[np.ndarray, "S"]
) -> tuple[Float64[np.ndarray, "3"], float, float, float]:
    """Returns slopes, bias, R2, and R2 on sequences that were left out."""
    mean, spread = x.mean(axis=0), x.std(axis=0)
    spread[spread == 0] = 1
    standard = (x - mean) / spread
    ridge = RidgeCV(_RIDGES).fit(standard, y)
    slopes = np.asarray(ridge.coef_) / spread
    left_out = cross_val_predict(RidgeCV(_RIDGES), standard, y, cv=LeaveOneOut())
    return (
        slopes,
        float(ridge.intercept_ - slopes @ mean),
        float(ridge.score(standard, y)),
        float(1 - ((y - left_out) ** 2).mean() / y.var()),
    )
