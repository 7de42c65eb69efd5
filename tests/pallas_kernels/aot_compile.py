"""Compiles the fused MoE for an H200 without one: `python aot_compile.py`.

Run by test_aot.py in a process of its own, since the CUDA plugin must be told at start
that no device is there. Prints one line for each case, and fails if a step would copy
the pool or side tables: both are given far larger than what the kernels work with.
"""

import dataclasses
import functools
import os
import time
from pathlib import Path

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from pallas_kernels.fused_moe import fused_moe
from pallas_kernels.fused_moe.arg_specs import (
    GEMMA4_26B_A4B,
    MIXTRAL_8X7B,
    QWEN1_5_MOE_A2_7B,
    MoeSpec,
)
from pallas_kernels.side_tables import AffineTables, CodebookTables, RefinedTables

TINY = MoeSpec(
    width=128,
    expert_width=128,
    num_experts=4,
    top_k=2,
    parent_bits=6,
    frames_per_plane=2,
)
LARGE = 20 * 2**30  # bytes of the pool, and at least of the tables of a block


def four_bits(spec):
    """Halves the branches that the prefill kernel is compiled for."""
    return dataclasses.replace(spec, parent_bits=4)


CASES = [  # sizes, format, tokens, type; few tokens and float32 take the decode kernel
    ("qwen", QWEN1_5_MOE_A2_7B, "affine", 1, "float32"),
    ("qwen", QWEN1_5_MOE_A2_7B, "affine", 64, "bfloat16"),
    ("qwen", QWEN1_5_MOE_A2_7B, "codebook", 8, "bfloat16"),
    ("qwen", QWEN1_5_MOE_A2_7B, "affine", 1024, "bfloat16"),
    ("mixtral", MIXTRAL_8X7B, "affine", 8, "bfloat16"),
    ("mixtral", four_bits(MIXTRAL_8X7B), "affine", 512, "bfloat16"),
    ("gemma", GEMMA4_26B_A4B, "affine", 8, "bfloat16"),
    ("gemma", four_bits(GEMMA4_26B_A4B), "affine", 1024, "bfloat16"),
    ("gemma", four_bits(GEMMA4_26B_A4B), "refined", 8, "bfloat16"),
    ("two frames a plane", TINY, "codebook", 4, "bfloat16"),
]


def make_arguments(spec, format, num_tokens, dtype, sharding):
    """Returns the shapes of all arguments."""

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    e, d, f = spec.num_experts, spec.width, spec.expert_width
    parts = spec.frames_per_plane
    frame_words = d * f // 32 // parts

    def tables(num_layers, n, k):
        batch = (num_layers, e)
        if format == "codebook":
            entries = 2 ** (spec.parent_bits + 1) - 2**spec.seed_bits
            return CodebookTables(lut=array((*batch, n, entries), "float16"))
        kind, columns = {
            "affine": (AffineTables, k // spec.group_size),
            "refined": (RefinedTables, 2**spec.seed_bits),
        }[format]
        return kind(words=array((*batch, n // 64, columns, 64), "uint32"))

    def num_bytes(tables):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tables))

    num_layers = -(-LARGE // num_bytes(tables(1, d, f)))
    gate_up, down = tables(num_layers, 2 * f, d), tables(num_layers, d, f)
    return (
        array((num_tokens, d), dtype),
        array((num_tokens, spec.top_k), "int32"),
        array((num_tokens, spec.top_k), "float32"),
        array((LARGE // (4 * frame_words), frame_words), "uint32"),
        array((num_layers, e, 3, spec.parent_bits, parts), "int32"),
        array((num_layers, e, 2), "int32"),
        *(gate_up, down),
        array((), "int32"),
    )


def main():
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200:1x1x1",
        topology="1x1x1",
        target_config=Path(__file__).with_name("h200.txtpb").read_text(),
    )
    sharding = SingleDeviceSharding(topology.devices[0])
    run = functools.partial(fused_moe, implementation="mosaic_gpu")
    for name, *case in CASES:
        args = make_arguments(*case, sharding)
        start = time.perf_counter()
        compiled = jax.jit(run).trace(*args).lower().compile()
        seconds = time.perf_counter() - start
        temp_bytes = compiled.memory_analysis().temp_size_in_bytes
        title = f"{name}, {case[1]}, {case[2]} tokens in {case[3]}"
        print(f"{title}: {temp_bytes / 2**20:.1f} MiB, {seconds:.0f} s", flush=True)
        assert temp_bytes < LARGE // 100, f"{title}: copies"


if __name__ == "__main__":
    main()
