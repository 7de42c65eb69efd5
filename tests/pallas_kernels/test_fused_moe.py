"""The fused MoE: every implementation against one oracle in NumPy.

The interpreter is slow: some twenty seconds to compile, and some seconds to run, which
grows with the number of CTAs. So it runs the decode kernel with few of them, problems
share shapes where they can (precision, routing and frames are data), and numbers of
tokens and CTAs at which nothing new happens are left to the GPU. The prefill kernel is
tested in test_prefill.py.
"""

import dataclasses
import functools
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_oracle import routed_experts

from pallas_kernels import testing
from pallas_kernels.fused_moe import (
    api,
    arg_specs,
    decode,
    fused_moe,
    mosaic_gpu,
    prefill,
)
from pallas_kernels.fused_moe.arg_specs import MoeSpec

SMALL = MoeSpec(
    width=128, expert_width=64, num_experts=4, top_k=2, group_size=64, parent_bits=8
)
TINY = MoeSpec(
    width=64,
    expert_width=64,
    num_experts=4,
    top_k=2,
    group_size=64,
    parent_bits=3,
    seed_bits=2,
)

IMPLEMENTATIONS = [
    "reference",
    "mosaic_gpu_interpret",
    pytest.param("mosaic_gpu", marks=pytest.mark.gpu),
]
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_format = pytest.mark.parametrize("format", ["affine", "codebook", "refined"])
FEWEST_BITS = {"affine": 1, "codebook": 3, "refined": 3}
FEW_CTAS = decode.Config(ctas=3, warpgroups=2)


def tolerance(dtype, format):
    """Returns the error that is allowed, of the largest result.

    float32: sums in another order, and tokens rounded to 23 bits.
    bfloat16: hidden activations and results are rounded to 8 bits; the outputs of
    experts, too, where `prefill` computes them, and the decode kernel rounds weights
    that it looks up, since the tensor cores take both sides in one type.
    """
    if dtype == "float32":
        return 1e-5
    return {"affine": 5e-3, "codebook": 1e-2, "refined": 6e-3}[format]


@functools.cache
def jitted(implementation, activation="silu", config=FEW_CTAS):
    if implementation == "mosaic_gpu_interpret":
        run = functools.partial(decode.fused_moe, config=config, interpret=True)
    else:
        run = functools.partial(fused_moe, implementation=implementation)
    return jax.jit(functools.partial(run, activation=activation))


def check_result(problem, actual, format, activation="silu"):
    assert actual.dtype == problem.x.dtype
    actual = np.asarray(actual, np.float32)
    error = testing.relative_error(actual, routed_experts(problem, activation))
    assert error <= tolerance(problem.x.dtype.name, format), (
        f"error {error:.2e} with {problem.spec}, T={problem.x.shape[0]},"
        f" bits={problem.bits.tolist()}, ids={problem.expert_ids.tolist()}"
    )


def check(problem, implementation, format="affine", activation="silu"):
    actual = jitted(implementation, activation)(*problem.args)
    check_result(problem, actual, format, activation)


def dtype_for(implementation, format):
    """Returns the type of tokens that the implementation has this format for."""
    if format == "refined" and implementation != "reference":
        if implementation == "mosaic_gpu_interpret":
            pytest.skip("refined weights are the prefill kernel's: test_prefill.py")
        return "bfloat16"
    return "float32"


@every_implementation
@every_format
@pytest.mark.parametrize("gate_up_first", [False, True])
def test_a_mixture_of_all_widths(implementation, format, gate_up_first):
    """Eight blocks, one at each width; twice, so that gate_up and down have had all."""
    widths = np.arange(1, 9, dtype=np.int32).reshape(4, 2)
    widths = np.maximum(widths, FEWEST_BITS[format])
    ids = np.array([[0, 1], [2, 3], [3, 0], [1, 2]], np.int32)
    problem = testing.make_moe_problem(
        np.random.default_rng(0),
        SMALL,
        format,
        num_tokens=4,
        bits=widths if gate_up_first else widths[:, ::-1],
        expert_ids=ids,
        dtype=dtype_for(implementation, format),
    )
    check(problem, implementation, format)


@pytest.mark.parametrize("implementation", [IMPLEMENTATIONS[0], IMPLEMENTATIONS[2]])
@every_format
@pytest.mark.parametrize("bits", range(1, 9))
def test_every_width(implementation, format, bits):
    if bits < FEWEST_BITS[format]:
        pytest.skip(f"{format} of 3 seed bits has no level of {bits}")
    rng = np.random.default_rng(bits)
    dtype = dtype_for(implementation, format)
    problem = testing.make_moe_problem(
        rng, SMALL, format, num_tokens=4, bits=bits, dtype=dtype
    )
    check(problem, implementation, format)


@every_implementation
@pytest.mark.parametrize("bits", [2, 3])
def test_codebook_of_two_seed_bits(implementation, bits):
    rng = np.random.default_rng(bits)
    problem = testing.make_moe_problem(rng, TINY, "codebook", num_tokens=16, bits=bits)
    check(problem, implementation, "codebook")


@every_implementation
@every_format
@pytest.mark.parametrize("num_tokens", [1, 4, 16, 64])
def test_every_number_of_tokens(implementation, format, num_tokens):
    if implementation == "mosaic_gpu_interpret" and num_tokens != 16:
        pytest.skip("nothing new for the interpreter")
    rng = np.random.default_rng(num_tokens)
    dtype = dtype_for(implementation, format)
    problem = testing.make_moe_problem(
        rng, TINY, format, num_tokens=num_tokens, dtype=dtype
    )
    check(problem, implementation, format)


