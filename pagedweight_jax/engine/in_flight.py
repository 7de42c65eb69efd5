"""A step that is enqueued, and the results of it that are on their way to the host."""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from pagedweight_jax.engine.batch import first_token, rows_of_chunks
from pagedweight_jax.engine.packing import unpack
from pagedweight_jax.engine.sampling import TokenLogprobs
from pagedweight_jax.engine.scheduler import Chunk, Schedule
from pagedweight_jax.engine.step import StepResults, StepShape


@dataclass(frozen=True, kw_only=True)
class LandedStep:
    """The results of a step, on the host; log probabilities only if a row wants them.

    Attributes:
      prompt_logprobs: of the tokens of the prefill group.
    """

    results: StepResults
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None


@dataclass(frozen=True, kw_only=True)
class StepInFlight:
    """What a step computes, for whom, and at which precision.

    Attributes:
      mean_bits: committed bits of the average expert weight when it was enqueued.
      results: packed `StepResults`.
      like: what they unpack to.
    """

    schedule: Schedule
    shape: StepShape
    mean_bits: float
    results: Array
    like: StepResults
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None

    def __post_init__(self) -> None:
        for leaf in jax.tree.leaves(self._on_device):
            leaf.copy_to_host_async()

    @property
    def rows(self) -> list[tuple[int, Chunk]]:
        """The rows by number."""
        return rows_of_chunks(self.schedule, self.shape)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(chunk.length for chunk in self.schedule.chunks)

    def prompt_position(self, row: int) -> int:
        """Returns where a prefill row begins among the prompt's log probabilities."""
        return first_token(self.shape, row) - self.shape.decode_rows

    def land(self) -> LandedStep:
        """Waits until the step has run."""
        results, logprobs, prompt_logprobs = jax.tree.map(np.asarray, self._on_device)
        return LandedStep(
            results=unpack(results, self.like),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    @property
    def _on_device(self) -> tuple[Any, ...]:
        return self.results, self.logprobs, self.prompt_logprobs
