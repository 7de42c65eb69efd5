"""Exact facts about the compiled programs: memory, donation, and no recompiles."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from pagedweight_jax.engine.programs import Programs, compile_programs
from pagedweight_jax.engine.request import SamplingParams
from pagedweight_jax.engine.step import StepShape
from pagedweight_jax.models.interface import Pages
from pagedweight_jax.paging.planner import Watermarks
from pagedweight_jax.paging.pool import PoolLayout
from pagedweight_jax.serving.build import Built, build_engine
from pagedweight_jax.serving.sizing import kv_layout, workspace

SHAPES = (
    StepShape(decode_rows=2),
    StepShape(decode_rows=2, prefill_rows=2, prefill_queries=8),
)
POOL = PoolLayout(num_frames=50_000, frame_words=512, frames_per_plane=1)
SMALL = POOL.num_bytes // 50


@pytest.fixture(scope="module")
def model():
    return tiny.paged_model()


@pytest.fixture(scope="module")
def programs(model) -> Programs:
    """Compiled for a pool of 100 MB, which is never allocated."""
    shape = (2, 8, 3, 6, 1)
    return compile_programs(
        model.graphdef,
        model.params,
        SHAPES,
        pool=POOL,
        kv=kv_layout(model.config, "float32", 16),
        pages=Pages(
            bits=jnp.zeros((2, 8, 2), jnp.int32), frames=jnp.zeros(shape, jnp.int32)
        ),
        max_blocks=4,
        staging_frames=64,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=["decode", "prefill"])
def test_a_step_does_not_copy_the_pool(programs, shape):
    memory = programs.forward[shape].memory_analysis()
    assert memory.argument_size_in_bytes > POOL.num_bytes
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < SMALL


@pytest.mark.parametrize("shape", SHAPES, ids=["decode", "prefill"])
def test_a_commit_of_keys_and_values_is_in_place(programs, shape):
    """FIELD.md T6: a donation that is not applied doubles the memory."""
    memory = programs.commit_kv[shape].memory_analysis()
    assert memory.alias_size_in_bytes == POOL.num_bytes
    assert memory.temp_size_in_bytes < SMALL


def test_a_commit_of_planes_is_in_place(programs):
    memory = programs.commit_planes.memory_analysis()
    assert memory.alias_size_in_bytes == POOL.num_bytes
    assert memory.temp_size_in_bytes < SMALL


def test_the_reserve_bounds_what_the_programs_need(programs, model):
    bound = workspace(model, kv_layout(model.config, "float32", 16), SHAPES)
    assert 0 < programs.workspace_bytes() <= bound


class Compilations:
    """Counts what jax traces, lowers and compiles."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def __call__(self, event: str, _: float, **__: object) -> None:
        if event.startswith("/jax/core/compile"):
            self.events.append(event)


@pytest.fixture
def compilations() -> Iterator[Compilations]:
    counter = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)


@pytest.fixture(scope="module")
def adaptive() -> Built:
    """Six bits leave room for two of four sequences."""
    model = tiny.paged_model()
    marks = Watermarks(low_blocks=1, high_blocks=2, dwell_steps=4)
    chosen = tiny.options(block_size=4, watermarks=marks)
    budget = tiny.smallest_budget(model, chosen) + 40 * 4096
    return build_engine(model, dataclasses.replace(chosen, memory_budget=budget))


def test_a_pool_that_was_written_is_gone(adaptive):
    """Donation at run time: one buffer, at one address, through every write."""
    engine = adaptive.engine
    before = engine._pool
    address = before.unsafe_buffer_pointer()
    tiny.run(engine, [tiny.request("0", tiny.prompts(1, [20])[0])])
    assert before.is_deleted()
    assert engine._pool.unsafe_buffer_pointer() == address
    pools = [a for a in jax.live_arrays() if a.shape == engine._pool.shape]
    assert len(pools) == 1


def all_kinds_of_requests() -> list:
    params = [
        SamplingParams(temperature=0.0, max_tokens=12),
        SamplingParams(seed=1, max_tokens=3, top_k=5, logprobs=2),
        SamplingParams(seed=2, max_tokens=9, top_p=0.7, prompt_logprobs=1),
    ]
    return [
        tiny.request(str(i), prompt, params[i % 3])
        for i, prompt in enumerate(tiny.prompts(2, (5, 40, 17, 1, 50, 33, 8, 45, 44)))
    ]


def test_nothing_compiles_after_the_start(adaptive, compilations):
    """FIELD.md T7: over changes of batch, of sampling and of precision."""
    np.asarray(jax.jit(lambda a: a + 1)(np.float32(1)))
    assert compilations.events, "the counter does not count"
    compilations.events.clear()
    bits = set()
    tiny.run(
        adaptive.engine,
        all_kinds_of_requests(),
        after_step=lambda report: bits.add(round(report.mean_bits, 4)),
    )
    adaptive.engine.settle()
    assert len(bits) > 3, f"precision hardly changed: {bits}"
    assert compilations.events == []
    tiny.assert_idle(adaptive)
