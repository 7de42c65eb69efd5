"""Rows of the kernel bench, and the targets that they are held to.

A target is a limit on a figure of one row, or on the ratio of its time to that of
another row of the same run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pagedweight_jax.evaluation.device_timer import DeviceTimes
from pagedweight_jax.evaluation.moe_workload import Tokens
from pallas_kernels.fused_moe.arg_specs import MoeSpec
from pallas_kernels.fused_moe.reference import Activation

OURS = "pagedweight"
RAGGED_DOT = "jax ragged_dot bf16"
DEQUANTISE = "jax dequantise, ragged_dot"
TORCH_GROUPED = "torch grouped_mm bf16"

MIXED = "3..6"
"""The bits of a row whose pages have random ones."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured cell.

    Attributes:
      implementation: `OURS` or a rival.
      format: of the planes; "bf16" for experts that are matrices.
      group_size: columns that share a scale; "row" if all of a row do.
      bits: of all pages, as text; `MIXED` for random ones.
      mean_bits: of the pages' bytes.
      routing: "balanced" or "random".
      pages: "shuffled" frames, or frames "in order": a contiguous copy of the planes.
      active_experts: on average.
      num_experts: of the layer.
      top_k: experts of a token.
      seconds: sum of the device's kernel times of the median call.
      kernels: of one call.
      plane_bytes: planes (or matrices) of the active experts.
      table_bytes: their side tables.
      ceiling: bytes a second that this device reads at most, measured in the same run.
      graph_seconds: torch only: with the gaps between kernels, in a CUDA graph.
    """

    shape: str
    implementation: str = OURS
    format: str
    group_size: str
    bits: str
    mean_bits: float
    num_tokens: int
    routing: str
    pages: str = "shuffled"
    active_experts: float
    num_experts: int
    top_k: int
    seconds: float
    kernels: float
    plane_bytes: float
    table_bytes: float
    ceiling: float
    graph_seconds: float | None = None

    @property
    def bytes_per_second(self) -> float:
        """Planes and side tables read in a second."""
        return (self.plane_bytes + self.table_bytes) / self.seconds

    @property
    def ceiling_percent(self) -> float:
        """Of the read ceiling."""
        return 100 * self.bytes_per_second / self.ceiling


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What all rows of one shape share.

    Attributes:
      shape: name of the spec.
      ceiling: bytes a second that this device reads at most, measured in the same run.
    """

    shape: str
    spec: MoeSpec
    activation: Activation
    ceiling: float

    def row(self, tokens: Tokens, times: DeviceTimes, **fields: Any) -> Row:
        """Makes the row of a measurement."""
        return Row(
            shape=self.shape,
            num_tokens=tokens.num_tokens,
            routing=tokens.routing,
            active_experts=tokens.active_experts,
            num_experts=self.spec.num_experts,
            top_k=self.spec.top_k,
            seconds=times.median,
            kernels=times.kernels,
            ceiling=self.ceiling,
            **fields,
        )

    def bf16_row(self, tokens: Tokens, times: DeviceTimes, **fields: Any) -> Row:
        """Makes the row of experts that are bf16 matrices."""
        weights = 3 * self.spec.width * self.spec.expert_width
        return self.row(
            tokens,
            times,
            format="bf16",
            group_size="",
            bits="16",
            mean_bits=16.0,
            plane_bytes=2.0 * weights * tokens.active_experts,
            table_bytes=0.0,
            **fields,
        )


@dataclass(frozen=True, kw_only=True)
class Check:
    """A target, what was measured, and whether it is met."""

    target: str
    measured: float
    limit: float
    sense: Literal["at least", "at most"]

    @property
    def met(self) -> bool:
        """Whether the figure is on the right side of the limit."""
        if self.sense == "at least":
            return self.measured >= self.limit
        return self.measured <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.sense == "at least" else "<="
        verdict = "met" if self.met else "MISSED"
        return f"{self.target} {self.measured:.3g} {sign} {self.limit:g} {verdict}"


READ_PERCENT = {
    "mixtral": {"3": 62, "4": 75, "6": 80, "8": 85},
    "qwen": {"3": 58, "4": 70, "6": 76, "8": 82},
    "gemma": {"3": 58, "4": 70, "6": 76, "8": 82},
}
"""Decode with all experts active and up to 16 tokens an expert, affine."""

