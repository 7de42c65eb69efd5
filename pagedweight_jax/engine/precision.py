"""How an engine changes precision: what it needs to know, and the plan it makes."""

from dataclasses import dataclass

from pagedweight_jax.paging.migration import Migrator
from pagedweight_jax.paging.planner import (
    Plan,
    PlannerLimits,
    Watermarks,
    plan_lower,
    plan_raise,
)
from pagedweight_jax.paging.statistics import RoutingStatistics
from pagedweight_jax.sensitivity import Sensitivity


@dataclass(frozen=True, kw_only=True)
class PrecisionControl:
    """How the engine changes precision; without one it never does.

    Attributes:
      half_life_tokens: memory of the routing statistics.
    """

    sensitivity: Sensitivity
    limits: PlannerLimits
    watermarks: Watermarks
    half_life_tokens: float = 2048.0


def make_plan(
    control: PrecisionControl,
    statistics: RoutingStatistics,
    migrator: Migrator,
    frame_bytes: int,
    *,
    demand_bytes: int | None = None,
    slack_bytes: int = 0,
) -> Plan:
    """Plans to free ``demand_bytes``, or without a demand to spend ``slack_bytes``."""
    inputs = (migrator.table, control.sensitivity, statistics, control.limits)
    if demand_bytes is None:
        return plan_raise(
            *inputs,
            slack_bytes=slack_bytes,
            frame_bytes=frame_bytes,
            held=migrator.held,
        )
    return plan_lower(
        *inputs, demand_bytes=demand_bytes, frame_bytes=frame_bytes, held=migrator.held
    )
