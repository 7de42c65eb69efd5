"""What the formats share: checks of bits and weights, rows in blocks, host arrays."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Integer

MAX_BITS = 8
"""Planes of a weight at most: codes are bytes, and kernels are made for 2 to 8."""

MAX_WEIGHT = 3.0e4
"""Largest weight: a range of twice this still fits float16 side tables."""

_WEIGHTS_PER_BLOCK = 32768  # its float64 working set stays in the second-level cache
_NUM_THREADS = 2

Weights = Float[Array | np.ndarray, "*batch n k"]


def check_bits(seed_bits: int, parent_bits: int) -> None:
    """Refuses bit counts that planes cannot have.

    Raises:
      ValueError: unless ``1 <= seed_bits <= parent_bits <= 8``.
    """
    if not 1 <= seed_bits <= parent_bits <= MAX_BITS:
        raise ValueError(
            f"seed_bits={seed_bits} and parent_bits={parent_bits}, but wanted"
            f" 1 <= seed_bits <= parent_bits <= {MAX_BITS}"
        )


def check_level(bits: int, seed_bits: int, parent_bits: int) -> None:
    """Refuses a number of bits that the format does not hold."""
    if not seed_bits <= bits <= parent_bits:
        raise ValueError(
            f"bits={bits} must be between seed_bits={seed_bits} and"
            f" parent_bits={parent_bits}"
        )


def weights_and_importance(
    weights: Weights, importance: Weights | None
) -> tuple[Float32[np.ndarray, "rows k"], Float32[np.ndarray, "rows k"]]:
    """Checks the inputs of `quantize` and flattens them to rows.

    Returns:
      The weights and their importance; rows come one after the other.
    Raises:
      ValueError: if shapes differ, a weight is not finite or too large for float16
        side tables, or an importance is negative or not finite.
    """
    w = np.asarray(weights, np.float32)
    h = np.ones_like(w) if importance is None else np.asarray(importance, np.float32)
    if h.shape != w.shape:
        raise ValueError(f"weights are {w.shape} but importance is {h.shape}")
    largest = np.abs(w).max(initial=0.0)
    if not largest <= MAX_WEIGHT:  # also when it is NaN
        raise ValueError(
            f"the largest weight is {largest}, but weights must be finite and at most"
            f" {MAX_WEIGHT}, because side tables are float16"
        )
    if not (np.isfinite(h).all() and h.min(initial=0.0) >= 0):
        raise ValueError("importance must be finite and not negative")
    k = w.shape[-1]
    return w.reshape(-1, k), h.reshape(-1, k)


def kept_planes(
    codes: Integer[Array | np.ndarray, "*shape"], parent_bits: int, bits: int
) -> Integer[Array, "*shape"]:
    """Returns parent codes whose planes from ``bits`` on are zero."""
    absent = parent_bits - bits
    return (jnp.asarray(codes, jnp.int32) >> absent) << absent


def row_blocks(num_rows: int, rows_per_block: int) -> Iterator[slice]:
    """Cuts rows into blocks that fit a cache."""
    for start in range(0, num_rows, rows_per_block):
        yield slice(start, min(start + rows_per_block, num_rows))


def in_threads(one_block: Callable[[slice], None], num_rows: int, k: int) -> None:
    """Calls a function of NumPy, which releases the lock, for blocks of rows.

    Args:
      one_block: is told the rows of each block, and stores what it makes of them.
      k: columns of a row.
    """
    blocks = row_blocks(num_rows, max(1, _WEIGHTS_PER_BLOCK // k))
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        list(pool.map(one_block, blocks))


def on_host[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Makes a jax function run on the CPU, whatever the default device is."""

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            return function(*args, **kwargs)

    return wrapped


@on_host
def host_array(values: np.ndarray) -> Array:
    """Puts an array into host memory as a jax array, for side tables.

    It is not committed to the CPU: a step on another device may take it as it is.
    """
    return jnp.asarray(values)
