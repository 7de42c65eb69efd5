"""Laws of the block manager, against a dictionary of sets."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pagedweight_jax.engine.block_manager import BlockManager
from pagedweight_jax.paging.allocator import FrameAllocator
from pallas_kernels.paged_attention import KvLayout

NAMES = st.sampled_from("abcd")


def layout(num_layers: int = 3) -> KvLayout:
    """Blocks of 4 tokens; 12 rows of 16 words in frames of 64 words are 3 frames."""
    return KvLayout(
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=8,
        block_size=4,
        dtype="float32",
        frame_words=64,
    )


def test_a_block_is_as_many_whole_frames_as_its_rows_fill():
    assert (layout(3).frames_per_block, layout(1).frames_per_block) == (3, 1)
    manager = BlockManager(FrameAllocator(11), layout())
    assert manager.num_free == 3, "10 frames are 3 blocks of 3 frames and a rest"


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_tokens_take_blocks_rounded_up(tokens, blocks):
    assert BlockManager(FrameAllocator(11), layout()).blocks_for(tokens) == blocks


def test_growing_keeps_the_blocks_that_are_held():
    manager = BlockManager(FrameAllocator(31), layout())
    manager.grow("a", 6)
    before = manager.frames("a").copy()
    manager.grow("b", 4)
    assert manager.grow("a", 14)
    np.testing.assert_array_equal(manager.frames("a")[: len(before)], before)
    assert len(manager.frames("a")) == 4


def test_planes_and_blocks_share_the_frames():
    allocator = FrameAllocator(11)
    manager = BlockManager(allocator, layout())
    plane = allocator.allocate(8, "plane")
    assert not manager.grow("a", 1), "2 free frames are no block of 3"
    assert manager.num_used == 0
    allocator.free(plane[:1])
    assert manager.grow("a", 4), "a dropped plane is a block at once"


class Blocks(RuleBasedStateMachine):
    """Grows and releases, with planes coming and going beside."""

    @initialize(frames=st.integers(2, 40))
    def start(self, frames):
        self.allocator = FrameAllocator(frames)
        self.manager = BlockManager(self.allocator, layout())
        self.tokens: dict[str, int] = {}
        self.held: dict[str, list[tuple[int, ...]]] = {}
        self.planes: list[np.ndarray] = []

    @rule(name=NAMES, more=st.integers(0, 20))
    def grow(self, name, more):
        tokens = self.tokens.get(name, 0) + more
        missing = -(-tokens // 4) - len(self.held.get(name, []))
        free = self.manager.num_free
        assert self.manager.num_missing(name, tokens) == max(0, missing)
        grown = self.manager.grow(name, tokens)
        assert grown == (missing <= free), f"{missing} missing, {free} free"
        if grown and tokens:
            self.tokens[name] = tokens
            frames = [tuple(block) for block in self.manager.frames(name).tolist()]
            old = self.held.get(name, [])
            assert frames[: len(old)] == old, "a block moved"
            self.held[name] = frames

    @rule(name=NAMES)
    def release(self, name):
        self.manager.release(name)
        self.tokens.pop(name, None)
        self.held.pop(name, None)

    @rule(count=st.integers(1, 4))
    def take_plane(self, count):
        if count <= self.allocator.num_free:
            self.planes.append(self.allocator.allocate(count, "plane"))

    @precondition(lambda self: self.planes)
    @rule()
    def drop_plane(self):
        self.allocator.free(self.planes.pop())

    @invariant()
    def no_frame_has_two_owners(self):
        if not hasattr(self, "manager"):
            return
        used = [f for blocks in self.held.values() for block in blocks for f in block]
        used += [int(f) for plane in self.planes for f in plane]
        assert len(used) == len(set(used)) and 0 not in used
        assert self.allocator.num_free == self.allocator.num_frames - 1 - len(used)
        assert self.manager.num_used == sum(map(len, self.held.values()))
        self.manager.check_integrity()
        self.allocator.check_integrity()


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=40, stateful_step_count=30)


def test_check_integrity_finds_a_leak():
    allocator = FrameAllocator(20)
    manager = BlockManager(allocator, layout())
    manager.grow("a", 4)
    allocator.allocate(1, "kv")
    with pytest.raises(AssertionError, match="requests hold 3 frames"):
        manager.check_integrity()
