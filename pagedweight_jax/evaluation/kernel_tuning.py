"""Chooses sizes of the kernels by measurement: `pagedweight bench kernels --tune`.

For each shape, format and bucket of tokens, every candidate of a kernel is compiled and
timed, and the best goes to the tuning store, where the kernel looks first. All experts
are active and all pages have 4 bits.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Compiled, Lowered

from pagedweight_jax.evaluation import moe_workload as workload
from pagedweight_jax.evaluation.device_timer import time_calls
from pagedweight_jax.evaluation.kernel_cells import (
    arguments,
    bits_of,
    make_tables,
)
from pagedweight_jax.evaluation.kernel_rows import Layer
from pagedweight_jax.evaluation.provenance import provenance
from pallas_kernels import tuning
from pallas_kernels.fused_moe.arg_specs import MoeSpec
from pallas_kernels.testing import Format
from pallas_kernels.tuning import Measured, moe_key

_CALLS = 8


@dataclass(frozen=True, kw_only=True)
class Tunable:
    """A kernel with sizes to choose.

    Attributes:
      name: of its file in the store.
      fused_moe: the kernel; takes a ``config``, and refuses one that does not fit the
        shape by a ValueError or NotImplementedError.
      candidates: returns the sizes to try for a layer and a number of tokens.
      tokens: buckets that it is used for.
    """

    name: str
    fused_moe: Callable[..., Any]
    candidates: Callable[[MoeSpec, int], Sequence[Any]]
    tokens: tuple[int, ...]


def tunables() -> list[Tunable]:
    """Returns the kernels of the default device.

    Raises:
      ValueError: if there are none.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise ValueError(
            f"kernels are tuned on a GPU but the device is {device.device_kind}"
        )
    from pallas_kernels.fused_moe import decode, prefill  # only where they are lowered

    def decode_candidates(spec: MoeSpec, num_tokens: int) -> list[Any]:
        rule = decode.default_config(
            num_tokens * spec.top_k,
            spec.num_experts,
            spec.width,
            spec.expert_width,
            jnp.dtype(jnp.bfloat16).itemsize,
        )
        return [
            replace(rule, warpgroups=warpgroups, ctas=ctas)
            for warpgroups in (2, 4, 6, 8)
            for ctas in (rule.ctas, 2 * rule.ctas)
        ]

    return [
        Tunable(
            name="decode",
            fused_moe=decode.fused_moe,
            candidates=decode_candidates,
            tokens=(1, 4, 16, 64),
        ),
        Tunable(
            name="prefill",
            fused_moe=prefill.fused_moe,
            candidates=lambda spec, num_tokens: prefill.candidate_configs(),
            tokens=(256, 1024, 4096),
        ),
    ]


def tune(layer: Layer, formats: Sequence[Format]) -> None:
    """Finds the best sizes of every kernel for one shape, prints and stores them."""
    planes = workload.random_planes(layer.spec)
    facts = provenance()
    for kernel in tunables():
        found: dict[str, Measured] = {}
        for key, problem in _problems(layer, kernel, planes, formats):
            config, seconds = fastest(problem)
            print(f"{kernel.name} {key}: {1e6 * seconds:.1f} us, {config}", flush=True)
            found[key] = Measured(
                config=config,
                seconds=seconds,
                versions=facts["versions"],
                commit=facts["commit"],
            )
        print(f"wrote {tuning.store(kernel.name, facts['device'], found)}")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What configurations are compared on.

    Attributes:
      lower: traces the kernel with a configuration.
      calls: arguments of the calls that are timed, each with other pages.
    """

    candidates: Sequence[Any]
    lower: Callable[[Any], Lowered]
    calls: Sequence[tuple]


def fastest(problem: Problem) -> tuple[Any, float]:
    """Returns the best configuration and its seconds a call.

    Raises:
      ValueError: if no candidate fits the shape and the device.
    """
    with ThreadPoolExecutor() as pool:
        lowered = list(_fitting(problem))
        compiled = pool.map(lambda pair: _compiled(pair[1]), lowered)
        programs = [
            (config, program)
            for (config, _), program in zip(lowered, compiled, strict=True)
            if program is not None
        ]
    if not programs:
        raise ValueError(f"none of {len(problem.candidates)} candidates fits")
    times = [(config, _time(p, problem.calls)) for config, p in programs]
    return min(times, key=lambda pair: pair[1])


def _fitting(problem: Problem) -> Iterator[tuple[Any, Lowered]]:
    for config in problem.candidates:
        try:
            yield config, problem.lower(config)
        except (NotImplementedError, ValueError):
            continue


def _compiled(lowered: Lowered) -> Compiled | None:
    """Compiles a candidate; None if it takes more of the device than there is."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError:
        return None


def _time(program: Compiled, calls: Sequence[tuple]) -> float:
    return time_calls(lambda i: program(*calls[i % len(calls)]), len(calls)).median


def _problems(
    layer: Layer, kernel: Tunable, planes: workload.Planes, formats: Sequence[Format]
) -> Iterator[tuple[str, Problem]]:
    spec, level = layer.spec, jnp.asarray(bits_of(layer, "4"))
    for format in formats:
        tables = make_tables(layer, format)
        for num_tokens in kernel.tokens:
            tokens = workload.make_tokens(spec, num_tokens, "balanced", _CALLS)
            calls = arguments(tokens, planes, level, tables)
            key = moe_key(
                width=spec.width,
                expert_width=spec.expert_width,
                num_experts=spec.num_experts,
                top_k=spec.top_k,
                num_tokens=num_tokens,
                format=format,
            )
            yield (
                key,
                Problem(
                    candidates=kernel.candidates(spec, num_tokens),
                    lower=partial(_lower, kernel, layer, calls[0]),
                    calls=calls,
                ),
            )


def _lower(kernel: Tunable, layer: Layer, example: tuple, config: Any) -> Lowered:
    fused = partial(kernel.fused_moe, activation=layer.activation, config=config)
    return jax.jit(fused).lower(*example)
