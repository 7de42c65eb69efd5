"""The command line: `pagedweight COMMAND --flag=value ...`."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import flags

Values = flags.FlagValues


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: what it is for, its flags, and what it does with them.

    Attributes:
      positional: name of the one argument that it takes; empty for none.
      required: flags that must be given.
    """

    summary: str
    define: Callable[[Values], None]
    run: Callable[[Values, str], None]
    positional: str = ""
    required: tuple[str, ...] = ()


# Flags that several commands share


def _define_serving(values: Values) -> None:
    """Defines the options of serve(); a flag that is not given keeps its default."""
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    text("model", None, "Folder of a converted model, or 'demo'.", flag_values=values)
    flags.DEFINE_enum(
        "policy",
        "pagedweight",
        ["pagedweight", "bf16"],
        "'bf16' serves a Hugging Face folder as it is.",
        flag_values=values,
    )
    number("pin_bits", None, "Keep all pages at so many bits.", flag_values=values)
    text(
        "expert_budget",
        None,
        "Bytes of expert planes, spent once by offline sensitivity, e.g. 12MiB.",
        flag_values=values,
    )
    text("memory_budget", None, "Bytes for everything, e.g. 80MiB.", flag_values=values)
    flags.DEFINE_enum(
        "dtype",
        "auto",
        ["auto", "float32", "bfloat16"],
        "Type of what is not quantised; auto is bfloat16.",
        flag_values=values,
    )
    number("max_model_len", None, "Tokens of a sequence.", flag_values=values)
    number("max_num_seqs", 16, "Requests that run at once.", flag_values=values)
    number("max_num_batched_tokens", 256, "Prompt tokens a step.", flag_values=values)
    number("seed", 0, "Of requests without one.", flag_values=values)


_SERVING = (
    "policy",
    "pin_bits",
    "expert_budget",
    "memory_budget",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "seed",
)


def _serving_options(values: Values) -> dict[str, Any]:
    return {name: values[name].value for name in _SERVING}


# Commands. Each imports what it needs, so that --help stays quick.


def _define_convert(values: Values) -> None:
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    text("hf_dir", None, "Folder in Hugging Face format.", flag_values=values)
    text("output", None, "Folder to make.", flag_values=values)
    text(
        "calibration",
        None,
        "JSON Lines files with a field 'text', separated by commas.",
        flag_values=values,
    )
    flags.DEFINE_enum(
        "format",
        "affine",
        ["affine", "codebook", "refined"],
        "Number format of the planes.",
        flag_values=values,
    )
    number("seed_bits", 3, "Bits of the lowest precision.", flag_values=values)
    number("parent_bits", 6, "Bits of the best precision.", flag_values=values)
    number("num_sequences", 128, "Calibration sequences.", flag_values=values)
    number("sequence_tokens", 512, "Tokens of each.", flag_values=values)


def _convert(values: Values, _: str) -> None:
    from checkpoints_tools.convert import convert

    convert(
        values.hf_dir,
        values.output,
        values.calibration,
        format=values.format,
        seed_bits=values.seed_bits,
        parent_bits=values.parent_bits,
        num_sequences=values.num_sequences,
        sequence_tokens=values.sequence_tokens,
    )


def _inspect(_: Values, folder: str) -> None:
    from rich.console import Console

    from checkpoints_tools.inspect import describe

    Console().print(describe(folder))


def _define_generate(values: Values) -> None:
    _define_serving(values)
    text, number = flags.DEFINE_string, flags.DEFINE_integer
    flags.DEFINE_multi_string(
        "prompt", None, "A prompt; may be given several times.", flag_values=values
    )
    number("max_tokens", 64, "Tokens to generate.", flag_values=values)
    flags.DEFINE_float("temperature", 1.0, "0 is greedy.", flag_values=values)
    flags.DEFINE_float("top_p", 1.0, "Nucleus.", flag_values=values)
    number("top_k", 0, "0 keeps all tokens.", flag_values=values)
    text("stop", None, "Text that ends the output.", flag_values=values)


def _generate(values: Values, _: str) -> None:
    from pagedweight_jax.engine.request import SamplingParams
    from pagedweight_jax.serving.llm import serve

    params = SamplingParams(
        max_tokens=values.max_tokens,
        temperature=values.temperature,
        top_p=values.top_p,
        top_k=values.top_k,
        stop=values.stop,
    )
    with serve(values.model, **_serving_options(values)) as llm:
        for output in llm.generate(values.prompt, params):
            print(f"{output.prompt}{output.outputs[0].text}\n")


