"""The fused MoE: every implementation against one oracle in NumPy.

The interpreter is slow to compile, so problems share shapes where they can: precision,
routing and frames are data.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_oracle import routed_experts

from pallas_kernels import testing
from pallas_kernels.fused_moe import arg_specs, fused_moe
from pallas_kernels.fused_moe.arg_specs import MoeSpec

SMALL = MoeSpec(
    width=128, expert_width=64, num_experts=4, top_k=2, group_size=64, parent_bits=8
)
TINY = MoeSpec(
    width=64, expert_width=64, num_experts=4, top_k=2, group_size=64, parent_bits=2
)

IMPLEMENTATIONS = [
    "reference",
    "mosaic_gpu_interpret",
    pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
]
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_format = pytest.mark.parametrize("format", ["affine", "codebook"])

# Of the largest result. float32: sums in another order, and fp16 twice is 22 bits.
# bfloat16: the result is rounded to 8 bits, the hidden activations to fp16.
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-3}


@functools.cache
def jitted(implementation, activation="silu"):
    return jax.jit(
        functools.partial(
            fused_moe, implementation=implementation, activation=activation
        )
    )


def check(problem, implementation, activation="silu"):
    actual = jitted(implementation, activation)(*problem.args)
    assert actual.dtype == problem.x.dtype
    error = testing.relative_error(actual, routed_experts(problem, activation))
    assert error <= TOLERANCE[problem.x.dtype.name], (
        f"error {error:.2e} with {problem.spec}, T={problem.x.shape[0]},"
        f" bits={problem.bits.tolist()}, ids={problem.expert_ids.tolist()}"
    )


@every_implementation
@every_format
@pytest.mark.parametrize("bits", [*range(2, 9), None])
def test_every_width_and_a_mixture_of_them(implementation, format, bits):
    if format == "codebook" and bits == 2:
        pytest.skip("a codebook of 3 seed bits has no level of 2")
    rng = np.random.default_rng(bits)
    problem = testing.make_moe_problem(rng, SMALL, format, num_tokens=4, bits=bits)
    check(problem, implementation)


@every_implementation
@pytest.mark.parametrize("bits", [2, 3])
def test_codebook_of_two_seed_bits(implementation, bits):
    spec = dataclasses.replace(TINY, seed_bits=2, parent_bits=3)
    rng = np.random.default_rng(bits)
    check(
        testing.make_moe_problem(rng, spec, "codebook", num_tokens=4, bits=bits),
        implementation,
    )


@every_implementation
@every_format
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64])
def test_every_number_of_tokens(implementation, format, num_tokens):
    spec = dataclasses.replace(TINY, seed_bits=2)
    rng = np.random.default_rng(num_tokens)
    check(
        testing.make_moe_problem(rng, spec, format, num_tokens=num_tokens),
        implementation,
    )


@every_implementation
@pytest.mark.parametrize(
    ("width", "expert_width", "group_size", "frames_per_plane"),
    [(256, 128, 128, 1), (256, 128, 64, 2), (192, 64, 64, 1)],
)
def test_every_vector_width_and_cut_of_a_plane(
    implementation, width, expert_width, group_size, frames_per_plane
):
    spec = dataclasses.replace(
        TINY,
        width=width,
        expert_width=expert_width,
        group_size=group_size,
        frames_per_plane=frames_per_plane,
    )
    rng = np.random.default_rng(0)
    problem = testing.make_moe_problem(rng, spec, "affine", num_tokens=4)
    check(problem, implementation)


@every_implementation
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_bfloat16_tokens(implementation, activation):
    rng = np.random.default_rng(0)
    problem = testing.make_moe_problem(
        rng, TINY, "affine", num_tokens=4, dtype="bfloat16"
    )
    check(problem, implementation, activation)


@every_implementation
def test_tokens_of_any_size_keep_their_precision(implementation):
    """A token's scale is its own, so tiny and huge tokens share a tile."""
    rng = np.random.default_rng(0)
    problem = testing.make_moe_problem(rng, TINY, "affine", num_tokens=4)
    for i, size in enumerate([1e-12, 1e-3, 1.0, 1e4]):
        x = problem.x.at[i].multiply(size)
        one = jnp.zeros_like(x).at[i].set(x[i])
        check(dataclasses.replace(problem, x=one), implementation)


