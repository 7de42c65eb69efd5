"""Tokens become fixed point: the jnp way, and the threads' way executed in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir
from warpgroup import THREADS, Warpgroup

from pallas_kernels.fused_moe import fixed_point, registers
from pallas_kernels.fused_moe.fixed_point import FixedPointTile

K = 448  # columns; the second part of 256 has 64 columns too many
PAIRS = 24
TILES = {
    "bfloat16": FixedPointTile(
        tokens=16, columns=256, parts=2, span=128, pairs_per_row=2, warpgroups=2
    ),
    "float32": FixedPointTile(
        tokens=8, columns=256, parts=3, span=64, pairs_per_row=1, warpgroups=1
    ),
}
LARGEST = {2: 32512, 3: 2**22 - 1}
# Of a span's largest value: half a unit, about 2**-16 and 2**-23, and what the rounding
# of 1 / scale to 24 bits adds: less than 1 % to two parts, up to a half to three.
ERROR = {2: 1.01 / (2 * LARGEST[2]), 3: 1.5 / (2 * LARGEST[3])}

every_type = pytest.mark.parametrize("dtype", TILES)
every_way = pytest.mark.parametrize("way", ["jnp", "threads"])


def rows(dtype, seed=0):
    """Returns tokens whose spans differ in size."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((PAIRS // TILES[dtype].pairs_per_row, K))
    sizes = 10.0 ** rng.integers(-6, 6, (len(x), K // 64)).repeat(64, axis=1)
    return (x * sizes).astype(jnp.dtype(dtype))


def gathered(tile, x, order, first_pair, num_tokens, column):
    """Returns the tokens of the tile in float64, zeros where there are none."""
    out = np.zeros((tile.tokens, tile.columns))
    width = min(tile.columns, K - column)
    pairs = order[first_pair : first_pair + num_tokens]
    out[:num_tokens, :width] = x[pairs // tile.pairs_per_row, column : column + width]
    return out


@functools.partial(jax.jit, static_argnums=0)
def convert_with_jnp(tile, x, order, to, scales, first_pair, num_tokens, column):
    to, scales = jax.new_ref(to), jax.new_ref(scales)
    fixed_point._convert_with_jnp(
        tile, x, order, to, scales, first_pair, num_tokens, column
    )
    return to[...], scales[...]


def convert_with_threads(tile, x, order, to, scales, *scalars):
    with (
        ir.Context(),
        ir.Location.unknown(),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        group = Warpgroup(x, order, to, scales)
        group.patch(monkeypatch, registers, fixed_point)
        for number in range(tile.warpgroups):
            registers_of = [np.full(THREADS, v, np.uint32) for v in (*scalars, number)]
            fixed_point._convert_with_threads(tile, *group.memrefs, *registers_of)
    to, scales = (np.array(ref.values) for ref in group.memrefs[2:])
    # Byte n of word t of the k-th 16 bytes: column 8 (k + 4 (n % 2)) + 2 t + n // 2.
    columns = np.arange(tile.columns).reshape(-1, 2, 4, 4, 2)  # tile n%2 k t n//2
    columns = columns.transpose(0, 2, 3, 4, 1).reshape(-1)
    in_order = np.zeros_like(to)
    in_order[:, columns] = to[:, : tile.columns]
    return in_order, scales


def convert(way, dtype, x, first_pair=3, num_tokens=None, column=0):
    """Returns tokens as they were, integers, scales and sums; axes token, span, n."""
    tile = TILES[dtype]
    num_tokens = tile.tokens if num_tokens is None else num_tokens
    order = np.random.default_rng(1).permutation(PAIRS).astype(np.int32)
    scalars = (first_pair, num_tokens, column)
    run = convert_with_jnp if way == "jnp" else convert_with_threads
    to, scales = run(
        tile,
        x,
        order,
        np.full(tile.shape, 77, np.int8),
        np.full(tile.scales_shape, np.nan, np.float32),
        *map(np.int32, scalars),
    )
    parts = np.asarray(to, np.int64)[:, : tile.columns]
    parts = parts.reshape(tile.parts, tile.tokens, -1, tile.span)
    q = np.tensordot(256 ** np.arange(tile.parts), parts, axes=1)
    scale, total = np.asarray(scales, np.float64).transpose(2, 1, 0)
    expected = gathered(tile, x, order, *scalars).reshape(q.shape)
    return expected, q, scale, total


@every_way
@every_type
@pytest.mark.parametrize("column", [0, 256])
def test_parts_add_up_to_the_rounded_token(way, dtype, column):
    x, q, scale, total = convert(way, dtype, rows(dtype), column=column)
    largest = np.abs(x).max(axis=2)
    parts = TILES[dtype].parts
    np.testing.assert_allclose(scale, largest / LARGEST[parts], rtol=3e-7)
    np.testing.assert_allclose(total, x.sum(axis=2), atol=1e-5 * largest.max())
    exact = x / np.where(scale > 0, scale, 1)[..., None]
    assert np.all(np.abs(q - exact) <= 0.5 + 2.0**-23 * np.abs(exact))
    error = np.abs(q * scale[..., None] - x).max(axis=2)
    assert np.all(error <= ERROR[parts] * largest)


@every_type
def test_threads_and_jnp_differ_by_ties_alone(dtype):
    x = rows(dtype)
    _, q, *_ = convert("threads", dtype, x)
    _, expected, *_ = convert("jnp", dtype, x)
    assert np.abs(q - expected).max() <= 1
    assert np.mean(q != expected) < (1e-3 if dtype == "bfloat16" else 0.1)


@every_way
@every_type
def test_the_largest_values_do_not_wrap(way, dtype):
    x = np.ones_like(rows(dtype))
    x[:, ::2] = -1
    _, q, *_ = convert(way, dtype, x)
    largest = LARGEST[TILES[dtype].parts]
    assert np.all(np.abs(np.abs(q[:, :3]) - largest) <= 1)
    assert np.all(q[:, :3, ::2] < 0) and np.all(q[:, :3, 1::2] > 0)


@every_way
@every_type
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_slots_without_a_token_are_zero(way, dtype, num_tokens):
    _, q, scale, total = convert(way, dtype, rows(dtype), num_tokens=num_tokens)
    for values in (q, scale, total):
        assert np.all(values[num_tokens:] == 0)
        assert num_tokens == 0 or np.any(values[:num_tokens])


@every_way
@every_type
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-38, 1e-36, 1e-33])
def test_spans_of_nothing_or_next_to_nothing_stay_finite(way, dtype, size):
    x = (rows(dtype) * 0 + 1).astype(np.float64)
    x[:, 64:128] = size  # a span, or half a span with large values
    x[1] = size
    x, q, scale, total = convert(way, dtype, x.astype(jnp.dtype(dtype)))
    assert np.isfinite(scale).all() and np.isfinite(total).all()
    error = np.abs(q * scale[..., None] - x)
    # Scales below 1e-37 are taken for zero.
    bound = ERROR[TILES[dtype].parts] * np.abs(x).max(axis=2, keepdims=True)
    assert np.all(error <= bound + 1e-37 * LARGEST[TILES[dtype].parts])


@every_way
@every_type
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_spoils_only_its_own_token(way, dtype, value):
    x = rows(dtype)
    _, *expected = convert(way, dtype, x)
    spoilt = x.copy()
    spoilt[2, 70] = value
    tokens, *actual = convert(way, dtype, spoilt)
    is_spoilt = ~np.isfinite(tokens).all(axis=(1, 2))
    assert 1 <= is_spoilt.sum() <= TILES[dtype].pairs_per_row
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a[~is_spoilt], b[~is_spoilt])
    _, scale, total = actual
    span = 70 // TILES[dtype].span
    assert not np.isfinite(scale[is_spoilt, span]).any()
    assert not np.isfinite(total[is_spoilt, span]).any()
