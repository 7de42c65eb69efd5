"""From logits to the next token, on the device.

Sorting a vocabulary for top-p, drawing noise and ranking alternatives cost more than
all else that a small step does to its logits, so each is computed only if a row asks
for it. Which program that takes is known on the host (`sampling_kind`); a condition
inside of a program would make a GPU's host thread wait for the device to decide it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from pagedweight_jax.engine.request import MAX_LOGPROBS, SamplingParams
from pallas_kernels.pytree import pytree

SamplingKind = Literal["greedy", "drawn", "filtered"]
"""The most that a row asks for: the best token, a draw, a draw by top-k or top-p."""

SAMPLING_KINDS: tuple[SamplingKind, ...] = ("greedy", "drawn", "filtered")


def sampling_kind(params: Iterable[SamplingParams]) -> SamplingKind:
    """Returns the cheapest kind that serves all rows."""
    drawn = [p for p in params if p.temperature > 0]
    if any(p.top_k > 0 or p.top_p < 1 for p in drawn):
        return "filtered"
    return "drawn" if drawn else "greedy"


@pytree
@dataclass(frozen=True, kw_only=True)
class SamplingInputs:
    """Sampling options of the M rows of a step, as data.

    Attributes:
      token_index: token of the step's flat token axis whose logits a row reads.
      temperature: 0 is greedy.
      top_k: 0 keeps all tokens.
      seed: of the request.
      position: number of the token in the request's output; with the seed it fixes
        the random numbers, whatever else is in the batch.
      slots: where the next step finds the token; S for a row that samples none.
    """

    token_index: Int32[Array, "M"]
    temperature: Float32[Array, "M"]
    top_p: Float32[Array, "M"]
    top_k: Int32[Array, "M"]
    seed: UInt32[Array, "M"]
    position: Int32[Array, "M"]
    slots: Int32[Array, "M"]


@pytree
@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log probabilities (before temperature) of given tokens and the best ones."""

    logprob: Float32[Array, "M"]
    rank: Int32[Array, "M"]
    top_ids: Int32[Array, "M top"]
    top_logprobs: Float32[Array, "M top"]


@pytree
@dataclass(frozen=True, kw_only=True)
class Sampled:
    """The next token of each row; ``finite`` tells whether its logits were numbers."""

    tokens: Int32[Array, "M"]
    finite: Bool[Array, "M"]


def token_logprobs(
    logits: Float32[Array, "M V"], tokens: Int32[Array, "M"]
) -> TokenLogprobs:
    """Computes log probabilities and ranks of tokens, and the best alternatives."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    own = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)
    top_logprobs, top_ids = lax.top_k(logprobs, min(MAX_LOGPROBS, logits.shape[-1]))
    return TokenLogprobs(
        logprob=own[:, 0],
        rank=1 + jnp.sum(logprobs > own, axis=-1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def keep_likely(
    logits: Float32[Array, "M V"],
    top_k: Int32[Array, "M"],
    top_p: Float32[Array, "M"],
) -> Float32[Array, "M V"]:
    """Sets to minus infinity what top-k, then top-p (nucleus), leaves out.

    Nucleus: the fewest most likely tokens, of those that top-k left, whose
    probabilities reach ``top_p``; the most likely one always stays.
    """
    order = jnp.argsort(-logits, axis=-1)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None]
    ranked = jnp.where(
        (top_k[:, None] > 0) & (rank >= top_k[:, None]), -jnp.inf, ranked
    )
    shares = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares
    # Rounded shares may add up to 1 early, and a top_p of 1 keeps all.
    limit = jnp.where(top_p < 1, top_p, jnp.inf)[:, None]
    ranked = jnp.where((before < limit) | (rank == 0), ranked, -jnp.inf)
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros_like(logits).at[rows, order].set(ranked, unique_indices=True)


def _draw(
    logits: Float32[Array, "M V"], inputs: SamplingInputs, *, filtered: bool
) -> Int32[Array, "M"]:
    """Samples each row by the Gumbel-max trick with the row's own key."""
    # Colder than this is greedy; logits divided by less could overflow.
    scaled = logits / jnp.maximum(inputs.temperature, 1e-5)[:, None]
    if filtered:
        scaled = keep_likely(scaled, inputs.top_k, inputs.top_p)

    def noise(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (logits.shape[-1],), jnp.float32)

    return jnp.argmax(
        scaled + jax.vmap(noise)(inputs.seed, inputs.position), axis=-1
    ).astype(jnp.int32)


def sample(
    logits: Float32[Array, "M V"], inputs: SamplingInputs, kind: SamplingKind
) -> Sampled:
    """Chooses the next token of each row.

    Args:
      logits: of the rows.
      inputs: their options.
      kind: static; any kind that serves all rows gives the same tokens.
    """
    tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if kind != "greedy":
        drawn = _draw(logits, inputs, filtered=kind == "filtered")
        tokens = jnp.where(inputs.temperature > 0, drawn, tokens)
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    return Sampled(tokens=tokens, finite=finite)
