"""Calibration: what the loss of a model says about each of its expert weights.

For every sequence i of T predicted tokens, g_i is the gradient of its mean loss. If
the gradients of single tokens are independent around zero (they are, near a minimum),
a squared mean of T of them is 1/T of the mean square:

    fisher = mean over tokens of (token gradient)**2  ~=  T * mean_i g_i**2

This diagonal of the Fisher information stands for the Hessian of the mean loss: a
change d of the weights is predicted to raise the loss by 1/2 sum(fisher * d**2) nats
per token (Optimal Brain Damage, LeCun et al., 1990).

All of it is float32 on the CPU. The experts, their sums of squared gradients and the
gradients of one sequence are in memory together: 12 bytes an expert weight.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float32, Int32

from checkpoints_tools.huggingface import (
    HuggingFaceModel,
    Tree,
    load_dense,
    load_experts,
)
from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.interface import (
    InputMoments,
    RoutingCounts,
    uncached_inputs,
)
from pagedweight_jax.models.qwen2_moe import Qwen2Moe, layer_runs
from pallas_kernels.paged_attention import KvLayout
from pallas_kernels.pytree import pytree


@pytree
@dataclass(frozen=True, kw_only=True)
class Experts:
    """One number for every routed expert weight of a model."""

    gate_up: Float32[Array | np.ndarray, "L E N D"]
    down: Float32[Array | np.ndarray, "L E D F"]


@pytree
@dataclass(frozen=True, kw_only=True)
class Sums:
    """What is added up over the calibration sequences."""

    squared_gradients: Experts
    moments: InputMoments
    tokens: Int32[Array | np.ndarray, "L E"]


@dataclass(frozen=True, kw_only=True)
class LayerStatistics:
    """What the calibration says about the experts of one layer, in host memory.

    Attributes:
      gate_up_fisher, down_fisher: diagonal of the Fisher information.
      gate_up_moments, down_moments: squared inputs, summed over routed tokens.
      tokens: tokens routed to each expert.
    """

    gate_up_fisher: Float32[np.ndarray, "E N D"]
    down_fisher: Float32[np.ndarray, "E D F"]
    gate_up_moments: Float32[np.ndarray, "E D"]
    down_moments: Float32[np.ndarray, "E F"]
    tokens: Int32[np.ndarray, "E"]


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The result of a calibration, in host memory.

    Attributes:
      layers: statistics of each MoE layer.
      features: mean, root mean square and maximum over the tokens of each sequence of
        the norm of each MoE input.
      losses: mean loss of each sequence.
    """

    layers: list[LayerStatistics]
    features: Float32[np.ndarray, "S L 3"]
    losses: Float32[np.ndarray, "S"]


Loss = Callable[[Experts, Tree, Array], tuple[Array, RoutingCounts]]
"""The mean loss of a sequence and its routing, of experts, dense weights, tokens."""


@dataclass(frozen=True, kw_only=True)
class DifferentiableModel:
    """A float32 model whose loss can be differentiated by its experts."""

    config: ModelConfig
    dense: Tree
    experts: Experts
    loss: Loss


def load_model(source: HuggingFaceModel) -> DifferentiableModel:
    """Loads a checkpoint for calibration."""
    config = source.config
    layers = [load_experts(source, i) for i in range(config.num_moe_layers)]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return DifferentiableModel(
            config=config,
            dense=jax.tree.map(
                lambda a: jnp.asarray(a.astype(np.float32)), load_dense(source)
            ),
            experts=Experts(
                gate_up=jnp.stack([gate_up for gate_up, _ in layers]),
                down=jnp.stack([down for _, down in layers]),
            ),
            loss=_loss_function(config),
        )


def calibrate(
    model: DifferentiableModel,
    sequences: Int32[np.ndarray, "S T"],
    advance: Callable[[int], None] = lambda tokens: None,
) -> Calibration:
    """Runs the sequences forward and backward, one at a time.

    Args:
      advance: is told the tokens of each sequence when it is done.
    """
    features, losses = [], []
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        sums = _zero_sums(model)
        for tokens in sequences:
            sums, loss, norms = _add_sequence(
                model.loss, sums, model.experts, model.dense, tokens
            )
            losses.append(float(loss))
            features.append(norm_features(np.asarray(norms), len(tokens)))
            advance(len(tokens))
    num_sequences, num_targets = len(sequences), sequences.shape[1] - 1
    return Calibration(
        layers=_layer_statistics(sums, np.float32(num_targets / num_sequences)),
        features=np.stack(features),
        losses=np.asarray(losses, np.float32),
    )


