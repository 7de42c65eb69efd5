"""Dataclasses that JAX takes apart and puts together again."""

import jax


def pytree[T](cls: type[T]) -> type[T]:
    """Registers a dataclass as a pytree.

    JAX, and `jax.tree.map`, rebuild a pytree with whatever stands in for its arrays:
    tracers, shapes, NumPy arrays, sentinels. So the types of the fields say what they
    are inside of a computation, and are not checked when an instance is made (the mark
    is that of `typing.no_type_check`; methods are checked all the same).
    """
    cls.__no_type_check__ = True  # pyright: ignore[reportAttributeAccessIssue]
    return jax.tree_util.register_dataclass(cls)
