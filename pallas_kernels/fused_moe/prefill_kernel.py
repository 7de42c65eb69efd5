"""The kernel of `prefill`: tiles of tokens times 64-row tiles of paged weights.

A CTA takes one tile of tokens. Its producer warpgroup sends the tokens' columns, 64 or
128 at a time, through a ring in shared memory (TMA); each of its two consumers
multiplies them by two row tiles, those of gate and up at one place or two neighbours:

    columns          stage 0                          stage 1
    planes      load next words                  load next words
    unpack        A0      B0      A1      B1       A0      B0
    wgmma            |--A0--||--B0--||--A1--||--B1--||--A0--||--B0-- ...

While one product runs, the next weights are unpacked to the other registers, and the
warpgroups drift apart, so that the tensor cores rarely wait.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float16, Float32, Int32, UInt32

from pallas_kernels.bitplane import TILE, vector_width
from pallas_kernels.fused_moe import half_weights
from pallas_kernels.fused_moe.prefill_formats import Format, Rows, format_of
from pallas_kernels.fused_moe.reference import Activation
from pallas_kernels.fused_moe.registers import Ref
from pallas_kernels.fused_moe.token_tiles import ROW_ALIGNMENT, TokenTiles
from pallas_kernels.side_tables import SideTables

_CONSUMERS = 2
_REGISTERS = (24, 240)
"""Registers of each thread of the producer and of the consumers.

