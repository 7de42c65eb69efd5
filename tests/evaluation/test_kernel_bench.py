import json

import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax.evaluation import jax_rivals, kernel_bench
from pagedweight_jax.evaluation import moe_workload as workload
from pagedweight_jax.evaluation.kernel_bench import TINY, Options
from pagedweight_jax.evaluation.kernel_cells import arguments, make_tables
from pagedweight_jax.evaluation.kernel_rows import DEQUANTISE, OURS, RAGGED_DOT, Layer
from pallas_kernels.fused_moe import fused_moe
from pallas_kernels.testing import relative_error

LAYER = Layer(shape="tiny", spec=TINY, activation="silu", ceiling=1e9)


def test_the_result_is_json_with_rows_of_ours_and_of_rivals(capsys):
    options = Options(
        shapes=("tiny",),
        bits=("4", "mixed"),
        tokens=(16,),
        formats=("affine",),
        calls=1,
        torch=False,
    )
    result = kernel_bench.run(options)
    assert json.loads(json.dumps(result)) == result
    rows = result["rows"]
    assert {row["implementation"] for row in rows} == {OURS, RAGGED_DOT, DEQUANTISE}
    assert {row["routing"] for row in rows} == {"balanced", "random"}
    assert all(row["seconds"] > 0 and row["bytes_per_second"] > 0 for row in rows)
    assert {"time / contiguous", "time / row scales"} <= {
        check["target"] for row in rows for check in row["checks"]
    }
    assert result["command"].startswith("pagedweight bench kernels --shapes=tiny")
    assert {"device", "versions", "commit"} <= set(result["measured_with"])
    assert len(capsys.readouterr().out.splitlines()) == 3 + len(rows)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"shapes": ("llama",)}, r"shapes \['llama'\] are unknown; there are \['qwen'"),
        ({"bits": ("2",)}, r"bits \['2'\] are unknown"),
        ({"tokens": (0,)}, r"tokens=\(0,\) and calls=12 must be positive"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        Options(**options)


def test_balanced_routing_gives_all_experts_equally_many_tokens():
    tokens = workload.make_tokens(TINY, 6, "balanced", 3)
    for ids in tokens.ids:
        assert np.bincount(ids.ravel()).tolist() == [3, 3, 3, 3]
        assert (ids[:, 0] != ids[:, 1]).all(), "a token has an expert twice"
    assert tokens.active_experts == 4


def test_bytes_are_those_of_active_experts_at_their_bits():
    tables = make_tables(LAYER, "affine").blocks
    tokens = workload.make_tokens(TINY, 1, "random", 5)
    bits = workload.mixed_bits(TINY, 3, 6)
    read = workload.bytes_read(TINY, tokens, bits, *tables)
    plane = TINY.width * TINY.expert_width / 8
    expected = [
        plane * (2 * bits[i % 4, e, 0] + bits[i % 4, e, 1])
        for i, ids in enumerate(tokens.ids)
        for e in ids.ravel()
    ]
    assert read.planes == pytest.approx(sum(expected) / 5)
    # Two experts of (256 + 128) rows, two groups of 64 columns, 4 bytes each.
    assert read.tables == 2 * (256 + 128) * 2 * 4


def test_of_a_codebook_only_the_entries_of_a_level_count():
    tables = make_tables(LAYER, "codebook")
    sizes = workload.table_bytes(tables.down, np.array([3, 6], np.int32))
    assert sizes.tolist() == [2 * 128 * 2**3, 2 * 128 * 2**6]


def test_pages_in_order_name_every_frame_once():
    planes = workload.random_planes(TINY)
    for frames in (planes.frames, workload.in_order(planes).frames):
        assert np.array_equal(np.sort(frames.ravel()), 1 + np.arange(frames.size))
    assert (planes.pool[0] == 0).all()


def test_the_dequantising_rival_computes_what_we_compute():
    planes = workload.random_planes(TINY)
    tables = make_tables(LAYER, "affine")
    tokens = workload.make_tokens(TINY, 5, "random", 2)
    bits = jnp.asarray(workload.uniform_bits(TINY, 4))
    active = jax_rivals.active_experts(tokens.ids, TINY.num_experts)
    for call, args in enumerate(arguments(tokens, planes, bits, tables)):
        ours = fused_moe(*args, implementation="reference")
        theirs = jax_rivals.dequantized_moe(
            *args[:3],
            jnp.asarray(active[call]),
            planes.pool,
            planes.frames[..., :4, :],
            *tables.blocks,
            args[-1],
            "silu",
        )
        wide = (a.astype(jnp.float32) for a in (theirs, ours))
        assert relative_error(*wide) < 0.03, "bfloat16 weights and products"
