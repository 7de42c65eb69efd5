"""What a model is: the parts of a Hugging Face config that this library computes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh"]

MODEL_TYPES = ("qwen2_moe",)

# Keys whose value must be what this library computes; anything else is refused.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "attention_bias": (False, None),
    "rope_scaling": (None,),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only Mixture-of-Experts transformer.

    Attributes:
      num_layers: decoder layers, dense ones included.
      moe_layers: for each decoder layer, whether its feed-forward part is routed.
      dense_width: width of the feed-forward part of layers that are not routed.
      shared_expert_width: width of the expert that every token visits; 0 for none.
      norm_topk_prob: whether the weights of the chosen experts are made to sum to 1.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    shared_expert_width: int
    dense_width: int
    moe_layers: tuple[bool, ...]
    norm_topk_prob: bool
    qkv_bias: bool
    activation: Activation
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def num_moe_layers(self) -> int:
        """Layers with routed experts; the first axis of every page array."""
        return sum(self.moe_layers)

    @property
    def num_expert_weights(self) -> int:
        """Weights of all routed experts."""
        per_expert = 3 * self.hidden_size * self.expert_width
        return self.num_moe_layers * self.num_experts * per_expert


def read_config(folder: str | Path) -> ModelConfig:
    """Reads ``config.json`` (and ``generation_config.json``) of a checkpoint folder.

    Both styles are read: ``rope_theta`` at the top level (hub) and
    ``rope_parameters`` (transformers 5).

    Raises:
      FileNotFoundError: if the folder has no config.json.
      ValueError: if the model type is unknown, a key is missing, or a key has a value
        that this library does not compute.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; give a checkpoint folder in Hugging Face format"
        )
    raw = _read_json(path)
    generation = Path(folder) / "generation_config.json"
    eos = raw.get("eos_token_id")
    if generation.is_file():
        eos = _read_json(generation).get("eos_token_id", eos)
    return parse_config(raw, eos)


def parse_config(raw: dict[str, Any], eos: int | list[int] | None) -> ModelConfig:
    """Builds a `ModelConfig` from the keys of a config.json; see `read_config`."""
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type {model_type!r} is not supported; this version serves"
            f" {', '.join(MODEL_TYPES)}"
        )
    for key, allowed in _MUST_BE.items():
        if key in raw and raw[key] not in allowed:
            raise ValueError(
                f"config.json has {key}={raw[key]!r}, which is not implemented for"
                f" {model_type} (only {allowed[0]!r}); use a checkpoint without it"
            )
    try:
        return _qwen2_moe(raw, _as_tuple(eos))
    except KeyError as missing:
        raise ValueError(
            f"config.json of {model_type} lacks the key {missing}"
        ) from None


def _qwen2_moe(raw: dict[str, Any], eos: tuple[int, ...]) -> ModelConfig:
    num_layers = raw["num_hidden_layers"]
    step = raw.get("decoder_sparse_step", 1)
    dense_layers = raw.get("mlp_only_layers") or []
    return ModelConfig(
        model_type="qwen2_moe",
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        num_layers=num_layers,
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim")
        or raw["hidden_size"] // raw["num_attention_heads"],
        num_experts=raw["num_experts"],
        experts_per_token=raw["num_experts_per_tok"],
        expert_width=raw["moe_intermediate_size"],
        shared_expert_width=raw["shared_expert_intermediate_size"],
        dense_width=raw["intermediate_size"],
        moe_layers=tuple(
            i not in dense_layers and (i + 1) % step == 0 for i in range(num_layers)
        ),
        norm_topk_prob=raw.get("norm_topk_prob", False),
        qkv_bias=raw.get("qkv_bias", True),
        activation="silu",
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=_rope_theta(raw, default=1e4),
        max_position_embeddings=raw["max_position_embeddings"],
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        eos_token_ids=eos,
    )


def _rope_theta(raw: dict[str, Any], default: float) -> float:
    rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta", default)}
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"config.json has rope_type={rope['rope_type']!r}; only 'default' is"
            " implemented for this model type"
        )
    return float(rope.get("rope_theta", default))


def _as_tuple(ids: int | list[int] | None) -> tuple[int, ...]:
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
