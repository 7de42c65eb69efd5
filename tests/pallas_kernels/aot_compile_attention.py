"""Compiles the attention kernels for an H200 without one; see aot_compile.py.

Run by test_attention_aot.py in a process of its own, since the CUDA plugin must be told
at start that no device is there. Prints one line for each case and fails if the pool is
copied.
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

from pallas_kernels.paged_attention import KvLayout, Rows, paged_attention

NUM_FRAMES, FRAME_WORDS = 3000, 90112
CASES = [  # rows, queries, query heads, key-value heads, head_dim, stored type, window
    (1, 1, 16, 16, 128, "bfloat16", None),
    (16, 1, 32, 8, 128, "float8_e4m3fn", None),
    (4, 1, 16, 8, 256, "bfloat16", 1024),
    (4, 1, 16, 2, 512, "bfloat16", None),
    (2, 1, 6, 6, 64, "float8_e4m3fn", None),
    (4, 64, 16, 16, 128, "bfloat16", None),
    (4, 64, 32, 8, 128, "float8_e4m3fn", None),
    (4, 64, 16, 8, 256, "bfloat16", 1024),
    (4, 64, 16, 2, 512, "bfloat16", None),
    (2, 17, 6, 6, 64, "float8_e4m3fn", None),
]


def main():
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200:1x1x1",
        topology="1x1x1",
        target_config=Path(__file__).with_name("h200.txtpb").read_text(),
    )
    sharding = SingleDeviceSharding(topology.devices[0])

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    for case in CASES:
        r, queries, heads, kv_heads, head_dim, stored, window = case
        layout = KvLayout(
            num_layers=24,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=16,
            dtype=stored,
            frame_words=FRAME_WORDS,
        )
        rows = Rows(
            starts=array("int32", r),
            lengths=array("int32", r),
            cached=array("int32", r),
            sequences=array("int32", r),
            block_frames=array("int32", r, 128, layout.frames_per_block),
        )
        run = functools.partial(
            paged_attention,
            layout=layout,
            scale=head_dim**-0.5,
            window=window,
            implementation="mosaic_gpu",
        )
        key = array("bfloat16", r, queries, kv_heads, head_dim)
        query = array("bfloat16", r, queries, heads, head_dim)
        pool = array("uint32", NUM_FRAMES, FRAME_WORDS)
        args = (query, key, key, pool, rows, array("int32"))
        compiled = jax.jit(run).trace(*args).lower().compile()
        temp_bytes = compiled.memory_analysis().temp_size_in_bytes
        print(f"{case}: temporary {temp_bytes:,} B", flush=True)
        assert temp_bytes < NUM_FRAMES * FRAME_WORDS * 4 // 100, "the pool is copied"


if __name__ == "__main__":
    main()
