"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): layer, stack, names of the weights.

A layer is ``x += attention(norm1 x); x += moe(norm2 x)``. The routed sum keeps the
softmax weights as they are (unless the config says otherwise), and one shared expert
behind a sigmoid gate sees every token. Some layers may be dense MLPs instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.models.interface import (
    ModelInputs,
    ModelOutputs,
    Pages,
)
from pagedweight_jax.models.layers import (
    Attention,
    GatedMlp,
    Linear,
    RmsNorm,
    next_token_logits,
)
from pagedweight_jax.models.moe import (
    DenseExperts,
    PagedExperts,
    RoutedTokens,
    Router,
    SideTableParam,
    SideTableShapes,
    routed_tokens,
    routing_counts,
)
from pallas_kernels.fused_moe.api import Implementation
from pallas_kernels.paged_attention import KvLayout


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What every layer of a step shares."""

    inputs: ModelInputs
    valid: Bool[Array, "T"]
    layout: KvLayout
    collect_moments: bool


class SparseMoe(nnx.Module):
    """Router, routed experts and the gated shared expert."""

    def __init__(
        self,
        config: ModelConfig,
        tables: SideTableShapes | None,
        implementation: Implementation | None,
        *,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        width = config.hidden_size
        self.gate = Router(
            width,
            config.num_experts,
            config.experts_per_token,
            normalize=config.norm_topk_prob,
            dtype=dtype,
            rngs=rngs,
        )
        sizes = (config.num_experts, width, config.expert_width)
        if tables is None:
            self.experts = DenseExperts(
                *sizes, activation=config.activation, dtype=dtype, rngs=rngs
            )
        else:
            self.experts = PagedExperts(
                *sizes,
                shapes=tables,
                activation=config.activation,
                implementation=implementation,
            )
        self.shared_expert = GatedMlp(
            width, config.shared_expert_width, dtype=dtype, rngs=rngs
        )
        self.shared_expert_gate = Linear(width, 1, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "T D"],
        context: StepContext,
        pages: Pages | None,
        layer: Int32[Array, ""],
    ) -> tuple[Float[Array, "T D"], RoutedTokens]:
        """Returns routed plus shared output, and where the tokens went.

        ``pages`` are those of all layers of the run, and ``layer`` is the place in it.
        """
        ids, shares = self.gate(x, context.valid)
        routed = self.experts(x, ids, shares, context.inputs.pool, pages, layer)
        shared = jax.nn.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        moments = None
        if context.collect_moments and isinstance(self.experts, DenseExperts):
            moments = self.experts.input_moments(x, ids)
        return routed + shared, routed_tokens(x, ids, moments)


class DecoderLayer(nnx.Module):
    """Attention and a feed-forward part, each behind a norm and a residual."""

    def __init__(
        self,
        config: ModelConfig,
        tables: SideTableShapes | None,
        implementation: Implementation | None,
        *,
        routed: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        def norm() -> RmsNorm:
            return RmsNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)

        self.input_layernorm = norm()
        self.self_attn = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            theta=config.rope_theta,
            qkv_bias=config.qkv_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_attention_layernorm = norm()
        if routed:
            self.mlp = SparseMoe(config, tables, implementation, dtype=dtype, rngs=rngs)
        else:
            self.mlp = GatedMlp(
                config.hidden_size, config.dense_width, dtype=dtype, rngs=rngs
            )

    def __call__(
        self,
        x: Float[Array, "T D"],
        context: StepContext,
        first: int,
        layer: Int32[Array, ""],
        pages: Pages | None,
    ) -> tuple[Float[Array, "T D"], UInt32[Array, "T row_words"], RoutedTokens | None]:
        """Returns the new stream, fresh key-value rows and (if routed) the routing.

        ``layer`` is the place in the run, whose first layer is number ``first``.
        """
        inputs = context.inputs
        attended, fresh = self.self_attn(
            self.input_layernorm(x),
            inputs.rows,
            tuple(t.shape[1] for t in inputs.tokens),
            inputs.pool,
            first + layer,
            context.layout,
        )
        x = x + attended
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, SparseMoe):
            y, tokens = self.mlp(normed, context, pages, layer)
            return x + y, fresh, tokens
        return x + self.mlp(normed), fresh, None


def layer_runs(config: ModelConfig) -> list[tuple[bool, int]]:
    """Returns (routed, number of layers) of each run of layers of one kind."""
    return [(kind, len(list(run))) for kind, run in groupby(config.moe_layers)]


class Qwen2Moe(nnx.Module):
    """The whole model; layers of one kind that follow each other are one scan."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        tables: SideTableShapes | None = None,
        implementation: Implementation | None = None,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        """Builds the model with random weights.

        Args:
          config: sizes.
          tables: side tables of paged experts; None makes dense experts.
          implementation: of the fused MoE kernel; None chooses by device.
          dtype: of parameters and activations.
          rngs: for the random weights (use `nnx.eval_shape` to make none).
        """

        def run(routed: bool, length: int) -> DecoderLayer:
            @nnx.split_rngs(splits=length)
            @nnx.vmap(in_axes=0)
            def make(rngs: nnx.Rngs) -> DecoderLayer:
                return DecoderLayer(
                    config,
                    tables,
                    implementation,
                    routed=routed,
                    dtype=dtype,
                    rngs=rngs,
                )

            return make(rngs)

        shape = (config.vocab_size, config.hidden_size)
        init = jax.nn.initializers.normal(0.02)
        self.embed_tokens = nnx.Param(init(rngs.params(), shape, dtype))
        self.runs = nnx.List([run(*kind) for kind in layer_runs(config)])
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = nnx.Param(init(rngs.params(), shape, dtype))
        self.config = config

    def __call__(
        self, inputs: ModelInputs, layout: KvLayout, *, collect_moments: bool = False
    ) -> ModelOutputs:
        """Runs all layers over the step's tokens; the pool is only read."""
        valid = jnp.concatenate(
            [
                _valid_tokens(t, r.lengths)
                for t, r in zip(inputs.tokens, inputs.rows, strict=True)
            ]
        )
        tokens = jnp.concatenate([t.reshape(-1) for t in inputs.tokens])
        context = StepContext(
            inputs=inputs, valid=valid, layout=layout, collect_moments=collect_moments
        )
        x = self.embed_tokens[...][tokens]
        fresh, routed_runs, first, first_moe = [], [], 0, 0
        for layers, (routed, length) in zip(
            self.runs, layer_runs(self.config), strict=True
        ):
            pages = None
            if routed and inputs.pages is not None:
                stop = first_moe + length
                pages = jax.tree.map(lambda a: a[first_moe:stop], inputs.pages)  # noqa: B023
            x, (rows, tokens_of_run) = _scan(layers, x, context, first, length, pages)
            fresh.append(rows)
            first += length
            if routed:
                routed_runs.append(tokens_of_run)
                first_moe += length
        return ModelOutputs(
            hidden=self.norm(x),
            fresh_kv=jnp.concatenate(fresh),
            routing=routing_counts(
                jax.tree.map(lambda *a: jnp.concatenate(a), *routed_runs),
                valid,
                self.config.num_experts,
            ),
        )

    def logits(self, hidden: Float[Array, "*M D"]) -> Float32[Array, "*M V"]:
        """Computes float32 logits from hidden states after the final norm."""
        tied = self.config.tie_word_embeddings
        head = self.embed_tokens if tied else self.lm_head
        return next_token_logits(hidden, head[...])


