"""What `pagedweight inspect DIR` says about a converted model."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from checkpoints_tools.progress import format_bytes, format_count
from pagedweight_jax.checkpoint import Checkpoint, Manifest, open_checkpoint
from pagedweight_jax.sensitivity import Sensitivity


def describe(folder: str | Path) -> RenderableType:
    """Describes a converted model after verifying all its checksums.

    Returns:
      Something that a rich console prints.
    Raises:
      FileNotFoundError, ValueError: if a file is missing or damaged; see
        `open_checkpoint`.
    """
    opened = open_checkpoint(folder, verify_checksums=True)
    return Group(
        _facts(opened),
        Text(),
        _bytes_table(opened.manifest),
        Text(),
        _sensitivity_table(opened.sensitivity()),
    )


def _facts(opened: Checkpoint) -> Table:
    """Two columns: a name and a value."""
    table = Table.grid(padding=(0, 2))
    for name, value in _fact_rows(opened):
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def _fact_rows(opened: Checkpoint) -> Iterator[tuple[str, str]]:
    config, manifest = opened.config, opened.manifest
    form = manifest.format
    yield "folder", str(opened.folder)
    yield (
        "model",
        f"{manifest.model_type}: {config.num_moe_layers} MoE layers of"
        f" {config.num_experts} experts [{config.expert_width}, {config.hidden_size}],"
        f" {format_count(config.num_expert_weights)} expert weights",
    )
    options = ", ".join(f"{key}={value}" for key, value in vars(form).items())
    yield "format", f"{form.name}: {options}"
    yield (
        "made by",
        f"pagedweight-jax {manifest.library_version}, layout version"
        f" {manifest.layout_version}",
    )
    for name, value in manifest.calibration.items():
        yield f"calibration: {name.replace('_', ' ')}", _short(value)
    yield (
        "checksums",
        f"all {len(manifest.files)} files, {format_bytes(manifest.stored_bytes)}, are"
        " what they were when the model was converted",
    )


def _short(value: object) -> str:
    """Writes a value of the manifest in one line; a nested list by its range."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return f"{np.min(value):.3g} to {np.max(value):.3g}, mean {np.mean(value):.3g}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _bytes_table(manifest: Manifest) -> Table:
    """Bytes in memory by kind."""
    table = Table("in memory", "bytes", "share")
    total = sum(manifest.array_bytes.values())
    for kind, count in manifest.array_bytes.items():
        table.add_row(kind, f"{count:,}", f"{count / total:.1%}")
    table.add_row("total", f"{total:,}", "", style="bold")
    return table


def _sensitivity_table(sensitivity: Sensitivity) -> Table:
    """Predicted rise of the loss, in thousandths of a nat a token, by layer."""
    levels = range(sensitivity.seed_bits, sensitivity.parent_bits)
    table = Table("layer", "block", title="predicted loss, 0.001 nats a token")
    for bits in levels:
        table.add_column(f"all at {bits} bits", justify="right")
    table.add_column("dearest expert", justify="right")
    table.add_column("cheapest expert", justify="right")
    for layer, block in np.ndindex(sensitivity.loss.shape[0], 2):
        loss = 1e3 * sensitivity.loss[layer, :, block]
        at_seed = loss[:, sensitivity.seed_bits]
        extremes = (int(at_seed.argmax()), int(at_seed.argmin()))
        table.add_row(
            str(layer),
            ("gate_up", "down")[block],
            *(f"{loss[:, bits].sum():.3f}" for bits in levels),
            *(f"{at_seed[e]:.3f} ({e})" for e in extremes),
        )
    return table