def _layer_statistics(sums: Sums, scale: np.float32) -> list[LayerStatistics]:
    """Cuts sums by layer; ``scale`` makes Fisher information of squared gradients."""
    squares, moments = sums.squared_gradients, sums.moments
    return [
        LayerStatistics(
            gate_up_fisher=np.asarray(squares.gate_up[layer]) * scale,
            down_fisher=np.asarray(squares.down[layer]) * scale,
            gate_up_moments=np.asarray(moments.gate_up[layer]),
            down_moments=np.asarray(moments.down[layer]),
            tokens=np.asarray(sums.tokens[layer]),
        )
        for layer in range(len(sums.tokens))
    ]


def sequence_gradients(
    model: DifferentiableModel, sequences: Int32[np.ndarray, "S T"]
) -> Iterator[Experts]:
    """Yields the gradient of the mean loss of each sequence."""
    for tokens in sequences:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            gradient = _gradient(model.loss, model.experts, model.dense, tokens)
        yield gradient


def norm_features(
    norms: Float32[np.ndarray, "L 3"], num_tokens: int
) -> Float32[np.ndarray, "L 3"]:
    """Turns sum, sum of squares and maximum into mean, root mean square and maximum."""
    mean, mean_square = norms[:, 0] / num_tokens, norms[:, 1] / num_tokens
    return np.stack([mean, np.sqrt(mean_square), norms[:, 2]], axis=1)


@functools.cache  # one function a model, so that it is compiled once
def _loss_function(
    config: ModelConfig,
) -> Loss:
    """Returns the mean loss of a sequence as a function of the experts."""
    abstract = nnx.eval_shape(
        lambda: Qwen2Moe(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    )
    graphdef, empty = nnx.split(abstract)
    layout = KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=1,
        dtype="float32",
        frame_words=2 * config.num_kv_heads * config.head_dim,
    )

    def loss(
        experts: Experts, dense: Tree, tokens: Int32[Array, "T"]
    ) -> tuple[Array, RoutingCounts]:
        state = jax.tree.map(lambda x: x, empty)
        nnx.replace_by_pure_dict(state, with_experts(config, dense, experts))
        model = nnx.merge(graphdef, state)
        inputs = uncached_inputs(tokens[None], layout)
        out = model(inputs, layout, collect_moments=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model.logits(out.hidden[:-1]), tokens[1:]
        )
        return jnp.mean(losses), out.routing

    return loss


def with_experts(config: ModelConfig, dense: Tree, experts: Experts) -> Tree:
    """Puts experts into the pure dict of a model, run by run."""
    runs, first = dict(dense["runs"]), 0
    for run, (routed, length) in enumerate(layer_runs(config)):
        if routed:
            part = slice(first, first + length)
            here = {"gate_up": experts.gate_up[part], "down": experts.down[part]}
            runs[run] = {**runs[run], "mlp": {**runs[run]["mlp"], "experts": here}}
            first += length
    return {**dense, "runs": runs}


def _zero_sums(model: DifferentiableModel) -> Sums:
    config = model.config
    shape = (config.num_moe_layers, config.num_experts)
    return Sums(
        squared_gradients=jax.tree.map(jnp.zeros_like, model.experts),
        moments=InputMoments(
            gate_up=jnp.zeros((*shape, config.hidden_size)),
            down=jnp.zeros((*shape, config.expert_width)),
        ),
        tokens=jnp.zeros(shape, jnp.int32),
    )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _add_sequence(
    loss: Loss,
    sums: Sums,
    experts: Experts,
    dense: Tree,
    tokens: Int32[Array, "T"],
) -> tuple[Sums, Float32[Array, ""], Float32[Array, "L 3"]]:
    """Adds the squared gradients, input moments and counts of one sequence."""
    differentiate = jax.value_and_grad(loss, has_aux=True)
    (value, routing), gradient = differentiate(experts, dense, tokens)
    one = Sums(
        squared_gradients=jax.tree.map(jnp.square, gradient),
        moments=routing.moments,
        tokens=routing.tokens,
    )
    return jax.tree.map(jnp.add, sums, one), value, routing.norms


@functools.partial(jax.jit, static_argnums=0)
def _gradient(
    loss: Loss,
    experts: Experts,
    dense: Tree,
    tokens: Int32[Array, "T"],
) -> Experts:
    """Returns the gradient of the mean loss of one sequence."""
    return jax.grad(loss, has_aux=True)(experts, dense, tokens)[0]
