"""Rows of the step bench, and the targets that they are held to."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pagedweight_jax.evaluation.kernel_rows import Check
from pagedweight_jax.evaluation.migration_bench import MigrationRow
from pagedweight_jax.evaluation.step_bytes import StepBytes

EXPERTS_SPEEDUP = {1: 1.94, 4: 1.63}
"""Of the routed experts at mixed bits over bf16, by batch."""

KERNELS_A_LAYER = 10
P99_RATIO = 1.05


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One measured batch.

    Attributes:
      seconds: of a step on the wall.
      kernel_seconds: sum of the device's kernel times of a step.
      kernels: of a step, commit and sampling included.
      experts_seconds: sum of the kernel times of the routed experts of all layers,
        run by themselves on routings of the same kind.
      active_experts: of a layer, on average.
      bytes: what must move.
      ceiling: bytes a second that this device reads at most.
    """

    precision: str
    mean_bits: float
    batch: int
    context: int
    seconds: float
    kernel_seconds: float
    kernels: float
    num_layers: int
    experts_seconds: float
    active_experts: float
    bytes: StepBytes
    ceiling: float

    @property
    def tokens_per_second(self) -> float:
        """Of the whole batch."""
        return self.batch / self.seconds

    @property
    def outside_kernels(self) -> float:
        """Share of the time in which no kernel runs."""
        return max(0.0, 1 - self.kernel_seconds / self.seconds)

    @property
    def kernels_a_layer(self) -> float:
        """Kernels by layers, with those of head, sampling and commit."""
        return self.kernels / self.num_layers

    @property
    def ceiling_percent(self) -> float:
        """Of the read ceiling, over the whole step."""
        return 100 * self.bytes.total / self.seconds / self.ceiling


def checks(rows: Sequence[StepRow], moving: Sequence[MigrationRow]) -> Iterator[Check]:
    """Yields what the targets ask of a whole run."""
    experts = {
        (row.precision, row.batch, row.context): row.experts_seconds for row in rows
    }
    for (precision, batch, context), seconds in experts.items():
        dense = experts.get(("bf16", batch, context))
        if precision == "mixed" and dense and batch in EXPERTS_SPEEDUP:
            yield Check(
                target=f"experts over bf16, batch {batch}, context {context}",
                measured=dense / seconds,
                limit=EXPERTS_SPEEDUP[batch],
                sense="at least",
            )
    paged = [row.kernels_a_layer for row in rows if row.precision != "bf16"]
    if any(paged):  # the wall clock counts no kernels
        yield Check(
            target="kernels a layer",
            measured=max(paged),
            limit=KERNELS_A_LAYER,
            sense="at most",
        )
    for row in moving:
        yield Check(
            target=f"p99 while planes move, batch {row.batch}",
            measured=row.p99_ratio,
            limit=P99_RATIO,
            sense="at most",
        )


HEADER = (
    f"{'precision':<10}{'bits':>6}{'batch':>6}{'context':>8}{'ms':>9}{'tokens/s':>10}"
    f"{'kernels ms':>11}{'experts ms':>11}{'outside':>8}{'kernels':>8}{'a layer':>8}"
    f"{'active':>7}{'GB':>7}{'floor ms':>9}{'%':>6}"
)


def line(row: StepRow) -> str:
    """Returns the row of the table."""
    floor = row.bytes.total / row.ceiling
    return (
        f"{row.precision:<10}{row.mean_bits:>6.2f}{row.batch:>6}{row.context:>8}"
        f"{1e3 * row.seconds:>9.3f}{row.tokens_per_second:>10.0f}"
        f"{1e3 * row.kernel_seconds:>11.3f}{1e3 * row.experts_seconds:>11.3f}"
        f"{row.outside_kernels:>8.1%}{row.kernels:>8.0f}{row.kernels_a_layer:>8.1f}"
        f"{row.active_experts:>7.1f}{row.bytes.total / 1e9:>7.2f}"
        f"{1e3 * floor:>9.3f}{row.ceiling_percent:>6.1f}"
    )


MIGRATION_HEADER = (
    f"{'planes':<10}{'batch':>6}{'context':>8}{'p50 ms':>9}{'p99 ms':>9}"
    f"{'moving':>10}{'p99 ms':>9}{'p99 ratio':>11}{'GB/s':>7}"
)


def migration_line(row: MigrationRow) -> str:
    """Returns the row of the table."""
    return (
        f"{'moving':<10}{row.batch:>6}{row.context:>8}{row.p50_ms:>9.3f}"
        f"{row.p99_ms:>9.3f}{row.p50_ms_migrating:>10.3f}{row.p99_ms_migrating:>9.3f}"
        f"{row.p99_ratio:>11.3f}{row.bytes_per_second / 1e9:>7.1f}"
    )


def as_json(row: StepRow) -> dict[str, Any]:
    """Returns a row with what follows from it."""
    return {
        **asdict(row),
        "tokens_per_second": row.tokens_per_second,
        "kernels_a_layer": row.kernels_a_layer,
        "outside_kernels": row.outside_kernels,
        "ceiling_percent": row.ceiling_percent,
    }
