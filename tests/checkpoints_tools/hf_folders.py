"""A tiny random Qwen2-MoE folder, made with NumPy and safetensors."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pagedweight_jax.config import parse_config
from pagedweight_jax.models.qwen2_moe import hf_tensors

CONFIG = {
    "model_type": "qwen2_moe",
    "vocab_size": 288,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "intermediate_size": 128,
    "mlp_only_layers": [1],
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
    "hidden_act": "silu",
}

Tensors = dict[str, np.ndarray]


def random_tensors(seed: int = 0) -> Tensors:
    """Random bfloat16 tensors for every name that the config asks for."""
    rng = np.random.default_rng(seed)

    def values(shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return 1 + 0.1 * rng.standard_normal(shape)
        return rng.standard_normal(shape) / np.sqrt(shape[-1])

    return {
        spec.name: values(spec.shape).astype(jnp.bfloat16)
        for spec in hf_tensors(parse_config(CONFIG, 0))
    }


def save_model(folder: Path, tensors: Tensors, num_shards: int = 1) -> Path:
    """Writes config, tokenizer and weights, in shards with an index if asked to."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_tokenizer(folder / "tokenizer.json")
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(num_shards):
        shard = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(tensors.items())[i::num_shards])
        save_file(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    index = {
        "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
        "weight_map": weight_map,
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def save_tokenizer(path: Path) -> None:
    """Writes a tokenizer that makes one token of every byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {token: i + 1 for i, token in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
