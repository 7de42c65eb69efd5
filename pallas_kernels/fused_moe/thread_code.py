"""Small steps of the decode kernel that threads do each on their own."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Float32, Int32

from pallas_kernels.bitplane import TILE
from pallas_kernels.fused_moe import registers as reg
from pallas_kernels.fused_moe.reference import Activation, activation_function
from pallas_kernels.fused_moe.registers import SCALAR, THREADS, Ref, Register
from pallas_kernels.fused_moe.tile_product import ACCUMULATOR, TOKENS, elements


def synchronize(barrier: Ref, *, interpret: bool) -> None:
    """Waits for all threads of the CTA.

    Hardware barrier 0; arriving at an mbarrier with 512 threads takes far longer. The
    interpreter has only the latter.
    """
    if interpret:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return

    @reg.inline()
    def inlined(_: Any) -> None:
        utils.inline_ptx("barrier.sync 0;", has_side_effects=True, convergent=True)

    inlined()


def copy_words(source: Ref, to: Ref, *, interpret: bool) -> None:
    """Copies a few words from global to shared memory; every warpgroup does it all."""
    if interpret:
        to[...] = source[...]
        return
    (size,) = to.shape

    @reg.inline(arg_types=(plgpu.RefType(),) * 2)
    def inlined(_: Any, source: Register, to: Register) -> None:
        for i in range(0, size, THREADS):
            at = reg.add(reg.thread(), i)
            with utils.when(reg.less(at, size)):
                reg.store(reg.load(source, at), to, at)

    inlined(source, to)


def store_sums(sums: Float32[Array, "64 rows"], to: Ref, *, interpret: bool) -> None:
    """Puts the sums of a warpgroup into shared memory, ``[rows, 64 and padding]``."""
    if interpret:
        to[:, pl.ds(0, TILE)] = sums.T
        return

    @reg.inline(arg_types=(ACCUMULATOR, plgpu.RefType()))
    def inlined(_: Any, sums: Any, to: Register) -> None:
        thread = reg.thread()
        warp, lane = reg.right(thread, 5), reg.bits_and(thread, 31)
        row = reg.add(reg.left(warp, 4), reg.right(lane, 2))
        token = reg.left(reg.bits_and(lane, 3), 1)
        for i, pair in enumerate(sums.registers.flat):
            for j, value in enumerate(elements(pair)):
                at = reg.add(token, TOKENS * (i // 2) + j)
                reg.store(value, to, at, reg.add(row, 8 * (i % 2)))

    inlined(sums, to)


@dataclass(frozen=True, kw_only=True)
class Finish:
    """Static description of the end of a unit.

    The halves of the warpgroups hold two row tiles: with an activation those of gate
    and up at one place, without one tiles ``2 r`` and ``2 r + 1`` of one linear.
    """

    tokens: int  # M
    parts: int  # rows of sums that belong to a token
    warpgroups: int
    row_tiles: int
    activation: Activation | None


def finish(
    end: Finish,
    sums: Ref,
    order: Ref,
    out: Ref,
    *,
    first_pair: Int32[Array, ""],
    num_tokens: Int32[Array, ""],
    first_row: Int32[Array, ""],
    row_step: Int32[Array, ""],
    warpgroup: Int32[Array, ""],
    interpret: bool,
) -> None:
    """Adds up the sums of the warpgroups and stores the unit's part of the output.

    All warpgroups call it.

    Args:
      end: static sizes.
      sums: ``[warpgroups, parts * M, 64 and padding]`` in shared memory.
      order: pairs sorted by expert.
      out: ``[rows, N]``.
      first_pair: place in ``order`` of the tile's first pair.
      num_tokens: slots that hold a token.
      first_row: row of ``out`` for pair 0.
      row_step: which row tile of gate and up, or which two of down.
      warpgroup: number of the caller.
      interpret: whether to compute with jnp.
    """
    scalars = (first_pair, num_tokens, first_row, row_step, warpgroup)
    if interpret:
        _finish_with_jnp(end, sums, order, out, *scalars)
        return

    @reg.inline(arg_types=(plgpu.RefType(),) * 3 + (SCALAR,) * 5)
    def inlined(_: Any, sums, order, out, *scalars) -> None:
        scalars = [s.registers.item() for s in scalars]
        _finish_with_threads(end, sums, order, out, *scalars)

    inlined(sums, order, out, *scalars)


def _finish_with_jnp(
    end: Finish,
    sums: Ref,
    order: Ref,
    out: Ref,
    first_pair: Array,
    num_tokens: Array,
    first_row: Array,
    row_step: Array,
    warpgroup: Array,
) -> None:
    parts = sums[...][..., :TILE].reshape(2, -1, end.tokens, TILE)
    first, second = jnp.sum(parts, axis=1)

    def store(m: int, tile: Array, value: Array) -> None:
        @pl.when((warpgroup == 0) & (m < num_tokens) & (tile < end.row_tiles))
        def _() -> None:
            row = first_row + order[first_pair + m]
            out[row, pl.ds(tile * TILE, TILE)] = value[m].astype(out.dtype)

    for m in range(end.tokens):
        if end.activation:
            act = activation_function(end.activation)
            store(m, row_step, act(first) * second)
        else:
            store(m, 2 * row_step, first)
            store(m, 2 * row_step + 1, second)


def _finish_with_threads(
    end: Finish,
    sums: Register,
    order: Register,
    out: Register,
    first_pair: Register,
    num_tokens: Register,
    first_row: Register,
    row_step: Register,
    warpgroup: Register,
) -> None:
    threads, half = THREADS * end.warpgroups, end.warpgroups // 2
    thread = reg.add(reg.thread(), reg.multiply(warpgroup, THREADS))
    for i in range(0, end.tokens * TILE, threads):
        number = reg.add(thread, i)
        token, row = reg.right(number, 6), reg.bits_and(number, TILE - 1)
        with utils.when(reg.less(token, num_tokens)):
            first = _add_up(end, sums, range(half), token, row)
            second = _add_up(end, sums, range(half, end.warpgroups), token, row)
            at = reg.add(first_row, reg.load(order, reg.add(first_pair, token)))
            if end.activation:
                value = arith.mulf(_activate(end.activation, first), second)
                _store(end, value, out, at, row_step, row)
            else:
                tile = reg.left(row_step, 1)
                _store(end, first, out, at, tile, row)
                _store(end, second, out, at, reg.add(tile, 1), row)


def _add_up(
    end: Finish, sums: Register, warpgroups: range, token: Register, row: Register
) -> Register:
    total = reg.real(0.0)
    for w in warpgroups:
        for part in range(end.parts):
            slot = reg.add(token, part * end.tokens)
            total = arith.addf(total, reg.load(sums, w, slot, row))
    return total


def _store(
    end: Finish,
    value: Register,
    out: Register,
    at: Register,
    tile: Register,
    row: Register,
) -> None:
    """Stores a value at ``[at, 64 tile + row]``, if there is such a tile."""
    kind = ir.MemRefType(out.type).element_type
    if kind != reg.f32():
        value = arith.truncf(kind, value)
    with utils.when(reg.less(tile, end.row_tiles)):
        reg.store(value, out, at, reg.add(reg.multiply(tile, TILE), row))


def _activate(name: Activation, x: Register) -> Register:
    """Computes silu(x) = x sigmoid(x), or gelu_tanh(x) = x sigmoid(2 z(x))."""
    if name == "silu":
        z = x
    else:
        cube = arith.mulf(arith.mulf(x, x), x)
        inner = reg.fma(cube, reg.real(0.044715), x)
        z = arith.mulf(inner, reg.real(2 * math.sqrt(2 / math.pi)))
    power = reg.exp2(arith.mulf(z, reg.real(-math.log2(math.e))))
    return arith.mulf(x, reg.reciprocal(arith.addf(power, reg.real(1.0))))
