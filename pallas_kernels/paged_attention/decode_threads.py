"""What the threads of the decode kernel do, each on its own.

A warpgroup takes 64 tokens at a time, each of its warps 16 of them, and the 8 queries
that share a key-value head. With lane = 4 g + t (g < 8, t < 4):

    keys     thread has 16-byte pieces t, t + 4, .. of tokens g and g + 8
             scores [token, query] = K q        mma.sync, A = keys, B = queries
    softmax  thread has the scores of tokens g and g + 8, queries 2 t and 2 t + 1;
             maxima over the tokens by shuffles, sums at the end
    values   thread has piece g of every 8 of tokens 2 t, 2 t + 1, 2 t + 8, 2 t + 9
             sums [dim, query] += V' weights    A = values of two tokens a word,
                                                B = weights, transposed by movmatrix

A sum over dims (or tokens) may take them in any order, so both factors take the order
in which the pieces lie in memory, and nothing is rearranged but the values of pairs of
tokens (a byte permutation each). A thread reads back exactly the pieces that it copied
itself, so the ring needs no barrier. Where the 16 tokens lie is looked up by 16 lanes,
a step ahead, and handed to the others by shuffles.

bfloat16 is multiplied as it is; float8 becomes fp16, which holds it exactly, and so do
the queries and weights.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector
from jaxtyping import Array, Float32, Int32, UInt32

from pallas_kernels.paged_attention import instructions as ins
from pallas_kernels.paged_attention.addresses import (
    Ref,
    cached_frame,
    cached_row,
    load_cached,
)
from pallas_kernels.paged_attention.instructions import THREADS, Register
from pallas_kernels.paged_attention.layout import KvLayout

TOKENS = 64
"""Tokens of a step of a warpgroup."""

QUERIES = 8
"""Queries of a unit: columns of one mma.sync."""

EMPTY = -1e30
"""Maximum of no scores; finite, so that differences stay free of NaN."""

_MASKED = 2 * EMPTY  # its weight is zero even where the maximum is EMPTY
_PADDING = 4  # values after the sums of a query in shared memory
_SCALAR = plgpu.Layout.WG_SPLAT(())

State = tuple[Array, Array, Array]
"""Sums, maximum and total of the weights; see `empty_state`."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Static description of a unit: the queries of a row that share a key-value head.

    Attributes:
      layout: of the key-value blocks.
      num_heads: N, query heads of the model.
      scale: factor on the scores.
      splits: CTAs of a cluster, which share the tokens.
      warpgroups: of a CTA, which share its tokens.
      interpret: whether to compute with jnp.
    """

    layout: KvLayout
    num_heads: int
    scale: float
    splits: int
    warpgroups: int
    interpret: bool

    @property
    def queries_per_head(self) -> int:
        """Queries that share a key-value head."""
        return self.num_heads // self.layout.num_kv_heads

    @property
    def parts(self) -> int:
        """Units of a key-value head."""
        return -(-self.queries_per_head // QUERIES)

    @property
    def itemsize(self) -> int:
        """Bytes of a stored value."""
        return 4 // self.layout.values_per_word

    @property
    def head_bytes(self) -> int:
        """Bytes of a token's key (or value) of one head."""
        return self.layout.head_dim * self.itemsize

    @property
    def slot_words(self) -> int:
        """Words of the keys (or the values) of a step."""
        return TOKENS * self.head_bytes // 4

    @property
    def key_pieces(self) -> int:
        """Pieces of 16 bytes of a token that one thread takes."""
        return self.head_bytes // 64

    @property
    def value_bytes(self) -> int:
        """Bytes of a piece of a value."""
        return min(16, self.head_bytes // 8)

    @property
    def value_pieces(self) -> int:
        """Pieces of a token that one thread takes."""
        return self.head_bytes // (8 * self.value_bytes)

    @property
    def dims_per_piece(self) -> int:
        """Dims of a piece of a value."""
        return self.value_bytes // self.itemsize

    @property
    def vectors_per_key(self) -> int:
        """Pieces of 16 bytes of the queries that meet one piece of a key."""
        return 2 // self.itemsize

    @property
    def query_vectors(self) -> int:
        """Pieces of the queries that a lane multiplies its keys with."""
        return self.key_pieces * self.vectors_per_key

    @property
    def query_words(self) -> int:
        """Words of the queries in shared memory."""
        return self.query_vectors * 32 * 4

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return self.warpgroups * THREADS // 32

    @property
    def query_bytes(self) -> int:
        """Bytes of the results of one query in shared memory."""
        return 4 * (self.layout.head_dim + _PADDING)

    @property
    def result_bytes(self) -> int:
        """Bytes of the results of all warps, and of their sum, at the end."""
        return (self.warps + 1) * QUERIES * self.query_bytes


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a unit's tokens and queries are; scalars.

    Attributes:
      row: of the step.
      head: the key-value head.
      part: which 8 of the queries that share the head.
      layer: of the model.
      cached: tokens in the pool; the next one is the fresh one.
      first: position of the first token that is seen.
      warpgroup: number of the caller in its CTA.
    """

    row: Any
    head: Any
    part: Any
    layer: Any
    cached: Any
    first: Any
    warpgroup: Any

    def scalars(self) -> tuple[Any, ...]:
        """Returns all fields, to be given to inline code."""
        return tuple(vars(self).values())


_PLACE = (_SCALAR,) * len(Place.__dataclass_fields__)


def _place(scalars: tuple[Any, ...]) -> Place:
    registers = [s.registers.item() for s in scalars]
    return Place(**dict(zip(Place.__dataclass_fields__, registers, strict=True)))


# ---- values that every thread has of its own ----------------------------------------


def _own(count: int) -> Any:
    """Returns the layout of ``count`` values of each thread."""
    return plgpu.Layout.WG_STRIDED((THREADS * count,), vec_size=1)


def _own_type(count: int, dtype: Any) -> Any:
    return plgpu.ShapeDtypeStruct((THREADS * count,), dtype, layout=_own(count))


def _registers(array: Any) -> list[Register]:
    return [vector.extract(r, [], [0]) for r in array.registers.flat]


def _own_array(values: list[Register]) -> Any:
    """Makes an array of the values of each thread."""
    layout = mgpu.WGStridedFragLayout((THREADS * len(values),), 1)
    registers = np.empty(layout.registers_shape(layout.shape), dtype=object)
    kind = ir.VectorType.get((1,), values[0].type)
    for i, value in enumerate(values):
        registers.flat[i] = vector.broadcast(kind, value)
    signed = True if isinstance(values[0].type, ir.IntegerType) else None
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def empty_state(unit: Unit) -> State:
    """Returns the state before the first token.

    For threads: 4 sums of each 16 dims, and maximum and total of two queries. For the
    interpreter: sums ``[queries, head_dim]``, and one of the others a query.
    """
    dim = unit.layout.head_dim
    if unit.interpret:
        maxima = jnp.full((QUERIES,), EMPTY, jnp.float32)
        return jnp.zeros((QUERIES, dim), jnp.float32), maxima, jnp.zeros_like(maxima)

    def filled(count: int, value: float) -> Array:
        array = jnp.full((THREADS * count,), value, jnp.float32)
        return plgpu.layout_cast(array, _own(count))

    return filled(dim // 4, 0.0), filled(2, EMPTY), filled(2, 0.0)


# ---- tokens on their way ------------------------------------------------------------


def first_frames(
    unit: Unit, place: Place, table: Ref, start: Int32[Array, ""]
) -> Array:
    """Returns, for each thread, the frame of one of the tokens from ``start`` on.

    Args:
      unit: static sizes.
      place: which tokens.
      table: frames of the blocks of each row.
      start: position of the first of the 64 tokens.
    """
    if unit.interpret:
        return jnp.int32(0)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR, *_PLACE),
        return_type=_own_type(1, jnp.dtype(jnp.int32)),
    )
    def inlined(_: Any, table: Register, start: Any, *scalars: Any) -> Any:
        frame = frame_of_lane(unit, _place(scalars), table, start.registers.item())
        return _own_array([frame])

    return inlined(table, start, *place.scalars())


def begin_keys(
    unit: Unit,
    place: Place,
    sources: tuple[Ref, Ref, Ref],
    to: Ref,
    frames: Array,
    start: Int32[Array, ""],
    next_start: Int32[Array, ""],
) -> tuple[Array, Array]:
    """Begins to copy the keys of the tokens from ``start`` on.

    Args:
      unit: static sizes.
      place: which tokens.
      sources: pool, fresh rows, and frames of the blocks of each row.
      to: a slot of the ring.
      frames: of these tokens.
      start: position of the first of the 64 tokens. Those that are not seen are
        zeros: what their memory holds may be anything.
      next_start: the same of the next call.
    Returns:
      Frames of the next tokens, and for `begin_values` where these are.
    """
    if unit.interpret:
        _copy_with_jnp(unit, place, sources, to, start, values=False)
        return frames, frames

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * 4 + (_own(1), _SCALAR, _SCALAR, *_PLACE),
        return_type=(
            _own_type(1, jnp.dtype(jnp.int32)),
            _own_type(3, jnp.dtype(jnp.int32)),
        ),
    )
    def inlined(_: Any, *args: Any) -> Any:
        pool, fresh, table, to, frames = args[:5]
        start, next_start = (x.registers.item() for x in args[5:7])
        place = _place(args[7:])
        frame = _registers(frames)[0]
        rows = row_of_lane(unit, place, pool, fresh, frame, start)
        copy_keys(unit, to, rows)
        following = frame_of_lane(unit, place, table, next_start)
        return _own_array([following]), _own_array(rows)

    return inlined(*sources, to, frames, start, next_start, *place.scalars())


def begin_values(
    unit: Unit,
    place: Place,
    sources: tuple[Ref, Ref, Ref],
    to: Ref,
    rows: Array,
    start: Int32[Array, ""],
) -> None:
    """Begins to copy the values of the tokens whose keys were begun last.

    Args:
      unit: static sizes.
      place: which tokens.
      sources: pool, fresh rows, and frames of the blocks of each row.
      to: a slot of the ring.
      rows: where these tokens are.
      start: position of the first of the 64 tokens.
    """
    if unit.interpret:
        _copy_with_jnp(unit, place, sources, to, start, values=True)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _own(3)))
    def inlined(_: Any, *args: Any) -> None:
        to, rows = args
        copy_values(unit, to, _registers(rows))

    inlined(to, rows)


def _copy_with_jnp(
    unit: Unit,
    place: Place,
    sources: tuple[Ref, Ref, Ref],
    to: Ref,
    start: Array,
    *,
    values: bool,
) -> None:
    pool, fresh, table = sources
    layout, words = unit.layout, unit.head_bytes // 4
    column = (values * layout.num_kv_heads + place.head) * words

    def copy(i: Array, _: None) -> None:
        position = start + i
        at = jnp.clip(position, 0, jnp.maximum(place.cached - 1, 0))
        old = load_cached(
            layout, pool, table, place.row, place.layer, at, column, words
        )
        new = fresh[place.row, pl.ds(column, words)]
        seen = (position >= place.first) & (position <= place.cached)
        row_words = jnp.where(position == place.cached, new, old)
        to[pl.ds(i * words, words)] = jnp.where(seen, row_words, jnp.uint32(0))

    lax.fori_loop(0, TOKENS, copy, None)


def _position_of_lane(start: Register) -> Register:
    """Returns the position of the token that a lane looks after: lane % 16."""
    thread = ins.thread()
    warp = ins.right(thread, 5)
    return ins.add(start, ins.add(ins.left(warp, 4), ins.bits_and(thread, 15)))


def _in_pool(place: Place, position: Register) -> Register:
    """Returns the position, or another one that has a block."""
    last = ins.add(place.cached, -1)
    return ins.larger(ins.smaller(position, last), 0)


def frame_of_lane(
    unit: Unit, place: Place, table: Register, start: Register
) -> Register:
    """Returns the frame of the token that a lane looks after."""
    at = _in_pool(place, _position_of_lane(start))
    return cached_frame(unit.layout, table, place.row, place.layer, at)


def row_of_lane(
    unit: Unit,
    place: Place,
    pool: Register,
    fresh: Register,
    frame: Register,
    start: Register,
) -> list[Register]:
    """Returns where the key of a lane's token begins (two words), and if it is seen."""
    position = _position_of_lane(start)
    at = _in_pool(place, position)
    old = cached_row(unit.layout, pool, frame, place.layer, at)
    row_bytes = 4 * unit.layout.row_words
    new = ins.row_address(ins.global_address(fresh), place.row, row_bytes)
    address = ins.choose(ins.equal(position, place.cached), new, old)
    address = ins.offset_address(address, ins.multiply(place.head, unit.head_bytes))
    seen = ins.choose(_seen(place, position), ins.constant(1), ins.constant(0))
    return [*ins.halves_of_address(address), seen]


def copy_keys(unit: Unit, to: Register, rows: list[Register]) -> None:
    """Copies with threads; see `begin_keys`."""
    lane = ins.bits_and(ins.thread(), 31)
    group, t = ins.right(lane, 2), ins.bits_and(lane, 3)
    tokens = [group, ins.add(group, 8)]
    _copy_pieces(tokens, to, rows, 16, unit.key_pieces, ins.left(t, 4), 64)


def copy_values(unit: Unit, to: Register, rows: list[Register]) -> None:
    """Copies with threads; see `begin_values`."""
    lane = ins.bits_and(ins.thread(), 31)
    group, pair = ins.right(lane, 2), ins.left(ins.bits_and(lane, 3), 1)
    tokens = [ins.add(pair, i) for i in (0, 1, 8, 9)]
    size = unit.value_bytes
    column = unit.layout.num_kv_heads * unit.head_bytes
    offset = ins.add(ins.multiply(group, size), column)
    _copy_pieces(tokens, to, rows, size, unit.value_pieces, offset, 8 * size)


def _copy_pieces(
    tokens: list[Register],
    to: Register,
    rows: list[Register],
    size: int,
    pieces: int,
    offset: Register,
    gap: int,
) -> None:
    """Copies pieces of the warp's tokens to places of this thread.

    Args:
      tokens: which of the warp's 16.
      to: slot of the ring.
      rows: where the tokens are that the lanes look after.
      size: bytes of a piece.
      pieces: of a token.
      offset: bytes from the key of the row to the first of them.
      gap: bytes from each to the next.
    """
    mine = ins.add(ins.shared_address(to), ins.multiply(ins.thread(), size))
    for i, token in enumerate(tokens):
        low, high, seen = (ins.from_lane(x, token) for x in rows)
        address = ins.offset_address(ins.address_of_halves(low, high), offset)
        taken = ins.multiply(seen, size)
        for j in range(pieces):
            ins.begin_copy(
                ins.add(mine, (i * pieces + j) * THREADS * size),
                ins.offset_address(address, ins.constant(j * gap)),
                size,
                taken,
            )


def _seen(place: Place, position: Register) -> Register:
    before = ins.less(position, ins.add(place.cached, 1))
    return ins.both(before, ins.less(ins.add(place.first, -1), position))


def commit_copies(unit: Unit) -> None:
    """Closes a group of copies."""
    if not unit.interpret:
        plgpu.inline_mgpu()(lambda _: ins.commit_copies())()


def wait_for_copies(unit: Unit, newest: int) -> None:
    """Waits until at most ``newest`` groups of this thread are on their way."""
    if not unit.interpret:
        plgpu.inline_mgpu()(lambda _: ins.wait_for_copies(newest))()


# ---- keys and values of 64 tokens ---------------------------------------------------


def stage_queries(unit: Unit, place: Place, q: Ref, to: Ref) -> None:
    """Puts the queries into shared memory as lanes need them; one warpgroup does it.

    Args:
      unit: static sizes.
      place: which queries.
      q: queries, ``[rows, N, head_dim]``.
      to: shared memory; the interpreter leaves it as it is.
    """
    if unit.interpret:
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2 + _PLACE)
    def inlined(_: Any, q: Register, to: Register, *scalars: Any) -> None:
        store_queries(unit, _place(scalars), q, to)

    inlined(q, to, *place.scalars())


