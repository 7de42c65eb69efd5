"""What goes into a model's forward pass and what comes out of it."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.paged_attention import KvLayout, Rows
from pallas_kernels.pytree import pytree


@pytree
@dataclass(frozen=True, kw_only=True)
class Pages:
    """The expert pages as a step sees them: bits and frames are data, not shape."""

    bits: Int32[Array, "L E 2"]
    frames: Int32[Array, "L E 3 parent_bits frames_per_plane"]


@pytree
@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """The tokens of a step in groups of rows, and the memory that they read.

    A step has one group of decode rows (one token each), a group of prefill rows, or
    both; the groups' tokens follow each other in the flat token axis ``T``.
    """

    tokens: tuple[Int32[Array, "_R _Q"], ...]
    rows: tuple[Rows, ...]
    pool: UInt32[Array, "num_frames frame_words"]
    pages: Pages | None  # None: the experts are not paged


@pytree
@dataclass(frozen=True, kw_only=True)
class InputMoments:
    """Sums over routed tokens of the squared inputs of each expert's linears."""

    gate_up: Float32[Array, "*L E D"]
    down: Float32[Array, "*L E F"]


@pytree
@dataclass(frozen=True, kw_only=True)
class RoutingCounts:
    """What a step's routing looked like, layer by layer.

    Attributes:
      tokens: tokens that each expert got.
      norms: over the step's tokens, the sum, the sum of squares and the maximum of
        the root-mean-square norm of the MoE input.
      moments: only where asked for (calibration).
    """

    tokens: Int32[Array, "*L E"]
    norms: Float32[Array, "*L 3"]
    moments: InputMoments | None = None


@pytree
@dataclass(frozen=True, kw_only=True)
class ModelOutputs:
    """Hidden states after the final norm, fresh key-value rows and routing counts."""

    hidden: Float[Array, "T D"]
    fresh_kv: UInt32[Array, "num_layers T row_words"]
    routing: RoutingCounts


def uncached_inputs(tokens: Int32[Array, "B T"], layout: KvLayout) -> ModelInputs:
    """Builds the inputs of a full forward pass over B sequences without a cache."""
    num_rows, length = tokens.shape
    none = jnp.zeros((num_rows,), jnp.int32)
    rows = Rows(
        starts=none,
        lengths=jnp.full((num_rows,), length, jnp.int32),
        cached=none,
        sequences=jnp.arange(num_rows, dtype=jnp.int32),
        block_frames=jnp.zeros((num_rows, 0, layout.frames_per_block), jnp.int32),
    )
    pool = jnp.zeros((1, layout.frame_words), jnp.uint32)
    return ModelInputs(tokens=(tokens,), rows=(rows,), pool=pool, pages=None)
