import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedweight_jax.evaluation import decode_loop, migration_bench, step_bench
from pagedweight_jax.evaluation.decode_loop import DecodeLoop
from pagedweight_jax.evaluation.random_model import (
    QWEN1_5_MOE_A2_7B,
    TINY,
    affine_tables,
    random_model,
)
from pagedweight_jax.evaluation.step_bench import Options
from pagedweight_jax.evaluation.step_bytes import step_bytes
from pagedweight_jax.models.qwen2_moe import Qwen2Moe
from pagedweight_jax.paging.table import average_bits

CONTEXT, ROWS, STAGING = 40, 3, 16


@pytest.mark.slow
def test_the_result_is_json_with_steps_and_migration(capsys):
    options = Options(
        model="tiny",
        batches=(2,),
        contexts=(CONTEXT,),
        precisions=("bf16", "mixed"),
        steps=2,
        migration_steps=3,
        staging_frames=STAGING,
    )
    result = step_bench.run(options)
    assert json.loads(json.dumps(result)) == result
    assert [row["precision"] for row in result["rows"]] == ["mixed", "bf16"]
    for row in result["rows"]:
        assert row["tokens_per_second"] == pytest.approx(2 / row["seconds"])
        assert 0 <= row["outside_kernels"] < 1 and row["bytes"]["kv"] > 0
    (moving,) = result["migration"]
    assert moving["bytes_per_second"] > 0 and moving["p99_ms"] >= moving["p50_ms"]
    assert result["command"].startswith("pagedweight bench step --batch=2")
    assert {"device", "versions", "commit"} <= set(result["measured_with"])
    assert "tokens/s" in capsys.readouterr().out


@pytest.fixture(scope="module")
def loop() -> DecodeLoop:
    model = random_model(TINY, affine_tables(TINY))
    memory = decode_loop.plan_memory(TINY, 6, ROWS, CONTEXT + 1)
    return DecodeLoop(
        model,
        decode_loop.compile_decode(model, memory, ROWS, STAGING),
        memory,
        decode_loop.random_pool(memory),
        decode_loop.pages_at(memory, 4),
        CONTEXT,
    )


def test_steps_are_of_numbers_and_of_the_batch(loop):
    """Random keys and values must not be infinite: NaN would route all tokens alike."""
    for _ in range(3):
        results = loop.results(loop.step())
        assert results.sampled.finite.all()
        assert (results.routing.tokens.sum(axis=1) == ROWS * 2).all()


def test_planes_come_back_and_the_ledgers_agree(loop):
    memory = decode_loop.plan_memory(TINY, 6, ROWS, CONTEXT + 1)
    shuttle = migration_bench.Shuttle(loop, memory, STAGING)
    for _ in range(12):
        jax.block_until_ready(shuttle.step())
    assert shuttle.bytes_committed > 0
    shuttle.finish()
    shuttle._migrator.check_integrity()
    assert (shuttle._migrator.table.bits == 6).all()
    assert (loop.pages.bits == 6).all()


def test_bytes_are_those_of_experts_with_tokens():
    model = random_model(TINY, affine_tables(TINY))
    kv = decode_loop.plan_memory(TINY, 6, ROWS, CONTEXT).kv
    routed = np.array([[1, 0, 0, 0], [0, 2, 3, 0]], np.int32)
    bits = np.full((2, 4, 2), 3, np.int32)
    bits[1, 1] = (4, 6)
    moved = step_bytes(model, kv, routed, bits, num_rows=ROWS, context=CONTEXT)
    assert moved.experts == (9 + (8 + 6) + 9) * 128 * 128 / 8
    assert moved.side_tables == model.expert_bytes() * 3 / 8
    assert moved.kv == ROWS * (CONTEXT + 1) * 2 * 2 * 2 * 64 * 2  # L, k|v, heads, dims
    dense = random_model(TINY, None)
    moved = step_bytes(dense, kv, routed, None, num_rows=ROWS, context=CONTEXT)
    assert moved.experts == 3 * 3 * 128 * 128 * 2 and moved.side_tables == 0
    assert moved.dense == model.dense_bytes() == dense.dense_bytes()


def test_qwen_has_the_size_that_is_published():
    shapes = nnx.eval_shape(
        lambda: Qwen2Moe(
            QWEN1_5_MOE_A2_7B, dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0)
        )
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(shapes)))
    assert count == 14_315_784_192


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"model": "x"}, "model 'x' is unknown; there are"),
        ({"precisions": ("7",)}, r"precisions \['7'\] are unknown"),
        ({"contexts": (8192,)}, "must be from 1 to 8191"),
        ({"batches": (0,)}, r"batches=\(0,\) positive"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        Options(**options)


def test_mixed_precision_is_four_bits_on_average():
    bits = step_bench.bits_of(QWEN1_5_MOE_A2_7B, "mixed")
    assert bits is not None and average_bits(bits) == pytest.approx(4, abs=0.05)
