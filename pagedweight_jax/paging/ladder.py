"""The order in which planes are worth dropping or loading.

The *ladder* of a page has one step for each plane; step ``s`` leads from ``s - 1`` to
``s`` bits. Its price is what the plane weighs, its value the damage that it spares:

    bits      3 ---------- 4 ---------- 5 ---------- 6
    damage   0.9          0.3          0.2           0
    step            4            5            6             value 0.6, 0.1, 0.2
    hull            4            5            6             value 0.6, 0.15, 0.15

Lowering wants the cheapest steps per byte from the tops of the ladders, raising the
dearest from the bottoms, and both must take the steps of a page in order. So values
are replaced by the slopes of the ladder's lower convex hull, which never rise from
bottom to top: now one sort of all steps of all pages keeps each page's order, and a
prefix of it is the optimum of the linear relaxation (multiple-choice knapsack). An
integer optimum is cheaper by less than the last hull segment.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, UInt32

_HUGE = np.float32(1e30)
_FLOAT_BITS = np.uint32(0x7FFFFFFF)
_LAST_CLASS = np.uint32(0x80000000)
_INDEX = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ladders:
    """All pages in one row, each with its ladder.

    Attributes:
      desired: bits of the newest plan.
      held: bits whose planes hold frames.
      floor: fewest bits.
      frozen: pages without steps.
      price: frames of a plane, in planes of a down page.
      damage: at each number of bits from the seed bits up; never rises with bits.
      parent_bits: steps of each ladder.
    """

    desired: Int32[np.ndarray, "pages"]
    held: Int32[np.ndarray, "pages"]
    floor: Int32[np.ndarray, "pages"]
    frozen: Bool[np.ndarray, "pages"]
    price: Int[np.ndarray, "pages"]
    damage: Float32[np.ndarray, "levels pages"]
    parent_bits: int

    @property
    def seed_bits(self) -> int:
        """Fewest bits at which a page is of use."""
        return self.parent_bits + 1 - len(self.damage)

    def damage_at(
        self, bits: Int[np.ndarray, "n"], pages: Int[np.ndarray, "n"]
    ) -> Float32[np.ndarray, "n"]:
        """Returns the damage of pages at given bits; below the seed, as at the seed."""
        return self.damage[np.maximum(bits - self.seed_bits, 0), pages]

    def steps_down(self, start: Int[np.ndarray, "pages"]) -> Int[np.ndarray, "n"]:
        """Orders all steps from ``start`` down to the floors, cheapest first.

        Returns:
          The page of each step; its steps come from the top down.
        """
        pages = np.flatnonzero((start > self.floor) & ~self.frozen)
        low, high = self.floor[pages], start[pages]
        slopes = self._slopes(pages, low, high)[::-1]
        step = np.arange(self.parent_bits, self.seed_bits, -1)[:, None]
        _, column = _sort(_float_bits(slopes), (low < step) & (step <= high))
        return pages[column]

    def steps_up(
        self, start: Int[np.ndarray, "pages"], end: Int[np.ndarray, "pages"]
    ) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
        """Orders all steps from ``start`` up to ``end``, most urgent first.

        Three classes: up to the seed bits, low steps of all pages first; up to the
        floors, then beyond, both dearest per byte first.

        Returns:
          The page of each step and the bits that it leads to.
        """
        pages = np.flatnonzero(start < end)
        low, high = start[pages], end[pages]
        step = np.arange(1, self.parent_bits + 1)[:, None]
        keys = np.broadcast_to(step, (len(step), len(pages))).astype(np.uint32)
        slopes = self._slopes(pages, low, high)
        beyond = np.where(step[self.seed_bits :] > self.floor[pages], _LAST_CLASS, 0)
        keys[self.seed_bits :] = (_FLOAT_BITS - _float_bits(slopes)) | beyond
        row, column = _sort(keys, (low < step) & (step <= high))
        return pages[column], row + 1

    def _slopes(
        self,
        pages: Int[np.ndarray, "n"],
        low: Int[np.ndarray, "n"],
        high: Int[np.ndarray, "n"],
    ) -> Float32[np.ndarray, "steps n"]:
        """Returns damage per price of the steps above the seed bits, on the hull."""
        seed = self.seed_bits
        # Not damage[:, pages]: that has the pages outermost, six times slower below.
        damage = self.damage.take(pages, axis=1)
        slopes = hull_slopes(
            damage, np.maximum(low - seed, 0), np.maximum(high - seed, 0)
        )
        return slopes / self.price[pages].astype(np.float32)


def hull_slopes(
    damage: Float32[np.ndarray, "levels n"],
    low: Int[np.ndarray, "n"],
    high: Int[np.ndarray, "n"],
) -> Float32[np.ndarray, "steps n"]:
    """Returns the slopes of the lower convex hulls of ladders cut to ``low .. high``.

    Row ``s - 1`` is step ``s``. By the max-min formula of isotonic regression, with
    ``chord(a, b) = (damage[a] - damage[b]) / (b - a)``,

        slope[s] = max over b >= s of min over a < s of chord(a, b)

    A higher step minimises over more chords and maximises over fewer minima, so slopes
    never rise, to the last digit. Rows outside the cut are huge below and zero above,
    so that they never join in.
    """
    level = np.arange(len(damage))[:, None]
    bottom = np.where(level < low, _HUGE, damage)
    top = np.where(level > high, _HUGE, damage)
    best = np.full_like(damage, _HUGE)
    slopes = np.empty_like(damage[1:])
    for step in range(1, len(damage)):
        per_step = (1 / (level[step:] - (step - 1))).astype(np.float32)
        chords = (bottom[step - 1] - top[step:]) * per_step
        np.minimum(best[step:], chords, out=best[step:])
        np.max(best[step:], axis=0, out=slopes[step - 1], initial=0)
    return slopes


def _float_bits(values: Float32[np.ndarray, "*n"]) -> UInt32[np.ndarray, "*n"]:
    """Returns integers in the order of non-negative floats (and turns -0 into 0)."""
    return (values + np.float32(0)).view(np.uint32)


def _sort(
    keys: UInt32[np.ndarray, "rows n"], valid: Bool[np.ndarray, "rows n"]
) -> tuple[Int[np.ndarray, "m"], Int[np.ndarray, "m"]]:
    """Returns rows and columns of the valid entries by key, ties row by row.

    One sort of key and position packed together: stable, and faster than argsort.
    """
    position = np.flatnonzero(valid)
    packed = keys.ravel()[position].astype(np.uint64) << np.uint64(32)
    packed |= position.astype(np.uint64)
    packed.sort()
    row, column = np.divmod((packed & _INDEX).astype(np.int64), max(keys.shape[1], 1))
    return row, column
