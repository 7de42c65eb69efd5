"""What a JAX user would write without our kernel: the rivals of the same run.

Both compute the same layer as `fused_moe`, from tokens and routing to the weighted sum,
and multiply bf16 with `jax.lax.ragged_dot`:

    ragged_dot                    the experts are bf16 matrices
    dequantise, then ragged_dot   the active experts are unpacked to bf16 matrices first
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Compiled
from jaxtyping import Array, BFloat16, Float32, Int32, UInt32

from pagedweight_jax.evaluation import moe_workload as workload
from pagedweight_jax.evaluation.device_timer import DeviceTimes, time_calls
from pagedweight_jax.evaluation.kernel_cells import compile_all
from pagedweight_jax.evaluation.kernel_rows import DEQUANTISE, RAGGED_DOT, Layer, Row
from pagedweight_jax.evaluation.moe_workload import NUM_SETS, Planes, Tokens
from pallas_kernels.fused_moe.arg_specs import MoeSpec
from pallas_kernels.fused_moe.reference import (
    Activation,
    activation_function,
    dequantize,
)
from pallas_kernels.side_tables import SideTables


@partial(jax.jit, static_argnums=0)
def random_experts(
    spec: MoeSpec, key: Array
) -> tuple[BFloat16[Array, "E D rows"], BFloat16[Array, "E F D"]]:
    """Makes bf16 experts as (in, out), which is what `ragged_dot` takes."""
    e, d, f = spec.num_experts, spec.width, spec.expert_width
    gate_up = jax.random.normal(key, (e, d, 2 * f), jnp.bfloat16) * d**-0.5
    down = jax.random.normal(key, (e, f, d), jnp.bfloat16) * f**-0.5
    return gate_up, down


def ragged_dot_moe(
    x: BFloat16[Array, "T D"],
    expert_ids: Int32[Array, "T top_k"],
    expert_weights: Float32[Array, "T top_k"],
    gate_up: BFloat16[Array, "E D rows"],
    down: BFloat16[Array, "E F D"],
    activation: Activation,
) -> BFloat16[Array, "T D"]:
    """Computes the routed sum with two ragged matmuls over tokens sorted by expert."""
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat).astype(jnp.int32)
    tokens = order // expert_ids.shape[1]
    sizes = jnp.bincount(flat, length=len(down)).astype(jnp.int32)
    gate, up = jnp.split(lax.ragged_dot(x[tokens], gate_up, sizes), 2, axis=-1)
    hidden = activation_function(activation)(gate) * up
    y = lax.ragged_dot(hidden, down, sizes)
    y = y * expert_weights.reshape(-1)[order, None].astype(y.dtype)
    return jnp.zeros_like(x).at[tokens].add(y)


def dequantized_moe(
    x: BFloat16[Array, "T D"],
    expert_ids: Int32[Array, "T top_k"],
    expert_weights: Float32[Array, "T top_k"],
    active: Int32[Array, "A"],
    pool: UInt32[Array, "num_frames frame_words"],
    frames: Int32[Array, "L E 3 bits frames_per_plane"],
    gate_up: SideTables,
    down: SideTables,
    layer: Int32[Array, ""],
    activation: Activation,
) -> BFloat16[Array, "T D"]:
    """Unpacks the active experts, one after the other, then multiplies.

    Args:
      x: tokens.
      expert_ids: experts of each token.
      expert_weights: combine weights.
      active: the experts that occur, ascending; the host knows them.
      pool: the planes.
      frames: frames of the planes to read, all of them.
      gate_up: side tables of gate above up.
      down: side tables of down.
      layer: which of the L layers.
      activation: of the gate branch.
    """
    bits = frames.shape[3]
    widths = (x.shape[1], gate_up.num_rows // 2)

    def unpacked(expert: Array) -> tuple[Array, Array]:
        pages = frames[layer, expert]
        words = pool[pages].reshape(3, bits, -1)
        own = jax.tree.map(lambda a: a[layer, expert], (gate_up, down))
        level = jnp.int32(bits)
        up = dequantize(words[:2], level, own[0], widths[0])
        low = dequantize(words[2:], level, own[1], widths[1])
        return up.astype(jnp.bfloat16).T, low.astype(jnp.bfloat16).T

    up, low = lax.map(unpacked, active)
    places = jnp.searchsorted(active, expert_ids).astype(jnp.int32)
    return ragged_dot_moe(x, places, expert_weights, up, low, activation)


def ragged_dot_rows(layer: Layer, cases: Sequence[Tokens]) -> list[Row]:
    """Times bf16 experts."""
    keys = jax.random.split(jax.random.key(0), NUM_SETS)
    sets = [random_experts(layer.spec, key) for key in keys]
    calls = [
        [
            (tokens.x, jnp.asarray(ids), tokens.weights, *sets[i % NUM_SETS])
            for i, ids in enumerate(tokens.ids)
        ]
        for tokens in cases
    ]
    moe = partial(ragged_dot_moe, activation=layer.activation)
    return [
        layer.bf16_row(tokens, times, implementation=RAGGED_DOT)
        for tokens, times in zip(cases, _time_all(moe, calls), strict=True)
    ]


def dequantize_rows(
    layer: Layer,
    cases: Sequence[Tokens],
    planes: Planes,
    tables: tuple[SideTables, SideTables],
    bits: int = 4,
) -> list[Row]:
    """Times affine planes of ``bits`` bits that are unpacked before each layer."""
    pages = planes.pool, planes.frames[..., :bits, :], *tables

    def arguments(tokens: Tokens) -> list[tuple]:
        active = active_experts(tokens.ids, layer.spec.num_experts)
        return [
            (
                tokens.x,
                jnp.asarray(ids),
                tokens.weights,
                jnp.asarray(active[i]),
                *pages,
                jnp.int32(i % NUM_SETS),
            )
            for i, ids in enumerate(tokens.ids)
        ]

    calls = [arguments(tokens) for tokens in cases]
    moe = partial(dequantized_moe, activation=layer.activation)
    level = workload.uniform_bits(layer.spec, bits)
    rows = []
    for tokens, times in zip(cases, _time_all(moe, calls), strict=True):
        read = workload.bytes_read(layer.spec, tokens, level, *tables)
        row = layer.row(
            tokens,
            times,
            implementation=DEQUANTISE,
            format="affine",
            group_size=str(layer.spec.group_size),
            bits=str(bits),
            mean_bits=float(bits),
            plane_bytes=read.planes,
            table_bytes=read.tables,
        )
        rows.append(row)
    return rows


def _time_all(
    moe: Callable[..., Array], calls: Sequence[Sequence[tuple]]
) -> list[DeviceTimes]:
    """Compiles the cases side by side, then times one after the other."""
    program = jax.jit(moe)
    compiled = compile_all([program.lower(*own[0]) for own in calls])

    def time(program: Compiled, own: Sequence[tuple]) -> DeviceTimes:
        return time_calls(lambda i: program(*own[i % len(own)]), len(own))

    return [time(*pair) for pair in zip(compiled, calls, strict=True)]


def active_experts(
    expert_ids: Int32[np.ndarray, "calls T top_k"], num_experts: int
) -> list[Int32[np.ndarray, "A"]]:
    """Returns the experts of each call, filled up with others to equally many."""
    calls = [np.unique(ids) for ids in expert_ids]
    most = max(map(len, calls))
    everyone = np.arange(num_experts, dtype=np.int32)
    others = [np.setdiff1d(everyone, own)[: most - len(own)] for own in calls]
    return [np.sort(np.concatenate(p)) for p in zip(calls, others, strict=True)]
