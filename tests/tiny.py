"""Tiny models for tests, made in memory from the fixtures.

The weights are those of the fixtures' folders, the quantisation is our formats', the
sensitivity is invented: halving a quantisation step quarters what it costs, gate_up
costs more than down, and the experts differ.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from checkpoints_tools.huggingface import load_parameters
from pagedweight_jax.config import ModelConfig, read_config
from pagedweight_jax.engine.engine import Engine, StepReport
from pagedweight_jax.engine.request import Request, SamplingParams
from pagedweight_jax.formats import AffineFormat, Format
from pagedweight_jax.models.interface import uncached_inputs
from pagedweight_jax.models.moe import SideTableShapes
from pagedweight_jax.models.qwen2_moe import Qwen2Moe
from pagedweight_jax.paging.host_store import HostStore
from pagedweight_jax.sensitivity import Sensitivity
from pagedweight_jax.serving.build import Built, build_engine
from pagedweight_jax.serving.llm import LLM
from pagedweight_jax.serving.load import LoadedModel
from pagedweight_jax.serving.options import ServeOptions
from pallas_kernels import bitplane
from pallas_kernels.paged_attention import KvLayout
from pallas_kernels.side_tables import SideTables

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("qwen2_moe", "qwen2_moe_mixed")
VOCAB_SIZE = 512

POISON = VOCAB_SIZE - 1
"""A token that breaks what it is fed to, in the models that `paged_model` makes.

Its embedding is NaN. Its logit is always 0, so it is never among the likeliest ones.
"""

EOS = 2

Tree = dict[Any, Any]


# Fixtures


def folder(name: str) -> Path:
    return FIXTURES / name


@functools.cache
def reference(name: str) -> Mapping[str, np.ndarray]:
    """What Hugging Face computes; see fixtures/make_tiny_qwen2_moe.py."""
    with np.load(folder(name) / "ref.npz") as file:
        return dict(file)


def greedy_cases() -> list[dict[str, Any]]:
    file = FIXTURES / "greedy_qwen2_moe_35m.json"
    return json.loads(file.read_text())["cases"]


def dense_tree(name: str) -> Tree:
    """Parameters of a fixture in float32, experts as matrices."""
    return load_parameters(folder(name), "float32")


def poisoned(tree: Tree) -> Tree:
    tree["embed_tokens"][POISON] = np.nan
    tree["lm_head"][POISON] = 0
    return tree


# Quantisation


@dataclass(frozen=True)
class QuantisedLayer:
    """Codes [E, 2F, D] and [E, D, F] of one MoE layer, and their side tables."""

    codes: tuple[np.ndarray, np.ndarray]
    tables: tuple[SideTables, SideTables]

    def weights(self, form: Format, bits: np.ndarray) -> tuple[np.ndarray, ...]:
        """Both blocks of all experts, each page at its own bits [E, 2]."""
        blocks = []
        for block, (codes, tables) in enumerate(
            zip(self.codes, self.tables, strict=True)
        ):
            levels = {
                b: np.asarray(form.dequantize(codes, tables, b))
                for b in set(bits[:, block].tolist())
            }
            rows = [levels[b][e] for e, b in enumerate(bits[:, block].tolist())]
            blocks.append(np.stack(rows))
        return tuple(blocks)

    def planes(self, parent_bits: int) -> list[np.ndarray]:
        """Planes of gate, up and down as `HostStore` has them."""
        gate_up, down = self.codes
        experts, rows, width = gate_up.shape
        linears = gate_up.reshape(experts, 2, rows // 2, width)
        order = self.tables[0].order
        packed = np.concatenate(
            [
                np.asarray(bitplane.pack(linears, parent_bits, order)),
                np.asarray(bitplane.pack(down[:, None], parent_bits, order)),
            ],
            axis=1,
        )  # [E, 3, P, words]
        return [np.ascontiguousarray(packed[:, :, j]) for j in range(parent_bits)]


@functools.cache
def quantised(name: str, form: Format) -> tuple[QuantisedLayer, ...]:
    """All MoE layers of a fixture."""
    layers = []
    for run in dense_tree(name)["runs"].values():
        experts = run["mlp"].get("experts")
        for layer in range(0 if experts is None else len(experts["down"])):
            pairs = [form.quantize(experts[k][layer]) for k in ("gate_up", "down")]
            codes, tables = zip(*pairs, strict=True)
            layers.append(QuantisedLayer(codes, tables))
    return tuple(layers)


def with_experts(tree: Tree, blocks: Sequence[tuple[Any, Any]]) -> Tree:
    """Puts (gate_up, down) of each MoE layer into a tree of parameters."""
    left = list(blocks)
    for run in tree["runs"].values():
        if "experts" in run["mlp"]:
            length = len(run["input_layernorm"]["weight"])
            part, left = left[:length], left[length:]
            gate_up, down = (
                jax.tree.map(lambda *a: np.stack(a), *column)
                for column in zip(*part, strict=True)
            )
            run["mlp"]["experts"] = {"gate_up": gate_up, "down": down}
    return tree


def parameters(
    config: ModelConfig, tables: SideTableShapes | None, tree: Tree, dtype: str
) -> tuple[nnx.GraphDef[Qwen2Moe], nnx.State]:
    """The model's structure, and its parameters on the device."""
    kind = jnp.dtype(dtype)
    graphdef, state = nnx.split(
        nnx.eval_shape(
            lambda: Qwen2Moe(config, tables=tables, dtype=kind, rngs=nnx.Rngs(0))
        )
    )
    pure = nnx.to_pure_dict(state)
    placed = jax.tree.map(lambda want, a: jnp.array(a, want.dtype), pure, tree)
    nnx.replace_by_pure_dict(state, placed)
    return graphdef, state


