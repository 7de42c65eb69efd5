"""From a Hugging Face checkpoint to a checkpoint of planes: `pagedweight convert`.

    safetensors -> calibration -> for each layer: codes, planes, page losses
                -> prompt residual -> dense parameters, planner tables, manifest

Layers are streamed: one is in memory at a time (but for the calibration, which
differentiates the whole model). What is finished stays finished: killed at any point,
the same call goes on after the last finished stage and ends with the same arrays.
"""

import functools
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32
from rich.progress import Progress
from tokenizers import Tokenizer

from checkpoints_tools import calibrate, huggingface, regress, stages, texts
from checkpoints_tools.calibrate import DifferentiableModel, Experts
from checkpoints_tools.huggingface import HuggingFaceModel
from checkpoints_tools.progress import format_bytes, progress_bar
from checkpoints_tools.quantize import (
    LayerWeights,
    layer_fisher,
    pack_layer,
    quantize_layer,
    unpack_layer,
)
from checkpoints_tools.regress import PromptResidual
from checkpoints_tools.sensitivity import layer_loss
from pagedweight_jax import checkpoint
from pagedweight_jax.checkpoint import Manifest
from pagedweight_jax.config import ModelConfig
from pagedweight_jax.formats import Format, make_format
from pagedweight_jax.sensitivity import Sensitivity
from pallas_kernels import bitplane

RESIDUAL_SEQUENCES = 64
"""Calibration sequences, the first ones, that the prompt residual is fitted on."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a conversion did.

    Attributes:
      seconds: time by stage; a stage that an earlier run had finished takes none.
      num_weights: expert weights that this run quantised.
    """

    folder: Path
    manifest: Manifest
    seconds: dict[str, float]
    num_weights: int

    @property
    def weights_per_second(self) -> float:
        """Speed of quantisation, packing and page losses included."""
        return self.num_weights / max(self.seconds["quantize"], 1e-9)


@dataclass(frozen=True, kw_only=True)
class _Conversion:
    """What the stages share."""

    source: HuggingFaceModel
    output: Path
    form: Format
    sequences: Int32[np.ndarray, "S T"]
    stages: stages.Stages
    bar: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        return self.source.config

    @functools.cached_property
    def model(self) -> DifferentiableModel:
        """The model for calibration, loaded when first asked for."""
        return calibrate.load_model(self.source)

    @contextmanager
    def stage(self, name: str, total: int, unit: str) -> Iterator[Any]:
        """Shows a progress bar and takes the time of a stage."""
        task = self.bar.add_task(name, total=total, unit=unit)
        start = time.perf_counter()
        yield lambda done: self.bar.advance(task, done)
        self.seconds[name] = time.perf_counter() - start


def convert(
    hf_dir: str | Path,
    output: str | Path,
    calibration: str,
    *,
    format: str = "affine",
    seed_bits: int = 3,
    parent_bits: int = 6,
    num_sequences: int = 128,
    sequence_tokens: int = 512,
    progress: bool = True,
) -> Summary:
    """Converts a checkpoint; resumes where an interrupted call stopped.

    Args:
      hf_dir: checkpoint folder in Hugging Face format, with its tokenizer.
      output: folder to make.
      calibration: .jsonl files with a "text" field (see `texts.find_files`).
      format: "affine", "codebook" or "refined".
      seed_bits: bits of the lowest level.
      parent_bits: bits of the best level, and planes of a weight.
      num_sequences: calibration sequences.
      sequence_tokens: tokens of each.
      progress: whether to show progress bars.
    Returns:
      The manifest and what it took.
    Raises:
      FileNotFoundError: if the checkpoint or the text is missing.
      FileExistsError: if the output has files that are not of this conversion.
      ValueError: if the checkpoint or the text is unfit, or an option differs from
        those of the conversion that is resumed.
      OSError: if the disk has too little room.
    """
    output = Path(output)
    form = make_format(format, seed_bits=seed_bits, parent_bits=parent_bits)
    source = huggingface.open_model(hf_dir)
    _check_sizes(source.config, form)
    files = texts.find_files(calibration)
    sequences = texts.cut_sequences(
        files,
        _tokenizer(source.folder),
        vocab_size=source.config.vocab_size,
        num_sequences=num_sequences,
        sequence_tokens=sequence_tokens,
    )
    options = {
        "hf_dir": str(source.folder.resolve()),
        "weight_files": {p.name: p.stat().st_size for p in source.shards.values()},
        "calibration": [str(file.resolve()) for file in files],
        "format": form.name,
        **vars(form),
        "num_sequences": num_sequences,
        "sequence_tokens": sequence_tokens,
    }
    _check_disk_space(output, source.config, form)
    begun = stages.begin(output, options)
    with progress_bar(progress) as bar:
        run = _Conversion(
            source=source,
            output=output,
            form=form,
            sequences=sequences,
            stages=begun,
            bar=bar,
        )
        _calibrate(run)
        num_weights = _quantize(run)
        residual = _fit_residual(run)
        manifest = _write_rest(run, residual, [file.name for file in files])
    return Summary(
        folder=output,
        manifest=manifest,
        seconds=run.seconds,
        num_weights=num_weights,
    )


# Stages


def _calibrate(run: _Conversion) -> None:
    with run.stage("calibrate", run.sequences.size, "tokens") as advance:
        if not run.stages.has_calibration():
            result = calibrate.calibrate(run.model, run.sequences, advance)
            run.stages.write_calibration(result)


