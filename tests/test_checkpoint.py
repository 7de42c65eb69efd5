"""The layout on disk: what is written comes back, and what is damaged is named."""

import asyncio
import json
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pagedweight_jax import checkpoint
from pagedweight_jax.checkpoint import LayerPages
from pagedweight_jax.formats import AffineFormat, CodebookFormat, Format, RefinedFormat
from pagedweight_jax.sensitivity import Sensitivity
from pallas_kernels import bitplane

CONFIG = {
    "model_type": "qwen2_moe",
    "vocab_size": 32,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "intermediate_size": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
}
LAYERS, EXPERTS, WIDTH, INNER = 2, 4, 128, 64
FORMATS = (AffineFormat(), CodebookFormat(parent_bits=4), RefinedFormat(parent_bits=5))


def random_pages(form: Format, seed: int) -> LayerPages:
    rng = np.random.default_rng(seed)
    words = bitplane.plane_words(INNER, WIDTH)
    planes = rng.integers(
        0, 2**32, (form.parent_bits, EXPERTS, 3, words), dtype=np.uint32
    )

    def tables(n: int, k: int):
        w = rng.normal(size=(EXPERTS, n, k)).astype(np.float32)
        return form.quantize(w)[1]

    return LayerPages(
        planes=list(planes), gate_up=tables(2 * INNER, WIDTH), down=tables(WIDTH, INNER)
    )


def random_dense() -> dict:
    rng = np.random.default_rng(0)
    weight = (0.02 * rng.standard_normal((512, 128))).astype(jnp.bfloat16)
    gate = rng.standard_normal((1, 4, 128)).astype(np.float32)
    return {
        "embed_tokens": weight,
        "runs": {0: {"mlp": {"gate": {"weight": gate}}}, 11: {"norm": weight[:1]}},
    }


def random_sensitivity(form: Format) -> Sensitivity:
    rng = np.random.default_rng(1)
    loss = rng.random((LAYERS, EXPERTS, 2, form.parent_bits + 1), np.float32)
    loss[..., : form.seed_bits] = np.inf
    return Sensitivity(
        loss=loss,
        residual_weights=rng.random((LAYERS, 2, 3), np.float32),
        residual_bias=np.ones((LAYERS, 2), np.float32),
        expert_share=np.full((LAYERS, EXPERTS), 0.25, np.float32),
    )


def write(folder: Path, form: Format) -> Path:
    """Writes a whole checkpoint of random arrays."""
    source = folder.with_name(f"{folder.name}-source")
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    (source / "tokenizer.json").write_text("{}")
    (source / "model.safetensors").write_text("not copied")
    checkpoint.write_dense(folder, random_dense())
    for layer in range(LAYERS):
        checkpoint.write_layer(folder, layer, random_pages(form, layer))
    checkpoint.write_sensitivity(folder, random_sensitivity(form))
    checkpoint.finish(folder, source, format=form, calibration={"files": ["a.jsonl"]})
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model", FORMATS[0])


def assert_trees_equal(came: dict, wanted: dict) -> None:
    assert came.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, dict):
            assert_trees_equal(came[key], value)
        else:
            assert came[key].dtype == value.dtype
            np.testing.assert_array_equal(came[key], value)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_what_is_written_comes_back(tmp_path: Path, form: Format):
    opened = checkpoint.open_checkpoint(write(tmp_path / "model", form))
    assert opened.format == form
    assert opened.config.num_moe_layers == LAYERS
    assert opened.tokenizer_file.read_text() == "{}"
    assert opened.manifest.calibration == {"files": ["a.jsonl"]}
    assert_trees_equal(opened.dense(), random_dense())
    for layer in range(LAYERS):
        came, wanted = opened.layer(layer), random_pages(form, layer)
        np.testing.assert_array_equal(np.stack(came.planes), np.stack(wanted.planes))
        for block in ("gate_up", "down"):
            assert_trees_equal(vars(getattr(came, block)), vars(getattr(wanted, block)))
    assert_trees_equal(vars(opened.sensitivity()), vars(random_sensitivity(form)))


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_byte_census_is_that_of_the_arrays(tmp_path: Path, form: Format):
    opened = checkpoint.open_checkpoint(write(tmp_path / "model", form))
    pages = [opened.layer(i) for i in range(LAYERS)]
    tables = [
        t for p in pages for block in (p.gate_up, p.down) for t in vars(block).values()
    ]
    assert opened.manifest.array_bytes == {
        "planes": sum(plane.nbytes for p in pages for plane in p.planes),
        "side_tables": sum(table.nbytes for table in tables),
        "dense": 512 * 128 * 2 + 4 * 128 * 4 + 128 * 2,
        "planner": sum(a.nbytes for a in vars(opened.sensitivity()).values()),
    }


def test_every_bfloat16_comes_back_exactly(tmp_path: Path):
    every = np.arange(2**16, dtype=np.uint16).view(jnp.bfloat16).reshape(256, 256)
    checkpoint._write_tree(tmp_path, Path("part"), {"x": every})
    came = checkpoint._read_tree(tmp_path / "part")["x"]
    assert came.dtype == jnp.bfloat16
    np.testing.assert_array_equal(came.view(np.uint16), every.view(np.uint16))


def test_trained_bfloat16_is_stored_in_less_than_its_size(folder: Path):
    stored = sum(f.stat().st_size for f in (folder / "dense").glob("embed_tokens*/*"))
    assert stored < 0.75 * random_dense()["embed_tokens"].nbytes