@every_implementation
def test_no_tokens_give_no_rows(implementation):
    rng = np.random.default_rng(0)
    problem = testing.make_moe_problem(rng, TINY, "affine", num_tokens=0)
    out = fused_moe(*problem.args, implementation=implementation)
    assert out.shape == (0, TINY.width) and out.dtype == problem.x.dtype


@pytest.mark.slow
@every_implementation
@pytest.mark.parametrize(
    ("width", "expert_width", "group_size", "frames_per_plane"),
    [(256, 128, 128, 2), (192, 64, 64, 1)],
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
@pytest.mark.parametrize(
    ("format", "activation"),
    [("affine", "gelu_tanh"), ("affine", "silu"), ("codebook", "silu")],
)
def test_bfloat16_tokens(implementation, format, activation):
    if (implementation, activation) == ("mosaic_gpu_interpret", "silu"):
        pytest.skip("two compilations that others make up for")
    rng = np.random.default_rng(0)
    problem = testing.make_moe_problem(
        rng, TINY, format, num_tokens=4, dtype="bfloat16"
    )
    check(problem, implementation, format, activation)


def decode_with(problem, config, implementation):
    """Runs the decode kernel on the device of an implementation."""
    interpret = implementation == "mosaic_gpu_interpret"
    run = functools.partial(decode.fused_moe, config=config, interpret=interpret)
    return jax.jit(run)(*problem.args)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize(
    ("tokens_per_tile", "warpgroups", "column_parts"), [(8, 4, 2), (16, 2, 3)]
)
def test_every_cut_of_the_work(
    implementation, tokens_per_tile, warpgroups, column_parts
):
    """Warpgroups without columns, and column parts without any, add nothing."""
    config = decode.Config(
        tokens_per_tile=tokens_per_tile,
        warpgroups=warpgroups,
        ctas=3,
        column_parts=column_parts,
    )
    spec = dataclasses.replace(TINY, width=128, expert_width=320)
    rng = np.random.default_rng(0)
    problem = testing.make_moe_problem(rng, spec, "affine", num_tokens=12)
    check_result(problem, decode_with(problem, config, implementation), "affine")


@every_implementation
def test_tokens_of_any_size_keep_their_precision(implementation):
    """A token's scale is its own, so tiny and huge tokens share a tile."""
    rng = np.random.default_rng(0)
    problem = testing.make_moe_problem(rng, TINY, "affine", num_tokens=4)
    sizes = jnp.array([[1e-12], [1e-3], [1.0], [1e4]])
    problem = dataclasses.replace(
        problem, x=problem.x * jnp.broadcast_to(sizes, (4, 64))
    )
    actual = np.asarray(jitted(implementation)(*problem.args))
    expected = routed_experts(problem)
    for size, row, expected_row in zip(sizes, actual, expected, strict=True):
        error = testing.relative_error(row, expected_row)
        assert error <= tolerance("float32", "affine"), f"{error:.2e} at {size}"


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
        routings = routings[::5]
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
    out = jitted(implementation)(*problem.args)
    check_result(problem, out, "affine")
    np.testing.assert_array_equal(np.asarray(out)[[1, 3]], 0)


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
    run, traces = jitted(implementation), []
    for bits in [1, 3]:
        problem = testing.make_moe_problem(rng, TINY, "affine", num_tokens=4, bits=bits)
        run(*problem.args)
        traces.append(run._cache_size())
    assert traces[0] == traces[1]


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


def test_the_reference_takes_over_with_one_line_in_the_log(monkeypatch, caplog):
    rng = np.random.default_rng(0)
    spec = dataclasses.replace(TINY, group_size=32)
    problem = testing.make_moe_problem(rng, spec, "affine", num_tokens=4)
    monkeypatch.setattr(api, "default_implementation", lambda: "mosaic_gpu")
    api._tell_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger=api.__name__):
        for _ in range(2):
            check_result(problem, fused_moe(*problem.args), "affine")
    (record,) = caplog.records
    assert "plain JAX" in record.message and "groups of 32 columns" in record.message


@pytest.mark.parametrize(
    ("format", "dtype", "num_tokens", "calls"),
    [
        ("affine", "float32", 4, ["decode"]),
        ("affine", "float32", 64, ["decode"]),
        ("affine", "bfloat16", 32, ["decode"]),
        ("affine", "bfloat16", 33, ["prefill"]),
        ("refined", "bfloat16", 1, ["prefill"]),
        ("affine", "float32", 1100, ["decode"] * 3),  # 512 tokens a call
    ],
)
def test_which_kernel_serves_a_call(monkeypatch, format, dtype, num_tokens, calls):
    called = []
    for kernel in (decode, prefill):
        name = kernel.__name__.rpartition(".")[2]

        def note(x, *_, name=name, **__):
            called.append(name)
            return x

        monkeypatch.setattr(kernel, "fused_moe", note)
    problem = testing.make_moe_problem(
        np.random.default_rng(0), TINY, format, num_tokens=num_tokens, dtype=dtype
    )
    out = mosaic_gpu.fused_moe(*problem.args)
    assert called == calls
    np.testing.assert_array_equal(out, problem.x)  # every token once, in order


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
    dtype = dtype_for("mosaic_gpu", format)
    problem = testing.make_moe_problem(
        rng, spec, format, num_tokens=num_tokens, dtype=dtype
    )
    check(problem, "mosaic_gpu", format)