def store_queries(unit: Unit, place: Place, q: Register, to: Register) -> None:
    """Stores with threads; see `stage_queries`. Each warp takes every fourth piece."""
    thread = ins.thread()
    lane = ins.bits_and(thread, 31)
    warp, group, t = ins.right(thread, 5), ins.right(lane, 2), ins.bits_and(lane, 3)
    query = ins.add(ins.multiply(place.part, QUERIES), group)
    query = ins.smaller(query, unit.queries_per_head - 1)
    query = ins.add(query, ins.multiply(place.head, unit.queries_per_head))
    row = ins.add(ins.multiply(place.row, unit.num_heads), query)
    row_bytes = 2 * unit.layout.head_dim
    address = ins.row_address(ins.global_address(q), row, row_bytes)
    per_key = unit.vectors_per_key
    for i in range(0, unit.query_vectors, 4):
        number = ins.add(warp, i)
        with ins.when(ins.less(number, unit.query_vectors)):
            piece, half = ins.divide(number, per_key)
            at = ins.add(ins.left(piece, 2), t)
            at = ins.left(ins.add(ins.multiply(at, per_key), half), 4)
            words = ins.load_constant(ins.offset_address(address, at), 0, 4)
            if unit.itemsize == 1:
                words = [ins.pack_halves(*ins.unpack_bfloat16([w])) for w in words]
            place_in = ins.left(ins.add(ins.left(number, 5), lane), 4)
            ins.store_words(ins.add(ins.shared_address(to), place_in), 0, words)


