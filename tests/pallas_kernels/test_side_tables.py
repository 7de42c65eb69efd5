"""Weights from codes and side tables, against the formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_oracle import routed_experts
from moe_oracle import weights as oracle

from pallas_kernels import testing
from pallas_kernels.fused_moe import fused_moe
from pallas_kernels.fused_moe.arg_specs import MoeSpec
from pallas_kernels.side_tables import AffineTables, CodebookTables, RefinedTables

SPEC = MoeSpec(
    width=256, expert_width=64, num_experts=2, top_k=1, parent_bits=6, seed_bits=2
)


def problem(format, bits):
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**SPEC.parent_bits, (SPEC.num_experts, 64, 256), np.uint8)
    return codes, testing.make_tables(rng, SPEC, format, 64, 256)


@functools.partial(jax.jit, static_argnums=3)
def weights(tables, codes, bits, parent_bits):
    return tables.weights(codes, bits, parent_bits)


@pytest.mark.parametrize("format", ["affine", "codebook", "refined"])
@pytest.mark.parametrize("bits", range(2, 7))
def test_weights_follow_the_formula_at_every_number_of_bits(format, bits):
    codes, tables = problem(format, bits)
    absent = SPEC.parent_bits - bits
    actual = weights(
        jax.tree.map(lambda words: words[testing.LAYER], tables),
        jnp.asarray(codes >> absent << absent, jnp.int32),
        jnp.int32(bits),
        SPEC.parent_bits,
    )
    expected = [
        oracle(codes[e], SPEC.parent_bits, bits, tables, e)
        for e in range(SPEC.num_experts)
    ]
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("format", ["affine", "codebook", "refined"])
def test_the_reference_serves_every_format_at_mixed_bits(format):
    spec = MoeSpec(
        width=256, expert_width=128, num_experts=4, top_k=2, parent_bits=8, seed_bits=3
    )
    rng = np.random.default_rng(7)
    problem = testing.make_moe_problem(rng, spec, format, num_tokens=5)
    came = fused_moe(*problem.args, implementation="reference")
    assert testing.relative_error(came, routed_experts(problem)) < 2e-6


def test_fewer_bits_are_the_middle_of_the_finer_levels():
    """Why the affine format is nested: a coarse level is the mean of its finer ones."""
    codes, tables = problem("affine", 6)
    coarse = oracle(codes[0], 6, 3, tables, 0)
    fine = [oracle((codes[0] >> 3 << 3) + i, 6, 6, tables, 0) for i in range(8)]
    np.testing.assert_allclose(np.mean(fine, axis=0), coarse, rtol=1e-9)


def test_tables_know_their_rows_and_the_order_of_their_planes():
    kinds = {"affine": AffineTables, "codebook": CodebookTables}
    kinds |= {"refined": RefinedTables}
    tables = {format: problem(format, 4)[1] for format in kinds}
    assert {format: type(table) for format, table in tables.items()} == kinds
    assert [table.num_rows for table in tables.values()] == [64, 64, 64]
    assert [table.order for table in tables.values()] == ["split", "pair", "split"]


def test_a_refined_level_is_the_middle_of_the_finer_ones_of_its_cluster():
    codes, tables = problem("refined", 6)
    coarse = oracle(codes[0], 6, 3, tables, 0)
    fine = [oracle((codes[0] >> 3 << 3) + i, 6, 6, tables, 0) for i in range(8)]
    np.testing.assert_allclose(np.mean(fine, axis=0), coarse, atol=2e-4)  # of fp16


@pytest.mark.parametrize("kind", [AffineTables, RefinedTables])
def test_a_word_holds_both_parts_of_the_rows_that_a_thread_owns(kind):
    shape = (3, 2, 128)  # batch, groups or clusters, rows
    low = np.arange(np.prod(shape), dtype=np.float16).reshape(shape)
    tables = kind.from_parts(**dict(zip(kind.parts, (low, -low), strict=True)))
    assert tables.words.shape == (3, 2, 2, 64)
    for warp, g, half in np.ndindex(4, 8, 2):
        word = tables.words[2, 1, 0, 16 * warp + 2 * g + half]
        value = low[2, 0, 64 + 16 * warp + g + 8 * half]
        assert word.reshape(1).view(np.float16).tolist() == [value, -value]
    for name, part in zip(kind.parts, (low, -low), strict=True):
        np.testing.assert_array_equal(getattr(tables, name), part)
