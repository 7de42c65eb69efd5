"""Strict loading of Hugging Face checkpoints.

A checkpoint is one ``model.safetensors``, or shards with an index. Before anything is
loaded, all headers are read and compared with what the model wants: every tensor is
there once and used once, shapes and bytes fit. A loader that skips what it does not
know serves gibberish; this one names it. Values are read one tensor at a time through
a memory map.

The safetensors container: the length of the header (64-bit little-endian), the header
(JSON: name -> dtype, shape, data_offsets from the end of the header), the data.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32
from safetensors import safe_open

from pagedweight_jax.config import ModelConfig, read_config
from pagedweight_jax.models import qwen2_moe
from pagedweight_jax.models.qwen2_moe import TensorSpec

Dtype = Literal["float32", "bfloat16"]

Tree = dict[Any, Any]
"""The model's pure dict: nested dicts of arrays."""

_TENSORS: dict[str, Callable[[ModelConfig], Iterator[TensorSpec]]] = {
    "qwen2_moe": qwen2_moe.hf_tensors,
}

_DTYPES = {"BF16": 2, "F16": 2, "F32": 4}
"""Number types that are read, and their bytes."""

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_DOWNLOAD_AGAIN = "download or save it again"
_LISTED = 5  # names of a kind that an error message lists


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A checkpoint folder whose headers were found to fit its config.

    Attributes:
      specs: every tensor of the checkpoint and the parameter that it fills.
      shards: the file of every tensor.
    """

    folder: Path
    config: ModelConfig
    specs: tuple[TensorSpec, ...]
    shards: dict[str, Path]


@dataclass(frozen=True, kw_only=True)
class _Header:
    """What a shard says about one of its tensors."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


def open_model(folder: str | Path) -> HuggingFaceModel:
    """Reads the config and all headers of a checkpoint, and compares them.

    Raises:
      FileNotFoundError: if config.json, the weights or a shard is missing.
      ValueError: if a shard is truncated, a tensor is missing, unknown, or of another
        shape or type than the config asks for, or the bytes do not add up.
    """
    folder = Path(folder)
    config = read_config(folder)
    specs = tuple(_TENSORS[config.model_type](config))
    shards, total_bytes = _find_shards(folder)
    headers: dict[str, _Header] = {}
    for path in sorted(set(shards.values())):
        found = _read_header(path)
        _check_shard(path, found, shards)
        headers |= found
    _check_names(folder, [spec.name for spec in specs], list(headers))
    for spec in specs:
        _check_tensor(shards[spec.name], spec, headers[spec.name])
    came = sum(header.num_bytes for header in headers.values())
    if total_bytes is not None and came != total_bytes:
        raise ValueError(
            f"{folder / _INDEX_FILE} says total_size={total_bytes} but the tensors of"
            f" the shards have {came} bytes; {_DOWNLOAD_AGAIN}"
        )
    return HuggingFaceModel(folder=folder, config=config, specs=specs, shards=shards)


def load_parameters(folder: str | Path, dtype: Dtype) -> Tree:
    """Loads a whole model, dense experts included.

    Returns:
      NumPy arrays as the model's pure dict.
    Raises:
      FileNotFoundError, ValueError: see `open_model`; ValueError also if a weight is
        NaN or infinite.
    """
    model = open_model(folder)
    return _load(model, model.specs, np.dtype(jnp.dtype(dtype)))


def load_dense(model: HuggingFaceModel) -> Tree:
    """Loads all parameters but the routed experts, in the checkpoint's number type."""
    return _load(model, [s for s in model.specs if not _is_expert(s)], None)


def load_experts(
    model: HuggingFaceModel, layer: int
) -> tuple[Float32[np.ndarray, "E N D"], Float32[np.ndarray, "E D F"]]:
    """Loads the routed experts of one MoE layer.

    Returns:
      gate_up (rows of gate above rows of up) and down.
    """
    layers = [
        list(specs)
        for _, specs in groupby(
            filter(_is_expert, model.specs), lambda s: (s.path[:2], s.index[0])
        )
    ]
    local = [
        TensorSpec(name=s.name, shape=s.shape, path=s.path[-1:], index=s.index[1:])
        for s in layers[layer]
    ]
    tree = _load(model, local, np.dtype(np.float32))
    return tree["gate_up"], tree["down"]


def _is_expert(spec: TensorSpec) -> bool:
    return "experts" in spec.path


# Values


def _load(
    model: HuggingFaceModel, specs: Iterable[TensorSpec], dtype: np.dtype | None
) -> Tree:
    """Fills parameters from tensors; None keeps the number type of the tensors."""
    specs = list(specs)
    shapes = _parameter_shapes(specs)
    arrays: dict[tuple[str | int, ...], np.ndarray] = {}
    for spec, values in _read_tensors(model, specs):
        if not np.isfinite(values).all():
            raise ValueError(
                f"tensor {spec.name} in {model.shards[spec.name]} has NaN or infinite"
                f" values; {_DOWNLOAD_AGAIN}"
            )
        if spec.path not in arrays:
            arrays[spec.path] = np.empty(shapes[spec.path], dtype or values.dtype)
        arrays[spec.path][spec.index] = values.astype(arrays[spec.path].dtype)
    return _nested(arrays)