def synchronize_cta(unit: Unit) -> None:
    """Waits for all threads of the CTA."""
    if not unit.interpret:
        plgpu.inline_mgpu()(lambda _: ins.synchronize(1))()


def fold_keys(
    unit: Unit,
    place: Place,
    q: Ref,
    queries: Ref,
    keys: Ref,
    start: Int32[Array, ""],
    state: State,
) -> tuple[Array, Array, Array, Array]:
    """Multiplies queries and keys, and moves maximum and total on.

    Args:
      unit: static sizes.
      place: which queries and tokens.
      q: queries, ``[rows, N, head_dim]``; the interpreter reads them here.
      queries: what `stage_queries` has filled.
      keys: the tokens' slot of the ring.
      start: position of the first of the 64 tokens.
      state: before these tokens.
    Returns:
      Weights of the tokens, factors of the sums so far, new maximum and total.
    """
    _, top, total = state
    if unit.interpret:
        return _fold_keys_with_jnp(unit, place, q, keys, start, top, total)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * 2 + (_own(2),) * 2 + (_SCALAR,) + _PLACE,
        return_type=(
            _own_type(2, jnp.dtype(jnp.int32)),
            *[_own_type(2, jnp.dtype(jnp.float32))] * 3,
        ),
    )
    def inlined(_: Any, queries: Register, keys: Register, *args: Any) -> Any:
        top, total, start = args[:3]
        results = fold_key_pieces(
            unit,
            _place(args[3:]),
            queries,
            keys,
            start.registers.item(),
            _registers(top),
            _registers(total),
        )
        weights, *reals = [_own_array(r) for r in results]
        return (weights, *reals)

    return inlined(queries, keys, top, total, start, *place.scalars())


