"""How long the planner thinks: `pagedweight bench planner`.

The engine plans between two steps, so a plan must cost far less than a step. Times
are of one core, for random sensitivities that fall by about four a bit (as the error
of a quantised weight does) and shares with a long tail.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from pagedweight_jax.evaluation.provenance import provenance
from pagedweight_jax.paging import planner, statistics, table
from pagedweight_jax.paging.statistics import RoutingStatistics
from pagedweight_jax.paging.table import PageTable
from pagedweight_jax.sensitivity import Sensitivity

NUM_EXPERTS = 128
FRAME_BYTES = 247_808
"""A down plane of Gemma-4 26B."""

BOUND_MS = 5.0


def run(
    pages: int = 11_520,
    repeats: int = 200,
    *,
    seed_bits: int = 3,
    parent_bits: int = 6,
    seed: int = 0,
) -> dict[str, Any]:
    """Times `plan_lower` and `plan_raise`, prints and returns the result.

    The page table is mixed, as after earlier plans. Each repeat asks for another
    amount, from one plane up to half of all that can be freed or taken.

    Args:
      pages: pages of the model, a multiple of 256 (128 experts of two blocks).
      repeats: plans of each kind.
    Returns:
      Milliseconds with device, versions and commit, ready for JSON. Where other
      programs share the core, the median is above ``median_cpu``.
    Raises:
      ValueError: if ``pages`` is not a positive multiple of 256.
    """
    num_layers, rest = divmod(pages, 2 * NUM_EXPERTS)
    if rest or not num_layers or repeats < 1:
        raise ValueError(
            f"pages={pages} must be a positive multiple of {2 * NUM_EXPERTS}"
            f" and repeats={repeats} at least 1"
        )
    rng = np.random.default_rng(seed)
    sensitivity = random_sensitivity(rng, num_layers, seed_bits, parent_bits)
    live = _drifted(rng, sensitivity)
    pages_now = _mixed_table(rng, sensitivity, live)
    with _one_core():
        times = _time_plans(sensitivity, live, pages_now, repeats)
    result = {
        "benchmark": "planner",
        "command": f"pagedweight bench planner --pages={pages} --repeats={repeats}",
        "pages": pages,
        "seed_bits": seed_bits,
        "parent_bits": parent_bits,
        "repeats": repeats,
        "bound_ms": BOUND_MS,
        **{name: _summary(ms) for name, ms in times.items()},
        "measured_with": provenance(),
    }
    _print(result)
    return result


def random_sensitivity(
    rng: np.random.Generator, num_layers: int, seed_bits: int, parent_bits: int
) -> Sensitivity:
    """Returns sensitivities that look like measured ones."""
    shape = (num_layers, NUM_EXPERTS)
    share = rng.pareto(1.5, shape) + 0.05
    share /= share.sum(axis=1, keepdims=True)
    scale = rng.lognormal(-9, 1, (*shape, 2, 1)) * share[..., None, None]
    level = np.arange(parent_bits + 1)
    loss = scale * (4.0 ** -(level - seed_bits) - 4.0 ** -(parent_bits - seed_bits))
    loss *= rng.uniform(0.8, 1.25, loss.shape)
    loss[..., :seed_bits] = np.inf
    return Sensitivity(
        loss=loss.astype(np.float32),
        residual_weights=rng.normal(0, 0.1, (num_layers, 2, 3)).astype(np.float32),
        residual_bias=np.ones((num_layers, 2), np.float32),
        expert_share=share.astype(np.float32),
    )


def _drifted(rng: np.random.Generator, sensitivity: Sensitivity) -> RoutingStatistics:
    """Returns statistics after a batch that routes a little otherwise."""
    start = statistics.initial(sensitivity)
    counts = rng.poisson(4096 * start.share * rng.lognormal(0, 0.5, start.share.shape))
    norm_sums = np.tile(np.array([512, 700, 2], np.float32), (len(counts), 1))
    return statistics.update(start, counts, norm_sums, 512, half_life_tokens=512.0)


def _mixed_table(
    rng: np.random.Generator, sensitivity: Sensitivity, live: RoutingStatistics
) -> PageTable:
    """Returns a table from parent bits down to the floors, each page at random."""
    floor = planner.floors(sensitivity, live, planner.PlannerLimits())
    bits = rng.integers(floor, sensitivity.parent_bits, endpoint=True, dtype=np.int32)
    parent = sensitivity.parent_bits
    count = floor.size // 2 * 3 * parent
    frames = np.arange(1, count + 1, dtype=np.int32)
    frames = frames.reshape(*floor.shape[:2], 3, parent, 1)
    full = PageTable(frames, np.full(floor.shape, parent, np.int32))
    lowered, _ = table.lower(full, bits)
    return lowered


def _time_plans(
    sensitivity: Sensitivity,
    live: RoutingStatistics,
    pages_now: PageTable,
    repeats: int,
) -> dict[str, list[tuple[float, float]]]:
    values = (pages_now, sensitivity, live, planner.PlannerLimits())
    planes = np.linspace(1, pages_now.bits.size // 2, repeats).astype(int)

    def lower(amount: int) -> None:
        planner.plan_lower(*values, demand_bytes=amount, frame_bytes=FRAME_BYTES)

    def raise_(amount: int) -> None:
        planner.plan_raise(*values, slack_bytes=amount, frame_bytes=FRAME_BYTES)

    amounts = [int(n) * FRAME_BYTES for n in planes]
    return {
        "plan_lower_ms": [_milliseconds(lower, amount) for amount in amounts],
        "plan_raise_ms": [_milliseconds(raise_, amount) for amount in amounts],
    }


def _milliseconds(plan: Callable[[int], None], amount: int) -> tuple[float, float]:
    """Returns the time on the wall and of the core."""
    start, core_start = time.perf_counter(), time.thread_time()
    plan(amount)
    return 1e3 * (time.perf_counter() - start), 1e3 * (time.thread_time() - core_start)


def _summary(milliseconds: list[tuple[float, float]]) -> dict[str, float]:
    wall, core = np.array(milliseconds).T
    return {
        "median": float(np.median(wall)),
        "p99": float(np.percentile(wall, 99)),
        "median_cpu": float(np.median(core)),
    }


@contextmanager
def _one_core() -> Iterator[None]:
    """Keeps this process on one core, where the system lets it choose."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _print(result: dict[str, Any]) -> None:
    print(
        f"{result['pages']} pages, one core of {result['measured_with']['processor']}"
    )
    for name in ("plan_lower_ms", "plan_raise_ms"):
        times = result[name]
        print(
            f"{name.removesuffix('_ms'):<12} median {times['median']:.2f} ms,"
            f" p99 {times['p99']:.2f} ms; median on the core"
            f" {times['median_cpu']:.2f} ms (bound {BOUND_MS:.0f} ms)"
        )
