"""Attention of rows of many queries on Hopper: flash attention on paged blocks.

A CTA takes 64 queries of a row and a few heads that share a key-value head, a warpgroup
each (two for heads wider than 256, which share a head's columns):

    copy (cp.async)        |---- 0 ----||---- 1 ----||---- 2 ----|
    scores = q k' (wgmma)               |-0-|        |-1-|
    softmax                                 |-0-|        |-1-|
    sums += weights v (wgmma)                   |-0-|        |-1-|

First come the tiles of cached tokens, read straight out of the pool by table, then
those of the step's fresh rows of the same sequence. A tile that no query sees is
skipped: its copy does not begin. Both kinds are data, so one program serves all steps.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int32, UInt32

from pallas_kernels.paged_attention.addresses import Ref, flat_table
from pallas_kernels.paged_attention.layout import KvLayout
from pallas_kernels.paged_attention.prefill_threads import (
    SWIZZLED,
    Cut,
    Tokens,
    begin_copy,
    synchronize,
    wait_for_copies,
)
from pallas_kernels.paged_attention.rows import Rows

QUERIES = 64
"""Queries of a warpgroup: rows of one wgmma."""

_EMPTY = -1e30  # maximum of no scores; finite, so that differences stay free of NaN
_MASKED = 2 * _EMPTY  # its weight is zero even where the maximum is _EMPTY


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the kernel.

    Attributes:
      tokens: of a tile of keys: 64, 128, 192 or 256.
      heads: query heads of a CTA, which share its keys and values.
      slots: tiles in shared memory; with 2, one of them is on its way.
    """

    tokens: int
    heads: int
    slots: int

    def __post_init__(self) -> None:
        if self.tokens not in (64, 128, 192, 256):
            raise ValueError(f"tokens={self.tokens} must be 64, 128, 192 or 256")
        if self.heads < 1:
            raise ValueError(f"heads={self.heads} must be positive")
        if self.slots not in (1, 2):
            raise ValueError(f"slots={self.slots} must be 1 or 2")


def default_config(head_dim: int, queries_per_head: int) -> Config:
    """Returns sizes that fit shared memory and registers.

    Args:
      head_dim: H.
      queries_per_head: query heads that share a key-value head.
    """
    heads = 2 if head_dim <= 256 and queries_per_head % 2 == 0 else 1
    return Config(tokens=64, heads=heads, slots=2 if head_dim <= 256 else 1)