def _unpacked(unit: Unit, words: UInt32[Array, "words"]) -> Float32[Array, "64 H"]:
    values = lax.bitcast_convert_type(words, jnp.dtype(unit.layout.dtype))
    return values.reshape(TOKENS, unit.layout.head_dim).astype(jnp.float32)


def _fold_keys_with_jnp(
    unit: Unit,
    place: Place,
    q: Ref,
    keys: Ref,
    start: Array,
    top: Array,
    total: Array,
) -> tuple[Array, Array, Array, Array]:
    first = place.head * unit.queries_per_head + place.part * QUERIES
    last = (place.head + 1) * unit.queries_per_head - 1
    queries = [q[place.row, jnp.minimum(first + i, last)] for i in range(QUERIES)]
    queries = jnp.stack(queries).astype(jnp.float32)
    scores = jnp.dot(queries, _unpacked(unit, keys[...]).T)
    scores = scores * (unit.scale * math.log2(math.e))
    position = start + lax.broadcasted_iota(jnp.int32, (1, TOKENS), 1)
    seen = (position >= place.first) & (position <= place.cached)
    scores = jnp.where(seen, scores, _MASKED)
    new_top = jnp.maximum(top, jnp.max(scores, axis=1))
    weights = jnp.exp2(scores - new_top[:, None])
    keep = jnp.exp2(top - new_top)
    return weights, keep, new_top, total * keep + jnp.sum(weights, axis=1)


