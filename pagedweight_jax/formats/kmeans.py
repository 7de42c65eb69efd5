"""Weighted one-dimensional k-means of many rows at once, and exact splits in two.

A row is sorted once; a cluster then is an interval of it, and prefix sums of the
weights W and of weight times value S give its mean in constant time:

    mean[a, b) = (S[b] - S[a]) / (W[b] - W[a])

Splitting [a, b) at s lowers the weighted square error by

    gain(s) = d**2 * w / (l * (w - l)),   l = W[s] - W[a],  w = W[b] - W[a],
                                          d = S[s] - S[a] - l * mean[a, b)

(the sum of squares between the two halves), so the best split of every cluster of
every row is one pass over the values. Sums are float64: importance spans many orders
of magnitude, and differences of float32 prefix sums would drown the light clusters.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Float64, Int64, UInt8

_LEAST_WEIGHT = 1e-6
"""Part of the row's mean weight that `positive` gives every value at least."""

Bounds = Int64[np.ndarray, "rows _bounds"]
"""Where clusters begin in the sorted row; the last entry is the end, k."""

Means = Float64[np.ndarray, "rows _clusters"]


@dataclass(frozen=True, kw_only=True)
class SortedRows:
    """Rows in ascending order, with prefix sums that start at zero."""

    order: Int64[np.ndarray, "rows k"]  # places of the sorted values in the row
    values: Float64[np.ndarray, "rows k"]
    weight: Float64[np.ndarray, "rows k+1"]
    weighted: Float64[np.ndarray, "rows k+1"]

    @property
    def num_rows(self) -> int:
        """Rows of the block."""
        return self.values.shape[0]

    @property
    def k(self) -> int:
        """Values of a row."""
        return self.values.shape[1]

    def take(self, row: np.ndarray) -> "SortedRows":
        """Returns some of the rows."""
        return SortedRows(
            order=self.order[row],
            values=self.values[row],
            weight=self.weight[row],
            weighted=self.weighted[row],
        )


def sort_rows(values: np.ndarray, weights: np.ndarray) -> SortedRows:
    """Sorts rows; ``weights`` are positive (see `positive`)."""
    order = np.argsort(values, axis=1, kind="stable")
    x = np.take_along_axis(values, order, axis=1).astype(np.float64)
    h = np.take_along_axis(weights, order, axis=1).astype(np.float64)
    return SortedRows(
        order=order, values=x, weight=_prefix_sums(h), weighted=_prefix_sums(h * x)
    )


def positive(
    weights: Float32[np.ndarray, "rows k"],
) -> Float64[np.ndarray, "rows k"]:
    """Gives every value a little weight, and rows without any the same."""
    weights = weights.astype(np.float64)
    mean = weights.mean(axis=1, keepdims=True)
    return np.where(mean > 0, np.maximum(weights, _LEAST_WEIGHT * mean), 1.0)


def _prefix_sums(x: np.ndarray) -> np.ndarray:
    sums = np.zeros((x.shape[0], x.shape[1] + 1))
    np.cumsum(x, axis=1, out=sums[:, 1:])
    return sums


def cluster_means(rows: SortedRows, bounds: Bounds, empty: Means) -> Means:
    """Returns the weighted mean of every cluster.

    Args:
      empty: what to return for clusters without values.
    """
    weight = np.diff(np.take_along_axis(rows.weight, bounds, axis=1), axis=1)
    weighted = np.diff(np.take_along_axis(rows.weighted, bounds, axis=1), axis=1)
    filled = np.diff(bounds, axis=1) > 0
    means = np.where(filled, weighted / np.where(filled, weight, 1), empty)
    # Rounding may leave the cluster; a cluster of equal values must be exact.
    last = rows.k - 1
    low = np.take_along_axis(rows.values, np.minimum(bounds[:, :-1], last), axis=1)
    high = np.take_along_axis(rows.values, np.maximum(bounds[:, 1:] - 1, 0), axis=1)
    return np.where(filled, np.clip(means, low, np.maximum(low, high)), empty)