def _valid_tokens(
    tokens: Int32[Array, "R Q"], lengths: Int32[Array, "R"]
) -> Bool[Array, "R*Q"]:
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    return (offsets < lengths[:, None]).reshape(-1)


def _scan(
    layers: DecoderLayer,
    x: Float[Array, "T D"],
    context: StepContext,
    first: int,
    length: int,
    pages: Pages | None,
) -> tuple[Array, tuple[Array, RoutedTokens | None]]:
    """Runs a stack of equal layers; ``first`` is the number of the first one.

    Pages and side tables are not cut: every layer sees all of them and its number.
    """
    graphdef, tables, state = nnx.split(layers, SideTableParam, ...)

    @jax.jit  # lowered once, however often the loop is unrolled
    def body(
        x: Array, layer: tuple[nnx.State, Array]
    ) -> tuple[Array, tuple[Array, RoutedTokens | None]]:
        state, number = layer
        module = nnx.merge(graphdef, tables, state)
        x, fresh, tokens = module(x, context, first, number, pages)
        return x, (fresh, tokens)

    if not _unrolls():
        return lax.scan(body, x, (state, jnp.arange(length, dtype=jnp.int32)))
    outputs = []
    for number in range(length):
        weights = jax.tree.map(lambda a: a[number], state)  # noqa: B023
        x, output = body(x, (weights, jnp.int32(number)))
        outputs.append(output)
    return x, jax.tree.map(lambda *a: jnp.stack(a), *outputs)


