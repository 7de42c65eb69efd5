"""THE layout of a plane: how one bit of every weight of a linear block is packed.

A linear block is a matrix ``[n, k]`` (out, in). Its weights are integer codes of
``parent_bits`` bits; plane ``j`` holds bit ``parent_bits - 1 - j`` of every code, so
plane 0 is the most significant and the first ``b`` planes are the ``b``-bit code.

A plane is ``n * k / 32`` words in the order the tensor cores consume:

    plane = [n/64 row tiles, k/(64 V) column chunks, 128 threads, V tiles]   uint32

One word is exactly the 32 weights that thread ``l`` of a warpgroup owns in a 64 x 64
tile (the A fragment of four stacked m16n8k16 = one m64k64 wgmma): for ``s`` in 0..15
and ``hi`` in 0..1

    row = 16 (l // 32) + (l % 32) // 4 + 8 (s % 2)
    col = 8 (s // 2) + 2 (l % 4) + hi
    bit = s + 16 hi                        order "split": codes become fp16 pairs
    bit = 4 (2 (s // 4) + hi) + s % 4      order "pair": codes become PRMT selectors

``V`` neighbouring column tiles of one thread are adjacent, so a plane is read with
loads of ``4 V`` bytes. Row tiles are contiguous: a plane may be cut between them.
"""

from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Integer, UInt32

TILE = 64
"""Rows and columns of a tile; ``n`` and ``k`` must be multiples of it."""

WORD_BITS = 32

BitOrder = Literal["split", "pair"]


def vector_width(k: int) -> int:
    """Returns V, the column tiles that one thread reads with one load."""
    return 4 if k % 256 == 0 else 2 if k % 128 == 0 else 1


def plane_words(n: int, k: int) -> int:
    """Returns the uint32 words of one plane of a linear block ``[n, k]``.

    Raises:
      ValueError: if ``n`` or ``k`` is not a multiple of 64.
    """
    if n % TILE or k % TILE:
        raise ValueError(
            f"a linear block is [{n}, {k}] but planes are made of {TILE} x {TILE}"
            " tiles; both sizes must be multiples of 64"
        )
    return n * k // WORD_BITS


def _bit_positions(order: BitOrder) -> np.ndarray:
    """Returns the bit of each weight of a word, ``[row half, column octet, hi]``."""
    half, octet, hi = np.meshgrid(
        np.arange(2), np.arange(8), np.arange(2), indexing="ij"
    )
    s = 2 * octet + half
    if order == "split":
        return (s + 16 * hi).astype(np.uint32)
    return (4 * (2 * (s // 4) + hi) + s % 4).astype(np.uint32)


def _expanded_bits(order: BitOrder) -> Array:
    """Shapes the bit positions for ``[R, warp, half, 8, C, V, octet, 4, hi]``."""
    positions = _bit_positions(order)
    return jnp.asarray(positions.reshape(1, 1, 2, 1, 1, 1, 8, 1, 2))


def _tile_axes(n: int, k: int) -> tuple[int, ...]:
    """Returns ``[n, k]`` cut as ``[R, warp, half, 8, C, V, octet, 4, hi]``."""
    plane_words(n, k)
    v = vector_width(k)
    return (n // TILE, 4, 2, 8, k // (TILE * v), v, 8, 4, 2)


def pack(
    codes: Integer[Array | np.ndarray, "*batch n k"], bits: int, order: BitOrder
) -> UInt32[Array, "*batch {bits} words"]:
    """Packs integer codes into ``bits`` planes, most significant first.

    Args:
      codes: codes below ``2**bits``.
      bits: planes to make.
      order: place of a weight's bit within its word.
    Returns:
      The planes; ``words = n * k / 32``.
    Raises:
      ValueError: if ``n`` or ``k`` is not a multiple of 64.
    """
    *batch, n, k = codes.shape
    axes = _tile_axes(n, k)
    cut = jnp.asarray(codes, jnp.uint32).reshape(*batch, *axes)
    planes = []
    for j in range(bits):
        bit = (cut >> (bits - 1 - j)) & jnp.uint32(1)
        word = jnp.sum(
            bit
            << _expanded_bits(order).reshape(
                (1,) * len(batch) + (1, 1, 2, 1, 1, 1, 8, 1, 2)
            ),
            axis=(-7, -3, -1),
            dtype=jnp.uint32,
        )  # [R, warp, 8, C, V, 4]
        lead = tuple(range(len(batch)))
        word = jnp.transpose(
            word, lead + tuple(len(batch) + a for a in (0, 3, 1, 2, 5, 4))
        )  # [R, C, warp, 8, 4, V]
        planes.append(word.reshape(*batch, -1))
    return jnp.stack(planes, axis=-2)


def unpack(
    planes: UInt32[Array | np.ndarray, "*batch bits words"],
    n: int,
    k: int,
    order: BitOrder,
) -> Int[Array, "*batch {n} {k}"]:
    """Unpacks the leading planes of a linear block; the inverse of `pack`.

    Args:
      planes: the first ``bits`` planes, most significant first.
      n: rows (outputs).
      k: columns (inputs).
      order: place of a weight's bit within its word.
    Returns:
      Codes of ``bits`` bits, int32.
    """
    *batch, bits, _ = planes.shape
    r, _, _, _, c, v, _, _, _ = _tile_axes(n, k)
    lead = tuple(range(len(batch)))
    shifts = _expanded_bits(order).reshape(
        (1,) * len(batch) + (1, 1, 2, 1, 1, 1, 8, 1, 2)
    )
    codes: Array | None = None
    for j in range(bits):
        word = jnp.asarray(planes[..., j, :]).reshape(*batch, r, c, 4, 8, 4, v)
        word = jnp.transpose(
            word, lead + tuple(len(batch) + a for a in (0, 2, 3, 1, 5, 4))
        ).reshape(*batch, r, 4, 1, 8, c, v, 1, 4, 1)
        bit = ((word >> shifts) & jnp.uint32(1)).astype(jnp.int32)
        codes = bit if codes is None else (codes << 1) | bit
    if codes is None:
        return jnp.zeros((*batch, n, k), jnp.int32)
    return codes.reshape(*batch, n, k)


def truncate(
    codes: Integer[Array, "*shape"], parent_bits: int, bits: int
) -> Integer[Array, "*shape"]:
    """Returns the ``bits``-bit codes nested in ``parent_bits``-bit codes."""
    if not 0 < bits <= parent_bits:
        raise ValueError(f"bits={bits} must be between 1 and parent_bits={parent_bits}")
    return codes >> (parent_bits - bits)