def fold_key_pieces(
    unit: Unit,
    place: Place,
    queries: Register,
    keys: Register,
    start: Register,
    top: list[Register],
    total: list[Register],
) -> tuple[list[Register], list[Register], list[Register], list[Register]]:
    """Folds with threads; see `fold_keys`."""
    thread = ins.thread()
    lane = ins.bits_and(thread, 31)
    warp, group = ins.right(thread, 5), ins.right(lane, 2)
    scores = _scores(unit, queries, keys)

    first = ins.add(ins.add(start, ins.left(warp, 4)), group)
    factor = ins.real(unit.scale * math.log2(math.e))
    for half in range(2):
        seen = _seen(place, ins.add(first, 8 * half))
        for i in (2 * half, 2 * half + 1):
            scaled = ins.real_multiply(scores[i], factor)
            scores[i] = ins.choose(seen, scaled, ins.real(_MASKED))

    keep, new_top, new_total, weights = [], [], [], [None] * 4
    for i in range(2):
        most = ins.real_larger(scores[i], scores[i + 2])
        for distance in (4, 8, 16):
            most = ins.real_larger(most, ins.from_other_lane(most, distance))
        most = ins.real_larger(most, top[i])
        factor = ins.exp2(ins.real_subtract(top[i], most))
        for half in (i, i + 2):
            weights[half] = ins.exp2(ins.real_subtract(scores[half], most))
        both = ins.real_add(weights[i], weights[i + 2])
        keep.append(factor)
        new_top.append(most)
        new_total.append(ins.fma(total[i], factor, both))
    pack = ins.pack_bfloat16 if unit.itemsize == 2 else ins.pack_halves
    words = [ins.transpose(pack(*weights[i : i + 2])) for i in (0, 2)]
    return words, keep, new_top, new_total