def _read_tensors(
    model: HuggingFaceModel, specs: list[TensorSpec]
) -> Iterator[tuple[TensorSpec, np.ndarray]]:
    """Reads tensors shard by shard, one at a time."""

    def shard(spec: TensorSpec) -> Path:
        return model.shards[spec.name]

    for path, group in groupby(sorted(specs, key=shard), shard):
        with safe_open(path, framework="numpy") as tensors:
            for spec in group:
                yield spec, tensors.get_tensor(spec.name)


def _parameter_shapes(
    specs: list[TensorSpec],
) -> dict[tuple[str | int, ...], tuple[int, ...]]:
    """Adds up the shapes of parameters from the places of their tensors."""
    shapes: dict[tuple[str | int, ...], tuple[int, ...]] = {}
    filled: dict[tuple[str | int, ...], int] = {}
    for spec in specs:
        ends = [i.stop if isinstance(i, slice) else i + 1 for i in spec.index]
        num_sliced = sum(isinstance(i, slice) for i in spec.index)
        shape = (*ends, *spec.shape[num_sliced:])
        old = shapes.get(spec.path, shape)
        shapes[spec.path] = tuple(map(max, old, shape))
        filled[spec.path] = filled.get(spec.path, 0) + int(np.prod(spec.shape))
    for path, shape in shapes.items():
        assert filled[path] == np.prod(shape), f"{path} is {shape}, {filled[path]}"
    return shapes


def _nested(arrays: dict[tuple[str | int, ...], np.ndarray]) -> Tree:
    tree: Tree = {}
    for path, array in arrays.items():
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = array
    return tree


# Headers


def _find_shards(folder: Path) -> tuple[dict[str, Path], int | None]:
    """Returns the file of every tensor, and the bytes that the index promises."""
    index, single = folder / _INDEX_FILE, folder / _SINGLE_FILE
    if index.is_file():
        try:
            raw = json.loads(index.read_text())
            shards = {name: folder / file for name, file in raw["weight_map"].items()}
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(
                f"{index} is damaged ({type(error).__name__}: {error});"
                f" {_DOWNLOAD_AGAIN}"
            ) from None
        return shards, raw.get("metadata", {}).get("total_size")
    if single.is_file():
        return dict.fromkeys(_read_header(single), single), None
    raise FileNotFoundError(
        f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}; give a folder with"
        " safetensors weights (pickled .bin files are not read)"
    )


def _read_header(path: Path) -> dict[str, _Header]:
    """Reads the header of a shard and checks the size of the file."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing though {_INDEX_FILE} names it; {_DOWNLOAD_AGAIN}"
        )
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise ValueError(
                f"{path} is truncated: it has {size} bytes but its header alone takes"
                f" {8 + length}; {_DOWNLOAD_AGAIN}"
            )
        try:
            raw = json.loads(file.read(length))
        except ValueError as error:
            raise ValueError(
                f"{path} is no safetensors file ({error}); {_DOWNLOAD_AGAIN}"
            ) from None
    raw.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in raw.values()), default=0)
    if size != 8 + length + end:
        raise ValueError(
            f"{path} is truncated or damaged: it has {size} bytes but its header"
            f" promises {8 + length + end}; {_DOWNLOAD_AGAIN}"
        )
    return {
        name: _Header(
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            num_bytes=entry["data_offsets"][1] - entry["data_offsets"][0],
        )
        for name, entry in raw.items()
    }


def _check_shard(
    path: Path, found: dict[str, _Header], shards: dict[str, Path]
) -> None:
    """Compares the tensors of a shard with what the index says of it."""
    promised = {name for name, shard in shards.items() if shard == path}
    if promised != set(found):
        raise ValueError(
            f"{path} and {_INDEX_FILE} disagree: {_names(promised - set(found))} in"
            f" the index only, {_names(set(found) - promised)} in the shard only;"
            f" {_DOWNLOAD_AGAIN}"
        )


def _check_names(folder: Path, wanted: list[str], came: list[str]) -> None:
    missing, unknown = set(wanted) - set(came), set(came) - set(wanted)
    if missing or unknown:
        raise ValueError(
            f"the tensors of {folder} are not those that config.json asks for:"
            f" missing {_names(missing)}, unknown {_names(unknown)}; the config and"
            " the weights must be of one model, and every tensor must be used"
        )


def _check_tensor(path: Path, spec: TensorSpec, header: _Header) -> None:
    if header.dtype not in _DTYPES:
        raise ValueError(
            f"tensor {spec.name} in {path} is {header.dtype} but only"
            f" {', '.join(_DTYPES)} are read; save the model unquantised"
        )
    if header.shape != spec.shape:
        raise ValueError(
            f"tensor {spec.name} in {path} is {list(header.shape)} but config.json"
            f" asks for {list(spec.shape)}; the config and the weights must be of one"
            " model"
        )
    wanted = int(np.prod(spec.shape)) * _DTYPES[header.dtype]
    if header.num_bytes != wanted:
        raise ValueError(
            f"tensor {spec.name} in {path} has {header.num_bytes} bytes but"
            f" {list(spec.shape)} {header.dtype} takes {wanted}; {_DOWNLOAD_AGAIN}"
        )


def _names(names: Iterable[str]) -> str:
    """Lists a few names, for an error message."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return (", ".join(ordered[:_LISTED]) + more) if ordered else "none"
