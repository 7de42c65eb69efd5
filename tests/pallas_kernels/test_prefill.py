"""The prefill kernel against one oracle in NumPy, and the tiles of tokens.

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
from pallas_kernels.fused_moe import arg_specs, prefill, reference
from pallas_kernels.fused_moe.arg_specs import MoeSpec
from pallas_kernels.fused_moe.token_tiles import make_token_tiles, max_tiles

SMALL = MoeSpec(
    width=256, expert_width=128, num_experts=4, top_k=2, group_size=64, parent_bits=8
)
TINY = MoeSpec(
    width=128, expert_width=64, num_experts=4, top_k=2, group_size=64, parent_bits=2
)
CONFIGS = {
    "interpreter": prefill.Config(tile_sizes=(8, 16), stages=2, tiles_per_group=2),
    "gpu": None,
    "gpu, large tiles": prefill.Config(tile_sizes=(64, 128), tiles_per_group=2),
}

# Of the largest result. Three roundings to bfloat16, of 2**-9 each: of the rows of both
# experts of a token, and of their sum. Rounding weights and hidden activations to fp16
# adds little.
TOLERANCE = 3 * 2**-9

every_device = pytest.mark.parametrize(
    "device",
    [
        "interpreter",
        pytest.param("gpu", marks=pytest.mark.gpu),
        pytest.param("gpu, large tiles", marks=pytest.mark.gpu),
    ],
)
every_format = pytest.mark.parametrize("format", ["affine", "codebook", "refined"])


@functools.cache
def jitted(device, activation="silu"):
    return jax.jit(
        functools.partial(
            prefill.fused_moe,
            activation=activation,
            interpret=device == "interpreter",
            config=CONFIGS[device],
        )
    )


def check(problem, device, activation="silu"):
    actual = jitted(device, activation)(*problem.args)
    assert actual.dtype == problem.x.dtype
    actual = np.asarray(actual, np.float32)
    error = testing.relative_error(actual, routed_experts(problem, activation))
    assert error <= TOLERANCE, (
        f"error {error:.2e} with {problem.spec}, T={problem.x.shape[0]},"
        f" bits={problem.bits.tolist()}, ids={problem.expert_ids.tolist()}"
    )


def make(seed, spec, format="affine", *, num_tokens=21, **rest):
    rng = np.random.default_rng(seed)
    return testing.make_moe_problem(
        rng, spec, format, num_tokens=num_tokens, dtype="bfloat16", **rest
    )


@every_device
@every_format
@pytest.mark.slow
def test_every_width_and_a_mixture_of_them(device, format):
    fewest = {"affine": 1, "codebook": SMALL.seed_bits, "refined": 3}[format]
    for bits in [*range(fewest, 9), None]:
        check(make(bits, SMALL, format, bits=bits), device)


@every_device
@every_format
@pytest.mark.parametrize("num_tokens", [1, 16, 67])
def test_any_number_of_tokens(device, format, num_tokens):
    spec = dataclasses.replace(TINY, seed_bits=3, parent_bits=4)
    check(make(num_tokens, spec, format, num_tokens=num_tokens), device)


@every_device
@pytest.mark.parametrize(
    ("width", "expert_width", "group_size", "frames_per_plane"),
    [(256, 128, 128, 1), (256, 128, 64, 2), (192, 64, 64, 1)],
)
def test_every_vector_width_and_cut_of_a_plane(
    device, width, expert_width, group_size, frames_per_plane
):
    spec = dataclasses.replace(
        TINY,
        width=width,
        expert_width=expert_width,
        group_size=group_size,
        frames_per_plane=frames_per_plane,
    )
    check(make(0, spec), device)


@every_device
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_every_activation(device, activation):
    check(make(0, TINY), device, activation)


def patterns(spec, num_tokens, rng):
    """Yields routings for all 2^E sets of experts that may be chosen."""
    for chosen in itertools.product([False, True], repeat=spec.num_experts):
        allowed = np.append(np.flatnonzero(chosen), spec.num_experts)
        yield rng.choice(allowed, (num_tokens, spec.top_k)).astype(np.int32)


@every_device
def test_every_pattern_of_empty_experts(device):
    rng = np.random.default_rng(0)
    routings = list(patterns(TINY, 21, rng))
    if device == "interpreter":
        routings = routings[::4]
    for expert_ids in routings:
        check(make(0, TINY, expert_ids=expert_ids), device)


@every_device
@pytest.mark.parametrize("expert", [0, 3])
def test_one_expert_takes_all_tokens(device, expert):
    ids = np.full((67, TINY.top_k), TINY.num_experts, np.int32)
    ids[:, 1] = expert
    check(make(0, TINY, num_tokens=67, expert_ids=ids), device)


@every_device
def test_padding_tokens_get_exact_zeros(device):
    ids = testing.random_routing(np.random.default_rng(0), 21, TINY)
    ids[1:20:2] = TINY.num_experts
    problem = make(0, TINY, expert_ids=ids)
    check(problem, device)
    out = np.asarray(jitted(device)(*problem.args), np.float32)
    np.testing.assert_array_equal(out[1:20:2], 0)


@every_device
def test_tokens_of_any_size_keep_their_precision(device):
    """Each token is compared with its own largest result."""
    problem = make(0, TINY, num_tokens=21)
    sizes = 10.0 ** np.linspace(-15, 15, 21)
    x = problem.x * jnp.asarray(sizes, problem.x.dtype)[:, None]
    problem = dataclasses.replace(problem, x=x)
    actual = np.asarray(jitted(device)(*problem.args), np.float32)
    expected = routed_experts(problem)
    for row, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert testing.relative_error(a, b) <= TOLERANCE, f"token of size {sizes[row]}"


@every_device
def test_a_token_that_is_not_finite_stays_alone(device):
    problem = make(0, TINY)
    expected = np.asarray(jitted(device)(*problem.args), np.float32)
    for value in (jnp.nan, jnp.inf):
        args = (problem.x.at[2, 5].set(value), *problem.args[1:])
        actual = np.asarray(jitted(device)(*args), np.float32)
        assert not np.isfinite(actual[2]).all()
        others = np.arange(21) != 2
        np.testing.assert_array_equal(actual[others], expected[others])


@every_device
def test_precision_is_data(device):
    """A change of bits, frames or routing is answered by the same trace."""
    run = jax.jit(
        functools.partial(
            prefill.fused_moe,
            interpret=device == "interpreter",
            config=CONFIGS[device],
        )
    )
    for bits in [1, 2]:
        run(*make(bits, TINY, bits=bits).args)
    assert run._cache_size() == 1


def test_every_pair_with_an_expert_has_a_row_and_a_slot_of_its_own():
    make_tiles = jax.jit(
        make_token_tiles,
        static_argnames=("num_experts", "tokens_per_tile", "tiles_per_group"),
    )
    rng = np.random.default_rng(0)
    for m, num_tokens in itertools.product([8, 16], [1, 5, 40, 90]):
        ids = rng.integers(0, 7, (num_tokens, 3)).astype(np.int32)  # 6 is padding
        tiles = make_tiles(
            jnp.asarray(ids), num_experts=6, tokens_per_tile=m, tiles_per_group=2
        )
        slots, valid = np.asarray(tiles.slots), np.asarray(tiles.valid)
        np.testing.assert_array_equal(valid, ids < 6)
        assert len(set(slots[valid])) == valid.sum()
        experts, tokens = np.asarray(tiles.experts), np.asarray(tiles.tokens)
        rows, num_rows = np.asarray(tiles.rows), np.asarray(tiles.num_rows)
        for t, k in zip(*np.nonzero(valid), strict=True):
            tile, place = divmod(slots[t, k], m)
            assert experts[tile] == ids[t, k]
            assert place < num_rows[tile]
            assert rows[tile] % 8 == 0
            assert tokens[rows[tile] + place] == t
        real = experts < 6
        assert num_rows[real].sum() == valid.sum()
        assert np.all(rows[real] + m <= tokens.size)
        starts, sizes = np.asarray(tiles.group_starts), np.asarray(tiles.group_sizes)
        for tile in np.flatnonzero(real):
            group = range(starts[tile], starts[tile] + sizes[tile])
            assert tile in group and len(group) <= 2
            assert len(set(experts[group])) == 1
            assert {starts[i] for i in group} == {starts[tile]}
            assert {sizes[i] for i in group} == {sizes[tile]}


@pytest.mark.parametrize(("num_pairs", "num_experts"), [(1, 4), (9, 2), (40, 3)])
def test_the_bound_on_tiles_is_reached_and_never_passed(num_pairs, num_experts):
    """All ways to spread the pairs; the worst has most tiles with one token more."""
    worst = 0
    for counts in itertools.product(range(num_pairs + 1), repeat=num_experts - 1):
        rest = num_pairs - sum(counts)
        if rest >= 0:
            worst = max(worst, sum(-(-c // 8) for c in (*counts, rest)))
    assert worst == max_tiles(num_pairs, num_experts, 8)


def test_a_frame_that_cuts_a_tile_is_refused():
    spec = dataclasses.replace(TINY, frames_per_plane=2)
    with pytest.raises(ValueError, match="has 1 tiles of 64 rows"):
        jitted("interpreter")(*make(0, spec, num_tokens=1).args)


def test_groups_that_cut_a_tile_are_not_implemented():
    spec = dataclasses.replace(TINY, group_size=32)
    with pytest.raises(NotImplementedError, match="groups of 32 columns"):
        jitted("interpreter")(*make(0, spec, num_tokens=1).args)


@pytest.mark.parametrize("sizes", [(), (12,), (64, 64), (128, 64)])
def test_sizes_of_tiles_that_make_no_sense_are_refused(sizes):
    with pytest.raises(ValueError, match="ascending multiples of 8"):
        prefill.Config(tile_sizes=sizes)


@pytest.mark.gpu
@every_format
@pytest.mark.parametrize("num_tokens", [130, 1000])
@pytest.mark.parametrize("model", sorted(arg_specs.MODELS))
def test_shapes_of_real_models(model, format, num_tokens):
    """Against the reference, since the oracle would take minutes."""
    spec = dataclasses.replace(
        arg_specs.MODELS[model], num_experts=3, top_k=2, parent_bits=4
    )
    problem = make(num_tokens, spec, format, num_tokens=num_tokens)
    expected = jax.jit(reference.fused_moe)(
        problem.x.astype(jnp.float32), *problem.args[1:]
    )
    actual = np.asarray(jitted("gpu")(*problem.args), np.float32)
    assert testing.relative_error(actual, expected) <= TOLERANCE
