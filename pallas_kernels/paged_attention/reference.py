"""The contract of `paged_attention` in plain JAX.

Keys come in chunks, first the cached ones, then the step's fresh ones, and are folded
into a running softmax (Milakov and Gimelshein 2018, arXiv 1805.02867), so that the
number of cached tokens is data and one trace serves every context length.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from pallas_kernels.paged_attention.layout import (
    KvLayout,
    row_address,
    stored,
    unpack_rows,
)
from pallas_kernels.paged_attention.rows import Rows

_CHUNK_TOKENS = 128
_MASKED = -1e30  # finite, so that a row without any key stays free of NaN

# (weighted values, running maximum, running sum) of every query and head
_State = tuple[Array, Array, Array]


def _fold(
    state: _State,
    q: Float[Array, "R Q K G H"],
    k: Float[Array, "R S K H"],
    v: Float[Array, "R S K H"],
    visible: Bool[Array, "R Q S"],
) -> _State:
    """Folds S keys into the running softmax.

    Values that no query of a row sees are zeroed: what a frame held before, or another
    request's NaN, must not leak through a weight of zero.
    """
    out, top, total = state
    v = jnp.where(visible.any(axis=1)[..., None, None], v, 0)
    scores = jnp.einsum("RQKGH,RSKH->RKGQS", q, k.astype(jnp.float32))
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    new_top = jnp.maximum(top, scores.max(-1))
    weights = jnp.exp(scores - new_top[..., None])
    weights = jnp.where(visible[:, None, None], weights, 0.0)
    keep = jnp.exp(top - new_top)
    total = total * keep + weights.sum(-1)
    out = out * keep[..., None] + jnp.einsum(
        "RKGQS,RSKH->RKGQH", weights, v.astype(jnp.float32)
    )
    return out, new_top, total


def _visible(
    q_positions: Int32[Array, "R Q"],
    k_positions: Int32[Array, "R S"],
    window: int | None,
) -> Bool[Array, "R Q S"]:
    """Causal, and within the window if there is one (the token itself counts)."""
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    seen = distance >= 0
    return seen if window is None else seen & (distance < window)


def _gather_chunk(
    pool: UInt32[Array, "num_frames frame_words"],
    rows: Rows,
    positions: Int32[Array, "S"],
    layer: Int32[Array, ""],
    layout: KvLayout,
) -> UInt32[Array, "R S row_words"]:
    """Reads the rows of the given positions of every sequence out of the pool."""
    last_block = rows.block_frames.shape[1] - 1
    block = jnp.minimum(positions // layout.block_size, last_block)
    frames = rows.block_frames[:, block]
    token = jnp.broadcast_to(positions % layout.block_size, frames.shape[:2])
    frame, word = row_address(frames, token, layer, layout)
    starts = jnp.stack([frame, word], axis=-1)
    dims = lax.GatherDimensionNumbers(
        offset_dims=(2,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    return lax.gather(
        pool,
        starts,
        dims,
        slice_sizes=(1, layout.row_words),
        mode=lax.GatherScatterMode.CLIP,
    )


def paged_attention(
    q: Float[Array, "R Q N H"],
    k: Float[Array, "R Q K H"],
    v: Float[Array, "R Q K H"],
    pool: UInt32[Array, "num_frames frame_words"],
    rows: Rows,
    layer: Int32[Array, ""] | int,
    layout: KvLayout,
    *,
    scale: float,
    window: int | None = None,
) -> Float[Array, "R Q N H"]:
    """Computes attention; see `pallas_kernels.paged_attention.paged_attention`."""
    num_rows, num_queries, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    groups = num_heads // num_kv_heads
    layer = jnp.asarray(layer, jnp.int32)
    offsets = jnp.arange(num_queries, dtype=jnp.int32)
    q_positions = rows.starts[:, None] + offsets[None]
    queries = (q.astype(jnp.float32) * scale).reshape(
        num_rows, num_queries, num_kv_heads, groups, head_dim
    )
    shape = (num_rows, num_kv_heads, groups, num_queries)
    state: _State = (
        jnp.zeros((*shape, head_dim), jnp.float32),
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )

    def cached_chunk(i: Array, state: _State) -> _State:
        positions = i * _CHUNK_TOKENS + jnp.arange(_CHUNK_TOKENS, dtype=jnp.int32)
        words = _gather_chunk(pool, rows, positions, layer, layout)
        keys, values = unpack_rows(words, layout)
        every_row = jnp.broadcast_to(positions[None], (num_rows, _CHUNK_TOKENS))
        visible = _visible(q_positions, every_row, window)
        visible &= (positions[None] < rows.cached[:, None])[:, None, :]
        return _fold(state, queries, keys, values, visible)

    if rows.block_frames.shape[1]:  # without blocks there is nothing to loop over
        num_chunks = (jnp.max(rows.cached) + _CHUNK_TOKENS - 1) // _CHUNK_TOKENS
        state = lax.fori_loop(0, num_chunks, cached_chunk, state)

    # What decode reads back from the pool has been rounded: round the fresh ones alike.
    k, v = stored(k, layout.dtype), stored(v, layout.dtype)
    if num_queries == 1:
        own = (rows.lengths > 0)[:, None, None]
        state = _fold(state, queries, k, v, own)
    else:

        def fresh_row(state: _State, row: Array) -> tuple[_State, None]:
            def of_row(a: Array) -> Array:
                return jnp.broadcast_to(a[row][None], (num_rows, *a.shape[1:]))

            visible = _visible(q_positions, of_row(q_positions), window)
            visible &= (rows.sequences == rows.sequences[row])[:, None, None]
            visible &= (offsets < rows.lengths[row])[None, None]
            return _fold(state, queries, of_row(k), of_row(v), visible), None

        state, _ = lax.scan(fresh_row, state, jnp.arange(num_rows, dtype=jnp.int32))

    out, _, total = state
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    out = jnp.transpose(out, (0, 3, 1, 2, 4))
    return out.reshape(q.shape).astype(q.dtype)
