"""Fixtures: a tiny Hugging Face folder and calibration texts."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hf_folders import Tensors, random_tensors, save_model


@pytest.fixture(scope="session")
def tensors() -> Tensors:
    return random_tensors()


@pytest.fixture(scope="session")
def hf_dir(tmp_path_factory: pytest.TempPathFactory, tensors: Tensors) -> Path:
    return save_model(tmp_path_factory.mktemp("hf"), tensors, num_shards=2)


@pytest.fixture
def save(tmp_path: Path) -> Callable[[Tensors, int], Path]:
    """Saves tensors as a model in a folder of this test."""
    return lambda tensors, num_shards=1: save_model(
        tmp_path / "hf", tensors, num_shards
    )


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two files of random words."""
    folder = tmp_path_factory.mktemp("calibration")
    rng = np.random.default_rng(0)
    words = ["plane", "page", "frame", "expert", "router", "token", "bit", "code"]
    for name in ("first", "second"):
        lines = [" ".join(rng.choice(words, 40)) for _ in range(6)]
        text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    return str(folder)
