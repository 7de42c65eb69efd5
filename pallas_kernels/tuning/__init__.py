"""Block sizes that were measured to be best, by device and shape.

`<device_kind>/<kernel>.json` beside this file maps canonical shapes to entries:

    {"D=2048 F=1408 E=60 k=4 T<=16 affine": {
        "config": {"warpgroups": 4, "k_splits": 1},
        "seconds": 5.1e-05,
        "versions": {"jax": "0.11.2"},
        "commit": "70773d9"}}

`pagedweight bench kernels --tune` writes them. A shape without an entry is no error:
the kernel then follows its own rule.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

TOKEN_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 8192)
"""Numbers of tokens that entries are made for; an entry serves all below, too."""

_FIELDS = {"config": dict, "seconds": float, "versions": dict, "commit": str}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A configuration with its time and what it was measured with.

    Attributes:
      config: an instance of the kernel's frozen `Config` dataclass.
      seconds: time of the kernel's calls of this shape.
    """

    config: Any
    seconds: float
    versions: Mapping[str, str]
    commit: str


def moe_key(
    *,
    width: int,
    expert_width: int,
    num_experts: int,
    top_k: int,
    num_tokens: int,
    format: str,
) -> str:
    """Returns the canonical shape of a fused MoE layer.

    Numbers of tokens fall into buckets; there is none above the last one, whose entry
    serves all that is larger.
    """
    bucket = next((t for t in TOKEN_BUCKETS if num_tokens <= t), TOKEN_BUCKETS[-1])
    return f"D={width} F={expert_width} E={num_experts} k={top_k} T<={bucket} {format}"


def lookup(
    kernel: str, device_kind: str, key: str, *, folder: Path = FOLDER
) -> dict[str, Any] | None:
    """Returns the fields of the best configuration, or None where none is stored.

    Args:
      kernel: name of the file.
      device_kind: as JAX gives it, for example "NVIDIA H200".
      key: canonical shape.
      folder: of the store.
    Raises:
      ValueError: if the file is malformed; the message names it.
    """
    entry = _read(_path(kernel, device_kind, folder)).get(key)
    return None if entry is None else dict(entry["config"])


def tuned[C](
    config_type: type[C],
    kernel: str,
    device_kind: str,
    key: str,
    *,
    folder: Path = FOLDER,
) -> C | None:
    """Returns `lookup`'s answer as the kernel's `Config`.

    Raises:
      ValueError: if the stored fields are not those of ``config_type``: the kernel has
        changed and must be tuned again.
    """
    values = lookup(kernel, device_kind, key, folder=folder)
    if values is None:
        return None
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    try:
        return config_type(**values)
    except TypeError:
        assert is_dataclass(config_type)
        known = [field.name for field in fields(config_type)]
        raise ValueError(
            f"{_path(kernel, device_kind, folder)}: {key!r} has the fields"
            f" {list(values)} but {config_type.__qualname__} has {known}; run"
            " `pagedweight bench kernels --tune` again"
        ) from None


def store(
    kernel: str,
    device_kind: str,
    entries: Mapping[str, Measured],
    *,
    folder: Path = FOLDER,
) -> Path:
    """Adds entries to the store, in place of those of the same shapes.

    Returns:
      The file.
    """
    path = _path(kernel, device_kind, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = {
        key: {
            "config": asdict(measured.config),
            "seconds": measured.seconds,
            "versions": dict(measured.versions),
            "commit": measured.commit,
        }
        for key, measured in entries.items()
    }
    merged = dict(sorted({**_read(path), **new}.items()))
    path.write_text(json.dumps(merged, indent=1) + "\n")
    _read.cache_clear()
    return path


def _path(kernel: str, device_kind: str, folder: Path) -> Path:
    return folder / device_kind.replace(" ", "_") / f"{kernel}.json"


@cache
def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        entries = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(entries, dict):
        raise ValueError(f"{path} holds a {type(entries).__name__}; wanted an object")
    for key, entry in entries.items():
        _check_entry(path, key, entry)
    return entries


def _check_entry(path: Path, key: str, entry: Any) -> None:
    for name, kind in _FIELDS.items():
        value = entry.get(name) if isinstance(entry, dict) else None
        if not isinstance(value, kind):
            raise ValueError(
                f"{path}: the entry {key!r} has {name}={value!r}; wanted"
                f" a {kind.__name__}. Delete the entry or tune again"
            )
