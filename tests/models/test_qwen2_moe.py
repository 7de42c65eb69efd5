"""Qwen2-MoE against Hugging Face, and paged experts against dense ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from jax import Array

from pagedweight_jax.config import read_config
from pagedweight_jax.formats import AffineFormat, CodebookFormat, RefinedFormat
from pagedweight_jax.models.interface import (
    ModelInputs,
    ModelOutputs,
    Pages,
    uncached_inputs,
)
from pagedweight_jax.models.moe import routing_counts
from pagedweight_jax.models.qwen2_moe import Qwen2Moe, StepContext, layer_runs
from pagedweight_jax.paging import pool as paged_pool
from pallas_kernels import bitplane
from pallas_kernels.paged_attention import KvLayout, Rows

ATOL = 1e-5  # the bound on logits; they reach 5 and come out within 4e-6
BLOCK = 4
ALL_BITS = range(2, 9)


@dataclass(frozen=True)
class Served:
    """A model as jitted functions of its parameters."""

    graphdef: nnx.GraphDef[Qwen2Moe]
    params: nnx.State
    layout: KvLayout
    forward: Callable[..., ModelOutputs]

    def logits(self, outputs: ModelOutputs) -> np.ndarray:
        return np.asarray(nnx.merge(self.graphdef, self.params).logits(outputs.hidden))


def serve(graphdef: nnx.GraphDef[Qwen2Moe], params: nnx.State) -> Served:
    config = nnx.merge(graphdef, params).config
    layout = KvLayout(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK,
        dtype="float32",
        frame_words=bitplane.plane_words(config.hidden_size, config.expert_width),
    )

    @jax.jit
    def forward(params: nnx.State, inputs: ModelInputs) -> ModelOutputs:
        return nnx.merge(graphdef, params)(inputs, layout)

    return Served(graphdef, params, layout, forward)


@pytest.fixture(scope="module", params=tiny.NAMES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def served(name) -> Served:
    config = read_config(tiny.folder(name))
    return serve(*tiny.parameters(config, None, tiny.dense_tree(name), "float32"))


def token_ids(name: str) -> np.ndarray:
    return tiny.reference(name)["input_ids"]


# Against Hugging Face


def test_logits_equal_hugging_face(name, served):
    ids = token_ids(name)
    inputs = uncached_inputs(jnp.asarray(ids), served.layout)
    got = served.logits(served.forward(served.params, inputs)).reshape(*ids.shape, -1)
    np.testing.assert_allclose(got, tiny.reference(name)["logits"], atol=ATOL, rtol=0)


class CachedSequences:
    """Sequences whose keys and values lie in scattered frames of a dirty pool."""

    def __init__(self, served: Served, num_sequences: int, num_tokens: int) -> None:
        self.served = served
        layout = served.layout
        blocks = -(-num_tokens // BLOCK)
        shape = (num_sequences, blocks, layout.frames_per_block)
        count = int(np.prod(shape))
        frames = 1 + np.random.default_rng(3).permutation(count)
        self.block_frames = jnp.asarray(frames.reshape(shape), jnp.int32)
        # All bits set is a NaN in float32: what was not written must not be read.
        dirty = jnp.full((count, layout.frame_words), 0xFFFFFFFF, jnp.uint32)
        null = jnp.zeros((1, layout.frame_words), jnp.uint32)
        self.pool = jnp.concatenate([null, dirty])
        self.cached = 0
        self.commit = jax.jit(
            lambda pool, fresh, rows, queries: paged_pool.commit_kv(
                pool, fresh, (rows,), layout, (queries,)
            ),
            static_argnums=3,
        )

    def feed(self, tokens: np.ndarray, row_tokens: int) -> np.ndarray:
        """Computes [B, T] further tokens as rows of ``row_tokens``: their logits."""
        batch, length = tokens.shape
        rows_each = -(-length // row_tokens)
        padding = rows_each * row_tokens - length
        padded = np.pad(tokens, ((0, 0), (0, padding)))
        sequences = np.repeat(np.arange(batch), rows_each)
        offsets = np.tile(np.arange(rows_each) * row_tokens, batch)
        ints = [
            self.cached + offsets,
            np.minimum(row_tokens, length - offsets),
            np.full(len(offsets), self.cached),
            sequences,
        ]
        starts, lengths, cached, numbers = (jnp.asarray(a, jnp.int32) for a in ints)
        rows = Rows(
            starts=starts,
            lengths=lengths,
            cached=cached,
            sequences=numbers,
            block_frames=self.block_frames[sequences],
        )
        inputs = ModelInputs(
            tokens=(jnp.asarray(padded.reshape(-1, row_tokens), jnp.int32),),
            rows=(rows,),
            pool=self.pool,
            pages=None,
        )
        outputs = self.served.forward(self.served.params, inputs)
        self.pool = self.commit(self.pool, outputs.fresh_kv, rows, row_tokens)
        self.cached += length
        logits = self.served.logits(outputs)
        return logits.reshape(batch, rows_each * row_tokens, -1)[:, :length]


def test_cached_decode_equals_hugging_face(name, served):
    ids, wanted = token_ids(name), tiny.reference(name)["step_logits"]
    steps = wanted.shape[1]
    first = ids.shape[1] - steps
    sequences = CachedSequences(served, *ids.shape)
    sequences.feed(ids[:, :first], row_tokens=first)
    for step in range(steps):
        now = ids[:, first + step : first + step + 1]
        got = sequences.feed(now, row_tokens=1)[:, 0]
        np.testing.assert_allclose(
            got, wanted[:, step], atol=ATOL, rtol=0, err_msg=f"step {step}"
        )


def test_a_prompt_in_chunks_equals_hugging_face(name, served):
    ids, wanted = token_ids(name), tiny.reference(name)["logits"]
    sequences = CachedSequences(served, *ids.shape)
    # Two steps of 24 tokens, each as three rows of ten tokens (the last of four).
    halves = [sequences.feed(part, row_tokens=10) for part in np.split(ids, 2, axis=1)]
    np.testing.assert_allclose(
        np.concatenate(halves, axis=1), wanted, atol=ATOL, rtol=0
    )


def layer_states(served: Served) -> list[tuple[Any, Any, Any]]:
    """(graphdef, state, rest) of every layer, cut out of the stacked runs."""
    model = nnx.merge(served.graphdef, served.params)
    layers = []
    for run, (_, length) in zip(model.runs, layer_runs(model.config), strict=True):
        graphdef, state = nnx.split(run)
        for i in range(length):
            layers.append((graphdef, jax.tree.map(lambda a, i=i: a[i], state)))
    return layers


def test_each_layer_and_its_routing_equal_hugging_face(name, served):
    """Every layer starts from Hugging Face's own stream, so errors cannot add up."""
    reference = tiny.reference(name)
    hidden = reference["hidden"]
    inputs = uncached_inputs(jnp.asarray(token_ids(name)), served.layout)
    num_tokens = hidden[0].reshape(-1, hidden.shape[-1]).shape[0]
    context = StepContext(
        inputs=inputs,
        valid=jnp.ones(num_tokens, bool),
        layout=served.layout,
        collect_moments=False,
    )
    for number, (graphdef, state) in enumerate(layer_states(served)):
        layer = nnx.merge(graphdef, state)
        x = jnp.asarray(hidden[number].reshape(num_tokens, -1))
        index = jnp.int32(number)
        attended, _ = layer.self_attn(
            layer.input_layernorm(x),
            inputs.rows,
            (inputs.tokens[0].shape[1],),
            inputs.pool,
            index,
            served.layout,
        )
        normed = layer.post_attention_layernorm(x + attended)
        if f"topk_{number}" in reference:
            ids, weights = layer.mlp.gate(normed, context.valid)
            np.testing.assert_array_equal(ids, reference[f"topk_{number}"])
            np.testing.assert_allclose(
                weights, reference[f"topw_{number}"], atol=1e-6, rtol=0
            )
        y, _, routed = layer(x, context, number, jnp.int32(0), None)
        if routed is not None:
            counts = routing_counts(routed, context.valid, 8)
            wanted = np.bincount(reference[f"topk_{number}"].ravel(), minlength=8)
            assert counts.tokens.tolist() == wanted.tolist()
        if number + 1 < len(hidden) - 1:  # the last one is after the final norm
            np.testing.assert_allclose(
                y, hidden[number + 1].reshape(y.shape), atol=ATOL, rtol=0
            )


