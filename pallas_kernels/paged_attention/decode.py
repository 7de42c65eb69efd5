"""Attention of one query a row on Hopper: keys and values at the speed of memory.

    unit = the queries of a row that share a key-value head (8 of them at most)
    cluster = the CTAs that share the tokens of a unit, 64 tokens at a time

    CTA 0            keys 0   values 0   keys 2   values 2 ..    -> ring in SMEM
    CTA 1            keys 1   values 1   keys 3   values 3 ..
                     for each 64 tokens
                       keys:   ring -> registers -> mma.sync -> scores -> weights
                       values: ring -> registers -> mma.sync -> sums
    cluster          sums, maxima, totals in SMEM of each CTA -> weighted mean -> out

One launch. Blocks are read straight out of the pool, by table, 16 bytes a thread
(`cp.async`), with ``ring_slots - 1`` slots on their way. The number of tokens is data;
tokens before the window are skipped 64 at a time. The fresh token of the row comes as
one more row of the same form. CTAs take turns in a fixed order, and their results are
added up in a fixed order, so that two runs are equal.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int32, UInt32

from pallas_kernels.paged_attention.addresses import Ref, flat_table
from pallas_kernels.paged_attention.decode_threads import (
    TOKENS,
    Place,
    Unit,
    begin_keys,
    begin_values,
    commit_copies,
    empty_state,
    finish,
    first_frames,
    fold_keys,
    fold_values,
    stage_queries,
    synchronize_cta,
    wait_for_copies,
)
from pallas_kernels.paged_attention.layout import KvLayout
from pallas_kernels.paged_attention.rows import Rows

_SHARED_MEMORY = 208 * 1024  # bytes of a multiprocessor that rings may take
_MULTIPROCESSORS = 132
_MAX_SPLITS = 8  # CTAs of a cluster that every Hopper can launch


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the kernel.

    Attributes:
      splits: CTAs that share the tokens of a unit.
      warpgroups: of a CTA, which share its tokens.
      ring_slots: keys or values of 64 tokens that a warpgroup has room for.
    """

    splits: int
    warpgroups: int
    ring_slots: int

    def __post_init__(self) -> None:
        if not 1 <= self.splits <= _MAX_SPLITS or self.splits & (self.splits - 1):
            raise ValueError(
                f"splits={self.splits} must be a power of two, at most {_MAX_SPLITS}"
            )
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups={self.warpgroups} must be 1 to 4")
        if self.ring_slots < 2:
            raise ValueError(f"ring_slots={self.ring_slots} must be at least 2")