def _scores(unit: Unit, queries: Register, keys: Register) -> list[Register]:
    """Returns scores of tokens g and g + 8 (halves), queries 2 t and 2 t + 1."""
    thread = ins.thread()
    lane = ins.bits_and(thread, 31)
    shared = ins.add(ins.shared_address(queries), ins.left(lane, 4))
    mine = ins.add(ins.shared_address(keys), ins.left(thread, 4))
    sums = [[ins.real(0.0)] * 4 for _ in range(2)]
    for j in range(unit.key_pieces):
        b = []
        for i in range(unit.vectors_per_key):
            b += ins.load_shared(shared, 512 * (unit.vectors_per_key * j + i), 4)
        tokens = []
        for half in range(2):
            at = (half * unit.key_pieces + j) * THREADS * 16
            words = list(ins.load_shared(mine, at, 4))
            tokens.append(words if unit.itemsize == 2 else _halves(words))
        for s in range(0, len(b), 2):
            a = [tokens[half][s + k] for k in range(2) for half in range(2)]
            which = s // 2 % 2
            sums[which] = _product(unit)(a, b[s : s + 2], sums[which])
    return [ins.real_add(x, y) for x, y in zip(*sums, strict=True)]


def _product(unit: Unit) -> Any:
    return ins.multiply_accumulate if unit.itemsize == 2 else ins.multiply_halves


def _halves(words: list[Register]) -> list[Register]:
    return [half for word in words for half in ins.float8_to_halves(word)]


def fold_values(
    unit: Unit, values: Ref, weights: Array, keep: Array, sums: Array
) -> Array:
    """Adds the weighted values of 64 tokens to the sums.

    Args:
      unit: static sizes.
      values: the tokens' slot of the ring.
      weights: of the tokens.
      keep: factors of the sums so far.
      sums: before these tokens.
    """
    if unit.interpret:
        return sums * keep[:, None] + jnp.dot(weights, _unpacked(unit, values[...]))
    count = unit.layout.head_dim // 4

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _own(2), _own(2), _own(count)),
        return_type=_own_type(count, jnp.dtype(jnp.float32)),
    )
    def inlined(_: Any, *args: Any) -> Any:
        arrays = [_registers(x) for x in args[1:]]
        return _own_array(fold_value_pieces(unit, args[0], *arrays))

    return inlined(values, weights, keep, sums)