def test_padding_changes_nothing(name, served):
    ids = token_ids(name)
    length = 30

    def outputs(filler: int, unused_rows: int) -> ModelOutputs:
        tokens = np.full((2 + unused_rows, 48), filler, np.int32)
        tokens[:2, :length] = ids[:, :length]
        inputs = uncached_inputs(jnp.asarray(tokens), served.layout)
        lengths = np.where(np.arange(len(tokens)) < 2, length, 0)
        starts = np.where(lengths, 0, filler)
        rows = replace(
            inputs.rows[0],
            lengths=jnp.asarray(lengths, jnp.int32),
            starts=jnp.asarray(starts, jnp.int32),
        )
        return served.forward(served.params, replace(inputs, rows=(rows,)))

    def used(out: ModelOutputs) -> tuple[np.ndarray, np.ndarray]:
        fresh = np.asarray(out.fresh_kv).view(np.float32)
        hidden = np.asarray(out.hidden)
        return (
            hidden.reshape(-1, 48, hidden.shape[-1])[:2, :length],
            fresh.reshape(len(fresh), -1, 48, fresh.shape[-1])[:, :2, :length],
        )

    plain, other = outputs(0, 1), outputs(77, 1)
    for one, two in zip(used(plain), used(other), strict=True):
        np.testing.assert_array_equal(one, two, err_msg="filler leaks into tokens")
    for one, two in zip(
        jax.tree.leaves(plain.routing), jax.tree.leaves(other.routing), strict=True
    ):
        np.testing.assert_array_equal(one, two, err_msg="filler is counted")
    for one, two in zip(used(plain), used(outputs(0, 0)), strict=True):
        np.testing.assert_allclose(one, two, atol=ATOL, rtol=0)


