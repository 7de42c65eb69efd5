"""The fused MoE in Pallas Mosaic GPU: which of its two kernels serves a call.

    few tokens, or float32                `decode`    planes at the speed of memory
    many tokens in bfloat16, or refined   `prefill`   tensor cores kept busy

Sizes come from the tuning store, by device and shape, and else from the kernel's rule.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels import tuning
from pallas_kernels.fused_moe import decode, prefill
from pallas_kernels.fused_moe.reference import Activation
from pallas_kernels.side_tables import (
    AffineTables,
    CodebookTables,
    RefinedTables,
    SideTables,
)

_DECODE_TOKENS = 16  # of an expert, on average
_MAX_PAIRS = 1024  # that one call of `decode` sorts, 32 at a time
_FORMATS = {
    AffineTables: "affine",
    CodebookTables: "codebook",
    RefinedTables: "refined",
}


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
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Computes the routed experts; see `pallas_kernels.fused_moe.fused_moe`.

    Raises:
      ValueError: if a frame does not hold whole 64-row tiles.
      NotImplementedError: if the side tables or the sizes do not fit the kernel.
    """
    num_tokens, top_k = expert_ids.shape
    pages = (pool, frames, bits, gate_up, down, layer)
    keywords: dict[str, Any] = {"activation": activation, "interpret": interpret}
    many = expert_ids.size > _DECODE_TOKENS * frames.shape[1]
    if x.dtype != jnp.float32 and (many or isinstance(gate_up, RefinedTables)):
        config = _tuned(prefill.Config, "prefill", x, expert_ids, frames, gate_up)
        return prefill.fused_moe(
            x, expert_ids, expert_weights, *pages, config=config, **keywords
        )
    config = _tuned(decode.Config, "decode", x, expert_ids, frames, gate_up)
    rows = _MAX_PAIRS // top_k
    parts = [
        decode.fused_moe(
            x[start : start + rows],
            expert_ids[start : start + rows],
            expert_weights[start : start + rows],
            *pages,
            config=config,
            **keywords,
        )
        for start in range(0, num_tokens, rows)
    ]
    return jnp.concatenate(parts) if len(parts) > 1 else parts[0]


def _tuned[C](
    config: type[C],
    kernel: str,
    x: Array,
    expert_ids: Array,
    frames: Array,
    gate_up: SideTables,
) -> C | None:
    """Returns the measured sizes of this device and shape, if there are any."""
    if x.dtype != jnp.bfloat16:  # what was measured
        return None
    key = tuning.moe_key(
        width=x.shape[1],
        expert_width=gate_up.num_rows // 2,
        num_experts=frames.shape[1],
        top_k=expert_ids.shape[1],
        num_tokens=x.shape[0],
        format=_FORMATS[type(gate_up)],
    )
    return tuning.tuned(config, kernel, jax.devices()[0].device_kind, key)
