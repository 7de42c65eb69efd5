"""Laws of the plane layout; the oracle is the formula of the docstring, bit by bit."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import bitplane

SIZES = st.sampled_from([64, 128, 192, 256])
ORDERS = st.sampled_from(["split", "pair"])


def slow_pack(codes, bits, order):
    """Sets one bit after the other where the docstring says it lies."""
    n, k = codes.shape
    v = 4 if k % 256 == 0 else 2 if k % 128 == 0 else 1
    planes = np.zeros((bits, n // 64, k // (64 * v), 128, v), np.uint32)
    for lane in range(128):
        for s in range(16):
            for hi in range(2):
                row = 16 * (lane // 32) + (lane % 32) // 4 + 8 * (s % 2)
                col = 8 * (s // 2) + 2 * (lane % 4) + hi
                bit = (
                    s + 16 * hi if order == "split" else 4 * (2 * (s // 4) + hi) + s % 4
                )
                code = codes[row::64, col::64].astype(np.uint32)  # [n/64, k/64]
                code = code.reshape(n // 64, k // (64 * v), v)
                for j in range(bits):
                    value = (code >> (bits - 1 - j)) & 1
                    planes[j, :, :, lane, :] |= value << np.uint32(bit)
    return planes.reshape(bits, -1)


@st.composite
def codes(draw, batch=()):
    bits, n, k = draw(st.integers(1, 8)), draw(SIZES), draw(SIZES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return rng.integers(0, 2**bits, (*batch, n, k), np.uint8), bits


@settings(max_examples=8)
@given(codes(), ORDERS)
def test_pack_is_the_documented_layout(drawn, order):
    values, bits = drawn
    packed = bitplane.pack(values, bits, order)
    assert packed.shape == (bits, bitplane.plane_words(*values.shape))
    np.testing.assert_array_equal(packed, slow_pack(values, bits, order))


@settings(max_examples=5)
@given(codes(batch=(2, 3)), ORDERS)
def test_unpack_is_the_inverse_of_pack_for_every_batch(drawn, order):
    values, bits = drawn
    packed = bitplane.pack(values, bits, order)
    back = bitplane.unpack(packed, *values.shape[-2:], order)
    np.testing.assert_array_equal(back, values)
    one = bitplane.pack(values[1, 2], bits, order)
    np.testing.assert_array_equal(packed[1, 2], one)


@settings(max_examples=8)
@given(codes(), ORDERS, st.data())
def test_the_first_planes_are_the_truncated_codes(drawn, order, data):
    values, parent_bits = drawn
    bits = data.draw(st.integers(1, parent_bits))
    planes = bitplane.pack(values, parent_bits, order)
    short = bitplane.truncate(jnp.asarray(values), parent_bits, bits)
    np.testing.assert_array_equal(planes[:bits], bitplane.pack(short, bits, order))
    np.testing.assert_array_equal(
        bitplane.unpack(planes[:bits], *values.shape, order), short
    )


def test_the_bits_of_a_word_are_a_permutation():
    """32 weights share a word and none shares its bit: all ones fill every word."""
    for order in ("split", "pair"):
        planes = bitplane.pack(np.full((64, 128), 3, np.uint8), 2, order)
        np.testing.assert_array_equal(planes, np.uint32(0xFFFFFFFF))


def test_no_planes_are_zero_codes():
    planes = jnp.zeros((0, 128), jnp.uint32)
    np.testing.assert_array_equal(bitplane.unpack(planes, 64, 64, "split"), 0)


@pytest.mark.parametrize(("n", "k"), [(63, 64), (64, 96)])
def test_sizes_that_are_no_tiles_are_refused(n, k):
    with pytest.raises(ValueError, match=rf"\[{n}, {k}\]"):
        bitplane.plane_words(n, k)
    with pytest.raises(ValueError, match="64"):
        bitplane.pack(np.zeros((n, k), np.uint8), 2, "split")


@pytest.mark.parametrize("bits", [0, 5])
def test_truncation_to_no_or_more_bits_is_refused(bits):
    with pytest.raises(ValueError, match=f"bits={bits}"):
        bitplane.truncate(jnp.zeros((64, 64), jnp.int32), 4, bits)
