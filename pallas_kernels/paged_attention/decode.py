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
    State,
    Unit,
    begin_copy,
    commit_copies,
    empty_state,
    finish,
    fold_keys,
    fold_values,
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
      ring_slots: keys or values of 64 tokens that a CTA has room for.
    """

    splits: int
    ring_slots: int

    def __post_init__(self) -> None:
        if not 1 <= self.splits <= _MAX_SPLITS or self.splits & (self.splits - 1):
            raise ValueError(
                f"splits={self.splits} must be a power of two, at most {_MAX_SPLITS}"
            )
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
    ctas = num_units * splits / _MULTIPROCESSORS  # on a multiprocessor
    neighbours = 1 if ctas <= 1 else 2
    slots = _SHARED_MEMORY // neighbours // slot_bytes
    return Config(splits=splits, ring_slots=max(2, min(slots, 12)))


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
        interpret=interpret,
    )
    slots = max(config.ring_slots, -(-unit.result_bytes // slot_bytes))
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
        ring: Ref,
    ) -> None:
        number = lax.axis_index("unit")
        split = jnp.int32(0) if interpret else lax.axis_index("split")
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
        )
        # Blocks of 16 tokens stay whole where the window begins in their middle.
        begin = lax.div(place.first, 16) * 16
        steps = lax.div(cached - begin + TOKENS, TOKENS)
        count = lax.div(steps - split + (unit.splits - 1), unit.splits)
        count = jnp.where(lengths_ref[row] > 0, count, 0)

        def start(step: Array) -> Array:
            return begin + (step * unit.splits + split) * TOKENS

        def begin_slot(step: Array, slot: Array, *, values: bool) -> None:
            @pl.when(step < count)
            def _() -> None:
                sources = (pool_ref, fresh_ref, table_ref)
                to = ring.at[slot]
                begin_copy(unit, place, sources, to, start(step), values=values)

            commit_copies(unit)

        def fold(step: Array, state: State) -> State:
            slot = lax.rem(2 * step, slots)
            ahead, odd = divmod(slots - 1, 2)

            def begin_next(used: Array, half: int) -> None:
                # The slot before the used one is free: its words are in registers.
                which = (odd + half) % 2
                at = step + ahead + (odd + half) // 2
                free = lax.rem(used + (slots - 1), slots)
                begin_slot(at, free, values=which == 1)

            wait_for_copies(unit, slots - 2)
            begin_next(slot, 0)
            weights, keep, top, total = fold_keys(
                unit, place, q_ref, ring.at[slot], start(step), state
            )
            slot = lax.rem(slot + 1, slots)
            wait_for_copies(unit, slots - 2)
            begin_next(slot, 1)
            sums = fold_values(unit, ring.at[slot], weights, keep, state[0])
            return sums, top, total

        for i in range(slots - 1):
            begin_slot(jnp.int32(i // 2), jnp.int32(i), values=i % 2 == 1)
        state = lax.fori_loop(0, count, fold, empty_state(unit))
        finish(unit, place, state, ring, out_ref)

    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_rows, num_heads, head_dim), q.dtype),
        grid=(num_units,),
        grid_names=("unit",),
        cluster=() if interpret else (unit.splits,),
        cluster_names=() if interpret else ("split",),
        num_threads=1,
        thread_name="warpgroup",
        scratch_types=[plgpu.SMEM((slots, unit.slot_words), jnp.uint32)],
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