def _quantize(run: _Conversion) -> int:
    """Quantises the layers that are not written yet; returns their weights."""
    todo = [
        layer
        for layer in range(run.config.num_moe_layers)
        if not checkpoint.has_layer(run.output, layer)
    ]
    total = run.config.num_expert_weights // run.config.num_moe_layers * len(todo)
    with run.stage("quantize", total, "weights") as advance:
        for layer in todo:
            weights = _layer_weights(run, layer)
            fisher = layer_fisher(run.stages.layer_statistics(layer))
            quantized = quantize_layer(weights, fisher, run.form, advance)
            loss = functools.partial(layer_loss, weights, quantized, fisher, run.form)
            run.stages.array(f"loss/{layer:05d}", loss)
            pages = pack_layer(quantized, run.form.parent_bits)
            checkpoint.write_layer(run.output, layer, pages)
    return total


def _fit_residual(run: _Conversion) -> PromptResidual:
    sequences = run.sequences[:RESIDUAL_SEQUENCES]
    with run.stage("residual", sequences.size, "tokens") as advance:
        damage = run.stages.array(
            "damage",
            lambda: regress.sequence_damage(
                run.model, _squared_errors(run), sequences, advance
            ),
        )
    features = run.stages.calibration_array("features")
    return regress.fit(features[: len(damage)], damage)


def _write_rest(
    run: _Conversion, residual: PromptResidual, file_names: list[str]
) -> Manifest:
    """Writes dense parameters, planner tables and manifest."""
    with run.stage("write", 1, "files") as advance:
        if not checkpoint.has_dense(run.output):
            checkpoint.write_dense(run.output, huggingface.load_dense(run.source))
        sensitivity = _sensitivity(run, residual)
        checkpoint.write_sensitivity(run.output, sensitivity)
        manifest = checkpoint.finish(
            run.output,
            run.source.folder,
            format=run.form,
            calibration=_calibration_summary(run, residual, file_names),
        )
        advance(1)
    return manifest


# Parts of stages


def _layer_weights(run: _Conversion, layer: int) -> LayerWeights:
    gate_up, down = huggingface.load_experts(run.source, layer)
    return LayerWeights(gate_up=gate_up, down=down)


def _squared_errors(run: _Conversion) -> Experts:
    """Returns the squared errors of the seed level, from the layers on disk."""
    gate_up, down = [], []
    for layer in range(run.config.num_moe_layers):
        weights = _layer_weights(run, layer)
        pages = checkpoint.read_layer(run.output, layer, run.config, run.form)
        seed = unpack_layer(pages).weights(run.form, run.form.seed_bits)
        gate_up.append((weights.gate_up - seed.gate_up) ** 2)
        down.append((weights.down - seed.down) ** 2)
    return Experts(gate_up=np.stack(gate_up), down=np.stack(down))


def _sensitivity(run: _Conversion, residual: PromptResidual) -> Sensitivity:
    layers = range(run.config.num_moe_layers)
    loss = [np.load(run.stages.folder / "loss" / f"{i:05d}.npy") for i in layers]
    tokens = np.stack([run.stages.layer_statistics(i).tokens for i in layers])
    share = tokens / tokens.sum(axis=1, keepdims=True)
    return Sensitivity(
        loss=np.stack(loss),
        residual_weights=residual.weights,
        residual_bias=residual.bias,
        expert_share=share.astype(np.float32),
    )


def _calibration_summary(
    run: _Conversion, residual: PromptResidual, file_names: list[str]
) -> dict[str, Any]:
    layers = range(run.config.num_moe_layers)
    tokens = np.stack([run.stages.layer_statistics(i).tokens for i in layers])
    return {
        "files": file_names,
        "num_sequences": run.sequences.shape[0],
        "sequence_tokens": run.sequences.shape[1],
        "mean_loss": float(run.stages.calibration_array("losses").mean()),
        "least_tokens_of_an_expert": int(tokens.min()),
        "experts_without_tokens": int((tokens == 0).sum()),
        "residual_sequences": min(RESIDUAL_SEQUENCES, run.sequences.shape[0]),
        "residual_r2": _rounded(residual.r2),
        "residual_r2_left_out": _rounded(residual.r2_left_out),
    }


def _rounded(values: np.ndarray) -> list[Any]:
    return values.astype(np.float64).round(3).tolist()


# Checks


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; calibration needs the model's tokenizer in the"
            " tokenizers library's format"
        )
    return Tokenizer.from_file(str(path))


def _check_sizes(config: ModelConfig, form: Format) -> None:
    """Refuses models whose experts cannot be cut into planes and groups."""
    bitplane.plane_words(config.expert_width, config.hidden_size)
    form.side_table_bytes(config.hidden_size, config.expert_width)
    form.side_table_bytes(config.expert_width, config.hidden_size)


def _check_disk_space(output: Path, config: ModelConfig, form: Format) -> None:
    """Refuses to start when the result and the work folder would not fit."""
    experts = config.num_moe_layers * config.num_experts
    width, inner = config.hidden_size, config.expert_width
    tables = form.side_table_bytes(2 * inner, width)
    tables += form.side_table_bytes(width, inner)
    planes = config.num_expert_weights * form.parent_bits // 8
    statistics = 4 * config.num_expert_weights
    wanted = planes + experts * tables + statistics
    parent = output.absolute()
    while not parent.exists():
        parent = parent.parent
    if output.is_dir():
        wanted -= sum(p.stat().st_size for p in output.rglob("*") if p.is_file())
    free = shutil.disk_usage(parent).free
    if wanted > free:
        raise OSError(
            f"{output} needs about {format_bytes(wanted)} (calibration statistics"
            f" {format_bytes(statistics)} of it, until the end) but the disk has"
            f" {format_bytes(free)} free; choose another --output"
        )
