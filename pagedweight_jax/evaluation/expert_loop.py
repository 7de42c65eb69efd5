"""The routed experts of a step by themselves: what precision changes, and no more."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, BFloat16, Float32, Int32, UInt32

from pagedweight_jax.evaluation.random_model import RandomModel
from pagedweight_jax.models.interface import Pages
from pagedweight_jax.models.moe import SideTableParam
from pagedweight_jax.models.qwen2_moe import SparseMoe
from pallas_kernels.fused_moe.arg_specs import MoeSpec
from pallas_kernels.testing import random_routing

_ROUTINGS = 4


class ExpertLoop:
    """All layers' experts one after the other, as a GPU runs them in the model.

    They are the model's own; tokens and routings are random.
    """

    def __init__(self, model: RandomModel) -> None:
        """Compiles nothing yet."""
        self._model = model
        self._program = jax.jit(_program(model))

    def calls(
        self,
        pool: UInt32[Array, "num_frames frame_words"],
        pages: Pages | None,
        num_tokens: int,
    ) -> Callable[[int], Array]:
        """Returns a function of the number of the call, which chooses the routing."""
        config = self._model.config
        k = config.experts_per_token
        ids = [jnp.asarray(i) for i in self._routings(num_tokens)]
        shape = (num_tokens, config.hidden_size)
        x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
        weights = jnp.full((num_tokens, k), 1 / k, jnp.float32)
        fixed = (self._model.params, pool, pages, x, weights)
        return lambda i: self._program(*fixed, ids[i % _ROUTINGS])

    def _routings(self, num_tokens: int) -> Int32[np.ndarray, "routings L T top_k"]:
        config = self._model.config
        spec = MoeSpec(
            width=config.hidden_size,
            expert_width=config.expert_width,
            num_experts=config.num_experts,
            top_k=config.experts_per_token,
        )
        shape = (_ROUTINGS, config.num_moe_layers, num_tokens)
        rng = np.random.default_rng(0)
        return random_routing(rng, int(np.prod(shape)), spec).reshape(*shape, -1)


def _program(model: RandomModel) -> Callable[..., Array]:
    def run(
        params: nnx.State,
        pool: UInt32[Array, "num_frames frame_words"],
        pages: Pages | None,
        x: BFloat16[Array, "T D"],
        weights: Float32[Array, "T top_k"],
        ids: Int32[Array, "L T top_k"],
    ) -> Array:
        (layers,) = nnx.merge(model.graphdef, params).runs
        assert isinstance(layers.mlp, SparseMoe)
        structure, tables, state = nnx.split(layers.mlp.experts, SideTableParam, ...)

        @jax.jit  # lowered once
        def layer(x: Array, own: nnx.State, number: Array, ids: Array) -> Array:
            experts = nnx.merge(structure, tables, own)
            return x + experts(x, ids, weights, pool, pages, number)

        for number in range(len(ids)):
            own = jax.tree.map(lambda a: a[number], state)  # noqa: B023
            x = layer(x, own, jnp.int32(number), ids[number])
        return x

    return run
