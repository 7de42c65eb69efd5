"""A whole conversion: what it writes, how it resumes, what it refuses."""

import io
import os
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from checkpoints_tools import convert as convert_module
from checkpoints_tools import huggingface, inspect
from checkpoints_tools.convert import convert
from checkpoints_tools.quantize import unpack_layer
from pagedweight_jax import checkpoint
from pagedweight_jax.formats import make_format

OPTIONS = {
    "parent_bits": 5,
    "num_sequences": 6,
    "sequence_tokens": 32,
    "progress": False,
}


@pytest.fixture(scope="module")
def converted(hf_dir, calibration, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("converted") / "affine"
    return convert(hf_dir, output, calibration, **OPTIONS).folder


def array_files(folder: Path) -> dict[str, str]:
    """Checksums of all files but the one that holds the time."""
    files = checkpoint.verify(folder).files
    return {n: r.sha256 for n, r in files.items() if "_CHECKPOINT_METADATA" not in n}


def test_the_dense_parameters_are_untouched(hf_dir, converted):
    came = checkpoint.open_checkpoint(converted).dense()
    wanted = huggingface.load_dense(huggingface.open_model(hf_dir))
    assert jax.tree.structure(came) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(came), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_the_planes_are_the_experts(hf_dir, converted):
    opened = checkpoint.open_checkpoint(converted)
    source = huggingface.open_model(hf_dir)
    assert opened.config.num_moe_layers == 2
    for layer in range(2):
        codes = unpack_layer(opened.layer(layer))
        wanted = huggingface.load_experts(source, layer)
        for bits, limit in ((3, 0.25), (4, 0.13), (5, 0.09)):
            came = codes.weights(opened.format, bits)
            for a, b in zip((came.gate_up, came.down), wanted, strict=True):
                assert np.sqrt(((a - b) ** 2).mean() / (b**2).mean()) < limit


def test_the_planner_tables_are_sane(converted):
    sensitivity = checkpoint.open_checkpoint(converted).sensitivity()
    loss = sensitivity.loss
    assert loss.shape == (2, 8, 2, 6)
    assert (sensitivity.seed_bits, sensitivity.parent_bits) == (3, 5)
    assert np.isinf(loss[..., :3]).all()
    assert (loss[..., 3] > loss[..., 4]).all()
    assert (loss[..., 4] > 0).all()
    assert (loss[..., 5] == 0).all()
    np.testing.assert_allclose(sensitivity.expert_share.sum(axis=1), 1, rtol=1e-6)
    assert np.isfinite(sensitivity.residual_weights).all()


def test_the_manifest_tells_the_calibration(converted):
    manifest = checkpoint.verify(converted)
    told = manifest.calibration
    assert told["files"] == ["first.jsonl", "second.jsonl"]
    assert (told["num_sequences"], told["sequence_tokens"]) == (6, 32)
    assert np.shape(told["residual_r2"]) == (2, 2)
    assert manifest.format == make_format("affine", parent_bits=5)


def test_inspect_describes_it(converted):
    console = Console(width=120, file=io.StringIO())
    console.print(inspect.describe(converted))
    text = console.file.getvalue()
    for part in (
        "qwen2_moe: 2 MoE layers of 8 experts",
        "affine: seed_bits=3",
        "planes",
    ):
        assert part in text


class Killed(BaseException):
    """Stands for the end of the process."""


def test_killed_between_any_two_commits_it_ends_with_the_same_files(
    hf_dir, calibration, converted, tmp_path, monkeypatch
):
    # All that is finished gets its name by os.replace; dying before one leaves
    # what a dead process leaves.
    replace, calibrate = os.replace, convert_module.calibrate.calibrate
    runs, commits_left, calibrations = 0, 0, 0

    def commit(source, target):
        nonlocal commits_left
        if "orbax" in str(source):  # Orbax makes its folders whole as well
            return replace(source, target)
        if not commits_left:
            raise Killed
        commits_left -= 1
        return replace(source, target)

    def counted(*args):
        nonlocal calibrations
        calibrations += 1
        return calibrate(*args)

    monkeypatch.setattr(os, "replace", commit)
    monkeypatch.setattr(convert_module.calibrate, "calibrate", counted)
    while not checkpoint.is_checkpoint(tmp_path / "out"):
        commits_left, runs = 1 + runs % 2, runs + 1
        assert runs < 20
        try:
            convert(hf_dir, tmp_path / "out", calibration, **OPTIONS)
        except Killed:
            with pytest.raises(FileNotFoundError, match="it resumes"):
                checkpoint.open_checkpoint(tmp_path / "out")
    assert runs > 5
    # The first run died after calibrating and before storing it; then it was kept.
    assert calibrations == 2
    assert array_files(tmp_path / "out") == array_files(converted)
    assert not (tmp_path / "out/.work").exists()


def test_resuming_with_other_options_is_refused(hf_dir, calibration, tmp_path):
    def interrupted(*_):
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert_module, "_calibrate", interrupted)
        with pytest.raises(Killed):
            convert(hf_dir, tmp_path / "out", calibration, **OPTIONS)
    for option, value in (
        ("seed_bits", 2),
        ("parent_bits", 6),
        ("num_sequences", 5),
        ("format", "codebook"),
    ):
        message = f"{option}=.* but now {option}={value!r}; resume with the same"
        with pytest.raises(ValueError, match=message):
            convert(
                hf_dir, tmp_path / "out", calibration, **(OPTIONS | {option: value})
            )


def test_a_finished_folder_is_not_written_again(hf_dir, calibration, converted):
    with pytest.raises(FileExistsError, match="already holds a finished"):
        convert(hf_dir, converted, calibration, **OPTIONS)


def test_a_folder_with_other_files_is_not_touched(hf_dir, calibration, tmp_path):
    (tmp_path / "thesis.tex").write_text("...")
    with pytest.raises(FileExistsError, match="has files but is no interrupted"):
        convert(hf_dir, tmp_path, calibration, **OPTIONS)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_too_small_a_disk_is_told_beforehand(
    hf_dir, calibration, tmp_path, monkeypatch
):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match=r"needs about .* MB .* has 1 kB free"):
        convert(hf_dir, tmp_path / "out", calibration, **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_tokenizer_is_refused(
    save, tensors, calibration, tmp_path
):
    folder = save(tensors)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json does not exist"):
        convert(folder, tmp_path / "out", calibration, **OPTIONS)