def patterns(spec, num_tokens, rng):
    """Yields routings for all 2^E sets of experts that may be chosen."""
    for chosen in itertools.product([False, True], repeat=spec.num_experts):
        allowed = np.append(np.flatnonzero(chosen), spec.num_experts)
        yield rng.choice(allowed, (num_tokens, spec.top_k)).astype(np.int32)


@every_implementation
def test_every_pattern_of_empty_experts(implementation):
    rng = np.random.default_rng(0)
    routings = list(patterns(TINY, 4, rng))
    if implementation == "mosaic_gpu_interpret":
        routings = routings[::4]
    for expert_ids in routings:
        problem = testing.make_moe_problem(
            rng, TINY, "affine", num_tokens=4, expert_ids=expert_ids
        )
        check(problem, implementation)


@every_implementation
@pytest.mark.parametrize("expert", [0, 3])
def test_one_expert_takes_all_tokens(implementation, expert):
    rng = np.random.default_rng(0)
    ids = np.full((16, TINY.top_k), TINY.num_experts, np.int32)
    ids[:, 1] = expert
    problem = testing.make_moe_problem(
        rng, TINY, "affine", num_tokens=16, expert_ids=ids
    )
    check(problem, implementation)


@every_implementation
def test_padding_tokens_get_exact_zeros(implementation):
    rng = np.random.default_rng(0)
    ids = testing.random_routing(rng, 4, TINY)
    ids[1], ids[3] = TINY.num_experts, TINY.num_experts
    problem = testing.make_moe_problem(
        rng, TINY, "affine", num_tokens=4, expert_ids=ids
    )
    check(problem, implementation)
    out = np.asarray(jitted(implementation)(*problem.args))
    np.testing.assert_array_equal(out[[1, 3]], 0)


@every_implementation
def test_a_token_that_is_not_finite_stays_alone(implementation):
    rng = np.random.default_rng(0)
    problem = testing.make_moe_problem(rng, TINY, "affine", num_tokens=4)
    expected = np.asarray(jitted(implementation)(*problem.args))
    args = (problem.x.at[2, 5].set(jnp.nan), *problem.args[1:])
    actual = np.asarray(jitted(implementation)(*args))
    assert np.isnan(actual[2]).any()
    others = [0, 1, 3]
    np.testing.assert_allclose(actual[others], expected[others], rtol=1e-5, atol=1e-5)


@every_implementation
def test_precision_is_data(implementation):
    """A change of bits, frames or routing is answered by the same trace."""
    rng = np.random.default_rng(0)
    run = jax.jit(functools.partial(fused_moe, implementation=implementation))
    for bits in [1, 2]:
        problem = testing.make_moe_problem(rng, TINY, "affine", num_tokens=4, bits=bits)
        run(*problem.args)
    assert run._cache_size() == 1


def test_a_frame_that_cuts_a_tile_is_refused():
    rng = np.random.default_rng(0)
    spec = dataclasses.replace(TINY, frames_per_plane=2)
    problem = testing.make_moe_problem(rng, spec, "affine", num_tokens=1)
    with pytest.raises(ValueError, match="has 1 tiles of 64 rows"):
        fused_moe(*problem.args, implementation="mosaic_gpu_interpret")


def test_groups_that_cut_a_tile_are_not_implemented():
    rng = np.random.default_rng(0)
    spec = dataclasses.replace(TINY, group_size=32)
    problem = testing.make_moe_problem(rng, spec, "affine", num_tokens=1)
    with pytest.raises(NotImplementedError, match="groups of 32 columns"):
        fused_moe(*problem.args, implementation="mosaic_gpu_interpret")


@pytest.mark.gpu
@every_format
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("model", sorted(arg_specs.MODELS))
def test_shapes_of_real_models(model, format, num_tokens):
    spec = dataclasses.replace(
        arg_specs.MODELS[model],
        num_experts=3,
        top_k=2,
        parent_bits=4 if model.startswith("mixtral") else 8,
    )
    rng = np.random.default_rng(num_tokens)
    problem = testing.make_moe_problem(rng, spec, format, num_tokens=num_tokens)
    check(problem, "mosaic_gpu")
