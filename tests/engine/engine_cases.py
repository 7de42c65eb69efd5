"""What the tests of the engine share."""

from collections.abc import Iterator
from contextlib import contextmanager

from pagedweight_jax.serving.build import Built


@contextmanager
def steps_in_flight(built: Built, count: int) -> Iterator[None]:
    """Lets an engine run ahead as far; nothing is compiled for it."""
    engine = built.engine
    before, engine._max_steps_in_flight = engine._max_steps_in_flight, count
    try:
        yield
    finally:
        engine._max_steps_in_flight = before
