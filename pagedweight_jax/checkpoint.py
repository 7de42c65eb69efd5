"""The layout of a converted model on disk, for the engine and the tools alike.

    DIR/manifest.json          written last: what this is, and size and sha256 of files
        config.json  generation_config.json  tokenizer.json  ...        copied
        dense/                 all parameters but the routed experts
        layers/00000/ ...      the pages of one MoE layer
            plane_0 .. plane_{P-1}    uint32[E, 3, plane_words], the most significant
                                      first, each an array of its own
            gate_up.* down.*          side tables, [E, ...]
        planner/               the arrays of `Sensitivity`
        .work/                 only while a conversion runs

``dense``, ``planner`` and each layer are Orbax PyTrees in Zarr (not OCDBT: files then
have the names of the arrays, so that a damaged one can be named, and the same arrays
make the same files). Every folder is written under ``.work`` and moved in place when
it is whole. The names of a nested dict are joined with dots.

A bfloat16 array is stored as two arrays of bytes, ``exponent`` and ``fraction`` (see
`_split_bfloat16`): exactly the same values, but the exponents then compress, and a
trained model is 12 % smaller than as plain bfloat16.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import UInt32

from pagedweight_jax.config import ModelConfig, read_config
from pagedweight_jax.formats import Format, make_format
from pagedweight_jax.sensitivity import Sensitivity
from pallas_kernels import bitplane
from pallas_kernels.side_tables import SideTables

LAYOUT_VERSION = 1

COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)
"""Files taken over from the Hugging Face folder; only the first one must exist."""

WORK_FOLDER = ".work"

ALWAYS_VERIFY_BELOW_BYTES = 2**30

_MANIFEST = "manifest.json"
_CONVERT_AGAIN = "convert the model again (`pagedweight convert`)"

Tree = dict[Any, Any]
"""Nested dicts of arrays; the keys are names, or numbers where the model has lists."""


@dataclass(frozen=True, kw_only=True)
class LayerPages:
    """All planes and side tables of one MoE layer, in host memory.

    Attributes:
      planes: plane ``j`` (0 is the most significant) of the linears gate, up and down
        of every expert.
      gate_up: side tables of all experts; rows of gate above rows of up. They hold
        NumPy arrays when they were read.
      down: side tables of all experts.
    """

    planes: list[UInt32[np.ndarray, "E 3 plane_words"]]
    gate_up: SideTables
    down: SideTables


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    """Size and checksum of a file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a converted model is.

    Attributes:
      format: number format of the planes.
      array_bytes: bytes in memory by kind: planes, side_tables, dense, planner.
      calibration: what the planner tables were measured on, and how well they fit.
      files: all files but the manifest, by their path below the folder.
    """

    layout_version: int
    library_version: str
    model_type: str
    format: Format
    array_bytes: dict[str, int]
    calibration: dict[str, Any]
    files: dict[str, FileRecord] = field(repr=False)

    @property
    def stored_bytes(self) -> int:
        """Bytes on disk without the manifest."""
        return sum(record.size_bytes for record in self.files.values())


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A converted model that was found whole; arrays are read when asked for."""

    folder: Path
    manifest: Manifest
    config: ModelConfig

    @property
    def format(self) -> Format:
        """Number format of the planes."""
        return self.manifest.format

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer in the `tokenizers` library's format.

        Raises:
          FileNotFoundError: if the model was converted without one.
        """
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{self.folder} has no tokenizer.json; put the model's tokenizer into"
                f" the Hugging Face folder and {_CONVERT_AGAIN}"
            )
        return path

    def dense(self) -> Tree:
        """Reads all parameters but the routed experts, as the model's nested dict."""
        return _unflatten(_read_tree(self.folder / "dense"))

    def layer(self, layer: int) -> LayerPages:
        """Reads the pages of one MoE layer.

        Raises:
          IndexError: if there is no such layer.
          ValueError: if the arrays are not what the config asks for.
        """
        if not 0 <= layer < self.config.num_moe_layers:
            raise IndexError(
                f"layer {layer} is none of the {self.config.num_moe_layers} MoE layers"
            )
        return read_layer(self.folder, layer, self.config, self.format)

    def sensitivity(self) -> Sensitivity:
        """Reads the planner's tables."""
        return Sensitivity(**_read_tree(self.folder / "planner"))