All are launched with 168, what 65,536 registers give 3 warpgroups. Asking for more than
was launched with, 24 + 2 * 240 = 3 * 168, would wait for ever.
"""

_STAGE_TILES = 2  # most column tiles of a stage


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the kernel.

    Attributes:
      tile_sizes: numbers of tokens that a tile is multiplied with, ascending; the
        smallest that holds its tokens is taken, and tiles are cut at the largest.
      stages: of the ring of tokens in shared memory.
      tiles_per_group: most tiles of an expert that run side by side.
    """

    tile_sizes: tuple[int, ...] = (64, 128)
    stages: int = 4
    tiles_per_group: int = 16

    def __post_init__(self) -> None:
        sizes = self.tile_sizes
        aligned = all(n > 0 and n % ROW_ALIGNMENT == 0 for n in sizes)
        if not sizes or sorted(set(sizes)) != list(sizes) or not aligned:
            raise ValueError(
                f"tile_sizes={sizes} must be ascending multiples of {ROW_ALIGNMENT}"
            )

    @property
    def tokens_per_tile(self) -> int:
        """M, where tiles are cut."""
        return self.tile_sizes[-1]


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Where the planes are; see `pallas_kernels.fused_moe.fused_moe`."""

    pool: UInt32[Array, "num_frames frame_words"]
    frames: Int32[Array, "L E 3 parent_bits frames_per_plane"]
    bits: Int32[Array, "L E 2"]
    layer: Int32[Array, ""]


def hidden_activations(
    x: Float16[Array, "rows D"],
    factors: Float32[Array, "2 rows"],
    tiles: TokenTiles,
    pages: Pages,
    gate_up: SideTables,
    *,
    activation: Activation,
    config: Config,
    interpret: bool,
) -> Float16[Array, "slots F"]:
    """Computes ``act(gate x) * up x`` of each tile of tokens with its expert.

    Args:
      x: tokens sorted by expert.
      factors: what the products of gate and of up are multiplied by, for each row.
      tiles: of the rows.
      pages: of all experts.
      gate_up: side tables of gate above up.
      activation: of the gate branch.
      config: sizes of the kernel.
      interpret: whether to run on the CPU interpreter of Mosaic GPU.
    Returns:
      M slots a tile; those without a token hold anything.
    """
    call = _Call(
        linears=(0, 1),
        block=0,
        activation=activation,
        config=config,
        interpret=interpret,
        dtype=jnp.float16,
    )
    return _paged_linears(call, x, factors, tiles, pages, gate_up)


def outputs(
    hidden: Float16[Array, "slots F"],
    tiles: TokenTiles,
    pages: Pages,
    down: SideTables,
    *,
    config: Config,
    interpret: bool,
) -> Float[Array, "slots D"]:
    """Computes ``down h`` of each tile with its expert, in bfloat16.

    Args:
      hidden: M slots a tile.
      tiles: as for `hidden_activations`, but for the rows, which are slots.
      pages: of all experts.
      down: side tables.
      config: sizes of the kernel.
      interpret: whether to run on the CPU interpreter of Mosaic GPU.
    Returns:
      M slots a tile; those without a token hold anything.
    """
    call = _Call(
        linears=(2,),
        block=1,
        activation=None,
        config=config,
        interpret=interpret,
        dtype=jnp.bfloat16,
    )
    return _paged_linears(call, hidden, None, tiles, pages, down)


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What is static about one launch.

    Attributes:
      linears: gate and up side by side, or one whose row tiles go in pairs.
      block: which of an expert's bits.
      activation: None if the products themselves are wanted.
      config: sizes of the kernel.
      interpret: whether to compute with jnp what the interpreter cannot run.
      dtype: of the results.
    """

    linears: tuple[int, ...]
    block: int
    activation: Activation | None
    config: Config
    interpret: bool
    dtype: Any

    def results(
        self, products: Sequence[Float32[Array, "64 n"]]
    ) -> list[Float32[Array, "64 n"]]:
        """Returns what is stored of two scaled products."""
        if self.activation is None:
            return list(products)
        gate, up = products
        slope = gate  # act(z) = z * sigmoid(slope)
        if self.activation == "gelu_tanh":
            slope = gate * (1.5957691 + 0.07135481 * gate * gate)  # 2 sqrt(2 / pi)
        return [gate * up / (1 + jnp.exp(-slope))]


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """How linears are cut.

    Attributes:
      num_linears: side by side: 2, or 1 whose row tiles go in pairs.
      row_tiles: of a linear.
      tiles_per_frame: row tiles that a frame holds.
      steps: CTAs of a tile of tokens.
      v: column tiles whose words are adjacent.
      chunks: runs of v column tiles.
    """

    num_linears: int
    row_tiles: int
    tiles_per_frame: int
    steps: int
    v: int
    chunks: int

    @classmethod
    def of(cls, call: _Call, n: int, k: int, frames_per_plane: int) -> "_Cut":
        """Cuts linears ``[n, k]``.

        Raises:
          ValueError: if a frame does not hold whole row tiles.
        """
        num_linears, row_tiles, v = len(call.linears), n // TILE, vector_width(k)
        if row_tiles % frames_per_plane:
            raise ValueError(
                f"a linear of {n} rows has {row_tiles} tiles of {TILE} rows, which"
                f" cannot be cut into frames_per_plane={frames_per_plane} equal runs;"
                " choose a divisor"
            )
        return cls(
            num_linears=num_linears,
            row_tiles=row_tiles,
            tiles_per_frame=row_tiles // frames_per_plane,
            steps=-(-row_tiles * num_linears // (2 * _CONSUMERS)),
            v=v,
            chunks=k // (TILE * v),
        )

    @property
    def stage_tiles(self) -> int:
        """Column tiles of a stage."""
        return min(self.v, _STAGE_TILES)

    @property
    def columns(self) -> int:
        """Columns of a stage."""
        return TILE * self.stage_tiles

    @property
    def stages(self) -> int:
        """Stages of a whole row."""
        return self.chunks * self.v // self.stage_tiles

    def pair(self, i: Array) -> list[tuple[int, Array]]:
        """Returns linears and row tiles of the warpgroup ``i`` of a tile of tokens.

        Past the end they are the last ones, which are computed twice.
        """
        last = self.row_tiles - 1
        if self.num_linears == 2:
            return [(linear, jnp.minimum(i, last)) for linear in range(2)]
        return [(0, jnp.minimum(2 * i + half, last)) for half in range(2)]


def _paged_linears(
    call: _Call,
    x: Float16[Array, "rows K"],
    factors: Float32[Array, "2 rows"] | None,
    tiles: TokenTiles,
    pages: Pages,
    tables: SideTables,
) -> Float[Array, "slots N"]:
    """Launches the kernel; slots of tiles without an expert are left as they are."""
    config, interpret = call.config, call.interpret
    m, stages = config.tokens_per_tile, config.stages
    num_tiles = tiles.experts.size
    n, k = tables.num_rows // len(call.linears), x.shape[1]
    parent_bits, frames_per_plane = pages.frames.shape[3:]
    cut = _Cut.of(call, n, k, frames_per_plane)
    format = format_of(tables, parent_bits, k, interpret=interpret)
    operands = _Operands(
        x=x,
        experts=tiles.experts,
        rows=tiles.rows,
        num_rows=tiles.num_rows,
        group_starts=tiles.group_starts,
        group_sizes=tiles.group_sizes,
        pool=pages.pool.reshape(-1, 128 * cut.v),
        frames=pages.frames,
        bits=pages.bits,
        layer=pages.layer.reshape(1),
        table=format.table(tables, pages.layer),
        factors=factors,
    )
    given = {name: x for name, x in vars(operands).items() if x is not None}

    def kernel(*refs: Ref) -> None:
        inputs, scratch = refs[: len(given)], refs[len(given) :]
        out, ring, staging, full, empty, *sums = scratch
        _Cta(
            call=call,
            cut=cut,
            format=format,
            inputs=_Operands(**dict(zip(given, inputs, strict=True))),
            out=out,
            ring=ring,
            staging=staging,
            full=full,
            empty=empty,
            sums=sums,
        ).run()

    swizzled = (
        plgpu.TilingTransform((8, TILE)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((num_tiles * m, n), call.dtype),
        grid=(num_tiles * cut.steps,),
        grid_names=("cta",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((stages, m, cut.columns), jnp.float16, transforms=swizzled),
            plgpu.SMEM((_CONSUMERS, m, TILE), call.dtype, transforms=swizzled),
            plgpu.Barrier(num_arrivals=1, num_barriers=stages),
            plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=stages),
            *[plgpu.SMEM((_CONSUMERS, 2, TILE, m), jnp.float32)] * interpret,
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(*given.values())


@dataclass(frozen=True, kw_only=True)
class _Operands:
    """Operands of the kernel, or references to them; factors may be missing."""

    x: Any
    experts: Any
    rows: Any
    num_rows: Any
    group_starts: Any
    group_sizes: Any
    pool: Any
    frames: Any
    bits: Any
    layer: Any
    table: Any
    factors: Any = None


@dataclass(frozen=True, kw_only=True)
class _Cta:
    """One CTA of the kernel.

    Attributes:
      call: what is static.
      cut: how linears are cut.
      format: of the weights.
      inputs: in global memory.
      out: results in global memory.
      ring: tokens in shared memory, ``[stages, M, columns]``.
      staging: results on their way, ``[warpgroups, M, 64]``.
      full: barrier of each stage, for the consumers.
      empty: barrier of each stage, for the producer.
      sums: accumulators of the interpreter; a GPU has registers.
    """

    call: _Call
    cut: _Cut
    format: Format
    inputs: _Operands
    out: Ref
    ring: Ref
    staging: Ref
    full: Ref
    empty: Ref
    sums: Sequence[Ref]

    def run(self) -> None:
        """Runs the part of this warpgroup."""
        inputs, config = self.inputs, self.call.config
        warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("cta")
        # The CTAs of a group of tiles: for each row step, all tiles of the group.
        some_tile = lax.div(cta, self.cut.steps)
        expert = inputs.experts[some_tile]
        start = inputs.group_starts[some_tile]
        size = jnp.maximum(inputs.group_sizes[some_tile], 1)
        place = cta - start * self.cut.steps
        tile, step = start + lax.rem(place, size), lax.div(place, size)
        exists = expert < inputs.frames.shape[1]

        def at_size(f: Callable[[int], None]) -> None:
            num_rows = inputs.num_rows[tile]
            larger = [(num_rows > n).astype(jnp.int32) for n in config.tile_sizes[:-1]]
            which = sum(larger, jnp.int32(0))

            @pl.when(exists)
            def _() -> None:
                _switch(which, [functools.partial(f, n) for n in config.tile_sizes])

        @pl.when(warpgroup == _CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[0], action="decrease")
            at_size(functools.partial(self._produce, tile))

        @pl.when(warpgroup < _CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(_REGISTERS[1], action="increase")
            number = step * _CONSUMERS + warpgroup
            at_size(functools.partial(self._consume, warpgroup, number, tile, expert))

    def _produce(self, tile: Array, n: int) -> None:
        """Sends the columns of a tile's tokens through the ring."""
        stages, columns = self.call.config.stages, self.cut.columns
        rows = pl.ds(self.inputs.rows[tile], n)

        def step(i: Array, _: None) -> None:
            slot = lax.rem(i, stages)
            pl.when(i >= stages)(lambda: plgpu.barrier_wait(self.empty.at[slot]))
            plgpu.copy_gmem_to_smem(
                self.inputs.x.at[rows, pl.ds(i * columns, columns)],
                self.ring.at[slot, pl.ds(0, n)],
                self.full.at[slot],
            )

        lax.fori_loop(0, self.cut.stages, step, None)

    def _consume(
        self, warpgroup: Array, number: Array, tile: Array, expert: Array, n: int
    ) -> None:
        """Multiplies a tile by this warpgroup's row tiles, at their bits."""
        layer = self.inputs.layer[0]
        committed = self.inputs.bits[layer, expert, self.call.block]
        pair = self.cut.pair(number)
        to = pl.ds(tile * self.call.config.tokens_per_tile, n)
        staging = self.staging.at[warpgroup, pl.ds(0, n)]

        def at_bits(bits: int) -> None:
            rows = [self._row_tile(layer, expert, *at, bits) for at in pair]
            products = self._products(rows, warpgroup, n)
            factors = self._factors(tile, n, self.format.product_scale(bits))
            scaled = [p * f for p, f in zip(products, factors, strict=True)]
            results = self.call.results(scaled)
            for (_, r), result in zip(pair, results, strict=False):
                self._stage(result.astype(self.call.dtype), staging)
                plgpu.copy_smem_to_gmem(staging, self.out.at[to, pl.ds(r * TILE, TILE)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        widths = self.format.bit_widths
        branches = [functools.partial(at_bits, bits) for bits in widths]
        _switch(committed - widths[0], branches)

    def _row_tile(
        self, layer: Array, expert: Array, linear: int, r: Array, bits: int
    ) -> "_RowTile":
        cut, frames = self.cut, self.inputs.frames
        part = lax.div(r, cut.tiles_per_frame)
        in_frame = lax.rem(r, cut.tiles_per_frame)
        which = self.call.linears[linear]
        return _RowTile(
            cut=cut,
            pool=self.inputs.pool,
            planes=[
                (frames[layer, expert, which, j, part] * cut.tiles_per_frame + in_frame)
                * cut.chunks
                for j in range(bits)
            ],
            rows=self.format.rows(
                self.inputs.table, layer, expert, linear * cut.row_tiles + r
            ),
            wide_bits=self.format.wide_bits,
            interpret=self.call.interpret,
        )

    def _factors(
        self, tile: Array, n: int, scale: float
    ) -> Sequence[Float32[Array, "64 n"] | float]:
        if self.call.activation is None:
            return [scale] * 2
        columns = pl.ds(self.inputs.rows[tile], n)
        rows = [
            plgpu.load(
                self.inputs.factors.at[i, columns],
                layout=plgpu.Layout.WGMMA.reduce(0),
                optimized=False,
            )
            for i in range(2)
        ]
        return [lax.broadcast_in_dim(scale * row, (TILE, n), (1,)) for row in rows]

    def _products(
        self, rows: Sequence["_RowTile"], warpgroup: Array, n: int
    ) -> Sequence[Float32[Array, "64 n"]]:
        def run(*sums: Ref) -> list[Array]:
            self._multiply(rows, sums, n)
            return [s[...] for s in sums]

        if not self.call.interpret:
            accumulator = plgpu.ACC((TILE, n))  # pyright: ignore
            return pl.run_scoped(run, accumulator, accumulator)
        sums = [
            self.sums[0].at[warpgroup, i, slice(None), pl.ds(0, n)] for i in range(2)
        ]
        for s in sums:
            s[...] = jnp.zeros((TILE, n), jnp.float32)
        return run(*sums)

    def _multiply(
        self, pair: Sequence["_RowTile"], sums: Sequence[Ref], n: int
    ) -> None:
        """Multiplies two row tiles by the tokens that come through the ring."""
        cut, stages, width = self.cut, self.call.config.stages, pair[0].width
        loads = cut.stage_tiles // width  # of a stage

        def step(i: Array, loaded: tuple) -> tuple:
            slot, words, ahead = lax.rem(i, stages), list(loaded), list(loaded)
            for load, column, row_tile in np.ndindex(loads, width, 2):
                rows, total = pair[row_tile], sums[row_tile]
                first = load == column == row_tile == 0
                if column == 0:
                    ahead[row_tile] = rows.load(i * loads + load + 1)
                weights = rows.unpack(words[row_tile], column)
                if column == width - 1:
                    words[row_tile] = ahead[row_tile]
                if first:
                    plgpu.barrier_wait(self.full.at[slot])
                at = pl.ds((load * width + column) * TILE, TILE)
                self._accumulate(total, weights, self.ring.at[slot, pl.ds(0, n), at])
                if first:  # by now the products with the stage before are done
                    before = lax.rem(i + (stages - 1), stages)
                    release = functools.partial(
                        plgpu.barrier_arrive, self.empty.at[before]
                    )
                    pl.when(i > 0)(release)
            return tuple(words)

        first = tuple(rows.load(jnp.int32(0)) for rows in pair)
        lax.fori_loop(0, cut.stages, step, first)

    def _accumulate(
        self, total: Ref, weights: Float16[Array, "64 64"], tokens: Ref
    ) -> None:
        """Begins a product; when it returns, all before this one are done."""
        if self.call.interpret:
            left, right = (x.astype(jnp.float32) for x in (weights, tokens[...]))
            total[...] += jnp.dot(left, right.T)
            return
        plgpu.wgmma(total, weights, tokens.transpose((1, 0)))
        plgpu.wgmma_wait(self.format.in_flight)

    def _stage(self, result: Float[Array, "64 n"], to: Ref) -> None:
        """Writes the transposed result to shared memory, for a copy by TMA."""
        if self.call.interpret:
            to[...] = result.T
            return
        transposed = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
        to.transpose((1, 0))[...] = transposed
        plgpu.commit_smem()


@dataclass(frozen=True, kw_only=True)
class _RowTile:
    """64 rows of a linear at a known number of bits.

    Attributes:
      cut: how the linear is cut.
      pool: ``[chunks, 128 v]``.
      planes: first chunk of each plane, most significant first.
      rows: tables of the rows.
      wide_bits: of the format.
      interpret: whether to compute with jnp.
    """

    cut: _Cut
    pool: Ref
    planes: list[Array]
    rows: Rows
    wide_bits: int
    interpret: bool

    @property
    def width(self) -> int:
        """Column tiles that are loaded at once: fewer where there are many planes."""
        return self.cut.stage_tiles if len(self.planes) <= self.wide_bits else 1

    def load(self, i: Array) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Begins load ``i`` of a row; past the end it is the last one again."""
        parts = self.cut.v // self.width
        i = jnp.minimum(i, self.cut.chunks * parts - 1)
        words = tuple(
            half_weights.load_plane(
                self.pool,
                plane,
                lax.div(i, parts),
                width=self.width,
                part=lax.rem(i, parts),
                interpret=self.interpret,
            )
            for plane in self.planes
        )
        return words, self.rows.load(i * self.width, self.width)

    def unpack(self, loaded: tuple, column: int) -> Float16[Array, "64 64"]:
        """Makes the weights of one of the loaded column tiles."""
        words, of_rows = loaded
        return self.rows.unpack(words, of_rows, column)


def _switch(which: Array, branches: Sequence[Callable[[], None]]) -> None:
    """Runs one branch. A row of `pl.when` would keep registers for those to come."""
    lax.switch(which, branches)
