"""What the threads of the kernels do, executed in NumPy: see `attention_warpgroup`."""

import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import SCALE, Row, check_used, make_layout, make_step
from attention_warpgroup import Cluster

from pallas_kernels.paged_attention import decode_threads, prefill_threads
from pallas_kernels.paged_attention.decode_threads import (
    EMPTY,
    QUERIES,
    TOKENS,
    Place,
    Unit,
)
from pallas_kernels.paged_attention.layout import pack_rows, stored
from pallas_kernels.paged_attention.prefill_threads import Cut, Tokens

LAYER = 2
TOLERANCE = {"bfloat16": 2**-8, "float8_e4m3fn": 2**-8}  # weights and results rounded


def decode(monkeypatch, unit, step, window):
    """Runs the kernel's steps for every unit, in step and without the ring."""
    q, k, v, pool, rows, layer = step.args
    fresh = np.asarray(pack_rows(k, v, unit.layout))[:, 0]
    q, pool = np.asarray(q)[:, 0], np.asarray(pool)
    table = np.asarray(rows.block_frames).reshape(len(q), -1)
    out = np.full(q.shape, np.nan, jnp.bfloat16)
    heads = unit.layout.num_kv_heads
    for number in range(len(q) * heads * unit.parts):
        row, of_row = divmod(number, heads * unit.parts)
        head, part = divmod(of_row, unit.parts)
        cluster = Cluster(unit.splits, unit.warpgroups, q, fresh, pool, table, out)
        cluster.take_the_place_of_instructions(monkeypatch)
        cached = int(rows.cached[row])
        first = max(0, cached + 1 - window) if window else 0
        place = Place(
            row=cluster.scalar(row),
            head=cluster.scalar(head),
            part=cluster.scalar(part),
            layer=cluster.scalar(int(layer)),
            cached=cluster.scalar(cached),
            first=cluster.scalar(first),
            warpgroup=cluster.warpgroup,
        )
        begin = first // 16 * 16
        steps = -(-(cached + 1 - begin) // TOKENS) if rows.lengths[row] else 0
        decode_unit(cluster, unit, place, begin, steps)
        out = cluster.contents(4).copy()
    return out.astype(np.float32)[:, None]


def decode_unit(cluster, unit, place, begin, steps):
    q, fresh, pool, table, out = cluster.refs
    queries = (2 * unit.warpgroups) * 4 * unit.slot_words
    slots = 8 * unit.slot_words * cluster.warpgroup
    keys, values = slots, slots + 4 * unit.slot_words
    sharers = unit.splits * unit.warpgroups
    sharer = cluster.cta * unit.warpgroups + cluster.warpgroup

    def start(i):
        return (begin + (i * sharers + sharer) * TOKENS).astype(np.int32)

    decode_threads.store_queries(unit, place, q, queries)
    sums = [cluster.real(0.0)] * (unit.layout.head_dim // 4)
    top, total = [cluster.real(EMPTY)] * 2, [cluster.real(0.0)] * 2
    for i in range(-(-steps // sharers)):
        frame = decode_threads.frame_of_lane(unit, place, table, start(i))
        token_rows = decode_threads.row_of_lane(
            unit, place, pool, fresh, frame, start(i)
        )
        decode_threads.copy_keys(unit, keys, token_rows)
        decode_threads.copy_values(unit, values, token_rows)
        weights, keep, top, total = decode_threads.fold_key_pieces(
            unit, place, queries, keys, start(i), top, total
        )
        sums = decode_threads.fold_value_pieces(unit, values, weights, keep, sums)
    decode_threads.store_results(unit, place, 0, sums, top, total)
    if unit.splits > 1:
        decode_threads.combine_warps(unit, place, 0)
    decode_threads.combine_results(unit, place, 0, out)


def check(monkeypatch, layout, cached, window=None, heads=4, splits=2, warpgroups=1):
    rows = [Row(s, c, 1) for s, c in enumerate(cached)] + [Row(0, 0, 0)]
    step = make_step(
        layout, cached, rows, 1, layer=LAYER, heads=heads, dtype="bfloat16"
    )
    unit = Unit(
        layout=layout,
        num_heads=heads,
        scale=SCALE,
        splits=splits,
        warpgroups=warpgroups,
        interpret=False,
    )
    actual = decode(monkeypatch, unit, step, window)
    check_used(actual, step, layout, window, TOLERANCE[layout.dtype])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_type_and_head(monkeypatch, dtype, head_dim):
    layout = make_layout(dtype, 7, 2, head_dim, block_size=16, waste=4)
    check(monkeypatch, layout, [70])


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 1), (6, 2), (24, 2)])
def test_query_heads_share_their_key_value_head(monkeypatch, heads, kv_heads):
    layout = make_layout("bfloat16", 5, kv_heads, 64, waste=4)
    check(monkeypatch, layout, [9], heads=heads, splits=1)
    assert heads // kv_heads <= QUERIES or heads == 24  # the last one has two parts


@pytest.mark.parametrize("window", [None, 1, 40, 100])
@pytest.mark.parametrize(("splits", "warpgroups"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_any_number_of_tokens_in_any_window(monkeypatch, window, splits, warpgroups):
    layout = make_layout("bfloat16", 5, 1, 64, waste=4)
    cached = [0, 1, 15, 16, 17, 63, 64, 150, 300]
    check(monkeypatch, layout, cached, window, splits=splits, warpgroups=warpgroups)


def unswizzled(tile, parts, tokens, columns):
    """Reads ``[parts, tokens, columns]`` of 16-bit values from a swizzled tile."""
    out = np.empty((parts, tokens, columns), tile.dtype)
    tile = tile.reshape(parts, tokens // 8, columns // 64, 8, 8, 8)
    for row in range(8):
        for piece in range(8):
            at = tile[:, :, :, row, piece ^ row]  # [parts, tokens / 8, runs, 8]
            for run in range(columns // 64):
                column = slice(64 * run + 8 * piece, 64 * run + 8 * piece + 8)
                out[:, row::8, column] = at[:, :, run]
    return out


@pytest.mark.parametrize("stored_as", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("head_dim", "warpgroups"), [(64, 1), (128, 2), (512, 2)])
@pytest.mark.parametrize("is_fresh", [False, True])
def test_tiles_lie_as_wgmma_reads_them(
    monkeypatch, stored_as, head_dim, warpgroups, is_fresh
):
    layout = make_layout(stored_as, 5, 2, head_dim, waste=4)
    rows = [Row(1, 90, 20), Row(0, 0, 20)]
    step = make_step(layout, [0, 90], rows, 20, layer=LAYER, dtype="bfloat16")
    _, k, v, pool, table, layer = step.args
    fresh = np.asarray(pack_rows(k, v, layout)).reshape(40, -1)
    frames = np.asarray(table.block_frames).reshape(2, -1)
    cut = Cut(
        layout=layout, tokens=64, queries=20, warpgroups=warpgroups, interpret=False
    )
    start, stop = (90, 110) if is_fresh else (48, 90)
    cluster = Cluster(1, warpgroups, np.asarray(pool), fresh, frames)
    cluster.take_the_place_of_instructions(monkeypatch)
    fields = (0, 1, int(layer), start, stop, 90, -90, int(is_fresh))
    tokens = Tokens(
        **dict(
            zip(Tokens.__dataclass_fields__, map(cluster.scalar, fields), strict=True)
        )
    )
    at = cut.tokens * head_dim * 2
    prefill_threads.copy_tokens(cut, tokens, *cluster.refs, 0, at, cluster.warpgroup)

    memory = cluster.shared[0]
    for nth, sequence in enumerate((step.keys[1], step.values[1])):
        tile = memory[nth * at : nth * at + at].view(
            np.float16 if cut.converts else jnp.bfloat16
        )
        actual = unswizzled(tile, cut.parts, cut.tokens, cut.columns)
        actual = np.concatenate(list(actual), axis=1).astype(np.float32)
        expected = np.zeros((64, head_dim), np.float32)
        values = stored(jnp.asarray(sequence[start:stop, 1], jnp.float32), stored_as)
        expected[: stop - start] = values.astype(jnp.float32)
        np.testing.assert_array_equal(actual, expected)
