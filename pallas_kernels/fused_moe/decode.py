"""The fused MoE for few tokens: planes at the speed of memory, two launches.

    expert ids --(routing)--> this CTA's units: expert, tile of tokens, row step
                                        |
      for each segment (units of one expert and one tile of tokens)
        planes of the first chunk: on their way to registers
        tokens of the segment: gathered into SMEM as fixed point   (fixed_point)
        for each unit: two row tiles, half of the warpgroups each
          warpgroup: for each of its column chunks
                       planes of its next chunk: on their way to registers
                       unpack -> mma.sync                          (tile_product)
                     sums -> SMEM, barrier
          all threads: add up the warpgroups' sums, finish, store
                       gate_up   act(gate) * up -> hidden activations of the pair
                       down      both row tiles -> output of the pair

    y[t] = sum_k weight[t, k] * output of the pair (t, k)                   [XLA]

The grid is persistent. Bits, frames and layer are data; there is one static branch for
each number of bits. Affine codes meet fixed-point tokens on the integer tensor cores:
nothing is rounded but the tokens, to 16 bits (float32: 23) of the largest in a span.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, UInt32

from pallas_kernels.bitplane import TILE
from pallas_kernels.fused_moe import thread_code, tile_product
from pallas_kernels.fused_moe.decode_formats import format_of
from pallas_kernels.fused_moe.decode_sizes import Config as Config
from pallas_kernels.fused_moe.decode_sizes import Linear, default_config
from pallas_kernels.fused_moe.reference import Activation
from pallas_kernels.fused_moe.registers import Ref
from pallas_kernels.fused_moe.routing import (
    Position,
    RoutingRefs,
    Segment,
    Share,
    route,
)
from pallas_kernels.side_tables import SideTables

_SUMS_PADDING = 4  # values after each 64 sums, so that stores meet no bank twice


def fused_moe(
    x: Float[Array, "T D"],
    expert_ids: Int32[Array, "T top_k"],
    expert_weights: Float32[Array, "T top_k"],
    pool: UInt32[Array, "num_frames frame_words"],
    frames: Int32[Array, "L E 3 parent_bits frames_per_plane"],
    bits: Int32[Array, "L E 2"],
    gate_up: SideTables,
    down: SideTables,
    layer: Int32[Array, ""],
    *,
    activation: Activation = "silu",
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "T D"]:
    """Computes the routed experts; see `pallas_kernels.fused_moe.fused_moe`.

    Args:
      x: tokens, bfloat16 or float32.
      expert_ids: experts of each token; ``E`` for none.
      expert_weights: combine weights.
      pool: the paged pool; frame 0 is all zeros.
      frames: frames of gate, up and down.
      bits: committed bits, from 1 (codebook: from the seed bits) to ``parent_bits``.
      gate_up: side tables of gate above up.
      down: side tables of down.
      layer: which of the L layers.
      activation: of the gate branch.
      config: sizes of the kernel; None chooses them.
      interpret: whether to run on the CPU interpreter of Mosaic GPU.
    Returns:
      The routed sum, in the type of ``x``.
    Raises:
      ValueError: if a frame does not hold whole 64-row tiles.
      NotImplementedError: if groups of columns are not made of 64-column tiles.
    """
    num_tokens, width = x.shape
    top_k, expert_width = expert_ids.shape[1], gate_up.num_rows // 2
    config = config or default_config(
        expert_ids.size, frames.shape[1], width, expert_width, _parts(x)
    )

    def paged(source: Array, tables: SideTables, act: Activation | None) -> Array:
        linear = Linear(
            num_rows=width if act is None else expert_width,
            num_columns=source.shape[1],
            num_pairs=expert_ids.size,
            num_experts=frames.shape[1],
            parent_bits=frames.shape[3],
            frames_per_plane=frames.shape[4],
            parts=_parts(x),
            pairs_per_row=expert_ids.size // source.shape[0],
            activation=act,
            config=config,
            interpret=interpret,
        )
        ids = expert_ids.reshape(-1)
        return _paged_linear(
            linear, source, ids, pool, frames, bits, tables, layer, x.dtype
        )

    hidden = paged(x, gate_up, activation)
    rows = paged(hidden, down, None).reshape(-1, num_tokens, top_k, width)
    # The row of a pair without an expert holds whatever the memory held.
    valid = (expert_ids < frames.shape[1])[None, :, :, None]
    weighted = jnp.where(valid, rows * expert_weights[None, :, :, None], 0)
    return jnp.sum(weighted, axis=(0, 2)).astype(x.dtype)


def _parts(x: Array) -> int:
    return 2 if x.dtype == jnp.bfloat16 else 3


def _paged_linear(
    linear: Linear,
    source: Float[Array, "rows K"],
    ids: Int32[Array, "pairs"],
    pool: UInt32[Array, "num_frames frame_words"],
    frames: Int32[Array, "L E 3 parent_bits frames_per_plane"],
    bits: Int32[Array, "L E 2"],
    tables: SideTables,
    layer: Int32[Array, ""],
    dtype: jnp.dtype,
) -> Float[Array, "pairs_and_parts N"]:
    """Multiplies the row of each pair with its expert's linear(s).

    Rows of pairs without an expert are left as they are.
    """
    config, work = linear.config, linear.work
    warpgroups, interpret = config.warpgroups, linear.interpret
    format_ = format_of(linear, tables)
    width = linear.parent_bits * linear.frames_per_plane  # frames of a linear
    out_dtype = dtype if linear.activation else jnp.float32
    sharers = warpgroups // 2  # of the columns of a row tile

    def kernel(
        source_ref: Ref,
        ids_ref: Ref,
        pool_ref: Ref,
        frames_ref: Ref,
        bits_ref: Ref,
        layer_ref: Ref,
        table_ref: Ref,
        out_ref: Ref,
        x_smem: Ref,
        scales_smem: Ref,
        sums_smem: Ref,
        frames_smem: Ref,
        barrier: Ref,
        routing: RoutingRefs,
    ) -> None:
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        half = lax.div(warpgroup, sharers)  # of the two row tiles of a unit
        rank = warpgroup - half * sharers
        layer = layer_ref[0]

        def synchronize() -> None:
            thread_code.synchronize(barrier, interpret=interpret)

        @pl.when(warpgroup == 0)
        def _() -> None:
            block = 0 if linear.activation else 1
            of_block = bits_ref.at[layer, block]
            route(work, ids_ref, of_block, routing, interpret=interpret)

        synchronize()
        share = Share.of(work, routing, cta, config.ctas)

        def copy_frames(position: Position, buffer: Array) -> None:
            @pl.when(share.holds(position))
            def _() -> None:
                of_block = pl.ds(linear.linears[0] * width, frames_smem.shape[1])
                thread_code.copy_words(
                    frames_ref.at[layer, share.segment(position).expert, of_block],
                    frames_smem.at[buffer],
                    interpret=interpret,
                )

        def run(b: int, segment: Segment, buffer: Array, upcoming: Position) -> None:
            first = segment.column_part * linear.chunks_per_part
            last = jnp.minimum(first + linear.chunks_per_part, linear.chunks)
            mine = first + rank
            count = jnp.maximum(0, lax.div(last - mine + (sharers - 1), sharers))

            def tile_of(r: Array) -> Array:
                tile = r if linear.activation else 2 * r + half
                return jnp.minimum(tile, linear.row_tiles - 1)

            def table_of(r: Array) -> Ref:
                tile = tile_of(r)
                if linear.activation:
                    tile = tile + half * linear.row_tiles
                return format_.of_tile(table_ref.at[layer, segment.expert], tile)

            def load(position: tuple[Array, Array]) -> list[tuple]:
                r, chunk = position
                tile = tile_of(r)
                part = lax.div(tile, linear.tiles_per_frame)
                row = (tile - part * linear.tiles_per_frame) * linear.loads
                if linear.activation:
                    part = part + half * width
                results = []
                for i in range(linear.loads_per_chunk):
                    number = chunk * linear.loads_per_chunk + i
                    number = jnp.minimum(number, linear.loads - 1)
                    planes = [
                        plgpu.load(
                            pool_ref.at[
                                frames_smem[buffer, part + j * linear.frames_per_plane],
                                row + number,
                            ],
                            layout=tile_product.words_layout(linear.vector),
                            optimized=False,
                        )
                        for j in range(b)
                    ]
                    results.append((planes, format_.load(table_of(r), number)))
                return results

            def following(position: tuple[Array, Array]) -> tuple[Array, Array]:
                r, chunk = position
                wraps = chunk + sharers >= last
                r = jnp.where(wraps, jnp.minimum(r + 1, segment.stop - 1), r)
                return r, jnp.where(wraps, mine, chunk + sharers)

            position = (segment.start, mine)
            ahead = load(position)
            synchronize()  # all have done with the tokens of the segment before
            format_.prepare(
                source_ref,
                routing.order,
                x_smem,
                scales_smem,
                segment,
                warpgroup,
            )
            copy_frames(upcoming, 1 - buffer)
            synchronize()

            def unit(j: Array, carry: tuple) -> tuple:
                r = segment.start + j

                def chunk_step(i: Array, carry: tuple) -> tuple:
                    sums, position, loaded = carry
                    ahead = load(position)  # in flight while this chunk is multiplied
                    chunk = rank + i * sharers  # of the column part
                    for k, (planes, side) in enumerate(loaded):
                        number = chunk * linear.loads_per_chunk + k
                        size = TILE * linear.vector
                        sums = format_.product(
                            sums,
                            x_smem.at[:, pl.ds(number * size, size)],
                            scales_smem,
                            number,
                            planes,
                            side,
                            table_of(r),
                        )
                    return sums, following(position), ahead

                zeros = plgpu.layout_cast(
                    jnp.zeros((TILE, sums_smem.shape[2]), jnp.float32),
                    tile_product.ACCUMULATOR,
                )
                sums, *rest = lax.fori_loop(0, count, chunk_step, (zeros, *carry))
                sums_ref = sums_smem.at[lax.rem(j, 2)]
                thread_code.store_sums(
                    sums, sums_ref.at[warpgroup], interpret=interpret
                )
                synchronize()
                thread_code.finish(
                    thread_code.Finish(
                        tokens=config.tokens_per_tile,
                        parts=format_.rows_per_token,
                        warpgroups=warpgroups,
                        row_tiles=linear.row_tiles,
                        activation=linear.activation,
                    ),
                    sums_ref,
                    routing.order,
                    out_ref,
                    first_pair=segment.first_pair,
                    num_tokens=segment.num_tokens,
                    first_row=segment.column_part * linear.num_pairs,
                    row_step=r,
                    warpgroup=warpgroup,
                    interpret=interpret,
                )
                return tuple(rest)

            count_units = segment.stop - segment.start
            lax.fori_loop(0, count_units, unit, (following(position), ahead))

        def body(carry: tuple) -> tuple:
            place, first_unit, buffer = carry
            position = (place, first_unit)
            segment, upcoming = share.segment(position), share.next(position)
            for b in format_.bit_widths:
                pl.when(segment.bits == b)(
                    lambda b=b: run(b, segment, buffer, upcoming)
                )
            return (*upcoming, 1 - buffer)

        position = share.first()
        copy_frames(position, jnp.int32(0))
        synchronize()
        lax.while_loop(
            lambda carry: share.holds(carry[:2]), body, (*position, jnp.int32(0))
        )

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(
            (linear.column_parts * linear.num_pairs, linear.num_rows), out_dtype
        ),
        grid=(config.ctas,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            *format_.scratch(),
            plgpu.SMEM(
                (
                    2,
                    warpgroups,
                    config.tokens_per_tile * format_.rows_per_token,
                    TILE + _SUMS_PADDING,
                ),
                jnp.float32,
            ),
            plgpu.SMEM((2, len(linear.linears) * width), jnp.int32),
            plgpu.Barrier(num_arrivals=warpgroups),
            work.scratch(),
        ],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=plgpu.InterpretGPUParams() if linear.interpret else None,
    )(
        source,
        ids,
        pool.reshape(
            pool.shape[0], linear.tiles_per_frame * linear.loads, 128 * linear.vector
        ),
        frames.reshape(*frames.shape[:2], -1),
        jnp.swapaxes(bits, 1, 2),
        layer.reshape(1),
        *jax.tree.leaves(tables),
    )
