"""Problems of paged attention, and an oracle in NumPy: float64, query after query.

The pool is full of random words where no token was written, as a pool is whose frames
held expert planes before: read as keys and values they may be NaN.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import KvLayout, Rows

NUM_LAYERS, SCALE = 3, 0.3


def make_layout(
    dtype="float32", rows_per_frame=5, kv_heads=2, head_dim=16, block_size=8, waste=3
):
    """Five rows a frame and 24 a block: layers straddle frames."""
    row_words = 2 * kv_heads * head_dim * jnp.dtype(dtype).itemsize // 4
    return KvLayout(
        num_layers=NUM_LAYERS,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        frame_words=rows_per_frame * row_words + waste,
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


def make_step(
    layout, cached, rows, num_queries, layer, heads=4, seed=0, dtype="float32"
):
    """Writes the cached tokens of each sequence into random frames of a random pool."""
    rng = np.random.default_rng(seed)
    per_block, block_size = layout.frames_per_block, layout.block_size
    max_blocks = max(1, max(-(-c // block_size) for c in cached))
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
            rounded(rng.standard_normal((max(c, e), *size)), dtype)
            for c, e in zip(cached, ends, strict=True)
        ]
        for _ in range(2)
    )
    for s, tokens in enumerate(cached):
        for t in range(tokens):
            for at_layer in range(NUM_LAYERS):
                right = at_layer == layer  # the other layers hold something else
                pair = [
                    x[s][t] if right else rng.standard_normal(size)
                    for x in (keys, values)
                ]
                words = np.stack(pair).astype(jnp.dtype(layout.dtype)).reshape(-1)
                row = at_layer * block_size + t % block_size
                frame = frames[s, t // block_size, row // layout.rows_per_frame]
                at = row % layout.rows_per_frame * layout.row_words
                pool[frame, at : at + layout.row_words] = words.view(np.uint32)

    q = rounded(
        rng.standard_normal((len(rows), num_queries, heads, layout.head_dim)), dtype
    )
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
        *(jnp.asarray(x, dtype) for x in (q, *fresh)),
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


def check_used(actual, step, layout, window, tolerance):
    """Compares the used queries with the oracle; unused rows are zeros."""
    expected = oracle(step, layout, window)
    for r, row in enumerate(step.rows):
        if row.length == 0:
            np.testing.assert_array_equal(actual[r], 0, f"unused row {r}")
        used = slice(0, row.length)
        np.testing.assert_allclose(
            actual[r, used],
            expected[r, used],
            rtol=tolerance,
            atol=tolerance,
            err_msg=f"row {r}: {row}, window={window}, {layout}",
        )
