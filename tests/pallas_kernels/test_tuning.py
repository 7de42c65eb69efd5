import json
from dataclasses import dataclass

import pytest

from pallas_kernels import tuning
from pallas_kernels.tuning import Measured, lookup, moe_key, store, tuned

QWEN = {"width": 2048, "expert_width": 1408, "num_experts": 60, "top_k": 4}


@dataclass(frozen=True, kw_only=True)
class Config:
    warpgroups: int = 4
    k_splits: int = 1
    tiles: tuple[int, ...] = (8, 16)


def measured(config: Config, seconds: float = 5e-5) -> Measured:
    return Measured(
        config=config, seconds=seconds, versions={"jax": "0.11.2"}, commit="abc"
    )


@pytest.fixture
def folder(tmp_path):
    store("decode", "NVIDIA H200", {"a": measured(Config(k_splits=2))}, folder=tmp_path)
    return tmp_path


def test_what_was_stored_is_found(folder):
    assert lookup("decode", "NVIDIA H200", "a", folder=folder) == {
        "warpgroups": 4,
        "k_splits": 2,
        "tiles": [8, 16],
    }
    config = tuned(Config, "decode", "NVIDIA H200", "a", folder=folder)
    assert config == Config(k_splits=2)


@pytest.mark.parametrize(
    ("kernel", "device", "key"),
    [
        ("decode", "NVIDIA H200", "b"),
        ("prefill", "NVIDIA H200", "a"),
        ("decode", "x", "a"),
    ],
    ids=["shape", "kernel", "device"],
)
def test_what_was_not_stored_is_no_error(folder, kernel, device, key):
    assert lookup(kernel, device, key, folder=folder) is None
    assert tuned(Config, kernel, device, key, folder=folder) is None


def test_storing_again_replaces_the_shape_and_keeps_the_others(folder):
    new = {"a": measured(Config(warpgroups=2)), "b": measured(Config())}
    path = store("decode", "NVIDIA H200", new, folder=folder)
    store("decode", "NVIDIA H200", {"c": measured(Config())}, folder=folder)
    entries = json.loads(path.read_text())
    assert list(entries) == ["a", "b", "c"]
    assert entries["a"]["config"]["warpgroups"] == 2
    assert entries["a"]["seconds"] == 5e-5
    assert lookup("decode", "NVIDIA H200", "a", folder=folder) == entries["a"]["config"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds a list; wanted an object"),
        ('{"a": {"config": 3}}', "'a' has config=3; wanted a dict"),
        ('{"a": {"config": {}, "seconds": null}}', "'a' has seconds=None"),
    ],
)
def test_a_malformed_file_names_itself(tmp_path, text, complaint):
    path = tmp_path / "NVIDIA_H200" / "decode.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=complaint) as error:
        lookup("decode", "NVIDIA H200", "a", folder=tmp_path)
    assert str(path) in str(error.value)


def test_a_config_of_an_older_kernel_says_what_to_do(folder):
    @dataclass(frozen=True, kw_only=True)
    class Newer:
        stages: int

    with pytest.raises(ValueError, match=r"decode\.json: 'a' has the fields .* --tune"):
        tuned(Newer, "decode", "NVIDIA H200", "a", folder=folder)


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(1, 1), (2, 4), (16, 16), (17, 64), (9000, 8192)]
)
def test_keys_fall_into_buckets_of_tokens(num_tokens, bucket):
    expected = f"D=2048 F=1408 E=60 k=4 T<={bucket} affine"
    assert moe_key(**QWEN, num_tokens=num_tokens, format="affine") == expected


def test_every_stored_file_can_be_read():
    for path in tuning.FOLDER.glob("*/*.json"):
        assert lookup(path.stem, path.parent.name, "no such shape") is None
