"""How fast the fused MoE layer is: `pagedweight bench kernels`.

Each row is one whole layer: routing lists, gather, gate_up, activation, down, weighted
sum. Its time is the sum of its kernels' times, and its bytes are the planes and side
tables of the active experts, each read once. The ceiling is what the same device reads
in the same run when it does nothing else. Rivals run on the same routings.
"""

import time
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pagedweight_jax.evaluation import moe_workload as workload
from pagedweight_jax.evaluation import torch_rows
from pagedweight_jax.evaluation.device_timer import time_calls
from pagedweight_jax.evaluation.jax_rivals import dequantize_rows, ragged_dot_rows
from pagedweight_jax.evaluation.kernel_cells import (
    COMPARED_TOKENS,
    make_tables,
    our_rows,
)
from pagedweight_jax.evaluation.kernel_rows import MIXED, Layer, Row, checks
from pagedweight_jax.evaluation.kernel_tuning import tune
from pagedweight_jax.evaluation.moe_workload import Routing, Tokens
from pagedweight_jax.evaluation.provenance import provenance
from pallas_kernels.fused_moe.arg_specs import (
    GEMMA4_26B_A4B,
    MIXTRAL_8X7B,
    QWEN1_5_MOE_A2_7B,
    MoeSpec,
)
from pallas_kernels.fused_moe.reference import Activation
from pallas_kernels.testing import Format

TINY = MoeSpec(width=128, expert_width=128, num_experts=4, top_k=2, group_size=64)
"""For tests: a bench of it takes seconds on a CPU."""

SHAPES: dict[str, tuple[MoeSpec, Activation]] = {
    "qwen": (QWEN1_5_MOE_A2_7B, "silu"),
    "mixtral": (MIXTRAL_8X7B, "silu"),
    "gemma": (GEMMA4_26B_A4B, "gelu_tanh"),
    "tiny": (TINY, "silu"),
}

_NEIGHBOURS = ("4", "5")  # uniform bits on both sides of MIXED's mean
_NATURAL_TOKENS = (1, 4, 16, 64)  # routings are drawn, too: as a batch of decoding has
_MANY_TOKENS = 256  # calls of more take milliseconds, and a few of them will do


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure; the defaults are all that the targets speak of.

    Attributes:
      bits: of all pages; "mixed" draws 3 to 6 for each.
      calls: calls that are timed a row.
      torch: whether to time torch where it is installed.
      tune: whether to choose the kernels' sizes first, and to store them.
    """

    shapes: tuple[str, ...] = ("qwen", "mixtral", "gemma")
    bits: tuple[str, ...] = ("3", "4", "6", "8", "mixed")
    tokens: tuple[int, ...] = (1, 4, 16, 64, 4096)
    formats: tuple[Format, ...] = get_args(Format)
    calls: int = 12
    torch: bool = True
    tune: bool = False

    def __post_init__(self) -> None:
        for name, values, known in (
            ("shapes", self.shapes, list(SHAPES)),
            ("bits", self.bits, [*"345678", "mixed"]),
            ("formats", self.formats, list(get_args(Format))),
        ):
            if unknown := [value for value in values if value not in known]:
                raise ValueError(f"{name} {unknown} are unknown; there are {known}")
        if min(self.tokens) < 1 or self.calls < 1:
            raise ValueError(
                f"tokens={self.tokens} and calls={self.calls} must be positive"
            )

    @property
    def levels(self) -> list[str]:
        """The bits of the rows: those asked for, and what `MIXED` is held against."""
        levels = [MIXED if b == "mixed" else b for b in self.bits]
        if MIXED in levels:
            levels += [b for b in _NEIGHBOURS if b not in levels]
        return levels

    @property
    def parent_bits(self) -> int:
        """Planes that are made: of the highest level, and at least the rival's 4."""
        return max(4, *(int(level.rpartition("..")[2]) for level in self.levels))

    @property
    def command(self) -> str:
        """What to type to measure the same again."""
        lists = {
            "shapes": self.shapes,
            "bits": self.bits,
            "tokens": self.tokens,
            "format": self.formats,
        }
        flags = [f"--{k}={','.join(map(str, v))}" for k, v in lists.items()]
        flags += [f"--calls={self.calls}", "" if self.torch else "--notorch"]
        return " ".join(["pagedweight bench kernels", *flags]).strip()


