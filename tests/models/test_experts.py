"""Router and experts against NumPy, one token and one expert at a time."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pagedweight_jax.models.moe import (
    DenseExperts,
    PagedExperts,
    Router,
    SideTableShapes,
    routed_tokens,
    routing_counts,
)

TOKENS, WIDTH, INNER, EXPERTS, TOP_K = 11, 64, 64, 5, 3
SEED = 20


def experts() -> DenseExperts:
    return DenseExperts(
        EXPERTS,
        WIDTH,
        INNER,
        activation="silu",
        dtype=jnp.dtype("float32"),
        rngs=nnx.Rngs(SEED),
    )


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, distinct experts of each (E for the last two tokens), weights."""
    rng = np.random.default_rng(SEED)
    x = rng.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    ids[-2:] = EXPERTS
    weights = rng.random((TOKENS, TOP_K)).astype(np.float32)
    return x, ids.astype(np.int32), weights


def hidden(module: DenseExperts, x: np.ndarray, expert: int) -> np.ndarray:
    gate, up = np.split(np.asarray(module.gate_up[...], np.float64)[expert], 2)
    z = gate @ x
    return z / (1 + np.exp(-z)) * (up @ x)


def test_dense_experts_compute_the_weighted_sum_of_the_chosen_ones():
    module, (x, ids, weights) = experts(), inputs()
    down = np.asarray(module.down[...], np.float64)
    wanted = np.zeros((TOKENS, WIDTH))
    for t, e, w in _visits(ids, weights):
        wanted[t] += w * (down[e] @ hidden(module, x[t], e))
    none = jnp.zeros((1, 1), jnp.uint32)
    got = module(
        jnp.asarray(x), jnp.asarray(ids), jnp.asarray(weights), none, None, jnp.int32(0)
    )
    np.testing.assert_allclose(got, wanted, atol=1e-5, rtol=0)
    assert not np.asarray(got)[-2:].any(), "tokens without an expert got something"


def test_input_moments_are_sums_of_squares_over_the_routed_tokens():
    module, (x, ids, weights) = experts(), inputs()
    gate_up, down = np.zeros((EXPERTS, WIDTH)), np.zeros((EXPERTS, INNER))
    for t, e, _ in _visits(ids, weights):
        gate_up[e] += x[t].astype(np.float64) ** 2
        down[e] += hidden(module, x[t], e) ** 2
    moments = module.input_moments(jnp.asarray(x), jnp.asarray(ids))
    np.testing.assert_allclose(moments.gate_up, gate_up, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(moments.down, down, rtol=1e-4, atol=1e-6)


def _visits(ids: np.ndarray, weights: np.ndarray) -> list[tuple[int, int, float]]:
    return [
        (t, int(ids[t, k]), float(weights[t, k]))
        for t in range(TOKENS)
        for k in range(TOP_K)
        if ids[t, k] < EXPERTS
    ]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_router_takes_the_best_experts_in_float32(normalize, dtype):
    router = Router(
        WIDTH,
        EXPERTS,
        TOP_K,
        normalize=normalize,
        dtype=jnp.dtype(dtype),
        rngs=nnx.Rngs(SEED),
    )
    x = jnp.asarray(inputs()[0], dtype)
    valid = np.arange(TOKENS) < TOKENS - 2
    ids, shares = router(x, jnp.asarray(valid))
    weight = np.asarray(router.weight[...].astype(jnp.float32), np.float64)
    logits = np.asarray(x.astype(jnp.float32), np.float64) @ weight.T
    exact = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    order = np.argsort(-exact, axis=1)[:, :TOP_K]
    wanted = np.take_along_axis(exact, order, axis=1)
    if normalize:
        wanted /= wanted.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(ids, np.where(valid[:, None], order, EXPERTS))
    np.testing.assert_allclose(shares, wanted, rtol=1e-5)


def test_routing_counts_leave_padding_out():
    x, ids, _ = inputs()
    valid = np.arange(TOKENS) < TOKENS - 2
    routed = routed_tokens(jnp.asarray(x), jnp.asarray(ids))
    counts = routing_counts(routed, jnp.asarray(valid), EXPERTS)
    assert counts.tokens.tolist() == [int((ids == e).sum()) for e in range(EXPERTS)]
    norms = np.sqrt((x[:-2].astype(np.float64) ** 2).mean(axis=1))
    wanted = [norms.sum(), (norms**2).sum(), norms.max()]
    np.testing.assert_allclose(counts.norms, wanted, rtol=1e-5)


def test_paged_experts_without_pages_say_what_is_missing():
    shapes = SideTableShapes(
        format="affine", parent_bits=6, seed_bits=3, group_size=(64, 64)
    )
    module = PagedExperts(
        EXPERTS, WIDTH, INNER, shapes=shapes, activation="silu", implementation=None
    )
    x, ids, weights = map(jnp.asarray, inputs())
    with pytest.raises(ValueError, match=r"pass ModelInputs\.pages"):
        module(x, ids, weights, jnp.zeros((1, 1), jnp.uint32), None, jnp.int32(0))
