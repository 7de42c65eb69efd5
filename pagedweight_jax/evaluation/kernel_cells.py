"""Times our fused MoE layer of one shape in all cells of the kernel bench.

Bits and page table are data, so that one program serves all precisions, page orders
and routings of a (format, scales, number of tokens).
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from jaxtyping import Array, Int32

from pagedweight_jax.evaluation import moe_workload as workload
from pagedweight_jax.evaluation.device_timer import time_calls
from pagedweight_jax.evaluation.kernel_rows import DECODE_TOKENS, MIXED, Layer, Row
from pagedweight_jax.evaluation.moe_workload import NUM_SETS, Planes, Tokens
from pallas_kernels.fused_moe import fused_moe
from pallas_kernels.side_tables import SideTables
from pallas_kernels.testing import Format

COMPARED_TOKENS = 16
"""Where shuffled pages are held against pages in order, and groups against rows."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Side tables of both blocks.

    Attributes:
      group_size: columns that share an affine scale, "row" if all do; "-" for formats
        without groups.
    """

    format: Format
    group_size: str
    gate_up: SideTables
    down: SideTables

    @property
    def blocks(self) -> tuple[SideTables, SideTables]:
        """gate_up and down."""
        return self.gate_up, self.down


def make_tables(layer: Layer, format: Format, *, row_scales: bool = False) -> Tables:
    """Makes random tables in groups of the spec's size, or of whole rows."""
    spec = layer.spec
    group = None if row_scales else spec.group_size
    d, f = spec.width, spec.expert_width
    return Tables(
        format=format,
        group_size=_group_name(format, group),
        gate_up=workload.random_tables(spec, format, 2 * f, d, group or d),
        down=workload.random_tables(spec, format, d, f, group or f),
    )


def _group_name(format: Format, group: int | None) -> str:
    if format != "affine":
        return "-"
    return "row" if group is None else str(group)


def bits_of(layer: Layer, level: str) -> Int32[np.ndarray, "L E 2"]:
    """Returns the bits of all pages: equal ones, or random ones for `MIXED`."""
    if level == MIXED:
        low, high = map(int, MIXED.split(".."))
        return workload.mixed_bits(layer.spec, low, high)
    return workload.uniform_bits(layer.spec, int(level))


def arguments(
    tokens: Tokens, planes: Planes, bits: Int32[Array, "L E 2"], tables: Tables
) -> list[tuple]:
    """Returns the arguments of `fused_moe` for every call."""
    return [
        (
            tokens.x,
            jnp.asarray(ids),
            tokens.weights,
            planes.pool,
            planes.frames,
            bits,
            *tables.blocks,
            jnp.int32(call % NUM_SETS),
        )
        for call, ids in enumerate(tokens.ids)
    ]


def compile_all(lowered: Sequence[jax.stages.Lowered]) -> list[Compiled]:
    """Compiles programs side by side; most of it runs outside of Python."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda one: one.compile(), lowered))


def our_rows(
    layer: Layer,
    cases: Sequence[Tokens],
    levels: Sequence[str],
    planes: Planes,
    all_tables: Sequence[Tables],
) -> list[Row]:
    """Times every routing with every kind of tables at all bits.

    Row scales are measured at `COMPARED_TOKENS` only, and so are pages in order;
    formats other than affine where a step decodes. What no kernel implements is told
    and left out.
    """
    cells = [
        (tokens, tables)
        for tables in all_tables
        for tokens in cases
        if _is_measured(tokens, tables)
    ]
    programs = _programs(layer, planes, cells)
    rows = []
    for tokens, tables in cells:
        program = programs.get(_program_of(tokens, tables))
        if program is None:
            continue
        for pages in _page_orders(tokens, tables):
            named = planes if pages == "shuffled" else workload.in_order(planes)
            for level in levels:
                rows.append(_time(layer, program, tokens, named, level, tables, pages))
    return rows


def _program_of(tokens: Tokens, tables: Tables) -> tuple[int, str, str]:
    """Names the program of a cell: routing, bits and pages are data."""
    return tokens.num_tokens, tables.format, tables.group_size


def _programs(
    layer: Layer, planes: Planes, cells: Sequence[tuple[Tokens, Tables]]
) -> dict[tuple[int, str, str], Compiled]:
    fused = jax.jit(partial(fused_moe, activation=layer.activation))
    bits = jnp.asarray(bits_of(layer, "4"))
    lowered = {}
    for tokens, tables in {_program_of(*cell): cell for cell in cells}.values():
        try:
            example = arguments(tokens, planes, bits, tables)[0]
            lowered[_program_of(tokens, tables)] = fused.lower(*example)
        except NotImplementedError as error:
            print(f"{layer.shape} {tables.format} T={tokens.num_tokens}: {error}")
    return dict(zip(lowered, compile_all(list(lowered.values())), strict=True))


def _is_measured(tokens: Tokens, tables: Tables) -> bool:
    if tables.group_size == "row":
        return _is_compared(tokens)
    return tables.format == "affine" or tokens.num_tokens <= DECODE_TOKENS


def _is_compared(tokens: Tokens) -> bool:
    return tokens.num_tokens == COMPARED_TOKENS and tokens.routing == "balanced"


def _page_orders(tokens: Tokens, tables: Tables) -> Iterable[str]:
    grouped = tables.format == "affine" and tables.group_size != "row"
    compared = _is_compared(tokens) and grouped
    return ("shuffled", "in order") if compared else ("shuffled",)


def _time(
    layer: Layer,
    program: Compiled,
    tokens: Tokens,
    planes: Planes,
    level: str,
    tables: Tables,
    pages: str,
) -> Row:
    bits = bits_of(layer, level)
    calls = arguments(tokens, planes, jnp.asarray(bits), tables)
    times = time_calls(lambda i: program(*calls[i % len(calls)]), len(calls))
    read = workload.bytes_read(layer.spec, tokens, bits, *tables.blocks)
    return layer.row(
        tokens,
        times,
        format=tables.format,
        group_size=tables.group_size,
        bits=level,
        mean_bits=float(np.average(bits.mean(axis=(0, 1)), weights=(2, 1))),
        pages=pages,
        plane_bytes=read.planes,
        table_bytes=read.tables,
    )
