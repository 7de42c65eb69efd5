"""Options of serve(): each is checked before anything is loaded, or has an effect."""

import json

import pytest
import tiny

from pagedweight_jax.engine.memory import format_bytes, parse_bytes
from pagedweight_jax.paging.planner import PlannerLimits, Watermarks
from pagedweight_jax.serving.llm import serve
from pagedweight_jax.serving.options import ServeOptions, resolve_model

MARKS = Watermarks(low_blocks=1, high_blocks=2, dwell_steps=3)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("policy", "int4", r"policy='int4' is unknown.*pagedweight, bf16"),
        ("dtype", "float16", r"dtype='float16' is unknown.*float32, bfloat16"),
        ("kv_cache_dtype", "fp8", r"='fp8' is unknown.*auto, bfloat16, fp8_e4m3"),
        ("max_num_seqs", 0, "max_num_seqs=0 must be at least 1"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens=0 must be at least 1"),
        ("max_steps_in_flight", 0, "max_steps_in_flight=0 must be at least 1"),
        ("block_size", 0, "block_size=0 must be at least 1"),
        ("max_model_len", 1, "max_model_len=1 must be at least 2"),
        ("gpu_memory_utilization", 0.0, "must be above 0 and at most 1"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization=1.5 must be"),
    ],
)
def test_a_value_out_of_range_is_named(name, value, wanted):
    with pytest.raises(ValueError, match=wanted):
        # Past the run-time type check of policy and dtype, as users are without one.
        unchecked(**{name: value})


def unchecked(**options) -> ServeOptions:
    """Makes options without the test environment's check of literal types."""
    made = object.__new__(ServeOptions)
    fields = ServeOptions.__dataclass_fields__
    for name, field in fields.items():
        object.__setattr__(made, name, options.get(name, field.default))
    made.__post_init__()
    return made


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"policy": "bf16", "pin_bits": 4}, "pin_bits=4 has no effect"),
        ({"policy": "bf16", "expert_budget": "1MiB"}, "expert_budget='1MiB' has no"),
        ({"policy": "bf16", "watermarks": MARKS}, "watermarks=.* has no effect"),
        ({"policy": "bf16", "limits": PlannerLimits()}, "limits=.* has no effect"),
        ({"pin_bits": 4, "watermarks": MARKS}, "watermarks has no effect with pin_b"),
        ({"pin_bits": 4, "limits": PlannerLimits()}, "limits has no effect with pin_b"),
        ({"pin_bits": 4, "expert_budget": 9}, "expert_budget has no effect with pin"),
        ({"expert_budget": 9, "watermarks": MARKS}, "watermarks has no effect with ex"),
        (
            {"memory_budget": 9, "gpu_memory_utilization": 0.5},
            "gpu_memory_utilization=0.5 has no effect",
        ),
    ],
)
def test_an_option_without_effect_is_refused(options, wanted):
    with pytest.raises(ValueError, match=wanted):
        ServeOptions(**options)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (1000, 1000),
        ("1000", 1000),
        ("1000B", 1000),
        ("2KB", 2000),
        ("2KiB", 2048),
        ("1.5 MiB", 1_572_864),
        (".5GiB", 2**29),
        (" 3 GB ", 3 * 10**9),
        ("1TiB", 2**40),
    ],
)
def test_budgets_are_bytes_or_texts_with_a_unit(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["48 MBit", "48mib", "MiB", "", "4 8MiB", "-1MiB"])
def test_an_unknown_unit_is_named_with_the_known_ones(text):
    with pytest.raises(ValueError, match=f"'{text}' is not a size.*MiB.*'48MiB'"):
        parse_bytes(text)


@pytest.mark.parametrize("amount", [0, -5, "0MiB"])
def test_a_budget_of_nothing_is_refused(amount):
    with pytest.raises(ValueError, match="must be positive"):
        parse_bytes(amount)


def test_bytes_are_written_in_mebibytes():
    assert format_bytes(3 * 2**19) == "1.5MiB"


def test_a_missing_folder_is_named():
    with pytest.raises(FileNotFoundError, match="'nowhere' is neither 'demo' nor"):
        serve("nowhere")


def test_a_folder_that_is_not_converted_says_what_to_do():
    with pytest.raises(ValueError, match="pagedweight convert --hf_dir="):
        serve(tiny.folder("qwen2_moe"))


def test_a_converted_folder_is_not_served_dense(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    assert resolve_model(tmp_path, "pagedweight") == tmp_path
    with pytest.raises(ValueError, match="holds quantised experts"):
        resolve_model(tmp_path, "bf16")


def test_an_unknown_model_type_is_refused_by_name(tmp_path):
    raw = json.loads((tiny.folder("qwen2_moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type 'llama' is not supported"):
        serve(tmp_path, policy="bf16")


def test_missing_weights_are_named(tmp_path):
    config = (tiny.folder("qwen2_moe") / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        serve(tmp_path, policy="bf16")


@pytest.mark.parametrize("length", [257, 100_000])
def test_more_tokens_than_the_model_has_positions_are_refused(length):
    with pytest.raises(ValueError, match=f"max_model_len={length} is more than.*256"):
        serve(tiny.folder("qwen2_moe"), policy="bf16", max_model_len=length)
