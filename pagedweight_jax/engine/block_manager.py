"""Which frames hold the keys and values of which request."""

import numpy as np
from jaxtyping import Int32

from pagedweight_jax.paging.allocator import FrameAllocator
from pallas_kernels.paged_attention import KvLayout


class BlockManager:
    """Gives key-value blocks to requests; a block is a few whole frames.

    Frames come from the allocator that also serves the expert planes, so a block is
    free as soon as a plane is dropped, and the other way round.
    """

    def __init__(self, allocator: FrameAllocator, layout: KvLayout) -> None:
        self.layout = layout
        self._allocator = allocator
        self._blocks: dict[str, Int32[np.ndarray, "num_blocks frames_per_block"]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that could be allocated now (F_blk)."""
        return self._allocator.num_free // self.layout.frames_per_block

    @property
    def num_used(self) -> int:
        """Blocks that requests hold."""
        return sum(len(blocks) for blocks in self._blocks.values())

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the blocks that so many tokens of one request take."""
        return -(-num_tokens // self.layout.block_size)

    def num_missing(self, request_id: str, num_tokens: int) -> int:
        """Returns the blocks to add before a request can hold ``num_tokens``."""
        held = len(self._blocks.get(request_id, ()))
        return max(0, self.blocks_for(num_tokens) - held)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Gives a request room for ``num_tokens`` in all, or changes nothing.

        Returns:
          Whether there were blocks enough.
        """
        missing = self.num_missing(request_id, num_tokens)
        if missing > self.num_free:
            return False
        if missing:
            size = self.layout.frames_per_block
            frames = self._allocator.allocate(missing * size, "kv").reshape(-1, size)
            held = self._blocks.get(request_id, np.zeros((0, size), np.int32))
            self._blocks[request_id] = np.concatenate([held, frames])
        return True

    def release(self, request_id: str) -> None:
        """Frees all blocks of a request; a request without blocks is fine."""
        blocks = self._blocks.pop(request_id, None)
        if blocks is not None:
            self._allocator.free(blocks.reshape(-1))

    def frames(
        self, request_id: str
    ) -> Int32[np.ndarray, "num_blocks frames_per_block"]:
        """Returns the frames of a request's blocks in order of position."""
        return self._blocks[request_id]

    def check_integrity(self) -> None:
        """Raises AssertionError unless the allocator agrees on what is held."""
        held = self.num_used * self.layout.frames_per_block
        owned = self._allocator.num_used("kv")
        assert held == owned, f"requests hold {held} frames, the allocator says {owned}"
        frames = [blocks.reshape(-1) for blocks in self._blocks.values()]
        if frames:
            unique = np.unique(np.concatenate(frames))
            assert len(unique) == held, "a frame belongs to two blocks"
