"""Every tensor is used exactly once, and what is wrong is named."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from checkpoints_tools import huggingface
from pagedweight_jax.models.qwen2_moe import Qwen2Moe

INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"


def leaves(tree) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_the_parameters_are_those_of_the_model(hf_dir, tensors):
    tree = huggingface.load_parameters(hf_dir, "float32")
    config = huggingface.open_model(hf_dir).config
    model = nnx.eval_shape(
        lambda: Qwen2Moe(config, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    )
    wanted = leaves(nnx.to_pure_dict(nnx.split(model)[1]))
    came = leaves(tree)
    assert {k: (v.shape, v.dtype) for k, v in came.items()} == {
        k: (v.shape, v.dtype) for k, v in wanted.items()
    }
    assert sum(a.size for a in came.values()) == sum(t.size for t in tensors.values())
    # Layer 2 is the second MoE layer and the only one of its run; up is below gate.
    up = tree["runs"][2]["mlp"]["experts"]["gate_up"][0, 5, 64:]
    np.testing.assert_array_equal(up, tensors[EXPERT].astype(np.float32))


def test_dense_and_experts_are_the_parts_of_the_whole(hf_dir):
    model = huggingface.open_model(hf_dir)
    whole = leaves(huggingface.load_parameters(hf_dir, "bfloat16"))
    dense = leaves(huggingface.load_dense(model))
    assert set(whole) - set(dense) == {k for k in whole if "experts" in k}
    for name, array in dense.items():
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, whole[name])
    for layer, run in enumerate((0, 2)):
        gate_up, down = huggingface.load_experts(model, layer)
        prefix = f"['runs'][{run}]['mlp']['experts']"
        np.testing.assert_array_equal(gate_up, whole[f"{prefix}['gate_up']"][0])
        np.testing.assert_array_equal(down, whole[f"{prefix}['down']"][0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_one_file_of_another_type_gives_the_same_values(save, tensors, dtype):
    small = {k: (v.astype(np.float32) / 8).astype(dtype) for k, v in tensors.items()}
    tree = huggingface.load_parameters(save(small), "float32")
    np.testing.assert_array_equal(
        tree["lm_head"], small["lm_head.weight"].astype(np.float32)
    )


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_missing_and_an_unknown_tensor_are_named(save, tensors, num_shards):
    changed = {k: v for k, v in tensors.items() if k != EXPERT}
    changed["model.layers.9.mlp.gate.weight"] = changed["model.norm.weight"]
    with pytest.raises(ValueError) as error:
        huggingface.open_model(save(changed, num_shards))
    assert f"missing {EXPERT}" in str(error.value)
    assert "unknown model.layers.9.mlp.gate.weight" in str(error.value)


def test_a_wrong_shape_is_named(save, tensors):
    changed = tensors | {EXPERT: tensors[EXPERT][:, :64].copy()}
    with pytest.raises(ValueError, match=rf"{EXPERT} .* is \[64, 64\].* \[64, 128\]"):
        huggingface.open_model(save(changed))


def test_a_wrong_type_is_named(save, tensors):
    changed = tensors | {EXPERT: np.zeros((64, 128), np.int8)}
    with pytest.raises(ValueError, match=rf"{EXPERT} .* is I8 but only BF16, F16"):
        huggingface.open_model(save(changed))


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_value_that_is_not_finite_is_named(save, tensors, value):
    bad = tensors[EXPERT].copy()
    bad[3, 4] = value
    model = huggingface.open_model(save(tensors | {EXPERT: bad}))
    with pytest.raises(ValueError, match=f"{EXPERT} .* has NaN or infinite"):
        huggingface.load_experts(model, 1)


def test_a_truncated_shard_is_named_with_sizes(save, tensors):
    folder = save(tensors, 2)
    shard = folder / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    for size in (len(content) - 10, 100, 5):
        shard.write_bytes(content[:size])
        with pytest.raises(ValueError, match="is truncated") as error:
            huggingface.open_model(folder)
        assert f" {size} bytes" in str(error.value)


def test_a_file_that_is_no_safetensors_file_is_named(save, tensors):
    folder = save(tensors)
    (folder / "model.safetensors").write_bytes(b"\x05" + bytes(7) + b"hello world")
    with pytest.raises(ValueError, match="is no safetensors file"):
        huggingface.open_model(folder)


def test_a_missing_shard_is_named(save, tensors):
    folder = save(tensors, 2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00001-of-00002"):
        huggingface.open_model(folder)


def test_an_index_that_disagrees_with_a_shard_is_named(save, tensors):
    folder = save(tensors, 2)
    shard = folder / "model-00001-of-00002.safetensors"
    part = load_file(shard)
    part["model.extra"] = part.pop(EXPERT) if EXPERT in part else part.popitem()[1]
    save_file(part, shard)
    with pytest.raises(ValueError, match=r"disagree: .* model\.extra in the shard"):
        huggingface.open_model(folder)


def test_bytes_that_do_not_add_up_are_named(save, tensors):
    folder = save(tensors, 2)
    index = json.loads((folder / INDEX).read_text())
    index["metadata"]["total_size"] += 2
    (folder / INDEX).write_text(json.dumps(index))
    total = sum(t.nbytes for t in tensors.values())
    with pytest.raises(ValueError, match=f"total_size={total + 2} .* {total} bytes"):
        huggingface.open_model(folder)


def test_a_damaged_index_is_named(save, tensors):
    folder = save(tensors, 2)
    text = (folder / INDEX).read_text()
    (folder / INDEX).write_text(text[:100])
    with pytest.raises(ValueError, match=re.escape(f"{INDEX} is damaged")):
        huggingface.open_model(folder)


def test_a_folder_without_weights_is_refused(save, tensors):
    folder = save(tensors)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model.safetensors nor"):
        huggingface.open_model(folder)


def test_both_config_styles_are_one_config(save, tensors):
    folder = save(tensors)
    hub = huggingface.open_model(folder).config
    raw = json.loads((folder / "config.json").read_text())
    theta = raw.pop("rope_theta")
    raw["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    raw["dtype"] = "bfloat16"
    (folder / "config.json").write_text(json.dumps(raw))
    assert huggingface.open_model(folder).config == hub
