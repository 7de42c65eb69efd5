"""Weights from codes and side tables, against the formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_oracle import weights as oracle

from pallas_kernels import testing
from pallas_kernels.fused_moe.arg_specs import MoeSpec
from pallas_kernels.side_tables import AffineTables, CodebookTables

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


@pytest.mark.parametrize("format", ["affine", "codebook"])
@pytest.mark.parametrize("bits", range(2, 7))
def test_weights_follow_the_formula_at_every_number_of_bits(format, bits):
    codes, tables = problem(format, bits)
    absent = SPEC.parent_bits - bits
    actual = weights(
        tables,
        jnp.asarray(codes >> absent << absent, jnp.int32),
        jnp.int32(bits),
        SPEC.parent_bits,
    )
    expected = [
        oracle(codes[e], SPEC.parent_bits, bits, tables, e)
        for e in range(SPEC.num_experts)
    ]
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_fewer_bits_are_the_middle_of_the_finer_levels():
    """Why the affine format is nested: a coarse level is the mean of its finer ones."""
    codes, tables = problem("affine", 6)
    coarse = oracle(codes[0], 6, 3, tables, 0)
    fine = [oracle((codes[0] >> 3 << 3) + i, 6, 6, tables, 0) for i in range(8)]
    np.testing.assert_allclose(np.mean(fine, axis=0), coarse, rtol=1e-9)


def test_tables_know_their_rows_and_the_order_of_their_planes():
    affine, codebook = problem("affine", 4)[1], problem("codebook", 4)[1]
    assert affine.num_rows == codebook.num_rows == 64
    assert (AffineTables.order, CodebookTables.order) == ("split", "pair")
