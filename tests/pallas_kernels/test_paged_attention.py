"""Paged attention against an oracle in NumPy: float64, one query after the other.

The pool is full of random words where no token was written, as a pool is whose frames
held expert planes before: read as keys and values they may be NaN.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import KvLayout, Rows, paged_attention
from pallas_kernels.paged_attention.layout import pack_rows, row_address, unpack_rows

NUM_LAYERS, BLOCK_SIZE, SCALE = 3, 8, 0.3
TOLERANCE = 2e-5  # float32 sums in another order; the oracle rounds keys and values too


def make_layout(dtype="float32", rows_per_frame=5, kv_heads=2, head_dim=16):
    """Five rows a frame and 24 a block: layers straddle frames."""
    row_words = 2 * kv_heads * head_dim // (2 if dtype == "bfloat16" else 1)
    return KvLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=BLOCK_SIZE,
        dtype=dtype,
        frame_words=rows_per_frame * row_words + 3,  # and a waste at the end
    )


@dataclass(frozen=True)
class Row:
    """A row of the step: which sequence, and how many tokens of it are fresh before."""

    sequence: int
    start: int
    length: int


@dataclass(frozen=True)
class Step:
    """A step's arguments, and the keys and values of every sequence [S, heads, H]."""

    q: np.ndarray
    rows: list[Row]
    cached: list[int]
    keys: list[np.ndarray]
    values: list[np.ndarray]
    args: tuple


def rounded(x, dtype):
    return np.asarray(jnp.asarray(x, dtype).astype(jnp.float32), np.float64)


def make_step(layout, cached, rows, num_queries, layer, heads=4, seed=0):
    """Writes the cached tokens of each sequence into random frames of a random pool."""
    rng = np.random.default_rng(seed)
    per_block = layout.frames_per_block
    max_blocks = max(1, max(-(-c // BLOCK_SIZE) for c in cached))
    num_frames = 1 + len(cached) * max_blocks * per_block
    pool = rng.integers(0, 2**32, (num_frames, layout.frame_words), np.uint32)
    frames = rng.permutation(np.arange(1, num_frames)).astype(np.int32)
    frames = frames.reshape(len(cached), max_blocks, per_block)

    size = (layout.num_kv_heads, layout.head_dim)
    ends = [
        max([r.start + r.length for r in rows if r.sequence == s], default=0)
        for s in range(len(cached))
    ]
    keys, values = (
        [
            rng.standard_normal((max(c, e), *size))
            for c, e in zip(cached, ends, strict=True)
        ]
        for _ in range(2)
    )
    itemsize = 2 if layout.dtype == "bfloat16" else 4
    for s, tokens in enumerate(cached):
        for t in range(tokens):
            for at_layer in range(NUM_LAYERS):
                right = at_layer == layer  # the other layers hold something else
                pair = [
                    x[s][t] if right else rng.standard_normal(size)
                    for x in (keys, values)
                ]
                words = np.stack(pair).astype(jnp.dtype(layout.dtype)).reshape(-1)
                assert words.nbytes == 2 * np.prod(size) * itemsize
                row = at_layer * BLOCK_SIZE + t % BLOCK_SIZE
                frame = frames[s, t // BLOCK_SIZE, row // layout.rows_per_frame]
                at = row % layout.rows_per_frame * layout.row_words
                pool[frame, at : at + layout.row_words] = words.view(np.uint32)

    q = rng.standard_normal((len(rows), num_queries, heads, layout.head_dim))
    fresh = rng.standard_normal((2, len(rows), num_queries, *size))
    for r, row in enumerate(rows):
        for i in range(row.length):
            fresh[:, r, i] = (
                keys[row.sequence][row.start + i],
                values[row.sequence][row.start + i],
            )
    table = Rows(
        starts=jnp.asarray([r.start for r in rows], jnp.int32),
        lengths=jnp.asarray([r.length for r in rows], jnp.int32),
        cached=jnp.asarray(
            [cached[r.sequence] if r.length else 0 for r in rows], jnp.int32
        ),
        sequences=jnp.asarray(
            [r.sequence if r.length else -1 for r in rows], jnp.int32
        ),
        block_frames=jnp.asarray(
            np.stack([frames[r.sequence] * (r.length > 0) for r in rows])
        ),
    )
    args = (
        *(jnp.asarray(x, jnp.float32) for x in (q, *fresh)),
        jnp.asarray(pool),
        table,
        jnp.int32(layer),
    )
    return Step(q=q, rows=rows, cached=cached, keys=keys, values=values, args=args)


def oracle(step, layout, window):
    """Softmax over the tokens that each query may see."""
    out = np.zeros(step.q.shape)
    groups = step.q.shape[2] // layout.num_kv_heads
    for r, row in enumerate(step.rows):
        keys, values = (
            rounded(x[row.sequence], layout.dtype) for x in (step.keys, step.values)
        )
        for i in range(row.length):
            position = row.start + i
            first = 0 if window is None else max(0, position - window + 1)
            seen = slice(first, position + 1)
            for n in range(step.q.shape[2]):
                scores = keys[seen, n // groups] @ step.q[r, i, n] * SCALE
                weights = np.exp(scores - scores.max())
                out[r, i, n] = weights / weights.sum() @ values[seen, n // groups]
    return out


@functools.cache
def jitted(layout, window):
    return jax.jit(
        functools.partial(paged_attention, layout=layout, scale=SCALE, window=window)
    )


def check(step, layout, window=None):
    actual = np.asarray(jitted(layout, window)(*step.args))
    expected = oracle(step, layout, window)
    for r, row in enumerate(step.rows):
        if row.length == 0:
            np.testing.assert_array_equal(actual[r], 0, f"unused row {r}")
        used = slice(0, row.length)
        np.testing.assert_allclose(
            actual[r, used],
            expected[r, used],
            rtol=TOLERANCE,
            atol=TOLERANCE,
            err_msg=f"row {r}: {row}, window={window}, {layout}",
        )


DTYPES = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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
    no_blocks = Rows(
        starts=rows.starts,
        lengths=rows.lengths,
        cached=rows.cached,
        sequences=rows.sequences,
        block_frames=rows.block_frames[:, :0],
    )
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
    np.testing.assert_array_equal(back[0], k)
    np.testing.assert_array_equal(back[1], v)


@pytest.mark.parametrize("rows_per_frame", [1, 5, 24])
def test_no_two_rows_of_a_block_share_a_word(rows_per_frame):
    layout = make_layout("bfloat16", rows_per_frame)
    frames = jnp.arange(layout.frames_per_block, dtype=jnp.int32)
    taken = np.zeros((layout.frames_per_block, layout.frame_words), bool)
    tokens = jnp.arange(BLOCK_SIZE, dtype=jnp.int32)
    for layer in range(NUM_LAYERS):
        where = jnp.broadcast_to(frames[None], (BLOCK_SIZE, frames.size))
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