def _unrolls() -> bool:
    """Whether layers are unrolled: on a GPU, where a loop would copy their weights.

    XLA cuts the weights of a layer out of their stack before it multiplies; for
    Qwen1.5-MoE that is 100 MB a layer and step. A fixed place in the stack is read as
    it is. On a CPU the time to compile counts for more.
    """
    return jax.default_backend() == "gpu"


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Where a tensor of a Hugging Face checkpoint goes.

    Attributes:
      name: tensor name in the checkpoint.
      shape: its shape there.
      path: parameter in the model's pure dict.
      index: place within the parameter: layer of the run, expert, rows.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str | int, ...]
    index: tuple[int | slice, ...]


def hf_tensors(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yields every tensor of a Qwen2-MoE checkpoint; none is optional."""
    width, vocab = config.hidden_size, config.vocab_size

    def spec(
        name: str,
        shape: tuple[int, ...],
        path: tuple[str | int, ...],
        index: tuple[int | slice, ...] = (),
    ) -> TensorSpec:
        return TensorSpec(name=name, shape=shape, path=path, index=index)

    yield spec("model.embed_tokens.weight", (vocab, width), ("embed_tokens",))
    yield spec("model.norm.weight", (width,), ("norm", "weight"))
    if not config.tie_word_embeddings:
        yield spec("lm_head.weight", (vocab, width), ("lm_head",))
    number = 0
    for run, (routed, length) in enumerate(layer_runs(config)):
        for layer in range(length):
            prefix = f"model.layers.{number}."
            for name, shape, path, index in _layer_tensors(config, routed):
                yield spec(prefix + name, shape, ("runs", run, *path), (layer, *index))
            number += 1


_LayerTensor = tuple[
    str, tuple[int, ...], tuple[str, ...], tuple[int | slice, ...]
]  # name, shape, path, index, all relative to the layer


def _layer_tensors(config: ModelConfig, routed: bool) -> Iterator[_LayerTensor]:
    width, head_dim = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def same(name: str, *shape: int) -> _LayerTensor:
        return name, shape, tuple(name.split(".")), ()

    yield same("input_layernorm.weight", width)
    yield same("post_attention_layernorm.weight", width)
    yield same("self_attn.q_proj.weight", q, width)
    yield same("self_attn.k_proj.weight", kv, width)
    yield same("self_attn.v_proj.weight", kv, width)
    yield same("self_attn.o_proj.weight", width, q)
    if config.qkv_bias:
        for name, size in (("q", q), ("k", kv), ("v", kv)):
            yield same(f"self_attn.{name}_proj.bias", size)
    if not routed:
        yield from _mlp_tensors("mlp", width, config.dense_width)
        return
    yield same("mlp.gate.weight", config.num_experts, width)
    yield same("mlp.shared_expert_gate.weight", 1, width)
    yield from _mlp_tensors("mlp.shared_expert", width, config.shared_expert_width)
    inner = config.expert_width
    for expert in range(config.num_experts):
        prefix = f"mlp.experts.{expert}."
        gate_up, down = ("mlp", "experts", "gate_up"), ("mlp", "experts", "down")
        gate_rows, up_rows = slice(0, inner), slice(inner, 2 * inner)
        yield prefix + "gate_proj.weight", (inner, width), gate_up, (expert, gate_rows)
        yield prefix + "up_proj.weight", (inner, width), gate_up, (expert, up_rows)
        yield prefix + "down_proj.weight", (width, inner), down, (expert,)


def _mlp_tensors(prefix: str, width: int, inner: int) -> Iterator[_LayerTensor]:
    for name, shape in (
        ("gate_proj", (inner, width)),
        ("up_proj", (inner, width)),
        ("down_proj", (width, inner)),
    ):
        full = f"{prefix}.{name}.weight"
        yield full, shape, tuple(full.split(".")), ()
