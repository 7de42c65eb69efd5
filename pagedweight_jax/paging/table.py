"""The page table: which frames hold which planes, and what is wanted.

A page is one block (0 = gate_up, 1 = down) of one expert of one layer. Its planes lie
most significant first; the first ``bits`` of them are on the device and are what the
kernel reads. Tables are values: a change makes a new one.

    linear      gate   up   down
    block         0     0     1         a gate_up plane is two planes of one linear
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int8, Int32

from pagedweight_jax.paging.allocator import NULL_FRAME

LINEARS_OF_BLOCK = (slice(0, 2), slice(2, 3))
"""The linears of gate_up and of down."""

BLOCK_PLANES = (2, 1)
"""Planes of one linear in one plane of a gate_up and of a down page."""

_BLOCK_OF_LINEAR = np.array([0, 0, 1])


class PlaneId(NamedTuple):
    """One plane of one page; plane 0 is the most significant."""

    layer: int
    expert: int
    block: int
    plane: int


class Residency(IntEnum):
    """Where a plane is."""

    HOST = 0
    TRANSFER = 1
    DEVICE = 2


@dataclass(frozen=True, eq=False)
class PageTable:
    """Frames of every plane, and the bits that each page is meant to have.

    Attributes:
      frames: frames of each linear's planes, most significant plane first; planes
        that are not on the device name the null frame.
      desired: bits that the newest plan wants. Planes between the committed and the
        desired bits are on their way.

    The table takes its arrays over and makes them read-only.
    """

    frames: Int32[np.ndarray, "L E 3 P fpp"]
    desired: Int32[np.ndarray, "L E 2"]

    def __post_init__(self) -> None:
        self.frames.setflags(write=False)
        self.desired.setflags(write=False)

    @property
    def parent_bits(self) -> int:
        """Planes of the best precision that is stored."""
        return self.frames.shape[3]

    @property
    def frames_per_plane(self) -> int:
        """Frames of one plane of one linear."""
        return self.frames.shape[4]

    @cached_property
    def bits(self) -> Int32[np.ndarray, "L E 2"]:
        """Committed bits: the leading planes that are on the device."""
        bits = _leading(_block_resident(self.frames))
        bits.setflags(write=False)
        return bits


def plane_frames(table: PageTable, block: int) -> int:
    """Returns the frames of one plane of a page."""
    return BLOCK_PLANES[block] * table.frames_per_plane


def empty_table(
    num_layers: int, num_experts: int, parent_bits: int, frames_per_plane: int
) -> PageTable:
    """Returns a table with every plane on the host and nothing wanted."""
    shape = (num_layers, num_experts, 3, parent_bits, frames_per_plane)
    return PageTable(
        np.full(shape, NULL_FRAME, np.int32),
        np.zeros((num_layers, num_experts, 2), np.int32),
    )


def lower(
    table: PageTable, bits: Int32[np.ndarray, "L E 2"]
) -> tuple[PageTable, Int32[np.ndarray, "n"]]:
    """Drops all planes at and above ``bits``; pages that have fewer stay.

    Returns:
      The new table, desired bits lowered likewise, and the frames that it no longer
      names.
    """
    planes = np.arange(table.parent_bits)
    dropped = planes >= bits[..., _BLOCK_OF_LINEAR, None]
    freed = table.frames[dropped].ravel()
    frames = np.where(dropped[..., None], np.int32(NULL_FRAME), table.frames)
    desired = np.minimum(table.desired, bits)
    return PageTable(frames, desired), freed[freed != NULL_FRAME]


def raise_planes(
    table: PageTable, planes: Sequence[PlaneId], frames: Int32[np.ndarray, "n"]
) -> PageTable:
    """Enters planes that have fully arrived in the pool.

    Args:
      planes: planes to enter; each follows the planes that its page has, or another
        of this list.
      frames: their frames, plane after plane, those of gate before those of up.
    Raises:
      ValueError: if a plane is there already, or the plane before it is not.
    """
    wanted = sum(plane_frames(table, plane.block) for plane in planes)
    if len(frames) != wanted:
        raise ValueError(
            f"{len(planes)} planes take {wanted} frames but {len(frames)} came"
        )
    new, next_plane, start = table.frames.copy(), table.bits.copy(), 0
    for id_ in planes:
        if id_.plane != next_plane[id_.layer, id_.expert, id_.block]:
            raise ValueError(
                f"{id_} cannot be entered: the page has"
                f" {next_plane[id_.layer, id_.expert, id_.block]} planes, and planes"
                " follow each other"
            )
        count = plane_frames(table, id_.block)
        linears = LINEARS_OF_BLOCK[id_.block]
        new[id_.layer, id_.expert, linears, id_.plane] = frames[
            start : start + count
        ].reshape(-1, table.frames_per_plane)
        next_plane[id_.layer, id_.expert, id_.block] += 1
        start += count
    return PageTable(new, table.desired)


def with_desired(table: PageTable, desired: Int32[np.ndarray, "L E 2"]) -> PageTable:
    """Returns the table with other desired bits."""
    return replace(table, desired=desired.copy())


def residency(
    table: PageTable, in_flight: Collection[PlaneId]
) -> Int8[np.ndarray, "L E 2 P"]:
    """Returns the `Residency` of every plane."""
    on_device = _block_resident(table.frames)
    where = np.where(on_device, Residency.DEVICE, Residency.HOST).astype(np.int8)
    for plane in in_flight:
        where[plane] = Residency.TRANSFER
    return where


def mean_bits(table: PageTable) -> float:
    """Returns the committed bits of the average weight (gate_up has two of three)."""
    return average_bits(table.bits)


def average_bits(bits: Int32[np.ndarray, "L E 2"]) -> float:
    """Returns the bits of the average weight at the given bits of each page."""
    return float(np.average(bits.mean(axis=(0, 1)), weights=BLOCK_PLANES))


def plane_bytes(table: PageTable, frame_bytes: int) -> int:
    """Returns the bytes of all planes that the table holds on the device."""
    return int(np.count_nonzero(table.frames)) * frame_bytes


def check_integrity(table: PageTable) -> None:
    """Checks the laws of a table.

    Raises:
      RuntimeError: if a frame is used twice, a page has a plane but not the one
        before it, or desired bits are out of range.
    """
    used = table.frames[table.frames != NULL_FRAME]
    if len(np.unique(used)) != len(used):
        raise RuntimeError("a frame holds more than one plane")
    present = (table.frames != NULL_FRAME).any(axis=-1)
    if (present.sum(axis=-1) != table.bits[..., _BLOCK_OF_LINEAR]).any():
        raise RuntimeError("the planes of a page on the device are no prefix")
    if ((table.desired < 0) | (table.desired > table.parent_bits)).any():
        raise RuntimeError(
            f"desired bits {table.desired.min()} to {table.desired.max()} leave the"
            f" range 0 to {table.parent_bits}"
        )


def _block_resident(
    frames: Int32[np.ndarray, "L E 3 P fpp"],
) -> Bool[np.ndarray, "L E 2 P"]:
    """Tells which planes of pages are complete; gate_up needs both its linears."""
    linear = (frames != NULL_FRAME).all(axis=-1)
    return np.stack([linear[:, :, :2].all(axis=2), linear[:, :, 2]], axis=2)


def _leading(resident: Bool[np.ndarray, "L E 2 P"]) -> Int32[np.ndarray, "L E 2"]:
    count = np.zeros(resident.shape[:3], np.int32)
    unbroken = np.ones(resident.shape[:3], bool)
    for plane in range(resident.shape[3]):
        unbroken &= resident[..., plane]
        count += unbroken
    return count
