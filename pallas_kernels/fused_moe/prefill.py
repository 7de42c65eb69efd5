"""The fused MoE for many tokens: planes unpacked once a tile, tensor cores kept busy.

    expert ids --> rows sorted by expert, tiles of up to M rows       [XLA, token_tiles]
    x          --> fp16 with a power of two per token --> gathered                 [XLA]
    gate_up    h = act(gate x) * up x, fp16 in the slots of the tiles   [prefill_kernel]
    down       bfloat16 in the slots                                    [prefill_kernel]
    y[t] = sum_k weight[t, k] * row of the slot of the pair (t, k)                 [XLA]

Weights are the left-hand side of wgmma, 64 rows at a time from registers; tokens are
its columns. Precision is data: bits and frames are read by the kernel.

Numbers. Weights are rounded to fp16 once (`half_weights`), sums are float32, outputs of
experts are rounded to bfloat16. A token is scaled by a power of two so that its largest
value lies in [2**14, 2**15): bfloat16 is then exact down to 2**-29 of that value.

Hidden activations are scaled by a power of two that is known beforehand. With r the
root mean square of the token, |h| <= |gate| |up| <= |w_gate| |w_up| D r**2 (Cauchy and
Schwarz), so h / (16 r**2) is in the range of fp16 whenever the norms of the rows obey
|w_gate| |w_up| <= 2**20 / D: 16 each for D = 4,096, where trained rows have about 1.
And it keeps the precision of fp16 while a typical h / r**2, that is |w_gate| |w_up|,
is not below 2**-10. What is larger overflows to infinity, which is not hidden.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float16, Float32, Int32, UInt32

from pallas_kernels.fused_moe.prefill_kernel import (
    Config,
    Pages,
    hidden_activations,
    outputs,
)
from pallas_kernels.fused_moe.reference import Activation
from pallas_kernels.fused_moe.token_tiles import make_token_tiles
from pallas_kernels.side_tables import SideTables

_HIDDEN_RANGE = 4  # h is divided by 2**4 times the mean square of its token
_BIAS = 127  # of the exponent of float32


def default_config(num_pairs: int, num_experts: int) -> Config:
    """Returns the sizes for a mean number of tokens of an expert.

    The largest tile is for experts with many tokens, which there may be at any mean.
    """
    few = num_pairs <= 24 * num_experts
    return Config(tile_sizes=(32, 128) if few else (64, 128))


def candidate_configs() -> list[Config]:
    """Returns the sizes that are worth a measurement.

    Every size of a tile is one more branch for every number of bits to compile.
    """
    return [
        Config(tile_sizes=sizes, tiles_per_group=group)
        for sizes in ((16, 32, 128), (32, 128), (64, 128), (32, 64, 128))
        for group in (4, 16)
    ]


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
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Computes the routed experts; see `pallas_kernels.fused_moe.fused_moe`.

    Args:
      x: tokens; of float32 only the first 11 bits count.
      expert_ids: experts of each token; ``E`` for none.
      expert_weights: combine weights.
      pool: the paged pool; frame 0 is all zeros.
      frames: frames of gate, up and down.
      bits: committed bits, from 1 (codebook: from the seed bits; refined: from 3) to
        ``parent_bits``.
      gate_up: side tables of gate above up.
      down: side tables of down.
      layer: which of the L layers.
      activation: of the gate branch.
      config: sizes of the kernel; None chooses them.
      interpret: whether to run on the CPU interpreter of Mosaic GPU.
    Returns:
      The routed sum, in the type of ``x``.
    Raises:
      ValueError: if a frame does not hold whole 64-row tiles.
      NotImplementedError: if the side tables do not fit the tiles.
    """
    num_experts = frames.shape[1]
    config = config or default_config(expert_ids.size, num_experts)
    m = config.tokens_per_tile
    tiles = make_token_tiles(
        expert_ids,
        num_experts,
        tokens_per_tile=m,
        tiles_per_group=config.tiles_per_group,
    )
    pages = Pages(pool=pool, frames=frames, bits=bits, layer=layer)
    half, factors, undo = to_half(x.astype(jnp.float32))
    hidden = hidden_activations(
        half[tiles.tokens],
        factors[:, tiles.tokens],
        tiles,
        pages,
        gate_up,
        activation=activation,
        config=config,
        interpret=interpret,
    )
    slots = jnp.arange(tiles.experts.size, dtype=jnp.int32) * m
    in_slots = dataclasses.replace(tiles, rows=slots)
    y = outputs(hidden, in_slots, pages, down, config=config, interpret=interpret)
    rows = y[tiles.slots].astype(jnp.float32)
    # The row of a pair without an expert holds whatever the memory held.
    rows = jnp.where(tiles.valid[..., None], rows * expert_weights[..., None], 0)
    return (jnp.sum(rows, axis=1) * undo[:, None]).astype(x.dtype)


def to_half(
    x: Float32[Array, "T D"],
) -> tuple[Float16[Array, "T D"], Float32[Array, "2 T"], Float32[Array, " T"]]:
    """Scales each token by a power of two into the range of fp16.

    Returns:
      The tokens; the factors that undo the scaling, and those times the factor of the
      hidden activations; and what undoes the factor of the hidden activations. A token
      with a NaN or an infinity stays not finite.
    """
    exponent = jnp.clip(_exponent(jnp.max(jnp.abs(x), axis=-1)), -112, 127)
    half = (x * _power(14 - exponent)[:, None]).astype(jnp.float16)
    undo = _power(exponent - 14)
    square = jnp.clip(_exponent(jnp.mean(x * x, axis=-1)), -100, 100) + _HIDDEN_RANGE
    return half, jnp.stack([undo, undo * _power(-square)]), _power(square)


def _exponent(x: Float32[Array, "*n"]) -> Int32[Array, "*n"]:
    return (lax.bitcast_convert_type(x, jnp.int32) >> 23) - _BIAS


def _power(exponent: Int32[Array, "*n"]) -> Float32[Array, "*n"]:
    return lax.bitcast_convert_type((exponent + _BIAS) << 23, jnp.float32)
