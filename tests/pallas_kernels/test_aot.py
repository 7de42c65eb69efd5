"""The kernels of the fused MoE compile for an H200 on a machine without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="jax-cuda13-plugin is not installed",
)
def test_kernels_compile_for_an_h200_and_copy_neither_pool_nor_tables():
    here = Path(__file__).parent
    root = here.parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    run = subprocess.run(
        [sys.executable, here / "aot_compile.py"],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
