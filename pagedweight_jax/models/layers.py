"""Layers that the model families share: linear, norm, rotary embedding, attention."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.paged_attention import KvLayout, Rows, paged_attention
from pallas_kernels.paged_attention.layout import pack_rows


class Linear(nnx.Module):
    """``y = x W^T + b`` with W stored (out, in), as checkpoints store it."""

    def __init__(
        self,
        in_width: int,
        out_width: int,
        *,
        bias: bool = False,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        init = jax.nn.initializers.lecun_normal(in_axis=1, out_axis=0)
        self.weight = nnx.Param(init(rngs.params(), (out_width, in_width), dtype))
        self.bias = nnx.Param(jnp.zeros((out_width,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T N"]:
        """Applies the map to the last axis."""
        y = jnp.einsum("...D,ND->...N", x, self.weight[...])
        if self.bias is None:
            return y
        return y + jnp.broadcast_to(self.bias[...], y.shape)


class RmsNorm(nnx.Module):
    """Root-mean-square norm; statistics in float32, cast, then the weight."""

    def __init__(self, width: int, epsilon: float, *, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Normalises the last axis."""
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(mean_square + self.epsilon)
        return normed.astype(x.dtype) * self.weight[...][None]


class GatedMlp(nnx.Module):
    """``down(silu(gate x) * up x)``: a dense layer's MLP, or a shared expert."""

    def __init__(
        self, width: int, inner_width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs
    ) -> None:
        self.gate_proj = Linear(width, inner_width, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(width, inner_width, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(inner_width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Computes the MLP of each token."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


def rotate(
    x: Float[Array, "R Q N H"], positions: Int32[Array, "R Q"], theta: float
) -> Float[Array, "R Q N H"]:
    """Applies rotary embedding; dimension i turns with i + H/2 (RoFormer, "halves").

    Angles are float32; their cosine and sine are cast to the type of ``x``.
    """
    half = x.shape[-1] // 2
    exponents = -2.0 * jnp.arange(half, dtype=jnp.float32) / x.shape[-1]
    angles = positions[..., None].astype(jnp.float32) * (theta**exponents)[None, None]
    cos = jnp.cos(angles).astype(x.dtype)[:, :, None]
    sin = jnp.sin(angles).astype(x.dtype)[:, :, None]
    low, high = x[..., :half], x[..., half:]
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


class Attention(nnx.Module):
    """Grouped-query attention over the paged pool."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        theta: float,
        qkv_bias: bool,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ) -> None:
        def project(out_heads: int) -> Linear:
            out = out_heads * head_dim
            return Linear(width, out, bias=qkv_bias, dtype=dtype, rngs=rngs)

        self.q_proj = project(num_heads)
        self.k_proj = project(num_kv_heads)
        self.v_proj = project(num_kv_heads)
        self.o_proj = Linear(num_heads * head_dim, width, dtype=dtype, rngs=rngs)
        self.head_dim = head_dim
        self.theta = theta

    def __call__(
        self,
        x: Float[Array, "T D"],
        rows: tuple[Rows, ...],
        queries_per_row: tuple[int, ...],
        pool: UInt32[Array, "num_frames frame_words"],
        layer: Int32[Array, ""],
        layout: KvLayout,
    ) -> tuple[Float[Array, "T D"], UInt32[Array, "T row_words"]]:
        """Returns the attention output and the packed fresh keys and values."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        outputs, fresh, start = [], [], 0
        for group, num_queries in zip(rows, queries_per_row, strict=True):
            num_rows = group.starts.shape[0]
            stop = start + num_rows * num_queries
            shape = (num_rows, num_queries, -1, self.head_dim)
            offsets = jnp.arange(num_queries, dtype=jnp.int32)
            positions = group.starts[:, None] + offsets[None]
            qg = rotate(q[start:stop].reshape(shape), positions, self.theta)
            kg = rotate(k[start:stop].reshape(shape), positions, self.theta)
            vg = v[start:stop].reshape(shape)
            out = paged_attention(
                qg, kg, vg, pool, group, layer, layout, scale=self.head_dim**-0.5
            )
            outputs.append(out.reshape(stop - start, -1))
            fresh.append(pack_rows(kg, vg, layout).reshape(stop - start, -1))
            start = stop
        return self.o_proj(jnp.concatenate(outputs)), jnp.concatenate(fresh)


def next_token_logits(
    hidden: Float[Array, "*M D"], head: Float[Array, "V D"]
) -> Float32[Array, "*M V"]:
    """Computes logits in float32 from hidden states in the model's type."""
    return jnp.einsum("...D,VD->...V", hidden, head, preferred_element_type=jnp.float32)
