"""What live traffic looks like: routed shares and input norms, as moving averages."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Integer

from pagedweight_jax.sensitivity import Sensitivity


@dataclass(frozen=True, eq=False)
class RoutingStatistics:
    """Moving averages over the recent tokens.

    Attributes:
      share: share of the routed tokens of each expert; rows sum to 1.
      features: mean, root mean square and maximum of the norm of the MoE input of
        each layer: what the prompt residual is a linear function of. NaN in layers
        that have seen no token.
    """

    share: Float32[np.ndarray, "L E"]
    features: Float32[np.ndarray, "L 3"]


def initial(sensitivity: Sensitivity) -> RoutingStatistics:
    """Returns the statistics before the first token: the shares of calibration."""
    share = sensitivity.expert_share.astype(np.float32)
    unseen = np.full((len(share), 3), np.nan, np.float32)
    return RoutingStatistics(share, unseen)


def update(
    statistics: RoutingStatistics,
    counts: Integer[np.ndarray, "L E"],
    norm_sums: Float32[np.ndarray, "L 3"],
    num_tokens: int,
    *,
    half_life_tokens: float,
) -> RoutingStatistics:
    """Takes the tokens of one step in.

    What is older counts ``2 ** (-num_tokens / half_life_tokens)`` of what it counted,
    so the averages do not depend on how tokens are cut into steps. An expert that no
    token visits decays. A layer whose norms are not finite (a broken request) keeps
    its features.

    Args:
      counts: tokens routed to each expert in this step, padding left out.
      norm_sums: sum, sum of squares and maximum of the norms of this step's tokens.
      num_tokens: tokens of this step; 0 changes nothing.
      half_life_tokens: tokens after which an observation counts half.
    Raises:
      ValueError: if ``half_life_tokens`` is not positive or ``num_tokens`` negative.
    """
    if not half_life_tokens > 0 or num_tokens < 0:
        raise ValueError(
            f"half_life_tokens={half_life_tokens} must be positive and"
            f" num_tokens={num_tokens} not negative"
        )
    if num_tokens == 0:
        return statistics
    keep = np.float32(0.5 ** (num_tokens / half_life_tokens))
    return RoutingStatistics(
        _mix_share(statistics.share, counts, keep),
        _mix_features(statistics.features, norm_sums, num_tokens, keep),
    )


def _mix_share(
    share: Float32[np.ndarray, "L E"],
    counts: Integer[np.ndarray, "L E"],
    keep: np.float32,
) -> Float32[np.ndarray, "L E"]:
    total = counts.sum(axis=1, keepdims=True)
    now = counts / np.maximum(total, 1)
    mixed = np.where(total > 0, keep * share + (1 - keep) * now, share)
    # Rounding would drift over millions of steps.
    return (mixed / mixed.sum(axis=1, keepdims=True)).astype(np.float32)


def _mix_features(
    old: Float32[np.ndarray, "L 3"],
    norm_sums: Float32[np.ndarray, "L 3"],
    num_tokens: int,
    keep: np.float32,
) -> Float32[np.ndarray, "L 3"]:
    mean, mean_square = norm_sums[:, :2].T / np.float32(num_tokens)
    peak = norm_sums[:, 2]
    now = np.stack([mean, np.sqrt(mean_square), peak], axis=1)
    before = np.where(np.isnan(old), now, old)
    mixed_mean = keep * before[:, 0] + (1 - keep) * mean
    mixed_square = keep * before[:, 1] ** 2 + (1 - keep) * mean_square
    # A maximum over recent tokens rises at once and is forgotten slowly; an average
    # of maxima would sink with the number of tokens in a step.
    mixed_peak = np.maximum(peak, keep * before[:, 2] + (1 - keep) * peak)
    mixed = np.stack([mixed_mean, np.sqrt(mixed_square), mixed_peak], axis=1)
    finite = np.isfinite(norm_sums).all(axis=1, keepdims=True)
    return np.where(finite, mixed, old).astype(np.float32)