def _define_evaluate(values: Values) -> None:
    _define_serving(values)
    text = flags.DEFINE_string
    text("data", None, "JSON Lines files, separated by commas.", flag_values=values)
    text("output", None, "JSON file to write.", flag_values=values)
    flags.DEFINE_integer(
        "window_tokens", 1024, "Tokens of a window.", flag_values=values
    )


def _evaluate(values: Values, _: str) -> None:
    from pagedweight_jax.evaluation.perplexity import evaluate, read_texts
    from pagedweight_jax.serving.llm import serve

    files = values.data.split(",")
    list(read_texts(files))  # a mistake in them should not cost the loading of a model
    options = _serving_options(values)
    options["max_model_len"] = values.max_model_len or values.window_tokens + 1
    with serve(values.model, **options) as llm:
        result = evaluate(llm, files, window_tokens=values.window_tokens)
    for name, part in {**result["domains"], "all": result["perplexity"]}.items():
        print(
            f"{name:12s} perplexity {part['perplexity']:8.3f}"
            f"  95% [{part['low']:.3f}, {part['high']:.3f}]"
            f"  {part['num_tokens']} tokens"
        )
    _write_json(values.output, result)


def _define_demo(values: Values) -> None:
    flags.DEFINE_string(
        "output", "pagedweight_demo.png", "Picture to write.", flag_values=values
    )
    flags.DEFINE_string(
        "json", None, "File for the figures of the table.", flag_values=values
    )


def _demo(values: Values, _: str) -> None:
    from pagedweight_jax.demo.run import run

    result = run(Path(values.output))
    if values.json:
        _write_json(values.json, result)


def _define_planner_bench(values: Values) -> None:
    flags.DEFINE_integer("pages", 11_520, "Pages of the model.", flag_values=values)
    flags.DEFINE_integer("repeats", 200, "Plans of each kind.", flag_values=values)
    flags.DEFINE_string("output", None, "JSON file to write.", flag_values=values)


def _planner_bench(values: Values, _: str) -> None:
    from pagedweight_jax.evaluation import planner_bench

    result = planner_bench.run(values.pages, values.repeats)
    if values.output:
        _write_json(values.output, result)


def _define_kernel_bench(values: Values) -> None:
    many = flags.DEFINE_list
    many("shapes", ["qwen", "mixtral", "gemma"], "Layers, or tiny.", flag_values=values)
    many(
        "bits",
        ["3", "4", "6", "8", "mixed"],
        "Bits of all pages; mixed draws 3 to 6 for each.",
        flag_values=values,
    )
    many("tokens", ["1", "4", "16", "64", "4096"], "Of a call.", flag_values=values)
    many("format", ["affine", "codebook", "refined"], "Of planes.", flag_values=values)
    flags.DEFINE_integer("calls", 12, "Calls timed a row.", flag_values=values)
    flags.DEFINE_boolean(
        "torch", True, "Time torch, where installed.", flag_values=values
    )
    flags.DEFINE_boolean(
        "tune",
        False,
        "Choose sizes of the kernels for these shapes and formats first.",
        flag_values=values,
    )
    flags.DEFINE_string("output", None, "JSON file to write.", flag_values=values)


def _kernel_bench(values: Values, _: str) -> None:
    from pagedweight_jax.evaluation import kernel_bench

    options = kernel_bench.Options(
        shapes=tuple(values.shapes),
        bits=tuple(values.bits),
        tokens=tuple(_integers("tokens", values.tokens)),
        formats=tuple(values.format),
        calls=values.calls,
        torch=values.torch,
        tune=values.tune,
    )
    result = kernel_bench.run(options)
    if values.output:
        _write_json(values.output, result)


def _define_step_bench(values: Values) -> None:
    many, number = flags.DEFINE_list, flags.DEFINE_integer
    flags.DEFINE_string(
        "model",
        "qwen1.5-moe-a2.7b",
        "Sizes to fill with random weights, or tiny.",
        flag_values=values,
    )
    many("batch", ["1", "4", "16", "32"], "Sequences.", flag_values=values)
    many("context", ["2048", "8191"], "Cached tokens.", flag_values=values)
    many(
        "precision",
        ["bf16", "3", "4", "6", "mixed"],
        "Bits of all experts; mixed draws 3 to 6 for each page, 4 on average.",
        flag_values=values,
    )
    number("steps", 40, "Enqueued one after the other, at most.", flag_values=values)
    flags.DEFINE_boolean(
        "migration", True, "Also time steps while planes move.", flag_values=values
    )
    number("migration_steps", 400, "With and without planes.", flag_values=values)
    number("staging_frames", 256, "Rows of a staging array.", flag_values=values)
    flags.DEFINE_string("output", None, "JSON file to write.", flag_values=values)


