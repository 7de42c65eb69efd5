"""Tiles of keys and values into shared memory, for the prefill kernel.

wgmma wants a tile as columns of 64 values: 8 rows of 128 bytes follow each other, and
the 16-byte piece p of row r lies at place p ^ (r % 8) (the 128-byte swizzle). bfloat16
is copied there piece by piece. float8 is copied as it is, each thread to pieces of its
own, and becomes fp16 on the way from there to the tile.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.paged_attention import instructions as ins
from pallas_kernels.paged_attention.addresses import (
    Ref,
    cached_frame,
    cached_row,
    load_cached,
)
from pallas_kernels.paged_attention.instructions import THREADS, Register
from pallas_kernels.paged_attention.layout import KvLayout

SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)
"""How tiles lie in shared memory."""

MAX_COLUMNS = 256
"""Columns of a product of wgmma; wider heads are cut into parts."""

_LANES = 32
_SCALAR = plgpu.Layout.WG_SPLAT(())
_TILE_REF = plgpu.RefType(SWIZZLED)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Static description of the tiles.

    Attributes:
      layout: of the key-value blocks.
      tokens: of a tile.
      queries: Q, of a row of the step.
      warpgroups: of a CTA.
      interpret: whether to compute with jnp.
    """

    layout: KvLayout
    tokens: int
    queries: int
    warpgroups: int
    interpret: bool

    @property
    def itemsize(self) -> int:
        """Bytes of a stored value."""
        return 4 // self.layout.values_per_word

    @property
    def converts(self) -> bool:
        """Whether stored values are not what is multiplied."""
        return self.itemsize == 1

    @property
    def dtype(self) -> Any:
        """What is multiplied."""
        return jnp.float16 if self.converts else jnp.bfloat16

    @property
    def head_bytes(self) -> int:
        """Bytes of a token's key of one head."""
        return self.layout.head_dim * self.itemsize

    @property
    def parts(self) -> int:
        """Parts that a head is cut into."""
        return -(-self.layout.head_dim // MAX_COLUMNS)

    @property
    def columns(self) -> int:
        """Columns of a part."""
        return self.layout.head_dim // self.parts

    @property
    def pieces(self) -> int:
        """Pieces of 16 bytes of a token."""
        return self.head_bytes // 16

    @property
    def rounds(self) -> int:
        """Pieces of a tile that one thread copies."""
        return self.tokens * self.pieces // (self.warpgroups * THREADS)


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of a tile; scalars.

    Attributes:
      row: of the step, whose blocks are read.
      head: the key-value head.
      layer: of the model.
      start: position of the first token.
      stop: one past the last token's position; later ones are zeros.
      cached: tokens in the pool.
      fresh: index of position 0 among the fresh tokens, if these are fresh.
      is_fresh: 1 or 0.
    """

    row: Any
    head: Any
    layer: Any
    start: Any
    stop: Any
    cached: Any
    fresh: Any
    is_fresh: Any


_FIELDS = tuple(Tokens.__dataclass_fields__)


def begin_copy(
    cut: Cut,
    tokens: Tokens,
    sources: tuple[Ref, Ref, Ref],
    keys: Ref,
    values: Ref,
    warpgroup: Array,
) -> None:
    """Begins to copy a tile of keys and one of values; all warpgroups call it.

    float8 has been copied at the end, as fp16.

    Args:
      cut: static sizes.
      tokens: which ones.
      sources: pool, fresh rows ``[R Q, row_words]``, frames of each row's blocks.
      keys: ``[parts, tokens, columns]``.
      values: the same.
      warpgroup: number of the caller.
    """
    if cut.interpret:
        pl.when(warpgroup == 0)(
            lambda: _copy_with_jnp(cut, tokens, sources, keys, values)
        )
        return

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),) * 3
        + (_TILE_REF,) * 2
        + (_SCALAR,) * (1 + len(_FIELDS))
    )
    def inlined(_: Any, *args: Any) -> None:
        pool, fresh, table, keys, values = args[:5]
        warpgroup, *fields = [s.registers.item() for s in args[5:]]
        tokens = Tokens(**dict(zip(_FIELDS, fields, strict=True)))
        copy_tokens(cut, tokens, pool, fresh, table, keys, values, warpgroup)
        ins.commit_copies()

    inlined(*sources, keys, values, warpgroup, *vars(tokens).values())


def _copy_with_jnp(
    cut: Cut, tokens: Tokens, sources: tuple[Ref, Ref, Ref], keys: Ref, values: Ref
) -> None:
    pool, fresh, table = sources
    layout, words = cut.layout, cut.head_bytes // 4

    def copy(i: Array, _: None) -> None:
        position = tokens.start + i
        at = jnp.clip(position, 0, jnp.maximum(tokens.cached - 1, 0))
        nth = jnp.clip(tokens.fresh + position, 0, fresh.shape[0] - 1)
        for which, to in enumerate((keys, values)):
            column = (which * layout.num_kv_heads + tokens.head) * words
            old = load_cached(
                layout, pool, table, tokens.row, tokens.layer, at, column, words
            )
            new = fresh[nth, pl.ds(column, words)]
            row = jnp.where(tokens.is_fresh == 1, new, old)
            row = jnp.where(position < tokens.stop, row, jnp.uint32(0))
            row = lax.bitcast_convert_type(row, jnp.dtype(layout.dtype))
            to[:, i, :] = row.reshape(cut.parts, cut.columns).astype(cut.dtype)

    lax.fori_loop(0, cut.tokens, copy, None)


def copy_tokens(
    cut: Cut,
    tokens: Tokens,
    pool: Register,
    fresh: Register,
    table: Register,
    keys: Register,
    values: Register,
    warpgroup: Register,
) -> None:
    """Copies with threads; see `begin_copy`."""
    thread = ins.add(ins.thread(), ins.multiply(warpgroup, THREADS))
    lane_rows = [
        _row_of_lane(cut, tokens, pool, fresh, table, first)
        for first in range(0, cut.tokens, _LANES)
    ]
    value_column = cut.layout.num_kv_heads * cut.head_bytes
    pieces = []
    for i in range(cut.rounds):
        first = i * cut.warpgroups * THREADS
        token, piece = ins.divide(ins.add(thread, first), cut.pieces)
        last = first + cut.warpgroups * THREADS - 1
        groups = range(first // cut.pieces // _LANES, last // cut.pieces // _LANES + 1)
        low, high, exists = _from_lane(token, groups, lane_rows)
        source = ins.address_of_halves(low, high)
        source = ins.offset_address(source, ins.left(piece, 4))
        for ref, column in ((keys, 0), (values, value_column)):
            at = ins.offset_address(source, ins.constant(column))
            pieces.append((ref, token, piece, at, exists))
    (_convert if cut.converts else _copy)(cut, pieces)


def _row_of_lane(
    cut: Cut,
    tokens: Tokens,
    pool: Register,
    fresh: Register,
    table: Register,
    first: int,
) -> list[Register]:
    """Returns where the key of token ``first + lane`` begins, and 1 if it exists.

    The address takes two words, for `_from_lane`.
    """
    lane = ins.bits_and(ins.thread(), _LANES - 1)
    position = ins.add(ins.add(tokens.start, lane), first)
    last = ins.add(tokens.cached, -1)
    at = ins.larger(ins.smaller(position, last), 0)
    frame = cached_frame(cut.layout, table, tokens.row, tokens.layer, at)
    old = cached_row(cut.layout, pool, frame, tokens.layer, at)
    exists = ins.less(position, tokens.stop)
    nth = ins.choose(exists, ins.add(tokens.fresh, position), ins.constant(0))
    nth = ins.larger(nth, 0)
    row_bytes = 4 * cut.layout.row_words
    new = ins.row_address(ins.global_address(fresh), nth, row_bytes)
    is_fresh = ins.equal(tokens.is_fresh, ins.constant(1))
    address = ins.choose(is_fresh, new, old)
    address = ins.offset_address(address, ins.multiply(tokens.head, cut.head_bytes))
    exists = ins.choose(exists, ins.constant(1), ins.constant(0))
    return [*ins.halves_of_address(address), exists]


def _from_lane(
    token: Register, groups: range, lane_rows: list[list[Register]]
) -> list[Register]:
    """Returns the row of a token, which is in one of the groups of 32."""
    lane = ins.bits_and(token, _LANES - 1)
    row = [ins.from_lane(x, lane) for x in lane_rows[groups[0]]]
    for group in groups[1:]:
        here = ins.less(ins.constant(group * _LANES - 1), token)
        other = [ins.from_lane(x, lane) for x in lane_rows[group]]
        row = [ins.choose(here, y, x) for x, y in zip(row, other, strict=True)]
    return row


_Piece = tuple[Register, Register, Register, Register, Register]
"""Tile, token, number in the token, address in global memory, 1 if it exists."""


def _copy(cut: Cut, pieces: list[_Piece]) -> None:
    for ref, token, piece, source, exists in pieces:
        to = ins.add(ins.shared_address(ref), _in_tile(cut, token, piece))
        ins.begin_copy(to, source, 16, ins.left(exists, 4))


def _convert(cut: Cut, pieces: list[_Piece]) -> None:
    loaded = [ins.load_constant(piece[3], 0, 4) for piece in pieces]
    for (ref, token, piece, _, exists), words in zip(pieces, loaded, strict=True):
        words = [ins.multiply(word, exists) for word in words]
        halves = [half for word in words for half in ins.float8_to_halves(word)]
        for j in range(2):
            wide = ins.add(ins.left(piece, 1), j)
            to = ins.add(ins.shared_address(ref), _in_tile(cut, token, wide))
            ins.store_words(to, 0, halves[4 * j : 4 * j + 4])


def _in_tile(cut: Cut, token: Register, piece: Register) -> Register:
    """Returns the offset of a 16-byte piece of a token in ``[parts, tokens, columns]``.

    All bytes of a run of 64 columns lie 1024 bytes for every 8 tokens apart.
    """
    runs = cut.columns // 64
    run, place = ins.right(piece, 3), ins.bits_and(piece, 7)
    part, run = ins.divide(run, runs)
    row = ins.bits_and(token, 7)
    block = ins.add(ins.multiply(ins.right(token, 3), runs), run)
    offset = ins.add(
        ins.multiply(part, 2 * cut.tokens * cut.columns), ins.left(block, 10)
    )
    offset = ins.add(offset, ins.left(row, 7))
    return ins.add(offset, ins.left(ins.exclusive_or(place, row), 4))


def wait_for_copies(cut: Cut) -> None:
    """Waits until what this thread has begun to copy is there."""
    if not cut.interpret:
        plgpu.inline_mgpu()(lambda _: ins.wait_for_copies(0))()


def synchronize(cut: Cut, barrier: Ref) -> None:
    """Waits for all threads of the CTA, whose tiles wgmma may then read.

    A hardware barrier; the interpreter only has the other kind.
    """
    if cut.interpret:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return
    plgpu.inline_mgpu()(lambda _: ins.publish_shared())()
    plgpu.inline_mgpu()(lambda _: ins.synchronize(1))()
