"""The contract of `fused_moe` in plain JAX, and the path of every device but a GPU.

Experts are dequantised one after the other, so that no more than one expert's weights
exist at a time, and an expert without tokens costs nothing. Arithmetic is float32.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels import bitplane
from pallas_kernels.side_tables import SideTables

Activation = Literal["silu", "gelu_tanh"]


def activation_function(name: Activation) -> Callable[[Array], Array]:
    """Returns the activation of the gate branch."""
    if name == "silu":
        return jax.nn.silu
    return lambda x: jax.nn.gelu(x, approximate=True)


def dequantize(
    planes: UInt32[Array, "parts parent_bits words"],
    bits: Int32[Array, ""],
    tables: SideTables,
    k: int,
) -> Float32[Array, "n {k}"]:
    """Computes a linear block at ``bits`` bits.

    Args:
      planes: the planes of the block's parts, which are stacked along the rows (gate
        above up; ``down`` has one part). Planes from ``bits`` on are ignored.
      bits: committed bits, a traced scalar.
      tables: side tables of all ``n`` rows.
      k: columns (inputs).
    """
    parts, parent_bits, _ = planes.shape
    present = jnp.arange(parent_bits, dtype=jnp.int32)[:, None] < bits
    codes = bitplane.unpack(
        jnp.where(present, planes, jnp.uint32(0)),
        tables.num_rows // parts,
        k,
        tables.order,
    )
    return tables.weights(codes.reshape(-1, k), bits, parent_bits)


def _matmul(x: Array, y: Array) -> Array:
    """Multiplies in float32; the default of a GPU would be TF32, of 11 bits."""
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _tile_rows(num_tokens: int) -> int:
    """Tokens of one expert that are multiplied together; a power of two."""
    return min(64, max(8, 1 << (num_tokens - 1).bit_length()))


def fused_moe(
    x: Float[Array, "T D"],
    expert_ids: Int32[Array, "T top_k"],
    expert_weights: Float32[Array, "T top_k"],
    pool: UInt32[Array, "num_frames frame_words"],
    frames: Int32[Array, "L E 3 parent_bits frames_per_plane"],
    bits: Int32[Array, "L E 2"],
    gate_up: SideTables,
    down: SideTables,
    layer: Int32[Array, ""],
    *,
    activation: Activation = "silu",
) -> Float[Array, "T D"]:
    """Computes the routed experts; see `pallas_kernels.fused_moe.fused_moe`."""
    num_tokens, width = x.shape
    _, num_experts, _, parent_bits, _ = frames.shape
    expert_width = gate_up.num_rows // 2
    top_k = expert_ids.shape[1]
    act = activation_function(activation)
    rows = _tile_rows(num_tokens)

    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    counts = jnp.bincount(flat, length=num_experts).astype(jnp.int32)
    starts = jnp.cumsum(counts, dtype=jnp.int32) - counts
    active = jnp.argsort(counts == 0, stable=True).astype(jnp.int32)
    # One more row of zeros takes what the padding of a tile reads and writes.
    tokens = jnp.concatenate([x.astype(jnp.float32), jnp.zeros((1, width))])
    pair_weights = expert_weights.reshape(-1)

    def weights(e: Array, block: int, tables: SideTables, k: int) -> Array:
        linears = frames[layer, e, :2] if block == 0 else frames[layer, e, 2:]
        planes = pool[linears].reshape(len(linears), parent_bits, -1)
        return dequantize(
            planes,
            bits[layer, e, block],
            jax.tree.map(lambda t: t[layer, e], tables),
            k,
        )

    def one_expert(i: Array, out: Array) -> Array:
        e = active[i]
        w_up = weights(e, 0, gate_up, width)
        w_down = weights(e, 1, down, expert_width)

        def one_tile(tile: Array, out: Array) -> Array:
            local = tile * rows + jnp.arange(rows, dtype=jnp.int32)
            pair = order[jnp.minimum(starts[e] + local, order.size - 1)]
            valid = local < counts[e]
            token = jnp.where(valid, pair // top_k, num_tokens)
            hidden = _matmul(tokens[token], w_up.T)
            hidden = act(hidden[:, :expert_width]) * hidden[:, expert_width:]
            y = (
                _matmul(hidden, w_down.T)
                * jnp.where(valid, pair_weights[pair], 0)[:, None]
            )
            return out.at[token].add(y)

        num_tiles = (counts[e] + rows - 1) // rows
        return lax.fori_loop(0, num_tiles, one_tile, out)

    out = lax.fori_loop(0, jnp.sum(counts > 0), one_expert, jnp.zeros_like(tokens))
    return out[:num_tokens].astype(x.dtype)
