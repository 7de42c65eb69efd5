"""Small models for the tests of this folder."""

import numpy as np

from pagedweight_jax.paging.allocator import FrameAllocator
from pagedweight_jax.paging.host_store import HostStore
from pagedweight_jax.paging.table import PageTable, PlaneId
from pagedweight_jax.sensitivity import Sensitivity


def random_sensitivity(
    rng: np.random.Generator,
    num_layers: int = 2,
    num_experts: int = 4,
    *,
    seed_bits: int = 3,
    parent_bits: int = 6,
    convex: bool = True,
) -> Sensitivity:
    """Losses that fall by a factor a bit, or by any steps if not convex."""
    pages = (num_layers, num_experts, 2)
    steps = rng.exponential(1, (*pages, parent_bits - seed_bits))
    if convex:
        steps = -np.sort(-steps, axis=-1)
    usable = np.cumsum(steps[..., ::-1], axis=-1)[..., ::-1]
    loss = np.full((*pages, parent_bits + 1), np.inf)
    loss[..., seed_bits:parent_bits] = usable
    loss[..., parent_bits] = 0
    share = rng.dirichlet(np.ones(num_experts), num_layers)
    return Sensitivity(
        loss=loss.astype(np.float32),
        residual_weights=np.zeros((num_layers, 2, 3), np.float32),
        residual_bias=np.ones((num_layers, 2), np.float32),
        expert_share=share.astype(np.float32),
    )


def table_with_bits(
    bits: np.ndarray, parent_bits: int, frames_per_plane: int = 1
) -> tuple[PageTable, FrameAllocator]:
    """A table that has exactly these planes, and the allocator that gave the frames."""
    bits = np.asarray(bits, np.int32)
    there = np.arange(parent_bits) < bits[..., [0, 0, 1], None]
    allocator = FrameAllocator(there.size * frames_per_plane + 2)
    ids = allocator.allocate(int(there.sum()) * frames_per_plane, "plane")
    frames = np.zeros((*there.shape, frames_per_plane), np.int32)
    frames[there] = ids.reshape(-1, frames_per_plane)
    return PageTable(frames, bits.copy()), allocator


def planes_between(low: np.ndarray, high: np.ndarray) -> list[PlaneId]:
    """Planes of all pages from ``low`` up to ``high`` bits."""
    return [
        PlaneId(*map(int, page), plane)
        for page in np.ndindex(low.shape)
        for plane in range(low[page], high[page])
    ]


def random_host(
    rng: np.random.Generator,
    num_layers: int,
    num_experts: int,
    parent_bits: int,
    plane_words: int,
) -> HostStore:
    def plane() -> np.ndarray:
        shape = (num_experts, 3, plane_words)
        return rng.integers(1, 2**32, shape, dtype=np.uint32)

    return HostStore([[plane() for _ in range(parent_bits)] for _ in range(num_layers)])
