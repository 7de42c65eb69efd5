"""One array each way."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pagedweight_jax.engine.packing import num_words, pack, unpack

SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)
LEAVES = st.sampled_from([np.int32, np.uint32, np.float32, np.bool_]).flatmap(
    lambda dtype: SHAPES.flatmap(lambda shape: arrays.arrays(dtype, shape))
)
TREES = st.tuples(LEAVES, st.lists(LEAVES, max_size=3), st.none())


def shapes_of(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def assert_same_bits(one, two) -> None:
    def check(a, b) -> None:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(check, one, two)


@given(TREES)
@settings(max_examples=100)
def test_what_is_packed_comes_back_bit_by_bit(tree):
    """NaN and minus zero, too."""
    words = pack(tree)
    assert isinstance(words, np.ndarray) and words.dtype == np.int32
    assert words.size == num_words(shapes_of(tree))
    assert_same_bits(unpack(words, shapes_of(tree)), tree)


def test_host_and_device_read_each_other():
    rng = np.random.default_rng(1)
    tree = {
        "floats": rng.normal(size=(3, 2)).astype(np.float32),
        "seeds": rng.integers(0, 2**32, 5, np.uint32),
        "flags": rng.random(4) < 0.5,
    }
    like = shapes_of(tree)
    on_device = jax.jit(lambda words: unpack(words, like))(jnp.asarray(pack(tree)))
    assert_same_bits(on_device, tree)
    assert_same_bits(unpack(np.asarray(jax.jit(pack)(tree)), like), tree)