# Paged against dense


def pages_at(
    name: str, form: Any, bits: np.ndarray, garbage: int
) -> tuple[Array, Pages]:
    """A pool with exactly the planes that ``bits`` [L, E, 2] asks for.

    Frames that no page names are filled with ``garbage``, and a page's frame numbers
    beyond its bits point there: they must not be read.
    """
    layers = [layer.planes(form.parent_bits) for layer in tiny.quantised(name, form)]
    planes = np.stack([np.stack(layer, axis=2) for layer in layers])  # [L, E, 3, P, W]
    present = np.arange(form.parent_bits) < bits[..., [0, 0, 1], None]
    numbers = 2 + np.random.default_rng(5).permutation(planes[..., 0].size)
    frames = np.where(present, numbers.reshape(present.shape), 1).astype(np.int32)
    pool = np.full((2 + numbers.size, planes.shape[-1]), garbage, np.uint32)
    pool[0] = 0
    pool[frames[present]] = planes[present]
    return jnp.asarray(pool), Pages(
        bits=jnp.asarray(bits, jnp.int32), frames=jnp.asarray(frames[..., None])
    )


def dense_logits(name: str, form: Any, bits: np.ndarray, served: Served) -> np.ndarray:
    layers = tiny.quantised(name, form)
    blocks = [layer.weights(form, b) for layer, b in zip(layers, bits, strict=True)]
    tree = tiny.with_experts(tiny.dense_tree(name), blocks)
    config = read_config(tiny.folder(name))
    _, params = tiny.parameters(config, None, tree, "float32")
    inputs = uncached_inputs(jnp.asarray(token_ids(name)), served.layout)
    return served.logits(served.forward(params, inputs))


def mixed_bits(form: Any, shape: Sequence[int]) -> np.ndarray:
    levels = np.arange(form.seed_bits, form.parent_bits + 1)
    return np.resize(levels, shape)


@pytest.mark.parametrize(
    "form",
    [
        AffineFormat(seed_bits=ALL_BITS[0], parent_bits=ALL_BITS[-1]),
        CodebookFormat(seed_bits=ALL_BITS[0], parent_bits=ALL_BITS[-1]),
        RefinedFormat(parent_bits=ALL_BITS[-1]),
    ],
    ids=lambda form: form.name,
)
def test_paged_experts_equal_dense_ones_on_dequantised_weights(name, served, form):
    model = tiny.paged_model(name, form, poison=False)
    paged = serve(model.graphdef, model.params)
    inputs = uncached_inputs(jnp.asarray(token_ids(name)), paged.layout)
    shape = (model.config.num_moe_layers, model.config.num_experts, 2)
    levels = range(form.seed_bits, form.parent_bits + 1)
    cases = {str(b): np.full(shape, b) for b in levels}
    cases["mixed"] = mixed_bits(form, shape)
    previous = None
    for what, bits in cases.items():
        pool, pages = pages_at(name, form, bits, garbage=0xFFFFFFFF)
        got = paged.logits(
            paged.forward(paged.params, replace(inputs, pool=pool, pages=pages))
        )
        wanted = dense_logits(name, form, bits, served)
        # The same products, added up in another order.
        np.testing.assert_allclose(
            got, wanted, atol=ATOL, rtol=0, err_msg=f"{form.name}, bits {what}"
        )
        assert previous is None or not np.array_equal(got, previous)
        previous = got
    assert paged.forward._cache_size() == 1, "a change of bits was traced again"