def test_the_same_arrays_make_the_same_files(tmp_path: Path):
    one, two = (write(tmp_path / name, FORMATS[0]) for name in ("one", "two"))
    records = [checkpoint.open_checkpoint(f).manifest.files for f in (one, two)]
    assert records[0].keys() == records[1].keys()
    differ = {n for n in records[0] if records[0][n] != records[1][n]}
    # Orbax writes the time into this one.
    assert {Path(name).name for name in differ} == {"_CHECKPOINT_METADATA"}


def test_no_file_names_the_folder_that_it_was_written_to(folder: Path):
    for path in folder.rglob("*"):
        assert path.is_dir() or str(folder).encode() not in path.read_bytes()


def test_the_work_folder_is_gone_at_the_end(folder: Path):
    assert not (folder / ".work").exists()
    assert not (folder / "model.safetensors").exists()


def test_a_missing_file_is_named(folder: Path):
    path = folder / "layers/00001/plane_2/0.0.0"
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{path} is missing; wanted .* bytes"):
        checkpoint.open_checkpoint(folder)


def test_a_truncated_file_is_named_with_sizes(folder: Path):
    path = folder / "layers/00000/plane_0/0.0.0"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-7])
    wanted = f"{path} has {size - 7} bytes but the manifest says {size}; .*convert"
    with pytest.raises(ValueError, match=wanted):
        checkpoint.open_checkpoint(folder, verify_checksums=False)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_named(folder: Path):
    path = folder / "dense/embed_tokens.exponent/0.0"
    flip_a_bit(path)
    for check in (checkpoint.open_checkpoint, checkpoint.verify):
        with pytest.raises(ValueError, match=f"{path} is damaged: its sha256 is"):
            check(folder)
    checkpoint.open_checkpoint(folder, verify_checksums=False)


def test_checksums_of_large_models_are_verified_when_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    flip_a_bit(folder / "dense/embed_tokens.exponent/0.0")
    monkeypatch.setattr(checkpoint, "ALWAYS_VERIFY_BELOW_BYTES", 1)
    checkpoint.open_checkpoint(folder)
    with pytest.raises(ValueError, match="is damaged"):
        checkpoint.open_checkpoint(folder, verify_checksums=True)


def test_an_unfinished_conversion_says_so(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no converted model; convert"):
        checkpoint.open_checkpoint(tmp_path / "nowhere")
    (tmp_path / ".work").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no finished .* again: it resumes"):
        checkpoint.open_checkpoint(tmp_path)


def test_a_manifest_of_another_layout_is_refused(folder: Path):
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"layout_version": 99}))
    with pytest.raises(ValueError, match="layout_version=99 but this version reads 1"):
        checkpoint.open_checkpoint(folder)
    path.write_text(json.dumps(raw | {"format": {"name": "int4"}}))
    with pytest.raises(ValueError, match="format 'int4' is unknown"):
        checkpoint.open_checkpoint(folder)
    path.write_text(json.dumps({"layout_version": 1}))
    with pytest.raises(ValueError, match=r"is damaged \(KeyError: 'files'\)"):
        checkpoint.open_checkpoint(folder)
    path.write_text(json.dumps(raw)[:50])
    with pytest.raises(ValueError, match=r"is damaged \(JSONDecodeError"):
        checkpoint.open_checkpoint(folder)


def test_a_layer_that_does_not_exist_is_refused(folder: Path):
    with pytest.raises(IndexError, match="layer 2 is none of the 2 MoE layers"):
        checkpoint.open_checkpoint(folder).layer(2)


def test_planes_of_another_shape_are_refused(folder: Path):
    config = folder / "config.json"
    text = config.read_text().replace('"num_experts": 4', '"num_experts": 5')
    config.write_text(text)  # as long as before
    opened = checkpoint.open_checkpoint(folder, verify_checksums=False)
    with pytest.raises(ValueError, match=r"plane_0 is \(4, .* asks for \(5, "):
        opened.layer(0)


def test_a_model_without_tokenizer_says_what_to_do(folder: Path):
    opened = checkpoint.open_checkpoint(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json; put"):
        _ = opened.tokenizer_file


def test_a_part_that_is_missing_keeps_the_manifest_away(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    folder = tmp_path / "model"
    checkpoint.write_dense(folder, random_dense())
    checkpoint.write_sensitivity(folder, random_sensitivity(FORMATS[0]))
    checkpoint.write_layer(folder, 0, random_pages(FORMATS[0], 0))
    assert checkpoint.has_layer(folder, 0)
    assert not checkpoint.has_layer(folder, 1)
    with pytest.raises(FileNotFoundError, match="00001 has not been written"):
        checkpoint.finish(folder, tmp_path, format=FORMATS[0], calibration={})
    assert not checkpoint.is_checkpoint(folder)


def test_writing_again_replaces(folder: Path):
    checkpoint.write_layer(folder, 0, random_pages(FORMATS[0], 7))
    config, form = checkpoint.read_config(folder), FORMATS[0]
    came = checkpoint.read_layer(folder, 0, config, form)
    np.testing.assert_array_equal(came.planes, random_pages(form, 7).planes)


def test_it_works_inside_a_running_event_loop(folder: Path):
    async def as_in_a_notebook() -> dict:
        return checkpoint.open_checkpoint(folder).dense()

    assert_trees_equal(asyncio.run(as_in_a_notebook()), random_dense())


def test_no_thread_is_left_and_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    before = set(threading.enumerate())
    opened = checkpoint.open_checkpoint(write(tmp_path / "model", FORMATS[0]))
    opened.layer(0)
    opened.dense()
    deadline = time.monotonic() + 10  # event loops let go of their threads unwaited
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left
    assert [r for r in caplog.records if r.levelname != "INFO"] == []
    assert capfd.readouterr() == ("", "")
