"""Decode steps of a running batch, enqueued one after the other as the engine does.

Nothing is prefilled: the pool is filled with random planes and with keys and values
that are numbers, and every sequence is said to have so many tokens cached.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int32, UInt32

from pagedweight_jax.config import ModelConfig
from pagedweight_jax.engine.block_manager import BlockManager
from pagedweight_jax.engine.packing import pack, unpack
from pagedweight_jax.engine.programs import Programs, compile_programs
from pagedweight_jax.engine.sampling import SamplingInputs
from pagedweight_jax.engine.slots import NEWEST, RowInputs, Slots
from pagedweight_jax.engine.step import Batch, StepResults, StepShape
from pagedweight_jax.evaluation.random_model import RandomModel
from pagedweight_jax.models.interface import Pages
from pagedweight_jax.paging.allocator import FrameAllocator
from pagedweight_jax.paging.pool import PoolLayout
from pagedweight_jax.serving.sizing import kv_layout
from pallas_kernels.paged_attention import KvLayout

BLOCK_SIZE = 16

_FRAMES_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Memory:
    """The pool's frames and who has them.

    Attributes:
      plane_frames: frames of all planes, in random order; None without paged experts.
      block_frames: frames of the blocks of each sequence.
    """

    kv: KvLayout
    layout: PoolLayout
    allocator: FrameAllocator
    plane_frames: Int32[np.ndarray, "L E 3 parent_bits 1"] | None
    block_frames: Int32[np.ndarray, "S max_blocks frames_per_block"]


def plan_memory(
    config: ModelConfig, parent_bits: int, num_rows: int, num_tokens: int
) -> Memory:
    """Gives frames to all planes of all experts, and to the blocks of the sequences.

    Args:
      config: sizes of the model.
      parent_bits: planes of a page; 0 for experts that are not paged.
      num_rows: sequences.
      num_tokens: of each.
    """
    kv = kv_layout(config, "bfloat16", BLOCK_SIZE)
    pages = (config.num_moe_layers, config.num_experts, 3, parent_bits, 1)
    planes = int(np.prod(pages))
    blocks_each = -(-num_tokens // kv.block_size)
    num_frames = 1 + planes + num_rows * blocks_each * kv.frames_per_block
    num_frames += -num_frames % _FRAMES_AT_ONCE  # else filling it takes it twice
    allocator = FrameAllocator(num_frames)
    frames = np.random.default_rng(0).permutation(allocator.allocate(planes, "plane"))
    blocks = BlockManager(allocator, kv)
    for row in range(num_rows):
        blocks.grow(str(row), num_tokens)
    return Memory(
        kv=kv,
        layout=PoolLayout(
            num_frames=num_frames, frame_words=kv.frame_words, frames_per_plane=1
        ),
        allocator=allocator,
        plane_frames=frames.reshape(pages) if parent_bits else None,
        block_frames=np.stack([blocks.frames(str(row)) for row in range(num_rows)]),
    )


def random_pool(memory: Memory) -> UInt32[Array, "num_frames frame_words"]:
    """Fills planes with random bits, and blocks with bfloat16 numbers below 2."""
    count, words = memory.layout.num_frames, memory.layout.frame_words
    is_plane = np.zeros(count, bool)
    is_plane[memory.allocator.frames_of("plane")] = True

    @jax.jit
    def make(key: Array, is_plane: Array) -> Array:
        def frame(own: tuple[Array, Array]) -> Array:
            bits = jax.random.bits(own[0], (words,), jnp.uint32)
            # Without the exponent's highest bit there is no infinity and no NaN.
            return jnp.where(own[1], bits, bits & jnp.uint32(0xBFFFBFFF))

        keys = jax.random.split(key, count)
        return lax.map(frame, (keys, is_plane), batch_size=_FRAMES_AT_ONCE)

    return make(jax.random.key(1), jnp.asarray(is_plane))


def compile_decode(
    model: RandomModel, memory: Memory, num_rows: int, staging: int
) -> Programs:
    """Compiles the programs of decode steps of so many rows."""
    return compile_programs(
        model.graphdef,
        model.params,
        (StepShape(decode_rows=num_rows),),
        pool=memory.layout,
        kv=memory.kv,
        pages=pages_at(memory, 1),
        max_blocks=memory.block_frames.shape[1],
        staging_frames=staging,
    )


def pages_at(memory: Memory, bits: Int32[np.ndarray, "L E 2"] | int) -> Pages | None:
    """Returns the page table with all planes in the pool and so many bits committed."""
    if memory.plane_frames is None:
        return None
    shape = (*memory.plane_frames.shape[:2], 2)
    return Pages(
        bits=jnp.broadcast_to(jnp.asarray(bits, jnp.int32), shape),
        frames=jnp.asarray(memory.plane_frames),
    )


class DecodeLoop:
    """A batch that decodes for ever, at the same place.

    Every step samples greedily and reads the token that the step before it sampled,
    on the device. It writes the same position each time, so that no step differs.
    """

    def __init__(
        self,
        model: RandomModel,
        programs: Programs,
        memory: Memory,
        pool: UInt32[Array, "num_frames frame_words"],
        pages: Pages | None,
        context: int,
    ) -> None:
        """Joins the parts; ``context`` tokens of each sequence count as cached."""
        (self._shape,) = programs.shapes
        self._model, self._programs = model, programs
        rows = self._shape.decode_rows
        self.pool, self.pages = pool, pages
        self._words = pack(_batch(memory, rows, context))
        vocabulary = model.config.vocab_size
        tokens = np.random.default_rng(0).integers(0, vocabulary, rows, np.int32)
        self._slots = Slots(
            tokens=jnp.asarray(tokens),
            block_frames=jnp.asarray(memory.block_frames[:rows]),
        )

    def step(self) -> Int32[Array, "words"]:
        """Enqueues a step; returns what the host would read of it."""
        programs, rows = self._programs, self._shape.num_rows
        output, self._slots = programs.forward[self._shape](
            self._model.params, self.pool, self.pages, self._slots, self._words
        )
        self.pool = programs.commit_kv[self._shape](
            self.pool, output.fresh_kv, self._slots, self._words
        )
        results, _, self._slots = programs.sample[rows, "greedy"](
            output.logits, output.sampling, output.routing, self._slots
        )
        return results

    def commit_planes(
        self,
        words: UInt32[Array, "staging_frames frame_words"],
        frames: Int32[np.ndarray, "staging_frames"],
    ) -> None:
        """Enqueues the write of planes that have arrived."""
        self.pool = self._programs.commit_planes(self.pool, words, frames)

    def results(self, words: Int32[Array, "words"]) -> StepResults:
        """Waits for a step and unpacks what it returned."""
        return unpack(
            jax.device_get(words), self._programs.results[self._shape.num_rows]
        )


def _batch(memory: Memory, rows: int, context: int) -> Batch:
    """Builds the arrays of a step that decodes the token after ``context`` others."""

    def all_rows(value: float, dtype: type = np.int32) -> np.ndarray:
        return np.full(rows, value, dtype)

    last = memory.block_frames[:rows, context // memory.kv.block_size]
    numbers = np.arange(rows, dtype=np.int32)
    return Batch(
        rows=(
            RowInputs(
                slots=numbers,  # pyright: ignore
                tokens=all_rows(NEWEST)[:, None],  # pyright: ignore
                starts=all_rows(context),  # pyright: ignore
                lengths=all_rows(1),  # pyright: ignore
                cached=all_rows(context),  # pyright: ignore
                written=last[:, None],  # pyright: ignore
            ),
        ),
        sampling=SamplingInputs(
            token_index=numbers,  # pyright: ignore
            temperature=all_rows(0, np.float32),  # pyright: ignore
            top_p=all_rows(1, np.float32),  # pyright: ignore
            top_k=all_rows(0),  # pyright: ignore
            seed=all_rows(0, np.uint32),  # pyright: ignore
            position=all_rows(0),  # pyright: ignore
            slots=numbers,  # pyright: ignore
        ),
    )