def fold_value_pieces(
    unit: Unit,
    values: Register,
    weights: list[Register],
    keep: list[Register],
    sums: list[Register],
) -> list[Register]:
    """Folds with threads; see `fold_values`."""
    size, pieces = unit.value_bytes, unit.value_pieces
    mine = ins.add(ins.shared_address(values), ins.multiply(ins.thread(), size))
    sums = [ins.real_multiply(x, keep[i % 2]) for i, x in enumerate(sums)]
    results = []
    for j in range(pieces):
        tokens = [
            ins.load_shared(mine, (i * pieces + j) * THREADS * size, size // 4)
            for i in range(4)
        ]
        for words in zip(*tokens, strict=True):
            pairs = [_pairs(unit, *words[i : i + 2]) for i in (0, 2)]
            for d in range(0, len(pairs[0]), 2):
                a = [pair[d + i] for pair in pairs for i in range(2)]
                at = len(results)
                results += _product(unit)(a, weights, sums[at : at + 4])
    return results


def _pairs(unit: Unit, x: Register, y: Register) -> list[Register]:
    """Returns, for each dim of two words, the values of both tokens as one word."""
    if unit.itemsize == 2:
        return [ins.permute(x, y, 0x5410), ins.permute(x, y, 0x7632)]
    return _halves([ins.permute(x, y, 0x5140), ins.permute(x, y, 0x7362)])


# ---- the end ------------------------------------------------------------------------


def finish(unit: Unit, place: Place, state: State, ring: Ref, out: Ref) -> None:
    """Adds up what all warps of the cluster have, and stores the results.

    Args:
      unit: static sizes.
      place: which queries.
      state: after the last token.
      ring: shared memory that is free now.
      out: results, ``[rows, N, head_dim]``.
    """
    if unit.interpret:
        _finish_with_jnp(unit, place, state, out)
        return
    count = unit.layout.head_dim // 4

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * 2 + (_own(count), _own(2), _own(2)) + _PLACE
    )
    def inlined(_: Any, ring: Register, out: Register, *args: Any) -> None:
        state = [_registers(x) for x in args[:3]]
        place = _place(args[3:])
        ins.wait_for_copies(0)
        ins.synchronize(1)  # the ring is free
        store_results(unit, place, ring, *state)
        ins.synchronize(1)
        if unit.splits > 1:
            combine_warps(unit, place, ring)
            ins.synchronize(unit.splits)
        combine_results(unit, place, ring, out)
        if unit.splits > 1:
            ins.synchronize(unit.splits)  # others may still read this CTA's results

    inlined(ring, out, *state, *place.scalars())


def _finish_with_jnp(unit: Unit, place: Place, state: State, out: Ref) -> None:
    sums, _, total = state
    result = sums / jnp.where(total > 0, total, 1.0)[:, None]
    for i in range(QUERIES):
        query = place.part * QUERIES + i

        def store(i: int, query: Array) -> None:
            at = place.head * unit.queries_per_head + query
            out[place.row, at] = result[i].astype(out.dtype)

        exists = query < unit.queries_per_head
        pl.when(exists)(functools.partial(store, i, query))


