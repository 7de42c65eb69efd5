"""What the kernel computes on a GPU, case by case, from one linear to the whole.

`python tests/pallas_kernels/test_gpu_report.py` prints one line for each case and goes
on after a failure, since runs on a GPU are few: which bits, which tile of tokens, and
which rows and columns are wrong say more than the first assertion.
"""

import functools
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from moe_oracle import routed_experts, weights

from pallas_kernels import testing
from pallas_kernels.fused_moe import fused_moe, mosaic_gpu
from pallas_kernels.fused_moe.arg_specs import MoeSpec


def wrong(actual, expected, tolerance):
    """Describes where a matrix is wrong."""
    bad = ~(np.abs(actual - expected) <= tolerance * np.abs(expected).max())
    if not bad.any():
        return ""
    rows, columns = np.flatnonzero(bad.any(1)), np.flatnonzero(bad.any(0))
    at = tuple(np.argwhere(bad)[0])
    return (
        f"  WRONG {bad.mean():.1%}: rows {rows[:8]}.. ({rows.size}),"
        f" columns {columns[:8]}.. ({columns.size}),"
        f" first {at}: {actual[at]} for {expected[at]}"
    )


def one_linear(format, bits, tokens, width, interpret):
    """Checks the gate and up linears of two experts with one tile of tokens each."""
    spec = MoeSpec(
        width=width,
        expert_width=128,
        num_experts=2,
        top_k=1,
        group_size=64,
        seed_bits=2,
    )
    rng = np.random.default_rng(bits)
    problem = testing.make_moe_problem(rng, spec, format, num_tokens=1, bits=bits)
    x = rng.integers(-8, 9, (3, tokens, width)).astype(np.float16)
    experts = np.array([1, 0, 2], np.int32)  # the third tile has no expert
    y = jax.jit(
        functools.partial(mosaic_gpu._paged_linear, linears=(0, 1), interpret=interpret)
    )(
        jnp.asarray(x),
        jnp.asarray(experts),
        problem.pool,
        problem.frames,
        problem.bits,
        problem.gate_up,
    )
    lines = []
    for i, e in enumerate(experts[:2]):
        w = weights(problem.gate_up_codes[e], 8, bits, problem.gate_up, e)
        expected = w @ x[i].astype(np.float64).T
        error = testing.relative_error(y[i], expected)
        lines.append(f"{error:.1e}{wrong(np.asarray(y[i]), expected, 1e-5)}")
    return " ".join(lines)


def whole_layer(format, num_tokens, dtype, implementation):
    spec = MoeSpec(
        width=256, expert_width=128, num_experts=8, top_k=2, frames_per_plane=2
    )
    rng = np.random.default_rng(num_tokens)
    problem = testing.make_moe_problem(
        rng, spec, format, num_tokens=num_tokens, dtype=dtype
    )
    actual = fused_moe(*problem.args, implementation=implementation)
    expected = routed_experts(problem)
    error = testing.relative_error(actual, expected)
    tolerance = 1e-5 if dtype == "float32" else 5e-3
    return f"{error:.1e}{wrong(np.asarray(actual, np.float64), expected, tolerance)}"


def cases(interpret):
    implementation = "mosaic_gpu_interpret" if interpret else "mosaic_gpu"
    for format in ("affine", "codebook"):
        for tokens, width in ((8, 64), (16, 128), (32, 256), (64, 256)):
            for bits in range(2, 9):
                yield (
                    f"linear {format} bits={bits} M={tokens} K={width}",
                    functools.partial(
                        one_linear, format, bits, tokens, width, interpret
                    ),
                )
        for num_tokens in (1, 4, 16, 64, 500):
            for dtype in ("float32", "bfloat16"):
                yield (
                    f"layer {format} T={num_tokens} {dtype}",
                    functools.partial(
                        whole_layer, format, num_tokens, dtype, implementation
                    ),
                )


def report(interpret=False):
    """Prints all cases and returns those that failed."""
    failed = []
    for name, case in cases(interpret):
        start = time.perf_counter()
        try:
            text = case()
        except Exception:  # the next case may tell why
            text = "WRONG: " + traceback.format_exc()
        print(f"{name}: {text} ({time.perf_counter() - start:.1f} s)", flush=True)
        if "WRONG" in text:
            failed.append(f"{name}: {text}")
    print(f"{len(failed)} cases failed")
    return failed


@pytest.mark.gpu
def test_every_case_of_the_report_is_right():
    assert report() == []


if __name__ == "__main__":
    print(jax.__version__, jax.devices())
    raise SystemExit(bool(report(interpret=jax.default_backend() == "cpu")))
