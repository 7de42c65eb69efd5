"""Models of full size with random weights, made on the device: no checkpoint needed.

Only speed can be measured with them. Weights are of a size that keeps activations near
one, so that the router spreads tokens as widely as it can.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array

from pagedweight_jax.config import ModelConfig, parse_config
from pagedweight_jax.models.moe import SideTableShapes
from pagedweight_jax.models.qwen2_moe import Qwen2Moe

QWEN1_5_MOE_A2_7B = parse_config(
    {
        "model_type": "qwen2_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "intermediate_size": 5632,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 8192,
    },
    eos=151_643,
)

TINY = parse_config(
    {
        "model_type": "qwen2_moe",
        "vocab_size": 256,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
        "intermediate_size": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 8192,
    },
    eos=0,
)
"""For tests: a bench of it takes seconds on a CPU."""

CONFIGS = {"qwen1.5-moe-a2.7b": QWEN1_5_MOE_A2_7B, "tiny": TINY}


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """A model on the device; ``tables`` is None where experts are bf16 matrices."""

    config: ModelConfig
    tables: SideTableShapes | None
    graphdef: nnx.GraphDef[Qwen2Moe]
    params: nnx.State

    def expert_bytes(self) -> int:
        """Returns the bytes of all routed experts' parameters: matrices or tables."""
        return sum(a.nbytes for path, a in self._leaves() if "['experts']" in path)

    def dense_bytes(self) -> int:
        """Returns the bytes of what every step reads: all else but the embedding.

        Of the embedding a step reads a row a token, unless it is the head, too.
        """
        own = [(path, a) for path, a in self._leaves() if "['experts']" not in path]
        if not self.config.tie_word_embeddings:
            own = [(path, a) for path, a in own if "['embed_tokens']" not in path]
        return sum(a.nbytes for _, a in own)

    def _leaves(self) -> list[tuple[str, Array]]:
        leaves = jax.tree.leaves_with_path(nnx.to_pure_dict(self.params))
        return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def affine_tables(config: ModelConfig, parent_bits: int = 6) -> SideTableShapes:
    """Returns the shapes that a conversion with its defaults gives the tables."""
    sizes = config.hidden_size, config.expert_width
    gate_up, down = (128 if size % 128 == 0 else 64 for size in sizes)
    return SideTableShapes(
        format="affine",
        parent_bits=parent_bits,
        seed_bits=3,
        group_size=(gate_up, down),
    )


def random_model(
    config: ModelConfig, tables: SideTableShapes | None, dtype: str = "bfloat16"
) -> RandomModel:
    """Makes a model leaf by leaf, so that no more than one leaf exists twice.

    Args:
      config: sizes.
      tables: side tables of paged experts; None makes experts of matrices.
      dtype: of parameters and activations.
    """
    abstract = nnx.eval_shape(
        lambda: Qwen2Moe(
            config, tables=tables, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)
        )
    )
    graphdef, params = nnx.split(abstract)
    shapes = jax.tree.leaves_with_path(nnx.to_pure_dict(params))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    leaves = [
        _leaf(jax.tree_util.keystr(path), shape, key)
        for (path, shape), key in zip(shapes, keys, strict=True)
    ]
    tree = jax.tree.structure(nnx.to_pure_dict(params)).unflatten(leaves)
    nnx.replace_by_pure_dict(params, tree)
    return RandomModel(config=config, tables=tables, graphdef=graphdef, params=params)


def _leaf(path: str, leaf: Any, key: Array) -> Array:
    if "norm" in path:
        return jnp.ones(leaf.shape, leaf.dtype)
    if "bias" in path:
        return jnp.zeros(leaf.shape, leaf.dtype)
    if leaf.dtype == jnp.uint32:
        return _scales_and_zeros(leaf.shape, key)
    return _weights(leaf.shape, leaf.dtype, key)


@partial(jax.jit, static_argnums=(0, 1))
def _weights(shape: tuple[int, ...], dtype: jnp.dtype, key: Array) -> Array:
    """Makes matrices (out, in), one after the other: random bits take more memory."""
    *batch, rows, columns = shape
    keys = jax.random.split(key, tuple(batch)).reshape(-1)

    def one(key: Array) -> Array:
        return columns**-0.5 * jax.random.normal(key, (rows, columns), dtype)

    return lax.map(one, keys).reshape(shape)


@partial(jax.jit, static_argnums=0)
def _scales_and_zeros(shape: tuple[int, ...], key: Array) -> Array:
    """Makes words of affine tables: scale low, zero high, weights around zero."""
    scale = jax.random.uniform(key, shape, jnp.float16, 0.05, 0.1)
    low, high = (
        lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32)
        for half in (scale, -scale / 2)
    )
    return low | high << 16