def store_results(
    unit: Unit,
    place: Place,
    ring: Register,
    sums: list[Register],
    top: list[Register],
    total: list[Register],
) -> None:
    """Puts the results of each warp into shared memory: [warp, query, dims and top]."""
    thread = ins.thread()
    lane = ins.bits_and(thread, 31)
    warp, group, t = ins.right(thread, 5), ins.right(lane, 2), ins.bits_and(lane, 3)
    warp = ins.add(warp, ins.left(place.warpgroup, 2))
    query = ins.add(ins.left(warp, 3), ins.left(t, 1))
    base = ins.add(ins.shared_address(ring), ins.multiply(query, unit.query_bytes))
    dims = unit.dims_per_piece
    mine = ins.add(base, ins.multiply(group, 4 * dims))
    for i in range(0, len(sums), 4):
        piece, pair = divmod(i // 4, dims // 2)
        at = 4 * (8 * dims * piece + 2 * pair)
        ins.store_shared(mine, at, sums[i], sums[i + 2])
        ins.store_shared(mine, at + unit.query_bytes, sums[i + 1], sums[i + 3])
    for i in range(2):
        whole = total[i]
        for distance in (4, 8, 16):
            whole = ins.real_add(whole, ins.from_other_lane(whole, distance))
        # Every lane of a column has the same: all store it, to the same place.
        at = unit.query_bytes * i + 4 * unit.layout.head_dim
        ins.store_shared(base, at, top[i], whole)


def combine_warps(unit: Unit, place: Place, ring: Register) -> None:
    """Adds up the results of the CTA's warps; the sum lies behind them."""
    base, size = ins.shared_address(ring), QUERIES * unit.query_bytes
    for query, column, exists in _pairs_of_dims(unit, place, 1):
        with ins.when(exists):
            of_query = ins.add(base, ins.multiply(query, unit.query_bytes))
            warps = [(of_query, size * warp) for warp in range(unit.warps)]
            *sums, most, whole = _combined(unit, warps, column)
            of_query = ins.add(of_query, size * unit.warps)
            ins.store_shared(ins.add(of_query, ins.left(column, 3)), 0, *sums)
            ins.store_shared(of_query, 4 * unit.layout.head_dim, most, whole)


def combine_results(unit: Unit, place: Place, ring: Register, out: Register) -> None:
    """Stores the mean of all results; each CTA of the cluster does its part."""
    base, size = ins.shared_address(ring), QUERIES * unit.query_bytes
    for query, column, exists in _pairs_of_dims(unit, place, unit.splits):
        with ins.when(exists):
            of_query = ins.add(base, ins.multiply(query, unit.query_bytes))
            if unit.splits == 1:
                parts = [(of_query, size * warp) for warp in range(unit.warps)]
            else:
                parts = [
                    (ins.in_cta(of_query, cta), size * unit.warps)
                    for cta in range(unit.splits)
                ]
            *sums, _, whole = _combined(unit, parts, column)
            used, inverse = ins.positive(whole), ins.reciprocal(whole)
            means = [
                ins.choose(used, ins.real_multiply(x, inverse), ins.real(0.0))
                for x in sums
            ]
            nth = ins.add(ins.multiply(place.part, QUERIES), query)
            row = ins.add(nth, ins.multiply(place.head, unit.queries_per_head))
            row = ins.add(row, ins.multiply(place.row, unit.num_heads))
            row_bytes = 2 * unit.layout.head_dim
            to = ins.row_address(ins.global_address(out), row, row_bytes)
            to = ins.offset_address(to, ins.left(column, 2))
            ins.store_global(to, 0, ins.pack_bfloat16(*means))


def _pairs_of_dims(
    unit: Unit, place: Place, ctas: int
) -> Iterator[tuple[Register, Register, Register]]:
    """Yields a query, a pair of its dims, and whether there is such a query.

    All pairs of all queries are spread over the threads of so many CTAs.
    """
    half, threads = unit.layout.head_dim // 2, THREADS * unit.warpgroups
    pairs = min(QUERIES, unit.queries_per_head) * half
    share = -(-pairs // ctas)
    rank = ins.cta_in_cluster() if ctas > 1 else ins.constant(0)
    thread = ins.add(ins.thread(), ins.multiply(place.warpgroup, THREADS))
    for i in range(0, share, threads):
        in_share = ins.add(thread, i)
        pair = ins.add(ins.multiply(rank, share), in_share)
        query, column = ins.divide(pair, half)
        nth = ins.add(ins.multiply(place.part, QUERIES), query)
        exists = ins.less(nth, unit.queries_per_head)
        exists = ins.both(exists, ins.less(in_share, share))
        yield query, column, ins.both(exists, ins.less(pair, pairs))


def _combined(
    unit: Unit, parts: list[tuple[Register, int]], column: Register
) -> list[Register]:
    """Adds up a pair of dims over parts; returns the sums, maximum and total."""
    end = 4 * unit.layout.head_dim
    ends = [ins.load_cluster(address, offset + end) for address, offset in parts]
    most = functools.reduce(ins.real_larger, [top for top, _ in ends])
    whole, sums = ins.real(0.0), [ins.real(0.0)] * 2
    for (address, offset), (top, total) in zip(parts, ends, strict=True):
        factor = ins.exp2(ins.real_subtract(top, most))
        whole = ins.fma(total, factor, whole)
        pair = ins.load_cluster(ins.add(address, ins.left(column, 3)), offset)
        sums = [ins.fma(x, factor, y) for x, y in zip(pair, sums, strict=True)]
    return [*sums, most, whole]
