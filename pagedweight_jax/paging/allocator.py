"""Who owns which frame: the one ledger of the pool, shared by planes and KV blocks."""

from typing import Literal

import numpy as np
from jaxtyping import Int32

Owner = Literal["plane", "kv"]

NULL_FRAME = 0
"""The frame of absent planes: all zeros, never handed out, never written."""

_FREE, _NULL = 0, -1
_OWNER_CODES: dict[Owner, int] = {"plane": 1, "kv": 2}


class OutOfFrames(RuntimeError):
    """Fewer frames are free than were asked for; nothing was taken."""


class FrameAllocator:
    """Hands out the frames of one pool and takes them back.

    Free frames are a stack, so the frames given back last are given out first and a
    fresh allocator hands out 1, 2, 3, ... All operations are linear in the number of
    frames moved.
    """

    def __init__(self, num_frames: int) -> None:
        if num_frames < 2:
            raise ValueError(
                f"num_frames={num_frames} leaves nothing beside the null frame; a pool"
                " needs at least 2 frames"
            )
        self._codes = np.full(num_frames, _FREE, np.int8)
        self._codes[NULL_FRAME] = _NULL
        self._stack = np.arange(num_frames - 1, 0, -1, dtype=np.int32)
        self._num_free = num_frames - 1
        self._num_used: dict[Owner, int] = dict.fromkeys(_OWNER_CODES, 0)

    @property
    def num_frames(self) -> int:
        """Frames of the pool, the null frame included."""
        return len(self._codes)

    @property
    def num_free(self) -> int:
        """Frames that can be handed out."""
        return self._num_free

    def num_used(self, owner: Owner) -> int:
        """Returns how many frames an owner holds."""
        return self._num_used[owner]

    def frames_of(self, owner: Owner) -> Int32[np.ndarray, "n"]:
        """Returns the frames that an owner holds, in ascending order."""
        return np.flatnonzero(self._codes == _OWNER_CODES[owner]).astype(np.int32)

    def allocate(self, count: int, owner: Owner) -> Int32[np.ndarray, "count"]:
        """Takes ``count`` frames.

        Raises:
          OutOfFrames: if fewer are free; then none is taken.
          ValueError: if ``count`` is negative.
        """
        if count < 0:
            raise ValueError(f"count={count} must not be negative")
        if count > self._num_free:
            raise OutOfFrames(
                f"{count} frames were asked for ({owner}) but {self._num_free} of"
                f" {self.num_frames - 1} are free (planes hold"
                f" {self.num_used('plane')}, KV blocks {self.num_used('kv')}); lower"
                " planes or free KV blocks first"
            )
        self._num_free -= count
        frames = self._stack[self._num_free : self._num_free + count][::-1].copy()
        self._codes[frames] = _OWNER_CODES[owner]
        self._num_used[owner] += count
        return frames

    def free(self, frames: Int32[np.ndarray, "n"]) -> None:
        """Gives frames back, whoever owns them.

        Raises:
          ValueError: if a frame does not exist, is the null frame, is free already or
            is named twice; then none is given back.
        """
        codes = self._checked_codes(frames)
        for owner, code in _OWNER_CODES.items():
            self._num_used[owner] -= int(np.count_nonzero(codes == code))
        self._codes[frames] = _FREE
        self._stack[self._num_free : self._num_free + len(frames)] = frames[::-1]
        self._num_free += len(frames)

    def _checked_codes(self, frames: np.ndarray) -> np.ndarray:
        unknown = frames[(frames < 0) | (frames >= self.num_frames)]
        if unknown.size:
            raise ValueError(
                f"frames {unknown[:8].tolist()} do not exist; the pool has frames 1 to"
                f" {self.num_frames - 1}"
            )
        codes = self._codes[frames]
        wrong = frames[codes <= _FREE]
        if wrong.size:
            raise ValueError(
                f"frames {wrong[:8].tolist()} are not in use (frame {NULL_FRAME} is the"
                " null frame); free each frame once"
            )
        if len(np.unique(frames)) != len(frames):
            names, counts = np.unique(frames, return_counts=True)
            raise ValueError(
                f"frames {names[counts > 1][:8].tolist()} are named more than once;"
                " free each frame once"
            )
        return codes

    def check_integrity(self) -> None:
        """Checks that every frame is free or owned, exactly once.

        Raises:
          RuntimeError: naming the law that is broken.
        """
        free = self._stack[: self._num_free]
        if not np.array_equal(np.sort(free), np.flatnonzero(self._codes == _FREE)):
            raise RuntimeError("the free stack and the owners of frames disagree")
        if self._codes[NULL_FRAME] != _NULL:
            raise RuntimeError("the null frame was handed out")
        for owner in _OWNER_CODES:
            if len(self.frames_of(owner)) != self.num_used(owner):
                raise RuntimeError(
                    f"{owner} holds {len(self.frames_of(owner))} frames but"
                    f" {self.num_used(owner)} are counted"
                )