MAX_TOKENS_PER_EXPERT = 16
DECODE_TOKENS = 64
FORMAT_RATIO = 1.25
MIXED_RATIO = 1.04
GROUP_RATIO = 1.08
PAGES_RATIO = 1.03
SPEEDUP = {  # over a rival, at 4 bits
    TORCH_GROUPED: {
        "qwen": {1: 2.0, 4: 2.5, 16: 3.0, 64: 3.0, 4096: 1.0},
        "mixtral": {1: 4.0, 4: 4.0, 16: 4.0, 64: 4.0, 4096: 1.0},
    },
    RAGGED_DOT: {"qwen": {4096: 8.0}, "mixtral": {4096: 8.0}},
}


def checks(row: Row, rows: Sequence[Row]) -> list[Check]:
    """Returns the targets of a row.

    Rivals have none, and neither have the rows that others are held against.
    """
    if row.implementation != OURS or row.pages != "shuffled" or row.group_size == "row":
        return []
    return [
        *_read_percent(row),
        *_against_affine(row, rows),
        *_against_uniform(row, rows),
        *_against_row_scales(row, rows),
        *_against_contiguous(row, rows),
        *_against_rivals(row, rows),
    ]


def _read_percent(row: Row) -> Iterator[Check]:
    limit = READ_PERCENT.get(row.shape, {}).get(row.bits)
    pairs = row.num_tokens * row.top_k
    few = pairs <= MAX_TOKENS_PER_EXPERT * row.num_experts
    if limit and row.format == "affine" and few and _all_active(row):
        yield Check(
            target="% of ceiling",
            measured=row.ceiling_percent,
            limit=limit,
            sense="at least",
        )


def _all_active(row: Row) -> bool:
    return row.active_experts == row.num_experts


def _against_affine(row: Row, rows: Sequence[Row]) -> Iterator[Check]:
    decode = row.num_tokens <= DECODE_TOKENS
    if row.format in ("codebook", "refined") and decode:
        yield from _ratio("time / affine", row, rows, FORMAT_RATIO, format="affine")


def _against_uniform(row: Row, rows: Sequence[Row]) -> Iterator[Check]:
    """Compares with the time of uniform bits of equal bytes, between two neighbours."""
    if row.bits != MIXED:
        return
    low = int(row.mean_bits)
    ends = [_same(row, rows, bits=str(b)) for b in (low, low + 1)]
    if any(end is None for end in ends):
        return
    below, above = (end.seconds for end in ends if end is not None)
    uniform = below + (row.mean_bits - low) * (above - below)
    yield Check(
        target="time / uniform of equal bytes",
        measured=row.seconds / uniform,
        limit=MIXED_RATIO,
        sense="at most",
    )


def _against_row_scales(row: Row, rows: Sequence[Row]) -> Iterator[Check]:
    if row.format == "affine" and row.bits in ("4", "6", "8"):
        yield from _ratio("time / row scales", row, rows, GROUP_RATIO, group_size="row")


def _against_contiguous(row: Row, rows: Sequence[Row]) -> Iterator[Check]:
    yield from _ratio("time / contiguous", row, rows, PAGES_RATIO, pages="in order")


def _ratio(
    target: str, row: Row, rows: Sequence[Row], limit: float, **other: str
) -> Iterator[Check]:
    reference = _same(row, rows, **other)
    if reference is not None:
        yield Check(
            target=target,
            measured=row.seconds / reference.seconds,
            limit=limit,
            sense="at most",
        )


def _against_rivals(row: Row, rows: Sequence[Row]) -> Iterator[Check]:
    if row.bits != "4" or row.format != "affine":
        return
    for rival, by_shape in SPEEDUP.items():
        limit = by_shape.get(row.shape, {}).get(row.num_tokens)
        same = [
            r
            for r in rows
            if r.implementation == rival
            and (r.shape, r.num_tokens, r.routing)
            == (row.shape, row.num_tokens, row.routing)
        ]
        if limit and same:
            yield Check(
                target=f"speed-up over {rival}",
                measured=same[0].seconds / row.seconds,
                limit=limit,
                sense="at least",
            )


_CELL = ("shape", "implementation", "format", "bits", "num_tokens", "routing", "pages")


def _same(row: Row, rows: Sequence[Row], **other: str) -> Row | None:
    """Returns our row that differs from this one in the given fields only.

    Another format has groups of its own.
    """
    wanted = replace(row, **other)  # pyright: ignore[reportArgumentType]
    for candidate in rows:
        groups = {candidate.group_size, wanted.group_size}
        fits = "row" not in groups if "format" in other else len(groups) == 1
        if fits and all(getattr(candidate, n) == getattr(wanted, n) for n in _CELL):
            return candidate
    return None