# Reading


def open_checkpoint(
    folder: str | Path, *, verify_checksums: bool | None = None
) -> Checkpoint:
    """Opens a converted model after checking that it is whole.

    Presence and size of every file are always checked.

    Args:
      verify_checksums: whether to read all files and compare their checksums; None
        does so below 1 GiB.
    Raises:
      FileNotFoundError: if the folder or a file is missing.
      ValueError: if a file is damaged, or was made by another layout version.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    _check_sizes(folder, manifest)
    if verify_checksums is None:
        verify_checksums = manifest.stored_bytes < ALWAYS_VERIFY_BELOW_BYTES
    if verify_checksums:
        _check_checksums(folder, manifest)
    return Checkpoint(folder=folder, manifest=manifest, config=read_config(folder))


def verify(folder: str | Path) -> Manifest:
    """Checks presence, size and checksum of every file.

    Raises:
      FileNotFoundError: if the folder or a file is missing.
      ValueError: if a file is damaged; the message names it.
    """
    return open_checkpoint(folder, verify_checksums=True).manifest


def is_checkpoint(folder: str | Path) -> bool:
    """Returns whether a folder holds a finished converted model."""
    return (Path(folder) / _MANIFEST).is_file()


def read_layer(
    folder: str | Path, layer: int, config: ModelConfig, format: Format
) -> LayerPages:
    """Reads the pages of one MoE layer, of an unfinished conversion too.

    Raises:
      ValueError: if a file cannot be decoded, or the arrays are not what the config
        asks for.
    """
    path = _layer_folder(Path(folder), layer)
    tree = _read_tree(path)
    planes = [tree[f"plane_{j}"] for j in range(format.parent_bits)]
    words = bitplane.plane_words(config.expert_width, config.hidden_size)
    wanted = (config.num_experts, 3, words)
    for j, plane in enumerate(planes):
        if plane.shape != wanted:
            raise ValueError(
                f"{path}/plane_{j} is {plane.shape} but config.json asks for {wanted};"
                f" {_CONVERT_AGAIN}"
            )

    def tables(block: str) -> SideTables:
        kind = format.tables
        arrays: dict[str, Any] = {name: tree[f"{block}.{name}"] for name in kind.parts}
        return kind.from_parts(**arrays)

    return LayerPages(planes=planes, gate_up=tables("gate_up"), down=tables("down"))


def _read_manifest(folder: Path) -> Manifest:
    path = folder / _MANIFEST
    if not path.is_file():
        started = (folder / WORK_FOLDER).is_dir()
        remedy = "run the same `pagedweight convert` again: it resumes"
        raise FileNotFoundError(
            f"{path} does not exist, so {folder} is no"
            f" {'finished ' if started else ''}converted model;"
            f" {remedy if started else _CONVERT_AGAIN}"
        )
    try:
        raw = json.loads(path.read_text())
        if raw["layout_version"] != LAYOUT_VERSION:
            raise ValueError(
                f"{path} has layout_version={raw['layout_version']} but this version"
                f" reads {LAYOUT_VERSION}; {_CONVERT_AGAIN}"
            )
        files = {name: FileRecord(**record) for name, record in raw["files"].items()}
        form = make_format(**raw["format"])
        return Manifest(**{**raw, "format": form, "files": files})
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({type(error).__name__}: {error}); {_CONVERT_AGAIN}"
        ) from None


def _check_sizes(folder: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing; wanted {record.size_bytes} bytes;"
                f" copy it again from where the model came from, or {_CONVERT_AGAIN}"
            )
        size = path.stat().st_size
        if size != record.size_bytes:
            raise ValueError(
                f"{path} has {size} bytes but the manifest says {record.size_bytes};"
                f" copy it again from where the model came from, or {_CONVERT_AGAIN}"
            )


def _check_checksums(folder: Path, manifest: Manifest) -> None:
    for name, record in manifest.files.items():
        came = _sha256(folder / name)
        if came != record.sha256:
            raise ValueError(
                f"{folder / name} is damaged: its sha256 is {came[:16]}... but the"
                f" manifest says {record.sha256[:16]}...; copy it again from where the"
                f" model came from, or {_CONVERT_AGAIN}"
            )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Writing


def write_dense(folder: str | Path, tree: Tree) -> None:
    """Writes all parameters but the routed experts, as the model's nested dict."""
    _write_tree(Path(folder), Path("dense"), dict(_flatten(tree)))


