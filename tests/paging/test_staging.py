import threading
from functools import partial

import numpy as np
import pytest

from pagedweight_jax.paging.staging import (
    PageableStaging,
    PinnedStaging,
    device_put_transfer,
)

SHAPE = (6, 8)


def number_rows(words: np.ndarray, first: int, value: int) -> None:
    words[first : first + 2] = value + np.arange(2, dtype=np.uint32)[:, None]


def fills(value: int) -> list:
    return [partial(number_rows, first=i, value=value + i) for i in (0, 2, 4)]


def expected(value: int) -> np.ndarray:
    return np.broadcast_to(value + np.arange(6, dtype=np.uint32)[:, None], SHAPE)


@pytest.fixture(params=[PageableStaging, PinnedStaging])
def kind(request):
    return request.param()


def test_what_the_fills_wrote_arrives(kind):
    transfer = kind.send(SHAPE, fills(10))
    np.testing.assert_array_equal(transfer.result(), expected(10))
    assert transfer.is_ready()


def test_an_array_that_arrived_is_not_written_again(kind):
    """Page-locked arrays are used again, their copies on the device are not."""
    transfers = [kind.send(SHAPE, fills(i)) for i in range(20)]
    for i, transfer in enumerate(transfers):
        np.testing.assert_array_equal(transfer.result(), expected(i))


def test_shapes_may_change(kind):
    kind.send(SHAPE, fills(0)).result()
    wide = kind.send((6, 16), fills(3)).result()
    assert wide.shape == (6, 16) and wide[5, 15] == 8


def fail(words: np.ndarray) -> None:
    raise OSError("the file is gone")


def test_an_error_of_a_fill_is_raised_once_it_is_known():
    with pytest.raises(OSError, match="the file is gone"):
        PageableStaging().send(SHAPE, [fail])
    transfer = PinnedStaging().send(SHAPE, [*fills(0), fail])
    with pytest.raises(OSError, match="the file is gone"):
        transfer.result()
    assert transfer.is_ready()


def test_an_error_leaves_the_staging_usable():
    pinned = PinnedStaging()
    with pytest.raises(OSError):
        pinned.send(SHAPE, [fail]).result()
    np.testing.assert_array_equal(pinned.send(SHAPE, fills(1)).result(), expected(1))


def test_pinned_staging_does_not_wait_for_the_fills():
    go = threading.Event()
    transfer = PinnedStaging().send(SHAPE, [lambda _: go.wait(60), *fills(5)])
    assert not transfer.is_ready()
    go.set()
    np.testing.assert_array_equal(transfer.result(), expected(5))


def test_pinned_arrays_are_used_again():
    pinned = PinnedStaging()
    for i in range(5):
        pinned.send(SHAPE, fills(i)).result()
    assert len(pinned._slots) == 1


def test_device_put_brings_the_words():
    words = np.arange(12, dtype=np.uint32).reshape(3, 4)
    transfer = device_put_transfer(words)
    np.testing.assert_array_equal(transfer.result(), words)
    assert transfer.is_ready()
