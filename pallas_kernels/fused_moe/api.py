"""The public face of the fused MoE kernel: argument checks and choice of kernel."""

import functools
import logging
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels import bitplane
from pallas_kernels.fused_moe import reference
from pallas_kernels.fused_moe.reference import Activation
from pallas_kernels.side_tables import SideTables

Implementation = Literal["reference", "mosaic_gpu", "mosaic_gpu_interpret"]


def default_implementation() -> Implementation:
    """Returns the fastest implementation of the default device."""
    device = jax.devices()[0]
    if device.platform == "gpu" and device.compute_capability.startswith("9."):
        return "mosaic_gpu"
    return "reference"


def fused_moe(
    x: Float[Array, "T D"],
    expert_ids: Int32[Array, "T top_k"],
    expert_weights: Float32[Array, "T top_k"],
    pool: UInt32[Array, "num_frames frame_words"],
    frames: Int32[Array, "L E 3 parent_bits frames_per_plane"],
    bits: Int32[Array, "L E 2"],
    gate_up: SideTables,
    down: SideTables,
    layer: Int32[Array, ""] | int,
    *,
    activation: Activation = "silu",
    implementation: Implementation | None = None,
) -> Float[Array, "T D"]:
    """Computes ``sum_k w_k down_k(act(gate_k x) * up_k x)`` with paged experts.

    Each (expert, block) is read at its own number of bits through the page table, so
    a change of precision is a change of data: nothing is traced again. Pages and side
    tables of all layers come as they are and the layer is data, so that a scan over
    layers copies none of them.

    Args:
      x: tokens.
      expert_ids: experts of each token; ``E`` stands for "no expert" (padding) and
        costs nothing.
      expert_weights: combine weights; the caller has normalised them or not.
      pool: the paged pool, one frame a row. Frame 0 is the null frame, all zeros.
      frames: the frames of each plane of the linears gate, up and down (in this
        order), most significant plane first; a plane is cut into
        ``frames_per_plane`` equal runs of words. Absent planes name frame 0.
      bits: committed bits of gate_up and down; only so many planes are read.
      gate_up: side tables ``[L, E, ...]``, rows ``0..F-1`` gate and ``F..2F-1`` up.
      down: side tables ``[L, E, ...]``, ``D`` rows.
      layer: which of the L layers.
      activation: of the gate branch.
      implementation: None chooses by device: Mosaic GPU on Hopper, else the reference.
        Where the kernel does not fit the arguments, None takes the reference, too, and
        the log tells so once.
    Returns:
      The routed sum, in the type of ``x``.
    Raises:
      ValueError: if the shapes do not fit each other.
      NotImplementedError: if the implementation that was asked for does not fit.
    """
    _check(x, pool, frames, gate_up, down)
    if x.shape[0] == 0:
        return x
    args = (x, expert_ids, expert_weights, pool, frames, bits, gate_up, down)
    args = (*args, jnp.asarray(layer, jnp.int32))
    if implementation is None:
        try:
            return _run(default_implementation(), args, activation)
        except NotImplementedError as error:
            _tell_once(str(error))
            implementation = "reference"
    return _run(implementation, args, activation)


def _run(
    implementation: Implementation, args: tuple, activation: Activation
) -> Float[Array, "T D"]:
    if implementation == "reference":
        return reference.fused_moe(*args, activation=activation)
    from pallas_kernels.fused_moe import mosaic_gpu  # only where it can be lowered

    return mosaic_gpu.fused_moe(
        *args,
        activation=activation,
        interpret=implementation == "mosaic_gpu_interpret",
    )


@functools.cache
def _tell_once(reason: str) -> None:
    logging.getLogger(__name__).warning(
        "fused_moe runs as plain JAX, which is slow on a GPU: %s", reason
    )


def _check(
    x: Array, pool: Array, frames: Array, gate_up: SideTables, down: SideTables
) -> None:
    width, expert_width = x.shape[1], gate_up.num_rows // 2
    words = bitplane.plane_words(expert_width, width)
    if down.num_rows != width:
        raise ValueError(
            f"x has width {width} but the down tables have {down.num_rows} rows;"
            " they must be equal"
        )
    if frames.shape[4] * pool.shape[1] != words:
        raise ValueError(
            f"a plane of [{expert_width}, {width}] is {words} words but"
            f" {frames.shape[4]} frames of {pool.shape[1]} words hold"
            f" {frames.shape[4] * pool.shape[1]}; choose frame_words ="
            f" {words} / frames_per_plane"
        )