def write_layer(folder: str | Path, layer: int, pages: LayerPages) -> None:
    """Writes the pages of one MoE layer."""
    tree = {f"plane_{j}": plane for j, plane in enumerate(pages.planes)}
    for block, tables in (("gate_up", pages.gate_up), ("down", pages.down)):
        for part in tables.parts:
            tree[f"{block}.{part}"] = np.asarray(getattr(tables, part))
    _write_tree(Path(folder), _layer_folder(Path(), layer), tree)


def write_sensitivity(folder: str | Path, sensitivity: Sensitivity) -> None:
    """Writes the planner's tables."""
    _write_tree(Path(folder), Path("planner"), vars(sensitivity))


def has_dense(folder: str | Path) -> bool:
    """Returns whether the dense parameters are written."""
    return (Path(folder) / "dense").is_dir()


def has_layer(folder: str | Path, layer: int) -> bool:
    """Returns whether the pages of a layer are written."""
    return _layer_folder(Path(folder), layer).is_dir()


def finish(
    folder: str | Path,
    source: str | Path,
    *,
    format: Format,
    calibration: dict[str, Any],
) -> Manifest:
    """Copies config and tokenizer, and writes the manifest: the model is whole now.

    The work folder is removed.

    Args:
      source: the Hugging Face folder.
      calibration: for `Manifest.calibration`; must be JSON.
    Raises:
      FileNotFoundError: if a part of the model has not been written.
    """
    folder = Path(folder)
    for name in COPIED_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, folder / name)
    config = read_config(folder)
    parts = [Path("dense"), Path("planner")]
    parts += [_layer_folder(Path(), layer) for layer in range(config.num_moe_layers)]
    for part in parts:
        if not (folder / part).is_dir():
            raise FileNotFoundError(f"{folder / part} has not been written")
    manifest = Manifest(
        layout_version=LAYOUT_VERSION,
        library_version=_library_version(),
        model_type=config.model_type,
        format=format,
        array_bytes=_array_bytes(folder, config, format),
        calibration=calibration,
        files={
            path.relative_to(folder).as_posix(): FileRecord(
                size_bytes=path.stat().st_size, sha256=_sha256(path)
            )
            for path in _files(folder)
        },
    )
    _write_manifest(folder, manifest)
    return manifest


def _library_version() -> str:
    try:
        return metadata.version("pagedweight-jax")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "source"


def _array_bytes(folder: Path, config: ModelConfig, format: Format) -> dict[str, int]:
    """Counts the bytes in memory by kind."""
    width, inner = config.hidden_size, config.expert_width
    experts = config.num_moe_layers * config.num_experts
    words = bitplane.plane_words(inner, width)
    tables = format.side_table_bytes(2 * inner, width)
    tables += format.side_table_bytes(width, inner)
    return {
        "planes": experts * 3 * words * 4 * format.parent_bits,
        "side_tables": experts * tables,
        "dense": _tree_bytes(folder / "dense"),
        "planner": _tree_bytes(folder / "planner"),
    }


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        inner = path.relative_to(folder)
        if path.is_file() and inner.parts[0] not in (WORK_FOLDER, _MANIFEST):
            yield path


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    raw = {
        **vars(manifest),
        "format": {"name": manifest.format.name, **vars(manifest.format)},
        "files": {name: vars(record) for name, record in manifest.files.items()},
    }
    work = folder / WORK_FOLDER
    work.mkdir(exist_ok=True)
    (work / _MANIFEST).write_text(json.dumps(raw, indent=1) + "\n")
    os.replace(work / _MANIFEST, folder / _MANIFEST)
    shutil.rmtree(work)