def best_splits(
    rows: SortedRows, row: np.ndarray, start: np.ndarray, stop: np.ndarray
) -> tuple[Int64[np.ndarray, "n"], Float64[np.ndarray, "n"]]:
    """Finds the best split of intervals of sorted rows.

    Args:
      row, start, stop: the intervals ``[start, stop)``, none of them empty.
    Returns:
      Where the right part begins, and the error gained. What cannot be split (equal
      values) has its right part empty and gains nothing.
    """
    first = row * (rows.k + 1) + start  # within the flat prefix sums
    size = stop - start
    weight, weighted = rows.weight.ravel(), rows.weighted.ravel()
    w = weight[first + size] - weight[first]
    mean = (weighted[first + size] - weighted[first]) / w
    begin = np.cumsum(size) - size
    place = np.arange(size.sum()) + np.repeat(first - begin, size)
    left = weight[place] - np.repeat(weight[first], size)
    d = weighted[place] - np.repeat(weighted[first], size)
    d -= left * np.repeat(mean, size)
    left[begin] = w / 2  # a split before the first value splits nothing
    gain = d * d / (left * (np.repeat(w, size) - left))
    gain[begin] = 0.0
    best = np.maximum.reduceat(gain, begin)
    candidates = np.where(gain == np.repeat(best, size), place, place[-1] + 1)
    split = np.minimum.reduceat(candidates, begin) - first + start
    flat = rows.values.ravel()
    equal = flat[row * rows.k + start] == flat[row * rows.k + stop - 1]
    return np.where(equal, stop, split), np.where(equal, 0.0, best * w)


def greedy_clusters(rows: SortedRows, num_clusters: int) -> Bounds:
    """Splits, again and again, the cluster of each row that gains most by it.

    Rows with fewer different values than clusters get empty clusters at the end.
    """
    row = np.arange(rows.num_rows)
    start = np.full((rows.num_rows, num_clusters), rows.k)
    stop, split = start.copy(), start.copy()
    gain = np.zeros(start.shape)
    start[:, 0] = 0
    split[:, 0], gain[:, 0] = best_splits(rows, row, start[:, 0], stop[:, 0])
    for new in range(1, num_clusters):
        old = np.argmax(gain, axis=1)
        row = np.flatnonzero(gain.max(axis=1) > 0)
        if not len(row):
            break
        old = old[row]
        stop[row, new] = stop[row, old]
        start[row, new] = stop[row, old] = split[row, old]
        for cluster in (old, np.full_like(old, new)):
            split[row, cluster], gain[row, cluster] = best_splits(
                rows, row, start[row, cluster], stop[row, cluster]
            )
    return np.concatenate([np.sort(start, axis=1), stop[:, :1] * 0 + rows.k], axis=1)


def lloyd(rows: SortedRows, bounds: Bounds, max_iterations: int) -> Bounds:
    """Moves cluster bounds half way between the means until nothing moves.

    Clusters without values must be the last ones; they stand at the largest value.
    """
    bounds = bounds.copy()
    empty = np.repeat(rows.values[:, -1:], bounds.shape[1] - 1, axis=1)
    means = cluster_means(rows, bounds, empty)
    moving = np.arange(rows.num_rows)
    for _ in range(max_iterations):
        middles = (means[moving, 1:] + means[moving, :-1]) / 2
        inner = first_not_below(rows.values[moving], middles)
        changed = (inner != bounds[moving, 1:-1]).any(axis=1)
        moving = moving[changed]
        if not len(moving):
            break
        bounds[moving, 1:-1] = inner[changed]
        means[moving] = cluster_means(
            rows.take(moving), bounds[moving], empty=means[moving]
        )
    return bounds


def first_not_below(
    values: Float64[np.ndarray, "rows k"], limits: Float64[np.ndarray, "rows m"]
) -> Int64[np.ndarray, "rows m"]:
    """Counts the values of each sorted row below each limit, by binary search."""
    k = values.shape[1]
    count = np.zeros(limits.shape, np.int64)
    step = 1 << (k.bit_length() - 1)
    while step:
        more = np.minimum(count + step, k)
        below = np.take_along_axis(values, more - 1, axis=1) < limits
        count = np.where(below, more, count)
        step >>= 1
    return count


def split_all(rows: SortedRows, bounds: Bounds) -> Bounds:
    """Splits every cluster in two at its best place."""
    row, cluster = np.nonzero(np.diff(bounds, axis=1))
    halves = np.repeat(bounds, 2, axis=1)[:, 1:]  # an empty cluster stays as it is
    split, _ = best_splits(rows, row, bounds[row, cluster], bounds[row, cluster + 1])
    halves[:, 1::2] = bounds[:, 1:]
    halves[row, 2 * cluster + 1] = split
    return halves


def cluster_codes(rows: SortedRows, bounds: Bounds) -> UInt8[np.ndarray, "rows k"]:
    """Returns the cluster number of every value, in the order of the row."""
    num_clusters = bounds.shape[1] - 1
    numbers = np.tile(np.arange(num_clusters, dtype=np.uint8), rows.num_rows)
    sorted_codes = np.repeat(numbers, np.diff(bounds, axis=1).ravel())
    codes = np.empty(rows.values.shape, np.uint8)
    np.put_along_axis(codes, rows.order, sorted_codes.reshape(codes.shape), axis=1)
    return codes
