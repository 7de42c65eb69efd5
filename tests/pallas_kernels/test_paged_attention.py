"""Paged attention, every implementation, against an oracle in NumPy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import (
    NUM_LAYERS,
    SCALE,
    Row,
    check_used,
    make_layout,
    make_step,
    oracle,
)

from pallas_kernels.paged_attention import KvLayout, decode, paged_attention
from pallas_kernels.paged_attention.layout import pack_rows, row_address, unpack_rows
from pallas_kernels.paged_attention.support import HEAD_DIMS

TOLERANCE = 2e-5  # float32 sums in another order; the oracle rounds keys and values too
# Results are bfloat16; the kernel rounds weights to it, or to fp16.
ROUNDED_TOLERANCE = 2**-7

KERNELS = pytest.mark.parametrize(
    "implementation",
    [
        "mosaic_gpu_interpret",
        pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
    ],
)
STORED = pytest.mark.parametrize("stored", ["bfloat16", "float8_e4m3fn"])


@functools.cache
def jitted(layout, window, implementation="reference"):
    return jax.jit(
        functools.partial(
            paged_attention,
            layout=layout,
            scale=SCALE,
            window=window,
            implementation=implementation,
        )
    )


def check(step, layout, window=None, implementation="reference"):
    tolerance = TOLERANCE if implementation == "reference" else ROUNDED_TOLERANCE
    actual = jitted(layout, window, implementation)(*step.args)
    assert actual.dtype == step.args[0].dtype
    check_used(np.asarray(actual, np.float64), step, layout, window, tolerance)


DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
WINDOWS = pytest.mark.parametrize("window", [None, 1, 7, 200])


@DTYPES
@WINDOWS
def test_decode_sees_its_sequence_and_itself(dtype, window):
    layout = make_layout(dtype)
    cached = [1, 8, 13, 150]
    rows = [Row(s, c, 1) for s, c in enumerate(cached)]
    check(make_step(layout, cached, rows, 1, layer=1), layout, window)


@DTYPES
@WINDOWS
def test_rows_of_one_sequence_see_each_other_in_order(dtype, window):
    layout = make_layout(dtype)
    rows = [
        Row(0, 9, 4),  # with 9 cached tokens, in three rows, the last one short
        Row(1, 0, 3),  # a new sequence
        Row(0, 13, 4),
        Row(0, 17, 2),
        Row(1, 0, 0),  # unused
    ]
    check(make_step(layout, [9, 0], rows, 4, layer=2), layout, window)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("rows_per_frame", [1, 5, 24, 100])
def test_every_layer_of_every_cut_into_frames(layer, rows_per_frame):
    layout = make_layout("bfloat16", rows_per_frame)
    rows = [Row(0, 11, 1), Row(1, 3, 1)]
    check(make_step(layout, [11, 3], rows, 1, layer=layer), layout)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2)])
def test_query_heads_share_their_key_value_head(heads, kv_heads):
    layout = make_layout(kv_heads=kv_heads)
    rows = [Row(0, 5, 3), Row(0, 8, 1)]
    check(make_step(layout, [5], rows, 3, layer=0, heads=heads), layout)


@pytest.mark.parametrize("num_queries", [1, 2])
def test_unused_rows_give_zeros(num_queries):
    layout = make_layout()
    rows = [Row(0, 0, 0), Row(0, 4, 1), Row(0, 0, 0)]
    check(make_step(layout, [4], rows, num_queries, layer=0), layout)


def test_a_sequence_without_blocks_is_its_fresh_tokens():
    layout = make_layout()
    step = make_step(layout, [0], [Row(0, 0, 4)], 4, layer=0)
    q, k, v, pool, rows, layer = step.args
    no_blocks = dataclasses.replace(rows, block_frames=rows.block_frames[:, :0])
    actual = jitted(layout, None)(q, k, v, pool, no_blocks, layer)
    np.testing.assert_allclose(actual, oracle(step, layout, None), atol=TOLERANCE)


@DTYPES
def test_unpacked_rows_are_the_packed_ones(dtype):
    layout = make_layout(dtype)
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((2, 3, 2, 16))
    k, v = jnp.asarray(k, dtype), jnp.asarray(v, dtype)
    words = pack_rows(k, v, layout)
    assert words.shape == (3, layout.row_words)
    back = unpack_rows(words, layout)
    for x, y in zip(back, (k, v), strict=True):
        np.testing.assert_array_equal(x.astype(jnp.float32), y.astype(jnp.float32))


def test_float8_saturates_and_keeps_nan():
    layout = make_layout("float8_e4m3fn", kv_heads=1)
    k = jnp.asarray([1e9, -449.0, 448.0, jnp.nan] * 4)[None, None]
    back, _ = unpack_rows(pack_rows(k, k, layout), layout)
    expected = [448.0, -448.0, 448.0, np.nan] * 4
    np.testing.assert_array_equal(back[0, 0].astype(jnp.float32), expected)


@pytest.mark.parametrize("rows_per_frame", [1, 5, 24])
def test_no_two_rows_of_a_block_share_a_word(rows_per_frame):
    layout = make_layout("bfloat16", rows_per_frame)
    frames = jnp.arange(layout.frames_per_block, dtype=jnp.int32)
    taken = np.zeros((layout.frames_per_block, layout.frame_words), bool)
    tokens = jnp.arange(8, dtype=jnp.int32)
    for layer in range(NUM_LAYERS):
        where = jnp.broadcast_to(frames[None], (8, frames.size))
        for frame, word in zip(*row_address(where, tokens, layer, layout), strict=True):
            row = taken[int(frame), int(word) : int(word) + layout.row_words]
            assert row.size == layout.row_words
            assert not row.any()
            row[:] = True


def test_a_row_larger_than_a_frame_is_refused():
    with pytest.raises(ValueError, match="take 64 words but a frame has 60"):
        KvLayout(
            num_layers=1,
            num_kv_heads=2,
            head_dim=16,
            block_size=8,
            dtype="float32",
            frame_words=60,
        )


def test_heads_that_cannot_be_shared_are_refused():
    layout = make_layout(kv_heads=2)
    step = make_step(layout, [1], [Row(0, 1, 1)], 1, layer=0, heads=3)
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        jitted(layout, None)(*step.args)


# ---- the kernel for one query a row -------------------------------------------------


def decode_step(layout, cached, heads, layer=1):
    """One row for each length, and one that is not used."""
    rows = [Row(s, c, 1) for s, c in enumerate(cached)] + [Row(0, 0, 0)]
    return make_step(
        layout, cached, rows, 1, layer=layer, heads=heads, dtype="bfloat16"
    )


def decode_layout(stored, head_dim=64, kv_heads=1, rows_per_frame=7, **rest):
    return make_layout(stored, rows_per_frame, kv_heads, head_dim, waste=4, **rest)


@KERNELS
@STORED
@pytest.mark.parametrize("window", [None, 70])
def test_decode_of_any_length(implementation, stored, window):
    layout = decode_layout(stored)
    step = decode_step(layout, [0, 1, 15, 16, 17, 63, 64, 300], heads=2)
    check(step, layout, window, implementation)


@KERNELS
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 1)])
def test_decode_shares_key_value_heads(implementation, heads, kv_heads):
    layout = decode_layout("bfloat16", kv_heads=kv_heads)
    check(decode_step(layout, [20], heads), layout, None, implementation)


@pytest.mark.parametrize("ring_slots", [2, 3])
def test_decode_with_a_ring_of_any_size(ring_slots):
    layout = decode_layout("bfloat16")
    step = decode_step(layout, [300], heads=2)
    q, k, v, *rest = step.args
    config = decode.Config(splits=1, warpgroups=1, ring_slots=ring_slots)
    out = decode.paged_attention(
        *(q, pack_rows(k, v, layout), *rest, layout),
        scale=SCALE,
        config=config,
        interpret=True,
    )
    actual = np.asarray(out, np.float64)
    check_used(actual, step, layout, None, ROUNDED_TOLERANCE)


@pytest.mark.gpu
@STORED
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (16, 2)])
def test_decode_of_every_head(stored, head_dim, heads, kv_heads):
    layout = decode_layout(stored, head_dim, kv_heads, block_size=16)
    for cached in ([90], [0, 16, 1000, 130, 5]):  # with many splits and with fewer
        step = decode_step(layout, cached, heads)
        check(step, layout, None, "mosaic_gpu")


@pytest.mark.gpu
def test_decode_is_deterministic():
    layout = decode_layout("bfloat16", 128, 2, block_size=16)
    step = decode_step(layout, [777, 5000], 8)
    run = jitted(layout, None, "mosaic_gpu")
    first = np.asarray(run(*step.args).astype(jnp.float32))
    for _ in range(20):
        again = np.asarray(run(*step.args).astype(jnp.float32))
        np.testing.assert_array_equal(again, first)


# ---- the kernel for rows of many queries --------------------------------------------


PREFILL = [  # two sequences in turns, short rows, one that is not used
    Row(0, 90, 33),
    Row(1, 0, 33),
    Row(0, 123, 33),
    Row(1, 33, 1),
    Row(0, 0, 0),
]


@KERNELS
@STORED
@pytest.mark.parametrize("window", [None, 40])
def test_prefill_rows_see_each_other_in_order(implementation, stored, window):
    layout = decode_layout(stored)
    step = make_step(layout, [90, 0], PREFILL, 33, layer=1, heads=2, dtype="bfloat16")
    check(step, layout, window, implementation)


@pytest.mark.gpu
@STORED
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (8, 2)])
@pytest.mark.parametrize("window", [None, 100])
def test_prefill_of_every_head(stored, head_dim, heads, kv_heads, window):
    layout = decode_layout(stored, head_dim, kv_heads, block_size=16)
    rows = [Row(0, 700, 64), Row(1, 16, 64), Row(0, 764, 50), Row(2, 0, 5)]
    step = make_step(
        layout, [700, 16, 0], rows, 64, layer=1, heads=heads, dtype="bfloat16"
    )
    check(step, layout, window, "mosaic_gpu")


@pytest.mark.gpu
def test_prefill_of_long_rows():
    layout = decode_layout("bfloat16", 128, 1, block_size=16)
    rows = [Row(0, 65, 150), Row(1, 0, 130)]
    step = make_step(layout, [65, 0], rows, 150, layer=1, heads=2, dtype="bfloat16")
    check(step, layout, None, "mosaic_gpu")


def test_what_the_kernel_cannot_do_is_refused():
    layout = make_layout("float32")
    step = make_step(layout, [1], [Row(0, 1, 1)], 1, layer=0)
    with pytest.raises(NotImplementedError, match="queries are float32, keys float32"):
        jitted(layout, None, "mosaic_gpu_interpret")(*step.args)