def run(options: Options) -> dict[str, Any]:
    """Measures, prints a row a line, and returns the result, ready for JSON."""
    start = time.perf_counter()
    ceiling = read_ceiling()
    print(f"read ceiling {ceiling / 1e9:.0f} GB/s\n{_HEADER}", flush=True)
    rows: list[Row] = []
    for shape in options.shapes:
        of_shape = _rows_of_shape(shape, options, ceiling)
        for row in of_shape:
            print(_line(row, of_shape), flush=True)
        rows += of_shape
    seconds = time.perf_counter() - start
    print(f"took {seconds:.0f} s")
    return {
        "benchmark": "kernels",
        "command": options.command,
        "ceiling_bytes_per_second": ceiling,
        "bench_seconds": seconds,
        "rows": [_json(row, rows) for row in rows],
        "measured_with": provenance(),
    }


def read_ceiling() -> float:
    """Returns the bytes a second of a reduction of an array far beyond any cache."""
    size = 2**32 if jax.default_backend() == "gpu" else 2**24
    make = jax.jit(lambda key: jax.random.bits(key, (8192, size // 4 // 8192)))
    words = make(jax.random.key(0))

    @jax.jit
    def reduce(words: Array) -> Array:
        return jax.lax.reduce(words, jnp.uint32(0), jax.lax.bitwise_xor, (1,))

    return size / time_calls(lambda _: reduce(words), 10).median


def _rows_of_shape(shape: str, options: Options, ceiling: float) -> list[Row]:
    spec, activation = SHAPES[shape]
    # A kernel has a branch for each number of bits, and takes as long to compile.
    spec = replace(spec, parent_bits=options.parent_bits)
    layer = Layer(shape=shape, spec=spec, activation=activation, ceiling=ceiling)
    if options.tune:
        tune(layer, options.formats)
    cases = [
        _tokens(spec, num_tokens, routing, options)
        for num_tokens in options.tokens
        for routing in _routings(spec, num_tokens)
    ]
    rows = []
    if options.torch and torch_rows.installed():
        rows += torch_rows.torch_rows(layer, cases)
    rows += ragged_dot_rows(layer, cases)
    planes = workload.random_planes(spec)
    tables = [make_tables(layer, format) for format in options.formats]
    affine = [t for t in tables if t.format == "affine"]
    if affine:
        first = {tokens.num_tokens: tokens for tokens in reversed(cases)}
        rows += dequantize_rows(layer, [*first.values()], planes, affine[0].blocks)
    if affine and COMPARED_TOKENS in options.tokens:
        tables.append(make_tables(layer, "affine", row_scales=True))
    return our_rows(layer, cases, options.levels, planes, tables) + rows


def _routings(spec: MoeSpec, num_tokens: int) -> list[Routing]:
    """Dealt out where that makes all experts active, and drawn for few tokens."""
    routings: list[Routing] = []
    if num_tokens * spec.top_k >= spec.num_experts:
        routings.append("balanced")
    if num_tokens in _NATURAL_TOKENS or not routings:
        routings.append("random")
    return routings


def _tokens(
    spec: MoeSpec, num_tokens: int, routing: Routing, options: Options
) -> Tokens:
    few = max(1, options.calls // 3)
    calls = few if num_tokens > _MANY_TOKENS else options.calls
    return workload.make_tokens(spec, num_tokens, routing, calls)


_HEADER = (
    f"{'shape':<8}{'implementation':<28}{'format':<10}{'group':>6}{'bits':>6}"
    f"{'T':>6} {'routing':<9}{'pages':<9}{'active':>7}{'us':>10}{'kernels':>8}"
    f"{'GB/s':>7}{'%':>6}  targets"
)


def _line(row: Row, rows: list[Row]) -> str:
    return (
        f"{row.shape:<8}{row.implementation:<28}{row.format:<10}{row.group_size:>6}"
        f"{row.bits:>6}{row.num_tokens:>6} {row.routing:<9}{row.pages:<9}"
        f"{row.active_experts:>7.1f}{1e6 * row.seconds:>10.1f}{row.kernels:>8.0f}"
        f"{row.bytes_per_second / 1e9:>7.0f}{row.ceiling_percent:>6.1f}  "
        + "; ".join(map(str, checks(row, rows)))
    ).rstrip()


def _json(row: Row, rows: list[Row]) -> dict[str, Any]:
    return {
        **asdict(row),
        "bytes_per_second": row.bytes_per_second,
        "ceiling_percent": row.ceiling_percent,
        "checks": [{**asdict(c), "met": c.met} for c in checks(row, rows)],
    }
