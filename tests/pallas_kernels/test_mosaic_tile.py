"""The inline code of the Mosaic GPU kernel, executed by a warpgroup in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib.mlir import ir
from warpgroup import Warpgroup, accumulator

from pallas_kernels import bitplane
from pallas_kernels.fused_moe import mosaic_tile


@pytest.fixture(autouse=True)
def mlir():
    with ir.Context(), ir.Location.unknown():
        yield


def tokens(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    return rng.integers(-8, 8, (num_tokens, 64)).astype(np.float16)


def fragments(x: np.ndarray) -> np.ndarray:
    return np.asarray(mosaic_tile.to_fragments(jnp.asarray(x[None])))[0, 0]


@pytest.mark.parametrize("num_tokens", [8, 16, 64])
@pytest.mark.parametrize("bits", range(1, 9))
def test_device_code_multiplies_affine_codes(bits, num_tokens, monkeypatch):
    rng = np.random.default_rng(100 * bits + num_tokens)
    codes, x = rng.integers(0, 2**bits, (64, 64)), tokens(rng, num_tokens)
    planes = np.asarray(bitplane.pack(codes, bits, "split"))
    warpgroup = Warpgroup(fragments(x))
    warpgroup.patch(monkeypatch)

    registers = mosaic_tile._integers(list(planes))
    product = accumulator(mosaic_tile._multiply(registers, *warpgroup.memrefs))

    expected = (codes - 2 ** (bits - 1)) @ x.astype(np.float64).T
    np.testing.assert_array_equal(product, expected)


@pytest.mark.parametrize("bits", range(1, 9))
def test_device_code_looks_codebooks_up(bits, monkeypatch):
    rng = np.random.default_rng(bits)
    codes, x = rng.integers(0, 2**bits, (64, 64)), tokens(rng, 8)
    first = int(rng.integers(0, 40))
    lut = rng.integers(-99, 99, (64, first + 2**bits)).astype(np.float16)
    planes = np.asarray(bitplane.pack(codes, bits, "pair"))
    warpgroup = Warpgroup(fragments(x), lut)
    warpgroup.patch(monkeypatch)

    registers = mosaic_tile._looked_up(list(planes), warpgroup.memrefs[1], first)
    product = accumulator(mosaic_tile._multiply(registers, warpgroup.memrefs[0]))

    weights = np.take_along_axis(lut, codes + first, axis=1).astype(np.float64)
    np.testing.assert_array_equal(product, weights @ x.astype(np.float64).T)
