"""Rows of torch's rivals, which are timed in a process of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from pagedweight_jax.evaluation.device_timer import DeviceTimes, Kernel
from pagedweight_jax.evaluation.kernel_rows import Layer, Row
from pagedweight_jax.evaluation.moe_workload import NUM_SETS, Tokens


def installed() -> bool:
    """Whether torch can be imported here."""
    return find_spec("torch") is not None


def torch_rows(layer: Layer, cases: Sequence[Tokens]) -> list[Row]:
    """Times torch's experts on the same routings.

    Raises:
      RuntimeError: if torch fails; the message is the end of what it printed.
    """
    request = {
        "width": layer.spec.width,
        "expert_width": layer.spec.expert_width,
        "num_experts": layer.spec.num_experts,
        "activation": layer.activation,
        "num_sets": NUM_SETS,
        "cases": [case.ids[:NUM_SETS].tolist() for case in cases],
    }
    process = subprocess.run(
        [sys.executable, "-m", "pagedweight_jax.evaluation.torch_rivals"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    if process.returncode:
        raise RuntimeError(
            f"torch failed on {layer.shape}; leave it out with --notorch:"
            f"\n{process.stderr[-2000:]}"
        )
    rows = []
    for answer in json.loads(process.stdout):
        kernels = Kernel(answer["kernel_seconds"], answer["kernels"])
        times = DeviceTimes(
            seconds=(kernels.seconds,), source="cupti", by_name={"": kernels}
        )
        row = layer.bf16_row(
            cases[answer["case"]], times, implementation=answer["rival"]
        )
        rows.append(replace(row, graph_seconds=answer["graph_seconds"]))
    return rows
