"""The budget holds: what is named, what is used, and what close() gives back."""

import dataclasses
import gc
from collections.abc import Iterator

import jax
import numpy as np
import pytest
import scipy.special
import tiny

from pagedweight_jax.engine.memory import device_memory_bytes
from pagedweight_jax.engine.request import SamplingParams
from pagedweight_jax.paging import planner
from pagedweight_jax.paging.planner import PlannerLimits
from pagedweight_jax.paging.statistics import initial
from pagedweight_jax.serving.build import build_engine
from pagedweight_jax.serving.llm import LLM
from pagedweight_jax.serving.load import LoadedModel
from pagedweight_jax.serving.options import ServeOptions
from pagedweight_jax.serving.sizing import (
    kv_layout,
    needs_of,
    split_memory,
    step_shapes,
    workspace,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def live_bytes() -> int:
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def tokens(prompt: list[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": prompt}


def parts(llm: LLM) -> int:
    report = dataclasses.asdict(llm.memory_report())
    budget = report.pop("budget")
    assert sum(report.values()) == budget
    return budget


# The smallest budget, and the arrays that are alive

SMALLEST = [
    # One block of 4 tokens for keys and values: less than the high watermark.
    tiny.options(block_size=4, max_model_len=4),
    tiny.options(policy="bf16", max_num_seqs=1, max_num_batched_tokens=8),
]


def model_of(policy: str) -> LoadedModel:
    return tiny.dense_model() if policy == "bf16" else tiny.paged_model()


@pytest.mark.parametrize("chosen", SMALLEST, ids=["pagedweight", "bf16"])
def test_the_smallest_budget_works_and_is_all_that_is_used(chosen):
    model = model_of(chosen.policy)
    smallest = tiny.smallest_budget(model, chosen)
    with pytest.raises(ValueError, match=f"is {smallest - 1} bytes .*{smallest} bytes"):
        build_engine(model, dataclasses.replace(chosen, memory_budget=smallest - 1))
    del model
    before = live_bytes()
    model = model_of(chosen.policy)
    chosen = dataclasses.replace(chosen, memory_budget=smallest)
    with tiny.llm(model, chosen) as llm:
        check_floors(llm)
        assert llm.config.max_model_len == chosen.max_model_len
        longest = tiny.prompts(1, [chosen.max_model_len - 1])[0]
        groups = llm.submit([tokens(longest)] * 3, GREEDY)
        most = 0
        while llm._engine.has_work:
            llm.step()
            assert parts(llm) == smallest
            most = max(most, live_bytes() - before)
        requests = [request for group in groups for request in group]
        assert [len(r.output_token_ids) for r in requests] == [1] * 3
        assert {r.finish_reason for r in requests} == {"length"}
        report = llm.memory_report()
    pool = report.planes + report.kv + report.free
    assert report.dense + report.side_tables + pool <= most <= smallest
    assert live_bytes() == before, "close() left arrays behind"


def check_floors(llm: LLM) -> None:
    """The first pages came up to their floors, whatever the watermarks say."""
    if llm.config.policy == "pagedweight":
        start = initial(tiny.sensitivity())
        floors = planner.floors(tiny.sensitivity(), start, PlannerLimits())
        assert (llm.precision_map() >= floors).all()


def test_an_error_inside_of_with_closes_and_the_next_one_fits():
    """FIELD.md T5: opened again in the same process, as in a notebook."""
    chosen = dataclasses.replace(SMALLEST[0], memory_budget="6MiB")
    before = live_bytes()
    with pytest.raises(ZeroDivisionError), tiny.llm(tiny.paged_model(), chosen) as llm:
        llm.submit([tokens([5, 6])] * 5, GREEDY)
        llm.step()
        raise ZeroDivisionError
    assert live_bytes() == before
    with tiny.llm(tiny.paged_model(), chosen) as llm:
        assert live_bytes() - before <= parts(llm)
        assert llm.generate(tokens([5, 6]), GREEDY)[0].finished
    assert live_bytes() == before


def test_the_message_lists_where_the_bytes_go():
    with pytest.raises(ValueError) as error:
        build_engine(tiny.paged_model(), tiny.options(memory_budget="1MiB"))
    for text in (
        "memory_budget is 1048576 bytes (1.0MiB)",
        "dense weights 1.8MiB",
        "planes at their floors 0.4MiB",
        "raise memory_budget, or lower max_model_len",
    ):
        assert text in str(error.value)


@pytest.mark.parametrize("bits", [2, 7])
def test_bits_that_are_not_stored_are_refused(bits):
    with pytest.raises(ValueError, match=f"pin_bits={bits} but .* holds 3 to 6 bits"):
        build_engine(tiny.paged_model(), tiny.options(pin_bits=bits))


def test_an_expert_budget_below_the_seed_bits_is_refused_before_compiling():
    # 16 experts times 3 planes of 2 KiB times 3 seed bits.
    with pytest.raises(
        ValueError, match=r"'200KiB' is 204800 bytes but .* take 294912"
    ):
        build_engine(tiny.paged_model(), tiny.options(expert_budget="200KiB"))


def test_an_expert_budget_beyond_all_planes_asks_for_no_more_than_them():
    chosen = tiny.options(expert_budget="1GiB")
    pinned = tiny.options(pin_bits=6)
    model = tiny.paged_model()
    needed = tiny.smallest_budget(model, chosen)
    assert needed == tiny.smallest_budget(model, pinned)


# After the end


@pytest.fixture(scope="module")
def bfloat16() -> Iterator[LLM]:
    """As most users run it: dtype "auto"."""
    with tiny.llm(tiny.paged_model(dtype="bfloat16"), tiny.options(dtype="auto")) as m:
        yield m


def test_bfloat16_computes_nearly_the_same(bfloat16):
    oracle, prompt = tiny.Oracle(6), tiny.prompts(4, [50])[0]
    params = dataclasses.replace(GREEDY, prompt_logprobs=0)
    (output,) = bfloat16.generate(tokens(prompt), params)
    exact = scipy.special.log_softmax(oracle.logits(prompt), axis=-1)
    got = [
        position[token].logprob
        for position, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    # Eight bits of mantissa through two layers; logits spread by more than one.
    error = np.abs(np.array(got) - exact[np.arange(49), prompt[1:]])
    assert error.mean() < 0.05, error
    assert bfloat16.config.dtype == "bfloat16"
    assert bfloat16.mean_bits == 6


def test_nothing_works_after_close_but_close(bfloat16):
    llm = tiny.LLM(
        bfloat16._folder, bfloat16._options, bfloat16._model, bfloat16._built
    )
    (group,) = llm.submit(tokens(tiny.prompts(5, [20])[0]), GREEDY)
    llm.step()
    llm.close()
    llm.close()
    assert group[0].finish_reason == "abort"
    for use in (
        lambda: llm.generate(tokens([5])),
        lambda: llm.submit(tokens([5])),
        llm.step,
        llm.settle,
        llm.memory_report,
        llm.precision_map,
        llm.events,
        llm.check_integrity,
        lambda: llm.abort("0/0"),
        lambda: llm.config,
        lambda: llm.mean_bits,
    ):
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            use()
    bfloat16._built = None  # both were one engine


# What options do

EXPERT_BUDGET = 400 * 1024
SPENDING = tiny.options(
    memory_budget="7MiB",
    max_model_len=40,
    max_num_seqs=3,
    max_num_batched_tokens=16,
    max_steps_in_flight=3,
    block_size=8,
    seed=9,
    expert_budget=EXPERT_BUDGET,
)


@pytest.fixture(scope="module")
def spending() -> Iterator[LLM]:
    with tiny.llm(tiny.paged_model(), SPENDING) as llm:
        yield llm


def test_an_expert_budget_is_spent_once_and_bits_stay(spending):
    planes = spending.memory_report().planes
    assert EXPERT_BUDGET - 2 * 2048 < planes <= EXPERT_BUDGET
    bits = spending.precision_map()
    assert 3 <= bits.min() < bits.max() <= 6
    (event,) = spending.events()
    assert (event.reason, event.outcome) == ("expert_budget", "committed")
    spending.generate([tokens(p) for p in tiny.prompts(2, [30] * 6)], GREEDY)
    np.testing.assert_array_equal(spending.precision_map(), bits)


def test_options_have_an_effect_on_the_effective_configuration(spending):
    """FIELD.md T4: what is not refused can be seen."""
    config = dataclasses.asdict(spending.config)
    for name in AUDITED_HERE:
        assert config[name] == getattr(SPENDING, name), name
    assert spending.memory_report().budget == 7 * 2**20
    built = spending._running
    limits = built.engine.scheduler._limits
    assert (limits.max_num_seqs, limits.prefill_queries) == (3, 16)
    assert built.kv.block_size == 8
    assert built.engine._max_steps_in_flight == 3


AUDITED_HERE = (
    *("policy", "pin_bits", "dtype", "max_model_len", "max_num_seqs"),
    *("max_num_batched_tokens", "max_steps_in_flight", "block_size", "seed"),
)


def test_every_option_is_in_the_audit():
    elsewhere = {
        *("memory_budget", "expert_budget"),  # above
        "gpu_memory_utilization",  # below
        "kv_cache_dtype",  # test_kv_cache.py
        *("limits", "watermarks"),  # tests/engine/test_pressure.py
    }
    fields = {f.name for f in dataclasses.fields(ServeOptions)}
    assert fields == elsewhere | set(AUDITED_HERE)


def test_without_a_budget_a_share_is_taken():
    """On the CPU no more than can be used: all planes, all sequences, some blocks."""
    model = tiny.paged_model()

    def budget(**options) -> int:
        chosen = tiny.options(memory_budget=None, **options)
        kv, shapes = kv_layout(model.config, "float32", 16), step_shapes(chosen)
        reserved = workspace(model, kv, shapes)
        needs = needs_of(model, chosen, kv, reserved, PlannerLimits())
        memory, longest = split_memory(model, chosen, kv, needs)
        assert longest == 64
        return memory.budget

    most = budget()
    assert most < device_memory_bytes()
    fewer = 4e6 / device_memory_bytes()
    with pytest.raises(ValueError, match="needs at least"):
        budget(gpu_memory_utilization=fewer)
