"""Clusters of a sorted row with uniform levels inside: the search behind `refined`.

Cluster j of a row has a center c and a width w. Of the bits of a code, the first p name
the cluster and the others a cell of it; the level of b bits in cell m is

    c + w * u[b, m],    u[b, m] = (m >> (P - b) + 1/2) * 2**-(b - p) - 1/2

The search lowers the weighted square error of all levels b = p..P together, level b
counting s_b ~ 2**b, by turns:

- Given c and w, a value goes to the cell whose levels are nearest. Within a cluster
  the best cells are equal parts of the width. Between two neighbours the error of the
  last cell of the one and of the first cell of the other are parabolas of the same
  curvature, so they cross once.
- Given the cells, c and w are a line through the points (u[b, m], value), by weighted
  least squares. The weights of values H and of weight times value S, summed over each
  cell, are all that it needs, and `kmeans.SortedRows` has their prefix sums: a turn
  costs a binary search for each cell, whatever the length of the row.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from pagedweight_jax.formats import kmeans
from pagedweight_jax.formats.kmeans import Bounds, SortedRows

PerCluster = Float64[np.ndarray, "rows _clusters"]

_MAX_WIDTH = 6.0e4
"""A cluster of two weights wants up to twice their distance; float16 must hold it."""


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Centers, in ascending order, and widths of the clusters of some rows."""

    center: PerCluster
    width: PerCluster

    def where(self, row: np.ndarray, other: "Clusters") -> "Clusters":
        """Takes the marked rows from here, and the others from there."""
        return Clusters(
            center=np.where(row[:, None], self.center, other.center),
            width=np.where(row[:, None], self.width, other.width),
        )

    def rounded(self) -> "Clusters":
        """Returns what float16 keeps of them."""
        return Clusters(
            center=self.center.astype(np.float16).astype(np.float64),
            width=self.width.astype(np.float16).astype(np.float64),
        )


@dataclass(frozen=True, kw_only=True)
class Moments:
    """Weighted sums over the values of each cluster and over the levels.

    With u the place of a value's level: of 1, u and u**2, of the value and of u times
    the value.
    """

    weight: PerCluster
    place: PerCluster
    place_square: PerCluster
    value: PerCluster
    place_value: PerCluster

    def fit(self, old: Clusters) -> Clusters:
        """Returns the clusters of least error; those without values stay as points."""
        filled = self.weight > 0
        weight = np.where(filled, self.weight, 1)
        spread = weight * self.place_square - self.place**2
        many = filled & (spread > 1e-12 * weight**2)  # levels that differ
        slope = weight * self.place_value - self.place * self.value
        width = np.where(many, slope / np.where(many, spread, 1), 0)
        width = np.clip(width, 0, _MAX_WIDTH)
        center = (self.value - width * self.place) / weight
        center = np.where(filled, center, old.center)
        center = np.maximum.accumulate(center, axis=1)  # rounding may undo the order
        return Clusters(center=center, width=width)

    def error(self, clusters: Clusters) -> Float64[np.ndarray, "rows"]:
        """Returns the error of each row, less the weighted squares of its values."""
        c, w = clusters.center, clusters.width
        squares = self.weight * c**2 + 2 * self.place * c * w + self.place_square * w**2
        products = self.value * c + self.place_value * w
        return (squares - 2 * products).sum(axis=1)


