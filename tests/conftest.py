"""Turns on the strictness that every test runs under.

Shapes and types are checked at run time (jaxtyping with beartype), dtypes and
ranks promote only when asked to, and the CPU is the device unless
PAGEDWEIGHT_TEST_GPU=1. All of it must be set before jax or our packages load.
"""

import importlib.util
import os

import pytest

ON_GPU = os.environ.get("PAGEDWEIGHT_TEST_GPU") == "1"
IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
# A machine that only runs the gpu tests may lack beartype and hypothesis.
TYPE_CHECKED = importlib.util.find_spec("beartype") is not None
HAS_HYPOTHESIS = importlib.util.find_spec("hypothesis") is not None

# By environment rather than jax.config, so that tests' child processes have it too.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
if ON_GPU:
    # Several test processes share the one GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # In the interpreter of Mosaic GPU every warpgroup that waits keeps a thread of XLA,
    # so kernels of more warpgroups than cores would wait for ever.
    os.environ.setdefault("PJRT_NPROC", "16")

if TYPE_CHECKED:
    import jaxtyping

    jaxtyping.install_import_hook(
        ["pagedweight_jax", "pallas_kernels", "checkpoints_tools"],
        typechecker="typechecker.check",
    )

# Tracing makes a first call slow, so no example has a deadline; CI repeats exactly.
if HAS_HYPOTHESIS:
    import hypothesis

    hypothesis.settings.register_profile("project", deadline=None, derandomize=IN_CI)
    hypothesis.settings.load_profile("project")


def pytest_report_header() -> str:
    import jax

    return (
        f"jax {jax.__version__} on {jax.default_backend()}, "
        f"run-time type checks {'on' if TYPE_CHECKED else 'off: no beartype'}"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if ON_GPU:
        import jax

        if jax.default_backend() != "gpu":
            raise pytest.UsageError(
                "PAGEDWEIGHT_TEST_GPU=1, but jax runs on "
                f"{jax.default_backend()}; install the cuda12 or cuda13 extra"
            )
        return
    skip = pytest.mark.skip(reason="needs a GPU and PAGEDWEIGHT_TEST_GPU=1")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
