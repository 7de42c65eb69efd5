"""What a figure was measured with: device, versions, commit, time."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "numpy")


def provenance() -> dict[str, Any]:
    """Returns what must stand beside every stored figure, ready for JSON."""
    return {
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in _PACKAGES},
        "commit": _commit(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    """Returns the processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    """Returns the commit of this source tree, "-dirty" if it was changed.

    A copy without its repository is told by the variable PAGEDWEIGHT_COMMIT.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        result = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("PAGEDWEIGHT_COMMIT", "unknown")
    return result.stdout.strip()
