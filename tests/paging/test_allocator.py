import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedweight_jax.paging.allocator import FrameAllocator, OutOfFrames


def ids(*frames: int) -> np.ndarray:
    return np.array(frames, np.int32)


def test_frames_are_handed_out_in_order_and_never_the_null_frame():
    allocator = FrameAllocator(5)
    np.testing.assert_array_equal(allocator.allocate(2, "plane"), ids(1, 2))
    np.testing.assert_array_equal(allocator.allocate(2, "kv"), ids(3, 4))
    assert allocator.num_free == 0
    assert (allocator.num_used("plane"), allocator.num_used("kv")) == (2, 2)


def test_out_of_frames_takes_nothing_and_names_sizes():
    allocator = FrameAllocator(5)
    allocator.allocate(3, "plane")
    with pytest.raises(OutOfFrames, match=r"2 frames were asked for \(kv\) but 1 of 4"):
        allocator.allocate(2, "kv")
    assert allocator.num_free == 1
    allocator.check_integrity()


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (ids(1, 1), "named more than once"),
        (ids(1, 3), r"\[3\] are not in use"),
        (ids(0), "null frame"),
        (ids(5), "do not exist; the pool has frames 1 to 4"),
        (ids(-1), "do not exist"),
    ],
)
def test_a_wrong_free_is_refused_and_frees_nothing(frames: np.ndarray, message: str):
    allocator = FrameAllocator(5)
    allocator.allocate(2, "plane")
    with pytest.raises(ValueError, match=message):
        allocator.free(frames)
    assert allocator.num_free == 2
    allocator.check_integrity()


@pytest.mark.parametrize("num_frames", [0, 1])
def test_a_pool_without_frames_is_refused(num_frames: int):
    with pytest.raises(ValueError, match="at least 2 frames"):
        FrameAllocator(num_frames)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="count=-1"):
        FrameAllocator(5).allocate(-1, "kv")


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["plane", "kv"]))))
def test_every_frame_has_one_owner_whatever_comes_and_goes(requests: list):
    allocator, held = FrameAllocator(20), []
    for count, owner in requests:
        try:
            held.append((allocator.allocate(count, owner), owner))
        except OutOfFrames:
            assert allocator.num_free < count
            frames, _ = held.pop(0)
            allocator.free(frames)
        allocator.check_integrity()
        for name in ("plane", "kv"):
            mine = [frames for frames, owner in held if owner == name]
            expected = np.sort(np.concatenate([ids(), *mine]))
            np.testing.assert_array_equal(allocator.frames_of(name), expected)