def _step_bench(values: Values, _: str) -> None:
    from pagedweight_jax.evaluation import step_bench

    options = step_bench.Options(
        model=values.model,
        batches=tuple(_integers("batch", values.batch)),
        contexts=tuple(_integers("context", values.context)),
        precisions=tuple(values.precision),
        steps=values.steps,
        migration=values.migration,
        migration_steps=values.migration_steps,
        staging_frames=values.staging_frames,
    )
    result = step_bench.run(options)
    if values.output:
        _write_json(values.output, result)


def _integers(flag: str, texts: list[str]) -> list[int]:
    """Reads the parts of a flag.

    Raises:
      ValueError: if one is no whole number.
    """
    try:
        return [int(text) for text in texts]
    except ValueError:
        raise ValueError(
            f"--{flag}={','.join(texts)} must be whole numbers with commas between"
        ) from None


def _write_json(file: str, result: dict[str, Any]) -> None:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


COMMANDS = {
    "demo": Command(
        summary="serve a burst in a tight budget, and watch experts give way",
        define=_define_demo,
        run=_demo,
    ),
    "convert": Command(
        summary="turn a Hugging Face checkpoint into bit planes",
        define=_define_convert,
        run=_convert,
        required=("hf_dir", "output", "calibration"),
    ),
    "inspect": Command(
        summary="describe and verify a converted model",
        define=lambda values: None,
        run=_inspect,
        positional="DIR",
    ),
    "generate": Command(
        summary="continue prompts",
        define=_define_generate,
        run=_generate,
        required=("model", "prompt"),
    ),
    "evaluate": Command(
        summary="measure perplexity",
        define=_define_evaluate,
        run=_evaluate,
        required=("model", "data", "output"),
    ),
    "bench planner": Command(
        summary="time the planner",
        define=_define_planner_bench,
        run=_planner_bench,
    ),
    "bench kernels": Command(
        summary="time the fused MoE layer and its rivals against the memory limit",
        define=_define_kernel_bench,
        run=_kernel_bench,
    ),
    "bench step": Command(
        summary="time whole decode steps of a model of full size",
        define=_define_step_bench,
        run=_step_bench,
    ),
}


def _usage() -> str:
    lines = ["usage: pagedweight COMMAND [--flag=value ...]", ""]
    lines += [f"  {name:14s} {c.summary}" for name, c in COMMANDS.items()]
    return "\n".join([*lines, "", "`pagedweight COMMAND --help` lists its flags."])


def _flag_help(values: Values) -> str:
    """Lists the flags without the file that defines them."""
    if not len(values):
        return ""
    lines = values.get_help().splitlines()
    return "\n".join(line for line in lines if line.startswith("  "))


def _parse(name: str, command: Command, arguments: list[str]) -> tuple[Values, str]:
    """Parses a command's arguments; SystemExit after --help."""
    values = flags.FlagValues()
    command.define(values)
    if "--help" in arguments or "-h" in arguments:
        print(f"usage: pagedweight {name} {command.positional} [--flag=value ...]")
        print(f"{command.summary}\n\n{_flag_help(values)}")
        raise SystemExit(0)
    rest = values([name, *arguments])[1:]
    missing = [flag for flag in command.required if not values[flag].value]
    if missing:
        raise ValueError(f"--{missing[0]} is missing")
    if len(rest) != bool(command.positional):
        wanted = command.positional or "no arguments"
        raise ValueError(f"came with arguments {rest}; wanted {wanted}")
    return values, rest[0] if rest else ""


def _command_name(arguments: list[str]) -> tuple[str, list[str]]:
    """Takes the name of a command, of one word or two, off the arguments."""
    first = {name.split()[0] for name in COMMANDS if " " in name}
    words = 2 if arguments[0] in first else 1
    return " ".join(arguments[:words]), arguments[words:]


def main(arguments: list[str] | None = None) -> None:
    """Runs a command; a mistake of the caller's ends with exit code 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name, rest = _command_name(arguments or ["--help"])
    if name in ("--help", "-h", "help"):
        print(_usage())
        return
    if name not in COMMANDS:
        print(f"pagedweight: {name!r} is no command\n{_usage()}", file=sys.stderr)
        raise SystemExit(2)
    command = COMMANDS[name]
    try:
        values, positional = _parse(name, command, rest)
        command.run(values, positional)
    except (ValueError, FileNotFoundError, FileExistsError, flags.Error) as error:
        print(f"pagedweight {name}: {error}", file=sys.stderr)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
