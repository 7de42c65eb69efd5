"""Many small arrays as one: what a step costs is the number of copies, not their size.

A pytree is laid out leaf after leaf as 32-bit words; a bool takes a word. The same two
functions serve both ends: NumPy arrays pack and unpack on the host, JAX arrays inside
of a program.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32


def pack(tree: Any) -> Int32[Array | np.ndarray, "words"]:
    """Returns the leaves of a tree as one vector of words; the inverse of `unpack`."""
    leaves = [_words(leaf) for leaf in jax.tree.leaves(tree)]
    on_host = all(isinstance(leaf, np.ndarray) for leaf in leaves)
    return (np if on_host else jnp).concatenate(leaves)  # pyright: ignore


def unpack(words: Int32[Array | np.ndarray, "words"], like: Any) -> Any:
    """Returns the tree whose words these are.

    Args:
      words: what `pack` returned.
      like: the tree as `jax.ShapeDtypeStruct` leaves.
    """
    leaves, structure = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves]).tolist()
    parts = [
        _from_words(words[end - leaf.size : end], leaf)
        for leaf, end in zip(leaves, ends, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


def num_words(like: Any) -> int:
    """Returns the words of a tree given as shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(like))


def _words(leaf: Any) -> Any:
    flat = leaf.reshape(-1)
    return flat.astype(np.int32) if flat.dtype == bool else flat.view(np.int32)


def _from_words(words: Any, like: jax.ShapeDtypeStruct) -> Any:
    flat = words.astype(bool) if like.dtype == bool else words.view(like.dtype)
    return flat.reshape(like.shape)