def paged_attention(
    q: BFloat16[Array, "R Q N H"],
    fresh: UInt32[Array, "R Q row_words"],
    pool: UInt32[Array, "num_frames frame_words"],
    rows: Rows,
    layer: Int32[Array, ""],
    layout: KvLayout,
    *,
    scale: float,
    window: int | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> BFloat16[Array, "R Q N H"]:
    """Attends to the cached tokens of each row's sequence and to the fresh ones.

    Args:
      q: queries.
      fresh: packed keys and values of the fresh tokens.
      pool: the paged pool.
      rows: which positions of which sequences the queries are.
      layer: of the model.
      layout: of the key-value blocks.
      scale: factor on the scores.
      window: tokens that a query sees, itself included; None for all.
      config: sizes of the kernel; None chooses them.
      interpret: whether to run on the CPU interpreter of Mosaic GPU.
    Raises:
      ValueError: if the config's heads do not divide those of a key-value head.
    """
    num_rows, num_queries, num_heads, head_dim = q.shape
    shared = num_heads // layout.num_kv_heads
    config = config or default_config(head_dim, shared)
    if shared % config.heads:
        raise ValueError(
            f"heads={config.heads} must divide the {shared} query heads that share a"
            " key-value head"
        )
    parts = Cut(
        layout=layout,
        tokens=config.tokens,
        queries=num_queries,
        warpgroups=1,
        interpret=interpret,
    ).parts
    cut = Cut(
        layout=layout,
        tokens=config.tokens,
        queries=num_queries,
        warpgroups=config.heads * parts,
        interpret=interpret,
    )
    padding = -num_queries % QUERIES
    padded = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    if cut.converts:
        limit = float(jnp.finfo(cut.dtype).max)
        padded = jnp.clip(padded.astype(jnp.float32), -limit, limit).astype(cut.dtype)
    groups = num_heads // config.heads
    query_tiles = padded.shape[1] // QUERIES

    def kernel(*refs: Ref) -> None:
        count = len(vars(operands))
        inputs, (out, q_smem, keys, values, arrived, meeting) = (
            refs[:count],
            refs[count:],
        )
        number = lax.axis_index("unit")
        row = lax.div(number, groups * query_tiles)
        of_row = number - row * (groups * query_tiles)
        tile = lax.div(of_row, groups)
        _Cta(
            cut=cut,
            config=config,
            scale=scale,
            window=window,
            inputs=_Operands(*inputs),
            out=out,
            q=q_smem,
            keys=keys,
            values=values,
            arrived=arrived,
            meeting=meeting,
            row=row,
            tile=tile,
            first_head=(of_row - tile * groups) * config.heads,
        ).run()

    tiles = (config.slots, cut.parts, cut.tokens, cut.columns)
    q_shape = (config.heads, cut.parts, QUERIES, cut.columns)
    operands = _Operands(
        q=padded,
        fresh=fresh.reshape(-1, fresh.shape[-1]),
        pool=pool,
        table=flat_table(rows),
        starts=rows.starts,
        lengths=rows.lengths,
        cached=rows.cached,
        sequences=rows.sequences,
        layer=layer.reshape(1),
    )
    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(padded.shape, cut.dtype),
        grid=(num_rows * query_tiles * groups,),
        grid_names=("unit",),
        num_threads=cut.warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM(q_shape, cut.dtype, transforms=SWIZZLED),
            plgpu.SMEM(tiles, cut.dtype, transforms=SWIZZLED),
            plgpu.SMEM(tiles, cut.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_arrivals=cut.parts, num_barriers=config.heads),
            plgpu.Barrier(num_arrivals=cut.warpgroups),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(*vars(operands).values())
    return out[:, :num_queries].astype(q.dtype)


@dataclass(frozen=True)
class _Operands:
    """Operands of the kernel, or references to them."""

    q: Any
    fresh: Any
    pool: Any
    table: Any
    starts: Any
    lengths: Any
    cached: Any
    sequences: Any
    layer: Any


@dataclass(frozen=True, kw_only=True)
class _Tile:
    """A tile of keys: their positions, and which fresh row they are, if any."""

    start: Int32[Array, ""]
    stop: Int32[Array, ""]
    fresh: Int32[Array, ""]  # index of position 0 among the fresh tokens
    is_fresh: Bool[Array, ""]
    is_seen: Bool[Array, ""]


_State = tuple[Array, Array, Array]  # sums, maxima, totals


@dataclass(frozen=True, kw_only=True)
class _Cta:
    """One CTA of the kernel: a warpgroup for each head and part of its columns.

    Attributes:
      cut: static sizes.
      config: sizes of the kernel.
      scale: factor on the scores.
      window: tokens that a query sees.
      inputs: in global memory.
      out: results in global memory.
      q: queries, later results, ``[heads, parts, 64, columns]``.
      keys: ``[slots, parts, tokens, columns]``.
      values: the same.
      arrived: barrier of the queries of each head.
      meeting: barrier of the CTA for the interpreter.
      row: of the step.
      tile: which 64 of its queries.
      first_head: of the query heads.
    """

    cut: Cut
    config: Config
    scale: float
    window: int | None
    inputs: _Operands
    out: Ref
    q: Ref
    keys: Ref
    values: Ref
    arrived: Ref
    meeting: Ref
    row: Array
    tile: Array
    first_head: Array

    def run(self) -> None:
        """Runs the part of this warpgroup."""
        cut, row = self.cut, self.row
        warpgroup = lax.axis_index("warpgroup")
        head = lax.div(warpgroup, cut.parts)
        part = warpgroup - head * cut.parts
        at = (row, pl.ds(self.tile * QUERIES, QUERIES), self.first_head + head)
        columns = pl.ds(part * cut.columns, cut.columns)
        plgpu.copy_gmem_to_smem(
            self.inputs.q.at[*at, columns], self.q.at[head, part], self.arrived.at[head]
        )
        first, cached_tiles, end = self._range()

        def is_seen(i: Array) -> Array:
            return self._tile(first, cached_tiles, i).is_seen

        def next_seen(i: Array) -> Array:
            return lax.while_loop(
                lambda i: (i < end) & ~is_seen(jnp.minimum(i, end - 1)),
                lambda i: i + 1,
                i,
            )

        count = lax.fori_loop(
            0, end, lambda i, n: n + is_seen(i).astype(jnp.int32), jnp.int32(0)
        )

        def begin(i: Array, slot: Array) -> None:
            self._begin_copy(self._tile(first, cached_tiles, i), slot, warpgroup)

        def step(k: Array, carry: tuple[Array, _State]) -> tuple[Array, _State]:
            i, state = carry
            slot = lax.rem(k, self.config.slots)
            if self.config.slots == 1:
                synchronize(cut, self.meeting)  # all are done with the tile before
                begin(i, slot)
            wait_for_copies(cut)
            synchronize(cut, self.meeting)
            following = next_seen(i + 1)

            def meanwhile() -> None:
                if self.config.slots == 2:
                    pl.when(k + 1 < count)(lambda: begin(following, 1 - slot))

            seen = self._tile(first, cached_tiles, i)
            scores = self._scores(head, slot, meanwhile)
            return following, self._fold(seen, scores, slot, part, state)

        start = next_seen(jnp.int32(0))
        if self.config.slots == 2:
            pl.when(count > 0)(lambda: begin(start, jnp.int32(0)))
        plgpu.barrier_wait(self.arrived.at[head])
        _, state = lax.fori_loop(0, count, step, (start, self._empty()))
        synchronize(cut, self.meeting)  # all are done with the queries
        self._store(state, self.q.at[head, part])
        plgpu.copy_smem_to_gmem(self.q.at[head, part], self.out.at[*at, columns])
        plgpu.wait_smem_to_gmem(0)

    @property
    def _queries(self) -> tuple[Array, Array]:
        """Positions of the first query, and one past the last."""
        start = self.inputs.starts[self.row]
        first = start + self.tile * QUERIES
        return first, jnp.minimum(
            first + QUERIES, start + self.inputs.lengths[self.row]
        )

    def _range(self) -> tuple[Array, Array, Array]:
        """Returns the first cached position, its tiles, and all tiles there can be."""
        first_query, stop = self._queries
        seen = 0 if self.window is None else first_query - (self.window - 1)
        # Blocks of 16 tokens stay whole where the window begins in their middle.
        first = lax.div(jnp.maximum(seen, 0), 16) * 16
        cached = jnp.maximum(self.inputs.cached[self.row] - first, 0)
        tiles = lax.div(cached + (self.cut.tokens - 1), self.cut.tokens)
        fresh_tiles = self.inputs.starts.shape[0] * self._tiles_per_row
        end = jnp.where(first_query < stop, tiles + fresh_tiles, 0)
        return first, tiles, end

    @property
    def _tiles_per_row(self) -> int:
        return -(-self.cut.queries // self.cut.tokens)

    def _tile(self, first: Array, cached_tiles: Array, i: Array) -> _Tile:
        """Returns the tile of number i: cached ones, then those of each fresh row."""
        inputs, cut = self.inputs, self.cut
        nth = jnp.maximum(i - cached_tiles, 0)
        row = lax.div(nth, self._tiles_per_row)
        offset = (nth - row * self._tiles_per_row) * cut.tokens
        row_start = inputs.starts[row]
        row_stop = row_start + inputs.lengths[row]
        is_fresh = i >= cached_tiles
        start = jnp.where(is_fresh, row_start + offset, first + i * cut.tokens)
        stop = jnp.where(is_fresh, row_stop, inputs.cached[self.row])
        first_query, last_stop = self._queries
        own = inputs.sequences[row] == inputs.sequences[self.row]
        seen = (start < jnp.minimum(stop, last_stop)) & (own | ~is_fresh)
        if self.window is not None:
            newest = jnp.minimum(stop, start + cut.tokens) - 1
            seen &= first_query - newest < self.window
        return _Tile(
            start=start,
            stop=stop,
            fresh=row * cut.queries - row_start,
            is_fresh=is_fresh,
            is_seen=seen,
        )

    def _begin_copy(self, tile: _Tile, slot: Array, warpgroup: Array) -> None:
        inputs, cut = self.inputs, self.cut
        shared = inputs.q.shape[2] // cut.layout.num_kv_heads
        tokens = Tokens(
            row=self.row,
            head=lax.div(self.first_head, shared),
            layer=inputs.layer[0],
            start=tile.start,
            stop=tile.stop,
            cached=inputs.cached[self.row],
            fresh=tile.fresh,
            is_fresh=tile.is_fresh.astype(jnp.int32),
        )
        keys, values = self.keys.at[slot], self.values.at[slot]
        sources = (inputs.pool, inputs.fresh, inputs.table)
        begin_copy(cut, tokens, sources, keys, values, warpgroup)

    def _empty(self) -> _State:
        rows = plgpu.Layout.WGMMA.reduce(1)
        sums = jnp.zeros((QUERIES, self.cut.columns), jnp.float32)
        maxima = jnp.full((QUERIES,), _EMPTY, jnp.float32)
        totals = jnp.zeros((QUERIES,), jnp.float32)
        return (
            plgpu.layout_cast(sums, plgpu.Layout.WGMMA),
            plgpu.layout_cast(maxima, rows),
            plgpu.layout_cast(totals, rows),
        )

    def _fold(
        self,
        tile: _Tile,
        scores: Float32[Array, "64 tokens"],
        slot: Array,
        part: Array,
        state: _State,
    ) -> _State:
        """Folds a tile into the running softmax."""
        sums, top, total = state
        scores = scores * (self.scale * math.log2(math.e))
        scores = jnp.where(self._visible(tile), scores, _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        keep = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, (0,)))
        total = total * keep + jnp.sum(weights, axis=1)
        sums = sums * lax.broadcast_in_dim(keep, sums.shape, (0,))
        sums = self._add_values(sums, weights.astype(self.cut.dtype), slot, part)
        return sums, new_top, total

    def _visible(self, tile: _Tile) -> Bool[Array, "64 tokens"]:
        shape = (QUERIES, self.cut.tokens)
        query, token = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
            for axis in range(2)
        )
        distance = query - token + (self._queries[0] - tile.start)
        visible = (distance >= 0) & (token < tile.stop - tile.start)
        return visible if self.window is None else visible & (distance < self.window)

    def _scores(
        self, head: Array, slot: Array, meanwhile: Callable[[], None]
    ) -> Float32[Array, "64 tokens"]:
        """Multiplies queries and keys, and does something else while that runs."""
        shape = (QUERIES, self.cut.tokens)
        pairs = [(self.q.at[head, p], self.keys.at[slot, p]) for p in self._parts]
        if self.cut.interpret:
            meanwhile()
            return sum((_dot(q[...], k[...].T) for q, k in pairs), jnp.zeros(shape))

        def multiply(scores: Ref) -> Array:
            for q, k in pairs:
                plgpu.wgmma(scores, q, k.transpose((1, 0)))
            meanwhile()
            return scores[...]

        return pl.run_scoped(multiply, plgpu.ACC(shape))  # pyright: ignore

    @property
    def _parts(self) -> range:
        return range(self.cut.parts)

    def _add_values(
        self, sums: Array, weights: Float[Array, "64 tokens"], slot: Array, part: Array
    ) -> Float32[Array, "64 columns"]:
        values = self.values.at[slot, part]
        if self.cut.interpret:
            return sums + _dot(weights, values[...])

        def multiply(sums: Ref) -> None:
            plgpu.wgmma(sums, weights, values)

        accumulator: Any = plgpu.ACC.init(sums)  # pyright: ignore
        return pl.run_state(multiply)(accumulator)

    def _store(self, state: _State, to: Ref) -> None:
        sums, _, total = state
        inverse = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1.0), 0.0)
        result = sums * lax.broadcast_in_dim(inverse, sums.shape, (0,))
        to[...] = result.astype(self.cut.dtype)
        plgpu.commit_smem()


def _dot(x: Float[Array, "m k"], y: Float[Array, "k n"]) -> Float32[Array, "m n"]:
    return jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32))
