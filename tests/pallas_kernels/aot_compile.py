"""Compiles the Mosaic GPU kernel for an H200 without one: `python aot_compile.py`.

Run by test_aot.py in a process of its own, since the CUDA plugin must be told at start
that no device is there. Prints one line for each case and fails if the pool is copied.
"""

import functools
import os
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
    QWEN1_5_MOE_A2_7B,
    MoeSpec,
)
from pallas_kernels.side_tables import AffineTables, CodebookTables

TINY = MoeSpec(
    width=128,
    expert_width=128,
    num_experts=4,
    top_k=2,
    parent_bits=6,
    frames_per_plane=2,
)
CASES = [  # name, sizes, format, tokens, type; most experts at 8 bits are in the pool
    ("qwen, one token", QWEN1_5_MOE_A2_7B, "affine", 1, "float32"),
    ("qwen, 1024 tokens", QWEN1_5_MOE_A2_7B, "affine", 1024, "bfloat16"),
    ("gemma", GEMMA4_26B_A4B, "affine", 4, "bfloat16"),
    ("two frames a plane", TINY, "codebook", 4, "bfloat16"),
]


def arguments(spec, format, num_tokens, dtype, sharding):
    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    e, d, f, parts = (
        spec.num_experts,
        spec.width,
        spec.expert_width,
        spec.frames_per_plane,
    )
    num_frames = e * 3 * spec.parent_bits * parts

    def tables(n, k):
        if format == "codebook":
            entries = 2 ** (spec.parent_bits + 1) - 2**spec.seed_bits
            return CodebookTables(lut=array((2, e, n, entries), "float16"))
        return AffineTables(
            words=array((2, e, n // 64, k // spec.group_size, 64), "uint32")
        )

    return (
        array((num_tokens, d), dtype),
        array((num_tokens, spec.top_k), "int32"),
        array((num_tokens, spec.top_k), "float32"),
        array((num_frames, d * f // 32 // parts), "uint32"),
        array((2, e, 3, spec.parent_bits, parts), "int32"),
        array((2, e, 2), "int32"),
        tables(2 * f, d),
        tables(d, f),
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
    for name, spec, format, num_tokens, dtype in CASES:
        args = arguments(spec, format, num_tokens, dtype, sharding)
        compiled = jax.jit(run).trace(*args).lower().compile()
        temp_bytes = compiled.memory_analysis().temp_size_in_bytes
        pool_bytes = args[3].size * 4
        print(f"{name}: pool {pool_bytes:,} B, temporary {temp_bytes:,} B", flush=True)
        assert temp_bytes < max(pool_bytes // 2, 2**20), "the pool is copied"


if __name__ == "__main__":
    main()