def table_shapes(config: ModelConfig, form: Format) -> SideTableShapes:
    size = getattr(form, "group_size_for", lambda k: 0)
    return SideTableShapes(
        format=form.name,
        parent_bits=form.parent_bits,
        seed_bits=form.seed_bits,
        group_size=(size(config.hidden_size), size(config.expert_width)),
    )


# Models in memory


def sensitivity(
    num_layers: int = 2,
    num_experts: int = 8,
    *,
    seed_bits: int = 3,
    parent_bits: int = 6,
) -> Sensitivity:
    """Invented, but sane."""
    bits = np.arange(parent_bits + 1)
    level = 4.0**-bits - 4.0**-parent_bits
    level[:seed_bits] = np.inf
    scale = 1 + np.arange(num_layers * num_experts).reshape(num_layers, num_experts, 1)
    loss = (scale * [1.0, 0.7])[..., None] * level
    return Sensitivity(
        loss=loss.astype(np.float32),
        residual_weights=np.zeros((num_layers, 2, 3), np.float32),
        residual_bias=np.ones((num_layers, 2), np.float32),
        expert_share=np.full((num_layers, num_experts), 1 / num_experts, np.float32),
    )


AFFINE = AffineFormat()


def paged_model(
    name: str = "qwen2_moe",
    form: Format = AFFINE,
    *,
    dtype: str = "float32",
    poison: bool = True,
) -> LoadedModel:
    """A quantised fixture; its parameters belong to the caller alone."""
    config, layers = read_config(folder(name)), quantised(name, form)
    tree = with_experts(dense_tree(name), [layer.tables for layer in layers])
    if poison:
        poisoned(tree)
    graphdef, params = parameters(config, table_shapes(config, form), tree, dtype)
    return LoadedModel(
        config=config,
        graphdef=graphdef,
        params=params,
        tokenizer=tokenizer(),
        pages=HostStore([layer.planes(form.parent_bits) for layer in layers]),
        sensitivity=sensitivity(
            len(layers),
            config.num_experts,
            seed_bits=form.seed_bits,
            parent_bits=form.parent_bits,
        ),
    )


def dense_model(name: str = "qwen2_moe", *, dtype: str = "float32") -> LoadedModel:
    """A fixture as policy "bf16" serves it."""
    config = read_config(folder(name))
    graphdef, params = parameters(config, None, dense_tree(name), dtype)
    return LoadedModel(
        config=config, graphdef=graphdef, params=params, tokenizer=tokenizer()
    )


