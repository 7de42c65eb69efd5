"""Reading config.json: both styles, and nothing that the library does not compute."""

import json
from typing import Any

import pytest
import tiny

from pagedweight_jax.config import ModelConfig, parse_config, read_config

STYLES = ("config.json", "config_hub_style.json")


def raw_config(name: str = "qwen2_moe", style: str = "config.json") -> dict[str, Any]:
    return json.loads((tiny.folder(name) / style).read_text())


def expected(name: str) -> ModelConfig:
    mixed = name == "qwen2_moe_mixed"
    return ModelConfig(
        model_type="qwen2_moe",
        vocab_size=512,
        hidden_size=128,
        num_layers=3 if mixed else 2,
        num_heads=4,
        num_kv_heads=2 if mixed else 4,
        head_dim=32,
        num_experts=8,
        experts_per_token=4,
        expert_width=128,
        shared_expert_width=256,
        dense_width=256,
        moe_layers=(True, False, True) if mixed else (True, True),
        norm_topk_prob=mixed,
        qkv_bias=True,
        activation="silu",
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_ids=(),
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", tiny.NAMES)
def test_both_styles_describe_the_same_model(name, style):
    assert parse_config(raw_config(name, style), eos=None) == expected(name)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_folder_is_read_like_its_config(name):
    assert read_config(tiny.folder(name)) == expected(name)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("quantization_config", {"quant_method": "gptq"}),
        ("attention_bias", True),
        ("rope_scaling", {"type": "yarn", "factor": 4.0}),
        ("model_type", "llama"),
        ("model_type", None),
    ],
)
def test_a_value_that_is_not_computed_is_refused_by_name(style, key, value):
    raw = raw_config(style=style) | {key: value}
    with pytest.raises(ValueError) as error:
        parse_config(raw, eos=None)
    assert key in str(error.value) and repr(value) in str(error.value)


def test_another_rope_type_is_refused_by_name():
    raw = raw_config() | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}
    with pytest.raises(ValueError, match="rope_type='yarn'"):
        parse_config(raw, eos=None)


@pytest.mark.parametrize("key", ["hidden_size", "num_experts", "rms_norm_eps"])
def test_a_missing_key_is_named(key):
    raw = raw_config()
    del raw[key]
    with pytest.raises(ValueError, match=f"lacks the key '{key}'"):
        parse_config(raw, eos=None)


def test_a_sparse_step_makes_every_second_layer_routed():
    raw = raw_config() | {"num_hidden_layers": 4, "decoder_sparse_step": 2}
    assert parse_config(raw, eos=None).moe_layers == (False, True, False, True)


@pytest.mark.parametrize(
    ("own", "generation", "wanted"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (None, None, ()),
        (7, {"eos_token_id": [9, 7]}, (9, 7)),
        (7, {"temperature": 0.5}, (7,)),
    ],
)
def test_generation_config_decides_the_end_tokens(tmp_path, own, generation, wanted):
    (tmp_path / "config.json").write_text(
        json.dumps(raw_config() | {"eos_token_id": own})
    )
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_config(tmp_path).eos_token_ids == wanted


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        read_config(tmp_path)


def test_a_damaged_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_')
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        read_config(tmp_path)