def default_config(num_units: int, slot_bytes: int, max_tokens: int) -> Config:
    """Returns clusters that fill the device, and rings that fill shared memory.

    Args:
      num_units: rows times key-value heads.
      slot_bytes: keys of 64 tokens.
      max_tokens: that a row can have.
    """
    steps = -(-max_tokens // TOKENS)
    splits = 1
    while splits < min(_MAX_SPLITS, steps) and num_units * splits < _MULTIPROCESSORS:
        splits *= 2
    # Two CTAs of a multiprocessor, even if there is only one: clusters find room then.
    slots = _SHARED_MEMORY // 2 // slot_bytes
    warpgroups = 2 if num_units * splits <= _MULTIPROCESSORS and slots >= 6 else 1
    slots = max(2, min(slots // warpgroups, 6))
    return Config(splits=splits, warpgroups=warpgroups, ring_slots=slots)


def paged_attention(
    q: BFloat16[Array, "R 1 N H"],
    fresh: UInt32[Array, "R 1 row_words"],
    pool: UInt32[Array, "num_frames frame_words"],
    rows: Rows,
    layer: Int32[Array, ""],
    layout: KvLayout,
    *,
    scale: float,
    window: int | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> BFloat16[Array, "R 1 N H"]:
    """Attends to the cached tokens of each row and to its fresh one.

    Args:
      q: one query a row.
      fresh: packed keys and values of the fresh tokens.
      pool: the paged pool.
      rows: of one query each.
      layer: of the model.
      layout: of the key-value blocks.
      scale: factor on the scores.
      window: tokens that a query sees, itself included; None for all.
      config: sizes of the kernel; None chooses them.
      interpret: whether to run on the CPU interpreter of Mosaic GPU, with one split.
    """
    num_rows, _, num_heads, head_dim = q.shape
    blocks = rows.block_frames.shape[1]
    num_units = num_rows * layout.num_kv_heads
    slot_bytes = TOKENS * layout.row_words * 2 // layout.num_kv_heads
    tokens = 1 + min(blocks * layout.block_size, window or 2**30)
    config = config or default_config(num_units, slot_bytes, tokens)
    unit = Unit(
        layout=layout,
        num_heads=num_heads,
        scale=scale,
        splits=1 if interpret else config.splits,
        warpgroups=1 if interpret else config.warpgroups,
        interpret=interpret,
    )
    needed = -(-unit.result_bytes // (slot_bytes * unit.warpgroups))
    slots = max(config.ring_slots, needed)
    sharers = unit.splits * unit.warpgroups
    num_units *= unit.parts

    def kernel(
        q_ref: Ref,
        fresh_ref: Ref,
        pool_ref: Ref,
        table_ref: Ref,
        lengths_ref: Ref,
        cached_ref: Ref,
        layer_ref: Ref,
        out_ref: Ref,
        queries: Ref,
        whole_ring: Ref,
    ) -> None:
        number = lax.axis_index("unit")
        split = jnp.int32(0) if interpret else lax.axis_index("split")
        warpgroup = lax.axis_index("warpgroup")
        row = lax.div(number, layout.num_kv_heads * unit.parts)
        of_row = number - row * (layout.num_kv_heads * unit.parts)
        head = lax.div(of_row, unit.parts)
        cached = cached_ref[row]
        first = 0 if window is None else cached + (1 - window)
        place = Place(
            row=row,
            head=head,
            part=of_row - head * unit.parts,
            layer=layer_ref[0],
            cached=cached,
            first=jnp.maximum(first, 0),
            warpgroup=warpgroup,
        )
        ring, sources = whole_ring.at[warpgroup], (pool_ref, fresh_ref, table_ref)
        # Blocks of 16 tokens stay whole where the window begins in their middle.
        begin = lax.div(place.first, 16) * 16
        steps = lax.div(cached - begin + TOKENS, TOKENS)
        sharer = split * unit.warpgroups + warpgroup
        count = lax.div(steps - sharer + (sharers - 1), sharers)
        count = jnp.where(lengths_ref[row] > 0, count, 0)

        def start(step: Array) -> Array:
            return begin + (step * sharers + sharer) * TOKENS

        def begin_slot(
            step: Array, slot: Array, values: bool, where: tuple[Array, Array]
        ) -> tuple[Array, Array]:
            """Begins to fill a slot; past the end it is filled with zeros."""
            frames, token_rows = where
            to, at = ring.at[slot], start(step)
            if values:
                begin_values(unit, place, sources, to, token_rows, at)
            else:
                following = start(step + 1)
                where = begin_keys(unit, place, sources, to, frames, at, following)
            commit_copies(unit)
            return where

        def fold(step: Array, carry: tuple) -> tuple:
            state, where = carry
            slot = lax.rem(2 * step, slots)

            def begin_next(used: Array, half: int, where: tuple) -> tuple:
                # The slot before the used one is free: its words are in registers.
                ahead, half = divmod(slots - 1 + half, 2)
                free = lax.rem(used + (slots - 1), slots)
                return begin_slot(step + ahead, free, half == 1, where)

            wait_for_copies(unit, slots - 2)
            where = begin_next(slot, 0, where)
            weights, keep, top, total = fold_keys(
                unit, place, q_ref, queries, ring.at[slot], start(step), state
            )
            slot = lax.rem(slot + 1, slots)
            wait_for_copies(unit, slots - 2)
            where = begin_next(slot, 1, where)
            sums = fold_values(unit, ring.at[slot], weights, keep, state[0])
            return (sums, top, total), where

        frames = first_frames(unit, place, table_ref, start(jnp.int32(0)))
        where = begin_slot(jnp.int32(0), jnp.int32(0), False, (frames, frames))
        for i in range(1, slots - 1):
            where = begin_slot(jnp.int32(i // 2), jnp.int32(i), i % 2 == 1, where)
        pl.when(warpgroup == 0)(lambda: stage_queries(unit, place, q_ref, queries))
        synchronize_cta(unit)
        state, _ = lax.fori_loop(0, count, fold, (empty_state(unit), where))
        finish(unit, place, state, whole_ring, out_ref)

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows, num_heads, head_dim), q.dtype),
        grid=(num_units,),
        grid_names=("unit",),
        cluster=() if interpret else (unit.splits,),
        cluster_names=() if interpret else ("split",),
        num_threads=unit.warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((unit.query_words,), jnp.uint32),
            plgpu.SMEM((unit.warpgroups, slots, unit.slot_words), jnp.uint32),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(
        q[:, 0],
        fresh[:, 0],
        pool,
        flat_table(rows),
        rows.lengths,
        rows.cached,
        layer.reshape(1),
    )
    return out[:, None]
