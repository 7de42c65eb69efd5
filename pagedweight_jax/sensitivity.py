"""What a page loses at fewer bits: the offline tables that the planner reads."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """Offline damage of every page, and how a prompt changes it.

    ``loss[l, e, block, b]`` is the predicted rise of the mean loss, in nats per token,
    when this page alone is read at ``b`` bits and all else is exact; block 0 is
    gate_up, 1 is down. It falls with ``b``, is zero at ``parent_bits`` by definition
    (only differences to the best that is stored matter) and infinite below
    ``seed_bits``.

    The prompt residual of a page in layer ``l`` is

        eta = residual_bias[l, block] + residual_weights[l, block] @ features

    with ``features`` the mean, root mean square and maximum over the current tokens
    of the root-mean-square norm of the layer's MoE input. It is 1 for an average
    prompt.

    Attributes:
      expert_share: share of the routed calibration tokens of each expert; rows sum
        to 1. The planner starts from it.
    """

    loss: Float32[np.ndarray, "L E 2 levels"]  # levels = parent_bits + 1
    residual_weights: Float32[np.ndarray, "L 2 3"]
    residual_bias: Float32[np.ndarray, "L 2"]
    expert_share: Float32[np.ndarray, "L E"]

    @property
    def parent_bits(self) -> int:
        """Bits of the best precision that is stored."""
        return self.loss.shape[-1] - 1

    @property
    def seed_bits(self) -> int:
        """Bits of the lowest precision."""
        return int(np.isinf(self.loss[0, 0, 0]).sum())
