"""The routed part of a layer: router, and experts in memory or in pages."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from pagedweight_jax.models.interface import InputMoments, Pages, RoutingCounts
from pallas_kernels.fused_moe import fused_moe
from pallas_kernels.fused_moe.api import Implementation
from pallas_kernels.fused_moe.reference import Activation, activation_function
from pallas_kernels.pytree import pytree
from pallas_kernels.side_tables import (
    AffineTables,
    CodebookTables,
    RefinedTables,
    SideTables,
)


class Router(nnx.Module):
    """Softmax over all experts in float32, then the best few.

    The router is never quantised and never rounded: with bfloat16 logits the last
    expert chosen is an exact tie for some percent of the tokens.
    """

    def __init__(
        self,
        width: int,
        num_experts: int,
        experts_per_token: int,
        *,
        normalize: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        init = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0)
        self.weight = nnx.Param(init(rngs.params(), (num_experts, width), dtype))
        self.experts_per_token = experts_per_token
        self.normalize = normalize

    def __call__(
        self, x: Float[Array, "T D"], valid: Bool[Array, "T"]
    ) -> tuple[Int32[Array, "T top_k"], Float32[Array, "T top_k"]]:
        """Returns the experts of each token and their weights.

        Tokens that are not valid get the expert number E: no expert.
        """
        weight = self.weight[...].astype(jnp.float32)
        # A GPU would otherwise multiply float32 with the 10 bits of TF32.
        logits = jnp.einsum(
            "TD,ED->TE",
            x.astype(jnp.float32),
            weight,
            precision=lax.Precision.HIGHEST,
        )
        shares, ids = lax.top_k(jax.nn.softmax(logits, axis=-1), self.experts_per_token)
        if self.normalize:
            shares = shares / jnp.sum(shares, axis=-1, keepdims=True)
        num_experts = weight.shape[0]
        return jnp.where(valid[:, None], ids, num_experts), shares


class DenseExperts(nnx.Module):
    """Experts held as matrices: the calibration path, the oracle, and policy "bf16".

    Every token goes through every expert and is weighted by zero where it was not
    routed: simple, differentiable, and E / top_k times the arithmetic.
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        expert_width: int,
        *,
        activation: Activation,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        init = jax.nn.initializers.lecun_normal(in_axis=2, out_axis=1, batch_axis=0)
        up_shape = (num_experts, 2 * expert_width, width)
        down_shape = (num_experts, width, expert_width)
        self.gate_up = nnx.Param(init(rngs.params(), up_shape, dtype))
        self.down = nnx.Param(init(rngs.params(), down_shape, dtype))
        self.activation: Activation = activation

    def _hidden(
        self, x: Float[Array, "T D"], gate_up: Float[Array, "N D"]
    ) -> Float[Array, "T F"]:
        act = activation_function(self.activation)
        gate, up = jnp.split(jnp.einsum("TD,ND->TN", x, gate_up), 2, axis=-1)
        return act(gate) * up

    def __call__(
        self,
        x: Float[Array, "T D"],
        expert_ids: Int32[Array, "T top_k"],
        expert_weights: Float32[Array, "T top_k"],
        pool: UInt32[Array, "num_frames frame_words"],
        pages: Pages | None,
        layer: Int32[Array, ""],
    ) -> Float[Array, "T D"]:
        """Computes the routed sum; only tokens and routing are read."""
        del pool, pages, layer

        def one_expert(
            total: Array, expert: tuple[Array, Array, Array]
        ) -> tuple[Array, None]:
            gate_up, down, share = expert
            y = jnp.einsum("TF,DF->TD", self._hidden(x, gate_up), down)
            return total + y.astype(jnp.float32) * share[:, None], None

        shares = self._combine_weights(expert_ids, expert_weights)
        total, _ = lax.scan(
            one_expert,
            jnp.zeros(x.shape, jnp.float32),
            (self.gate_up[...], self.down[...], shares),
        )
        return total.astype(x.dtype)

    def input_moments(
        self, x: Float[Array, "T D"], expert_ids: Int32[Array, "T top_k"]
    ) -> InputMoments:
        """Sums the squared inputs of each expert's linears over its tokens."""
        ones = jnp.ones(expert_ids.shape, jnp.float32)
        visits = self._combine_weights(expert_ids, ones)

        def one_expert(expert: tuple[Array, Array]) -> Array:
            gate_up, visit = expert
            hidden = self._hidden(x, gate_up).astype(jnp.float32)
            return jnp.einsum("T,TF->F", visit, hidden**2)

        squares = x.astype(jnp.float32) ** 2
        return InputMoments(
            gate_up=jnp.einsum("ET,TD->ED", visits, squares),
            down=lax.map(one_expert, (self.gate_up[...], visits)),
        )

    def _combine_weights(
        self, expert_ids: Int32[Array, "T top_k"], weights: Float32[Array, "T top_k"]
    ) -> Float32[Array, "E T"]:
        num_experts = self.gate_up.shape[0]
        tokens = jnp.arange(expert_ids.shape[0], dtype=jnp.int32)[:, None]
        table = jnp.zeros((num_experts + 1, expert_ids.shape[0]), jnp.float32)
        tokens = jnp.broadcast_to(tokens, expert_ids.shape)
        return table.at[expert_ids, tokens].add(weights)[:num_experts]


