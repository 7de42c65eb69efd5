"""The queries of a step: rows of tokens, each row a run of one sequence."""

from dataclasses import dataclass

from jaxtyping import Array, Int32

from pallas_kernels.pytree import pytree


@pytree
@dataclass(frozen=True, kw_only=True)
class Rows:
    """R rows of Q tokens each; row r holds positions ``starts .. starts + lengths``.

    With Q > 1 (prefill) several rows may belong to one sequence: a row sees the
    tokens of the sequence's earlier rows in the same step. With Q = 1 (decode) every
    row is a sequence of its own.

    Attributes:
      starts: position of the first token of each row.
      lengths: tokens of each row, at most Q; 0 for an unused row.
      cached: tokens of the row's sequence that lie in the pool.
      sequences: rows with one number belong to one sequence.
      block_frames: frames of the sequence's blocks, in order of position.
    """

    starts: Int32[Array, "R"]
    lengths: Int32[Array, "R"]
    cached: Int32[Array, "R"]
    sequences: Int32[Array, "R"]
    block_frames: Int32[Array, "R max_blocks frames_per_block"]