# Trees on disk


def _layer_folder(folder: Path, layer: int) -> Path:
    return folder / "layers" / f"{layer:05d}"


def _flatten(tree: Tree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the arrays of a nested dict, their names joined with dots."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(dict(value), f"{name}.")
        else:
            yield name, np.asarray(value)


def _unflatten(flat: Mapping[str, Any]) -> Tree:
    """Undoes `_flatten`; a part of a name that is a number becomes an int key."""
    tree: Tree = {}
    for name, value in flat.items():
        *parents, last = [int(k) if k.isdigit() else k for k in name.split(".")]
        inner = tree
        for key in parents:
            inner = inner.setdefault(key, {})
        inner[last] = value
    return tree


def _split_bfloat16(array: np.ndarray) -> dict[str, np.ndarray]:
    """Stores bfloat16 as bytes: seeeeeee efffffff becomes eeeeeeee fffffffs."""
    bits = array.view(np.uint16)
    turned = (bits << 1) | (bits >> 15)
    return {
        "exponent": (turned >> 8).astype(np.uint8),
        "fraction": (turned & 0xFF).astype(np.uint8),
    }


def _join_bfloat16(parts: Mapping[str, np.ndarray]) -> np.ndarray:
    turned = (parts["exponent"].astype(np.uint16) << 8) | parts["fraction"]
    return ((turned >> 1) | (turned << 15)).view(jnp.bfloat16)


@contextmanager
def _checkpointer() -> Iterator[ocp.Checkpointer]:
    """An Orbax checkpointer that works in this thread and keeps quiet."""

    def needed(record: logging.LogRecord) -> bool:
        # Orbax 0.12 says so at every save without OCDBT, where there is none to merge.
        return "Skipping merge of OCDBT" not in str(record.msg)

    logger = logging.getLogger("absl")
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    logger.addFilter(needed)
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            yield checkpointer
    finally:
        logger.removeFilter(needed)


def _write_tree(folder: Path, part: Path, tree: Mapping[str, np.ndarray]) -> None:
    """Writes arrays under the work folder, then moves them to ``folder / part``."""
    stored = {
        name: _split_bfloat16(array) if array.dtype == jnp.bfloat16 else array
        for name, array in tree.items()
    }
    work = (folder / WORK_FOLDER / part.name).absolute()
    for old in (work, folder / part):
        shutil.rmtree(old, ignore_errors=True)
    work.parent.mkdir(parents=True, exist_ok=True)
    with _checkpointer() as checkpointer:
        checkpointer.save(work, args=ocp.args.PyTreeSave(stored))
    # It only repeats the path of this machine; being in place is our sign.
    (work / "commit_success.txt").unlink(missing_ok=True)
    (folder / part).parent.mkdir(parents=True, exist_ok=True)
    os.replace(work, folder / part)


def _read_tree(folder: Path) -> dict[str, np.ndarray]:
    """Reads arrays; undoes `_write_tree`.

    Raises:
      ValueError: if a file cannot be decoded.
    """
    try:
        with _checkpointer() as checkpointer:
            stored = checkpointer.restore(folder.absolute())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} cannot be read ({error}); copy it again from where the model"
            f" came from, or {_CONVERT_AGAIN}"
        ) from error
    return {
        name: _join_bfloat16(value) if isinstance(value, dict) else value
        for name, value in stored.items()
    }


def _tree_bytes(folder: Path) -> int:
    """Returns the bytes of the arrays of a folder in memory."""
    total = 0
    for path in folder.glob("*/.zarray"):
        array = json.loads(path.read_text())
        total += int(np.prod(array["shape"])) * np.dtype(array["dtype"]).itemsize
    return total