@dataclass(frozen=True, kw_only=True)
class SideTableShapes:
    """Static description of the side tables, to make them before they are loaded."""

    format: Literal["affine", "codebook", "refined"]
    parent_bits: int
    seed_bits: int
    group_size: tuple[int, int]  # along the inputs of gate_up and of down

    def tables(self, num_experts: int, n: int, k: int, group_size: int) -> SideTables:
        """Returns zero tables of the right shapes for one block of all experts."""
        if self.format == "affine":
            zeros = jnp.zeros((num_experts, k // group_size, n), jnp.float16)
            return AffineTables.from_parts(scale=zeros, zero=zeros)
        if self.format == "refined":
            zeros = jnp.zeros((num_experts, 2**self.seed_bits, n), jnp.float16)
            return RefinedTables.from_parts(center=zeros, width=zeros)
        entries = 2 ** (self.parent_bits + 1) - 2**self.seed_bits
        return CodebookTables(lut=jnp.zeros((num_experts, n, entries), jnp.float16))


class SideTableParam(nnx.Param):
    """Side tables of the paged experts of all layers of a run.

    A type of its own, so that a scan over layers can leave them whole: the kernels
    take the layer as data, and slicing would copy megabytes in every layer.
    """


class PagedExperts(nnx.Module):
    """Experts whose planes lie in the pool; only side tables are parameters."""

    def __init__(
        self,
        num_experts: int,
        width: int,
        expert_width: int,
        *,
        shapes: SideTableShapes,
        activation: Activation,
        implementation: Implementation | None,
    ) -> None:
        up_group, down_group = shapes.group_size
        up = shapes.tables(num_experts, 2 * expert_width, width, up_group)
        down = shapes.tables(num_experts, width, expert_width, down_group)
        self.gate_up = SideTableParam(up)
        self.down = SideTableParam(down)
        self.activation: Activation = activation
        self.implementation: Implementation | None = implementation

    def __call__(
        self,
        x: Float[Array, "T D"],
        expert_ids: Int32[Array, "T top_k"],
        expert_weights: Float32[Array, "T top_k"],
        pool: UInt32[Array, "num_frames frame_words"],
        pages: Pages | None,
        layer: Int32[Array, ""],
    ) -> Float[Array, "T D"]:
        """Computes the routed sum from planes.

        The side tables are those of all layers of the run, and so are ``pages``;
        ``layer`` says which to read.
        """
        if pages is None:
            raise ValueError("PagedExperts got no pages; pass ModelInputs.pages")
        return fused_moe(
            x,
            expert_ids,
            expert_weights,
            pool,
            pages.frames,
            pages.bits,
            self.gate_up.get_value(),
            self.down.get_value(),
            layer,
            activation=self.activation,
            implementation=self.implementation,
        )


@pytree
@dataclass(frozen=True, kw_only=True)
class RoutedTokens:
    """Where the tokens of a layer went; `routing_counts` adds them up for all layers.

    Attributes:
      expert_ids: experts of each token, ``E`` for none.
      norms: root-mean-square norm of each token's MoE input.
      moments: only where asked for (calibration).
    """

    expert_ids: Int32[Array, "*L T top_k"]
    norms: Float32[Array, "*L T"]
    moments: InputMoments | None = None


def routed_tokens(
    x: Float[Array, "T D"],
    expert_ids: Int32[Array, "T top_k"],
    moments: InputMoments | None = None,
) -> RoutedTokens:
    """Notes the experts of each token and the norm of the MoE input."""
    norms = jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, axis=-1))
    return RoutedTokens(expert_ids=expert_ids, norms=norms, moments=moments)


def routing_counts(
    routed: RoutedTokens, valid: Bool[Array, "T"], num_experts: int
) -> RoutingCounts:
    """Counts tokens per expert and adds up their norms, for all layers at once."""
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    ids = routed.expert_ids.reshape(*routed.norms.shape[:-1], -1, 1)
    same = ids == jnp.broadcast_to(experts, (*ids.shape[:-1], num_experts))
    norms = jnp.where(jnp.broadcast_to(valid, routed.norms.shape), routed.norms, 0.0)
    return RoutingCounts(
        tokens=jnp.sum(same, axis=-2, dtype=jnp.int32),
        norms=jnp.stack([norms.sum(-1), (norms**2).sum(-1), norms.max(-1)], axis=-1),
        moments=routed.moments,
    )
