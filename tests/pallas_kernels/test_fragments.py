"""Planes become fragments of weights: the inline code, executed in NumPy."""

import ml_dtypes
import numpy as np
import pytest
from jaxlib.mlir import ir
from warpgroup import THREADS, Warpgroup, matrix

from pallas_kernels import bitplane
from pallas_kernels.fused_moe import fragments, registers

every_width = pytest.mark.parametrize("bits", range(1, 9))


@pytest.fixture(autouse=True)
def mlir():
    with ir.Context(), ir.Location.unknown():
        yield


def run(monkeypatch, *arrays):
    warpgroup = Warpgroup(*arrays)
    warpgroup.patch(monkeypatch, fragments, registers)
    return warpgroup.memrefs


def random_tile(rng, bits, order):
    """Returns codes and the planes that they are packed in."""
    codes = rng.integers(0, 2**bits, (64, 64))
    return codes, list(np.asarray(bitplane.pack(codes, bits, order)))


@every_width
def test_codes_become_bytes_where_they_are_documented(bits, monkeypatch):
    codes, planes = random_tile(np.random.default_rng(bits), bits, "split")
    run(monkeypatch)
    actual = np.full((64, 64), -1)
    lane = np.arange(THREADS) % 32
    first_row, t = 16 * (np.arange(THREADS) // 32) + lane // 4, lane % 4
    for i, fragment in enumerate(fragments.bytes_of(planes)):
        for m, register in enumerate(fragment):
            for n in range(4):
                column = 8 * (2 * i + m // 2 + 4 * (n % 2)) + 2 * t + n // 2
                byte = register >> np.uint32(8 * n) & np.uint32(255)
                actual[first_row + 8 * (m % 2), column] = byte
    np.testing.assert_array_equal(actual, codes)


def look_up(monkeypatch, bits, *, exact):
    """Returns the looked-up parts of a tile, and the weights that they stand for."""
    rng = np.random.default_rng(bits)
    codes, planes = random_tile(rng, bits, "pair")
    first = int(rng.integers(0, 40))
    lut = rng.standard_normal((64, first + 2**bits)).astype(np.float16)
    (memory,) = run(monkeypatch, lut)
    rows = fragments.lookup_rows(memory, first)
    parts = fragments.looked_up(planes, rows, exact=exact)
    weights = np.take_along_axis(lut, codes + first, axis=1)
    return [(factor, matrix(part)) for factor, part in parts], weights


@every_width
def test_codebooks_are_looked_up_and_rounded_to_bfloat16(bits, monkeypatch):
    parts, weights = look_up(monkeypatch, bits, exact=False)
    ((factor, rounded),) = parts
    assert factor == 1
    np.testing.assert_array_equal(rounded, weights.astype(ml_dtypes.bfloat16))


@every_width
def test_two_parts_of_a_looked_up_weight_are_exact(bits, monkeypatch):
    parts, weights = look_up(monkeypatch, bits, exact=True)
    total = sum(factor * part for factor, part in parts)
    np.testing.assert_array_equal(total, weights)


def test_a_lookup_beyond_the_table_would_be_noticed(monkeypatch):
    """The stand-in for memory is strict, so that the tests above mean something."""
    (memory,) = run(monkeypatch, np.zeros((64, 16), np.float16))
    _, planes = random_tile(np.random.default_rng(0), 4, "pair")
    with pytest.raises(AssertionError, match="out of bounds"):
        fragments.looked_up(planes, fragments.lookup_rows(memory, 1), exact=False)