def tokenizer() -> Tokenizer:
    """512 tokens: three special ones, all bytes, and pieces of two letters.

    Nothing is ever merged, so a text is encoded byte by byte; generated tokens may be
    pieces, so that stop texts lie across their borders.
    """
    letters = "abcdefghijklmnopqrst"
    pieces = [a + b for a in letters for b in letters]
    special = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = (special + alphabet + pieces)[:VOCAB_SIZE]
    made = Tokenizer(models.BPE({n: i for i, n in enumerate(names)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(s, special=True) for s in special])
    return made


# What an engine must compute


class Oracle:
    """A full forward pass of dense experts, dequantised at fixed bits, uncached."""

    def __init__(self, bits: int, name: str = "qwen2_moe", form: Format = AFFINE):
        layers, config = quantised(name, form), read_config(folder(name))
        pages = np.full((config.num_experts, 2), bits)
        tree = with_experts(
            poisoned(dense_tree(name)),
            [layer.weights(form, pages) for layer in layers],
        )
        graphdef, self.params = parameters(config, None, tree, "float32")
        self.length = 128
        layout = KvLayout(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=16,
            dtype="float32",
            frame_words=512,
        )

        @jax.jit
        def forward(params: nnx.State, tokens: jax.Array) -> jax.Array:
            model = nnx.merge(graphdef, params)
            return model.logits(model(uncached_inputs(tokens, layout), layout).hidden)

        self._forward = forward

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits [T, V] of all positions; what follows a token cannot change it."""
        padded = np.zeros((1, self.length), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(self._forward(self.params, padded))[: len(tokens)]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


# Engines


def options(**changes: Any) -> ServeOptions:
    """Few and small step shapes; a roomy budget."""
    defaults = {
        "memory_budget": "8MiB",
        "dtype": "float32",
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
    }
    return ServeOptions(**(defaults | changes))


def smallest_budget(model: LoadedModel, chosen: ServeOptions) -> int:
    """The budget that the message about too small a one names."""
    try:
        build_engine(model, dataclasses.replace(chosen, memory_budget=1))
    except ValueError as error:
        return int(re.search(r"at least (\d+) bytes", str(error))[1])
    raise AssertionError("a budget of one byte was accepted")


def llm(model: LoadedModel, chosen: ServeOptions, **build: Any) -> LLM:
    return LLM(Path("tiny"), chosen, model, build_engine(model, chosen, **build))


@dataclass
class Transfers:
    """The ``put`` of an engine whose copies are late, or fail, when told to.

    Attributes:
      delay: polls until a copy is there, at most.
      fails: share of the copies that never get there.
      refused: share of the copies that do not even start.
    """

    rng: np.random.Generator
    delay: int = 0
    fails: float = 0.0
    refused: float = 0.0
    stalled: bool = False
    started: int = 0

    def __call__(self, words: np.ndarray) -> "Copy":
        self.started += 1
        if self.rng.random() < self.refused:
            raise RuntimeError("the device takes no copy")
        polls = int(self.rng.integers(0, self.delay + 1))
        return Copy(self, words, polls, bool(self.rng.random() < self.fails))

    def recover(self) -> None:
        self.delay, self.fails, self.refused, self.stalled = 0, 0.0, 0.0, False


@dataclass
class Copy:
    """One of them; who waits for it (settle, close) gets it at once."""

    transfers: Transfers
    words: np.ndarray
    polls_left: int
    broken: bool

    def is_ready(self) -> bool:
        self.polls_left -= 1
        return self.polls_left < 0 and not self.transfers.stalled

    def result(self) -> jax.Array:
        if self.broken:
            raise RuntimeError("the copy was lost on its way")
        return jnp.asarray(self.words)


def request(
    request_id: str, prompt: Iterable[int], params: SamplingParams | None = None
) -> Request:
    """A request as `LLM.submit` makes it, without end-of-sequence tokens."""
    params = params or SamplingParams(temperature=0.0, max_tokens=8)
    return Request(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=[int(t) for t in prompt],
        params=params,
        seed=params.seed or 0,
        max_tokens=params.max_tokens or 16,
        stop_token_ids=frozenset(params.stop_token_ids or ()),
    )


def prompts(seed: int, lengths: Iterable[int]) -> list[list[int]]:
    """Random prompts without special tokens and without the poisoned one."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, POISON, n).tolist() for n in lengths]


def run(
    engine: Engine,
    requests: Iterable[Request],
    *,
    after_step: Callable[[StepReport], None] = lambda report: None,
    max_steps: int = 2000,
) -> None:
    """Serves requests to their end."""
    for each in requests:
        engine.add(each)
    for _ in range(max_steps):
        if not engine.has_work:
            return
        after_step(engine.step())
    raise AssertionError(f"requests are unfinished after {max_steps} steps")


def assert_idle(built: Built) -> None:
    """No request holds anything, all ledgers agree, nobody wrote the null frame."""
    assert not built.engine.has_work
    assert built.allocator.num_used("kv") == 0
    built.engine.check_integrity()
    assert not np.asarray(built.engine._pool)[0].any()
