"""From logits to the next token, inside the step."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from pagedweight_jax.engine.request import MAX_LOGPROBS
from pallas_kernels.pytree import pytree


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
    """

    token_index: Int32[Array, "M"]
    temperature: Float32[Array, "M"]
    top_p: Float32[Array, "M"]
    top_k: Int32[Array, "M"]
    seed: UInt32[Array, "M"]
    position: Int32[Array, "M"]


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
    logprobs: TokenLogprobs


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


def _draw(logits: Float32[Array, "M V"], inputs: SamplingInputs) -> Int32[Array, "M"]:
    """Samples each row by the Gumbel-max trick with the row's own key."""
    # Colder than this is greedy; logits divided by less could overflow.
    scaled = logits / jnp.maximum(inputs.temperature, 1e-5)[:, None]
    restricted = jnp.any((inputs.top_k > 0) | (inputs.top_p < 1))
    scaled = lax.cond(
        restricted,
        lambda a: keep_likely(a, inputs.top_k, inputs.top_p),
        lambda a: a,
        scaled,
    )

    def noise(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, (logits.shape[-1],), jnp.float32)

    return jnp.argmax(
        scaled + jax.vmap(noise)(inputs.seed, inputs.position), axis=-1
    ).astype(jnp.int32)


def sample(logits: Float32[Array, "M V"], inputs: SamplingInputs) -> Sampled:
    """Chooses the next token of each row."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = lax.cond(
        jnp.any(inputs.temperature > 0),
        lambda: _draw(logits, inputs),
        lambda: greedy,
    )
    tokens = jnp.where(inputs.temperature > 0, drawn, greedy)
    return Sampled(
        tokens=tokens,
        finite=jnp.all(jnp.isfinite(logits), axis=-1),
        logprobs=token_logprobs(logits, tokens),
    )