@dataclass(frozen=True, kw_only=True)
class Levels:
    """Where the levels of a cluster are, and what their errors count.

    Attributes:
      cluster_bits: p, bits that name a cluster and bits of the lowest level.
      parent_bits: P, bits of the best level.
    """

    cluster_bits: int
    parent_bits: int

    @property
    def _rest(self) -> Int64[np.ndarray, "levels"]:
        """Bits of each level beyond those of the cluster."""
        return np.arange(self.parent_bits - self.cluster_bits + 1)

    @property
    def cells(self) -> int:
        """Cells of a cluster."""
        return 2 ** (self.parent_bits - self.cluster_bits)

    @property
    def share(self) -> Float64[np.ndarray, "levels"]:
        """What the error of each level counts, s_b; 1 in all."""
        return 2.0**self._rest / (2.0**self._rest).sum()

    @property
    def place(self) -> Float64[np.ndarray, "levels cells"]:
        """Where in the width of its cluster the level of each cell is, u[b, m]."""
        level = np.arange(self.cells) >> self._rest[::-1, None]
        return (level + 0.5) * 2.0 ** -self._rest[:, None] - 0.5

    def bounds(self, rows: SortedRows, clusters: Clusters) -> Bounds:
        """Puts each value into its best cell."""
        center, width = clusters.center[..., None], clusters.width[..., None]
        ends = np.full((rows.num_rows, 1), np.inf)
        edges = np.concatenate([-ends, self._edges(clusters), ends], axis=1)
        starts = center + width * (np.arange(self.cells) / self.cells - 0.5)
        starts = np.clip(starts, edges[:, :-1, None], edges[:, 1:, None])
        starts[..., 0] = edges[:, :-1]
        inner = kmeans.first_not_below(
            rows.values, starts.reshape(rows.num_rows, -1)[:, 1:]
        )
        first = np.zeros((rows.num_rows, 1), np.int64)
        return np.concatenate([first, inner, first + rows.k], axis=1)

    def _edges(self, clusters: Clusters) -> Float64[np.ndarray, "rows inner"]:
        """Returns where the errors of neighbouring clusters cross."""
        share, place = self.share, self.place
        last = clusters.width[:, :-1, None] * place[:, -1]
        last += clusters.center[:, :-1, None]
        first = clusters.width[:, 1:, None] * place[:, 0]
        first += clusters.center[:, 1:, None]
        gap = (first - last) @ share
        squares = (first**2 - last**2) @ share
        middle = (clusters.center[:, :-1] + clusters.center[:, 1:]) / 2
        crossing = np.where(gap > 0, squares / np.where(gap > 0, 2 * gap, 1), middle)
        return np.clip(crossing, clusters.center[:, :-1], clusters.center[:, 1:])

    def moments(self, rows: SortedRows, bounds: Bounds) -> Moments:
        """Sums up what lies between the bounds of cells."""
        shape = (rows.num_rows, 2**self.cluster_bits, self.cells)

        def cell_sums(prefix: np.ndarray) -> np.ndarray:
            ends = np.take_along_axis(prefix, bounds, axis=1)
            return np.diff(ends, axis=1).reshape(shape)

        weight, weighted = cell_sums(rows.weight), cell_sums(rows.weighted)
        mean, square = self.share @ self.place, self.share @ self.place**2
        return Moments(
            weight=weight.sum(axis=-1),
            place=weight @ mean,
            place_square=weight @ square,
            value=weighted.sum(axis=-1),
            place_value=weighted @ mean,
        )


def equal_parts(rows: SortedRows, count: int) -> Clusters:
    """Cuts the range of each row into clusters of the same width."""
    low, high = rows.values[:, :1], rows.values[:, -1:]
    width = (high - low) / count
    return Clusters(
        center=low + width * (np.arange(count) + 0.5),
        width=np.repeat(width, count, axis=1),
    )


def from_bounds(rows: SortedRows, bounds: Bounds) -> Clusters:
    """Makes clusters that reach from their least to their largest value."""
    last = rows.k - 1
    low = np.take_along_axis(rows.values, np.minimum(bounds[:, :-1], last), axis=1)
    high = np.take_along_axis(rows.values, np.maximum(bounds[:, 1:] - 1, 0), axis=1)
    high = np.maximum(low, high)  # a cluster without values is a point
    return Clusters(center=(low + high) / 2, width=high - low)


def improve(
    rows: SortedRows,
    levels: Levels,
    start: Clusters,
    other: Clusters,
    num_turns: int,
) -> Clusters:
    """Searches from a start; returns the best turn, or the other where it is better."""
    best, least = other, np.full(rows.num_rows, np.inf)

    def turn(clusters: Clusters) -> Moments:
        nonlocal best, least
        moments = levels.moments(rows, levels.bounds(rows, clusters))
        error = moments.error(clusters)
        best = clusters.where(error < least, best)
        least = np.minimum(error, least)
        return moments

    turn(other)
    for _ in range(num_turns):
        start = turn(start).fit(start)
    turn(start)
    return best
