"""The bytes that a decode step cannot avoid to move."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from pagedweight_jax.evaluation.random_model import RandomModel
from pallas_kernels.paged_attention import KvLayout


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """What must be read at least once, by kind.

    Attributes:
      experts: planes, or matrices, of the experts that have tokens.
      side_tables: of the same experts.
      dense: all other weights, without the embedding.
      kv: keys and values of the cached tokens, and those of the step, written.
    """

    experts: float
    side_tables: float
    dense: float
    kv: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.experts + self.side_tables + self.dense + self.kv


def step_bytes(
    model: RandomModel,
    kv: KvLayout,
    routed_tokens: Int32[np.ndarray, "L E"],
    bits: Int32[np.ndarray, "L E 2"] | None,
    *,
    num_rows: int,
    context: int,
) -> StepBytes:
    """Counts the bytes of one step.

    Args:
      model: says what is dense, and how large side tables are.
      kv: layout of keys and values.
      routed_tokens: tokens that each expert got; an expert without any is not read.
      bits: of every page; None for experts that are matrices.
      num_rows: sequences.
      context: cached tokens of each.
    """
    config = model.config
    active = routed_tokens > 0
    weights = config.hidden_size * config.expert_width  # of one linear
    share = active.sum() / active.size
    if bits is None:
        experts, tables = share * model.expert_bytes(), 0.0
    else:
        planes = bits @ np.array([2, 1])
        experts = float((planes * active).sum()) * weights / 8
        tables = share * model.expert_bytes()
    row_bytes = 4 * kv.row_words * kv.num_layers
    return StepBytes(
        experts=float(experts),
        side_tables=float(tables),
        dense=float(model.dense_bytes()),
        kv=float(num_rows * (context + 1) * row_bytes),
    )
