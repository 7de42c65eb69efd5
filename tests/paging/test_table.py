from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from paging_cases import planes_between, table_with_bits

from pagedweight_jax.paging import table as tables
from pagedweight_jax.paging.table import PageTable, PlaneId, Residency

PARENT_BITS = 4
SHAPE = (2, 3, 2)

page_bits = hnp.arrays(np.int32, SHAPE, elements=st.integers(0, PARENT_BITS))


def test_an_empty_table_has_no_bits():
    table = tables.empty_table(2, 3, PARENT_BITS, 2)
    assert (table.bits == 0).all()
    assert tables.mean_bits(table) == 0
    assert tables.plane_bytes(table, 64) == 0
    tables.check_integrity(table)


@given(page_bits, st.integers(1, 3))
def test_bits_are_the_planes_that_were_entered(bits: np.ndarray, frames_per_plane: int):
    table, _ = table_with_bits(bits, PARENT_BITS, frames_per_plane)
    np.testing.assert_array_equal(table.bits, bits)
    tables.check_integrity(table)


def test_a_gate_up_plane_counts_only_with_both_its_linears():
    table, _ = table_with_bits(np.full(SHAPE, 3), PARENT_BITS)
    frames = table.frames.copy()
    frames[0, 0, 1, 1] = 0  # plane 1 of up
    assert PageTable(frames, table.desired).bits[0, 0].tolist() == [1, 3]


@given(page_bits, page_bits, st.integers(1, 3))
def test_lowering_frees_exactly_the_planes_above(
    bits: np.ndarray, target: np.ndarray, frames_per_plane: int
):
    table, allocator = table_with_bits(bits, PARENT_BITS, frames_per_plane)
    lowered, freed = tables.lower(table, target)
    np.testing.assert_array_equal(lowered.bits, np.minimum(bits, target))
    np.testing.assert_array_equal(lowered.desired, np.minimum(bits, target))
    kept = lowered.frames[lowered.frames != 0]
    np.testing.assert_array_equal(
        np.sort(np.concatenate([kept, freed])), allocator.frames_of("plane")
    )
    tables.check_integrity(lowered)


@given(page_bits, page_bits)
def test_raising_what_was_lowered_gives_the_bits_back(
    bits: np.ndarray, target: np.ndarray
):
    table, allocator = table_with_bits(bits, PARENT_BITS)
    lowered, freed = tables.lower(table, target)
    allocator.free(freed)
    planes = planes_between(lowered.bits, bits)
    frames = allocator.allocate(len(freed), "plane")
    raised = tables.raise_planes(lowered, planes, frames)
    np.testing.assert_array_equal(raised.bits, bits)


def test_gate_frames_come_before_up_frames():
    table = tables.empty_table(1, 1, 2, 2)
    frames = np.array([1, 2, 3, 4], np.int32)
    raised = tables.raise_planes(table, [PlaneId(0, 0, 0, 0)], frames)
    assert raised.frames[0, 0, 0, 0].tolist() == [1, 2]
    assert raised.frames[0, 0, 1, 0].tolist() == [3, 4]


@pytest.mark.parametrize("plane", [1, 3])
def test_a_plane_that_does_not_follow_is_refused(plane: int):
    table, _ = table_with_bits(np.full(SHAPE, 2), PARENT_BITS)
    with pytest.raises(ValueError, match="has 2 planes, and planes follow"):
        tables.raise_planes(table, [PlaneId(0, 0, 1, plane)], np.int32([50]))


def test_the_number_of_frames_must_be_that_of_the_planes():
    table = tables.empty_table(1, 1, 2, 2)
    with pytest.raises(ValueError, match="1 planes take 4 frames but 2 came"):
        tables.raise_planes(table, [PlaneId(0, 0, 0, 0)], np.array([1, 2], np.int32))


def test_residency_tells_the_three_places():
    table, _ = table_with_bits([[[1, 0]]], 3)
    where = tables.residency(table, {PlaneId(0, 0, 0, 1)})
    host, transfer, device = Residency.HOST, Residency.TRANSFER, Residency.DEVICE
    assert where[0, 0, 0].tolist() == [device, transfer, host]
    assert where[0, 0, 1].tolist() == [host, host, host]


def test_mean_bits_counts_gate_up_twice_and_bytes_count_frames():
    table, _ = table_with_bits([[[3, 0]]], 3, frames_per_plane=2)
    assert tables.mean_bits(table) == 2
    assert tables.plane_bytes(table, 100) == 3 * 2 * 2 * 100


def test_tables_are_values():
    table, _ = table_with_bits([[[1, 1]]], 3)
    with pytest.raises(ValueError, match="read-only"):
        table.frames[:] = 0


def with_frame(table: PageTable, index: tuple[int, ...], frame: int) -> PageTable:
    frames = table.frames.copy()
    frames[index] = frame
    return PageTable(frames, table.desired)


def test_check_integrity_finds_each_broken_law():
    table, _ = table_with_bits(np.full(SHAPE, 2), PARENT_BITS)
    used = int(table.frames[0, 0, 0, 0, 0])
    with pytest.raises(RuntimeError, match="more than one plane"):
        tables.check_integrity(with_frame(table, (0, 0, 0, 2, 0), used))
    with pytest.raises(RuntimeError, match="no prefix"):
        tables.check_integrity(with_frame(table, (0, 0, 2, 0, 0), 0))
    with pytest.raises(RuntimeError, match="range 0 to 4"):
        tables.check_integrity(replace(table, desired=np.full(SHAPE, 5, np.int32)))
