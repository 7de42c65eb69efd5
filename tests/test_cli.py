"""The command line, called in this process."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from pagedweight_jax import cli

COMMANDS = (
    "demo",
    "convert",
    "inspect",
    "generate",
    "evaluate",
    "bench planner",
    "bench kernels",
    "bench step",
)
TEXT = "the quick brown fox jumps over the lazy dog and comes back again. "


def flags(command: str, **values: object) -> list[str]:
    return [command, *(f"--{name}={value}" for name, value in values.items())]


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that is a mistake: exit code 2, and one text for the user."""
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(arguments))
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_usage_lists_the_commands(capsys, arguments):
    cli.main(arguments)
    out = capsys.readouterr().out
    assert "usage: pagedweight COMMAND" in out
    assert [name for name in COMMANDS if f"  {name} " not in out] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_describes_its_flags(capsys, name):
    with pytest.raises(SystemExit) as exit_:
        cli.main([*name.split(), "--help"])
    out = capsys.readouterr().out
    assert exit_.value.code == 0
    assert f"usage: pagedweight {name}" in out and cli.COMMANDS[name].summary in out
    assert [f for f in cli.COMMANDS[name].required if f"--{f}" not in out] == []


def test_an_unknown_command_is_named_and_the_others_listed(capsys):
    err = fails(capsys, "serv")
    assert "'serv' is no command" in err and "  evaluate " in err
    assert "'bench engine' is no command" in fails(capsys, "bench", "engine")


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["generate", "--modle=x"], "modle"),
        (["generate", "--model=x", "--prompt=y", "--pin_bits=four"], "pin_bits=four"),
        (["generate", "--model=x", "--prompt=y", "--policy=int4"], "policy=int4"),
        (["generate", "--model=x"], "--prompt is missing"),
        (["generate", "--prompt=x"], "--model is missing"),
        (["evaluate", "--model=x", "--data=y"], "--output is missing"),
        (["convert", "--hf_dir=x", "--output=y"], "--calibration is missing"),
        (["convert", "stray", "--hf_dir=x", "--output=y", "--calibration=z"], "stray"),
        (["inspect"], "wanted DIR"),
        (["inspect", "a", "b"], "wanted DIR"),
        (["bench", "kernels", "--shapes=llama"], "shapes ['llama'] are unknown"),
        (["bench", "kernels", "--bits=9"], "bits ['9'] are unknown"),
        (["bench", "kernels", "--tokens=x"], "--tokens=x must be whole numbers"),
        (["bench", "step", "--model=x"], "model 'x' is unknown"),
        (["bench", "step", "--precision=9"], "precisions ['9'] are unknown"),
        (["bench", "step", "--context=8192"], "must be from 1 to 8191"),
        (["generate", "--model=nowhere", "--prompt=x"], "neither 'demo' nor a folder"),
        (
            ["generate", "--model=demo", "--prompt=x", "--top_p=0"],
            r"top_p=0.0 must be in (0, 1]",
        ),
        (
            ["generate", "--model=demo", "--prompt=x", "--policy=bf16", "--pin_bits=4"],
            "pin_bits=4 has no effect with policy='bf16'",
        ),
        (
            flags("generate", model="x", prompt="y", pin_bits=3, expert_budget="1MiB"),
            "expert_budget has no effect with pin_bits=3",
        ),
    ],
)
def test_a_mistake_names_itself_and_the_command(capsys, arguments, wanted):
    err = fails(capsys, *arguments)
    assert err.startswith(f"pagedweight {arguments[0]}") and wanted in err


def test_the_module_is_a_program(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pagedweight_jax.cli", "inspect", "nowhere"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == "" and "nowhere" in done.stderr
    assert "Traceback" not in done.stderr


def test_bench_planner_writes_its_figures(tmp_path, capsys):
    file = tmp_path / "deep" / "r.json"
    cli.main(["bench", "planner", "--pages=256", "--repeats=2", f"--output={file}"])
    assert json.loads(file.read_text())
    assert f"wrote {file}" in capsys.readouterr().out


# From a Hugging Face folder to figures


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = [
        json.dumps({"text": TEXT * 4, "domain": domain}) for domain in ("fox", "dog")
    ]
    file.write_text("\n".join(lines * 3) + "\n")
    return file


@pytest.fixture(scope="module")
def converted(tmp_path_factory, texts) -> Path:
    source, output = tmp_path_factory.mktemp("hf"), tmp_path_factory.mktemp("out") / "m"
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny.folder("qwen2_moe") / name, source)
    tiny.tokenizer().save(str(source / "tokenizer.json"))
    cli.main(
        flags(
            "convert",
            hf_dir=source,
            output=output,
            calibration=texts,
            num_sequences=4,
            sequence_tokens=32,
        )
    )
    return output


def test_a_converted_model_can_be_inspected(converted, capsys):
    capsys.readouterr()
    cli.main(["inspect", str(converted)])
    assert "qwen2_moe" in capsys.readouterr().out


def test_evaluate_writes_perplexities(converted, texts, tmp_path, capsys):
    file = tmp_path / "r.json"
    cli.main(
        flags(
            "evaluate",
            model=converted,
            data=texts,
            output=file,
            pin_bits=6,
            dtype="float32",
            window_tokens=48,
            max_num_seqs=4,
            max_num_batched_tokens=64,
        )
    )
    out = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert set(result["domains"]) == {"fox", "dog"}
    whole = result["perplexity"]
    assert 1 < whole["low"] <= whole["perplexity"] <= whole["high"] < 1e5
    # Two domains with the same text.
    assert result["domains"]["fox"] == result["domains"]["dog"]
    assert whole["num_tokens"] == 2 * result["domains"]["fox"]["num_tokens"]
    assert result["mean_bits"] == 6 and result["config"]["pin_bits"] == 6
    memory = result["memory_bytes"]
    assert memory.pop("budget") == sum(memory.values())
    assert "all" in out and f"wrote {file}" in out


def test_a_text_that_is_not_there_is_named_before_anything_is_loaded(tmp_path, capsys):
    file = tmp_path / "r.json"
    arguments = flags("evaluate", model="nowhere", data="gone.jsonl", output=file)
    assert "gone.jsonl does not exist" in fails(capsys, *arguments)
    assert not file.exists()


def test_generate_prints_the_prompt_and_what_follows(converted, capsys):
    capsys.readouterr()
    cli.main(
        [
            *flags("generate", model=converted, prompt="hello", max_tokens=4),
            *("--prompt=there", "--temperature=0", "--max_num_seqs=2"),
            *("--max_num_batched_tokens=8", "--max_model_len=32"),
        ]
    )
    first, second = capsys.readouterr().out.split("\n\n")[:2]
    assert first.startswith("hello") and second.startswith("there")
    assert len(first) > len("hello")
