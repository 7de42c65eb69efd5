"""The work folder of a conversion: what is finished, so that it can resume.

    DIR/.work/options.json      what was asked for; a resumed run must ask for the same
        calibration/            LayerStatistics of each layer, features, losses
        loss/00000.npy ...      page losses of each layer that is quantised
        damage.npy              for the prompt residual

A file or folder has its name only when it is whole: it is written under another one
first. Layers and dense parameters are checked for in the checkpoint itself.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints_tools.calibrate import Calibration, LayerStatistics
from pagedweight_jax.checkpoint import WORK_FOLDER, is_checkpoint

_OPTIONS = "options.json"


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Finished stages of one conversion, on disk."""

    folder: Path

    def array(self, name: str, compute: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns a stored array, or computes and stores it."""
        path = self.folder / f"{name}.npy"
        if path.is_file():
            return np.load(path)
        array = compute()
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_suffix(".unfinished.npy")
        np.save(unfinished, array)
        os.replace(unfinished, path)
        return array

    def has_calibration(self) -> bool:
        """Returns whether the calibration is finished."""
        return (self.folder / "calibration").is_dir()

    def write_calibration(self, calibration: Calibration) -> None:
        """Stores a calibration."""
        unfinished = self.folder / "calibration.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        for number, layer in enumerate(calibration.layers):
            np.savez(unfinished / f"{number:05d}.npz", **vars(layer))
        for name in ("features", "losses"):
            np.save(unfinished / f"{name}.npy", getattr(calibration, name))
        os.replace(unfinished, self.folder / "calibration")

    def calibration_array(self, name: str) -> np.ndarray:
        """Reads ``features`` or ``losses``."""
        return np.load(self.folder / "calibration" / f"{name}.npy")

    def layer_statistics(self, layer: int) -> LayerStatistics:
        """Reads the statistics of one layer."""
        with np.load(self.folder / "calibration" / f"{layer:05d}.npz") as arrays:
            return LayerStatistics(**arrays)


def begin(output: Path, options: dict[str, Any]) -> Stages:
    """Starts a conversion, or finds where an interrupted one stopped.

    Args:
      options: JSON values; what the result depends on.
    Raises:
      FileExistsError: if the folder has a finished model, or other files.
      ValueError: if a conversion with other options was interrupted.
    """
    if is_checkpoint(output):
        raise FileExistsError(
            f"{output} already holds a finished converted model; remove it, or choose"
            " another --output"
        )
    folder = output / WORK_FOLDER
    path = folder / _OPTIONS
    if path.is_file():
        _check_options(output, json.loads(path.read_text()), options)
        return Stages(folder=folder)
    if output.exists() and any(p for p in output.iterdir() if p != folder):
        raise FileExistsError(
            f"{output} has files but is no interrupted conversion; choose an empty"
            " --output"
        )
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{_OPTIONS}.unfinished"
    unfinished.write_text(json.dumps(options, indent=1))
    os.replace(unfinished, path)
    return Stages(folder=folder)


def _check_options(
    output: Path, started: dict[str, Any], options: dict[str, Any]
) -> None:
    # Through JSON and back, so that tuples and lists compare equal.
    asked = json.loads(json.dumps(options))
    for name in sorted(started | asked):
        if started.get(name) != asked.get(name):
            raise ValueError(
                f"{output} holds an interrupted conversion with {name}="
                f"{started.get(name)!r}, but now {name}={asked.get(name)!r}; resume"
                " with the same options, or remove the folder"
            )
