"""What users call: prompts, parameters, outputs, and what can be looked at."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.special
import tiny

from pagedweight_jax.engine.request import SamplingParams
from pagedweight_jax.serving.llm import LLM, serve

BITS = 5
MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def oracle() -> tiny.Oracle:
    return tiny.Oracle(BITS)


@pytest.fixture(scope="module")
def shared(oracle) -> Iterator[LLM]:
    """Pinned, with an end-of-sequence token: the third of the greedy answer."""
    eos = oracle.greedy(PROMPT, 3)[-1]
    model = tiny.paged_model()
    config = dataclasses.replace(model.config, eos_token_ids=(eos,))
    model = dataclasses.replace(model, config=config)
    with tiny.llm(model, tiny.options(pin_bits=BITS, seed=3)) as llm:
        yield llm


@pytest.fixture
def llm(shared) -> Iterator[LLM]:
    yield shared
    shared.check_integrity()
    assert shared.memory_report().kv == 0, "a request was left behind"


PROMPT = tiny.prompts(1, [20])[0]


def ids(prompt: list[int]) -> dict[str, list[int]]:
    return {"prompt_token_ids": prompt}


def greedy(max_tokens: int | None = 4, **options) -> SamplingParams:
    options = {"ignore_eos": True} | options
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


# Answers


def test_outputs_come_in_the_order_of_the_prompts(llm, oracle):
    prompts = tiny.prompts(2, (30, 3, 18, 50, 7, 11))
    outputs = llm.generate([ids(p) for p in prompts], greedy())
    assert [o.prompt_token_ids for o in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.greedy(prompt, 4)


def test_an_output_has_the_fields_of_vllm(llm):
    (output,) = llm.generate(ids(PROMPT), greedy(logprobs=1, prompt_logprobs=0))
    (completion,) = output.outputs
    assert output.finished and output.prompt is None
    assert len(output.prompt_logprobs) == len(PROMPT)
    assert completion.index == 0 and completion.finish_reason == "length"
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert len(completion.logprobs) == 4
    own = [p[t] for p, t in zip(completion.logprobs, completion.token_ids, strict=True)]
    assert [p.rank for p in own] == [1] * 4
    assert [p.decoded_token for p in own] == [
        llm.tokenizer.decode([t]) for t in completion.token_ids
    ]
    assert completion.cumulative_logprob == pytest.approx(sum(p.logprob for p in own))
    metrics = output.metrics
    assert metrics.arrival_seconds <= metrics.first_token_seconds
    assert metrics.first_token_seconds <= metrics.finished_seconds
    assert metrics.num_preemptions == 0
    assert output.precision.mean_bits == BITS and output.precision.plan_ids == ()
    assert output.num_cached_tokens == 0


def test_a_text_is_the_same_as_its_tokens(llm):
    text = "tiny models"
    tokens = llm.tokenizer.encode(text).ids
    one, two = llm.generate([text, ids(tokens)], greedy())
    assert one.prompt == text and one.prompt_token_ids == tokens
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    (alone,) = llm.generate(text, greedy())
    assert alone.outputs[0].text == one.outputs[0].text


def test_each_prompt_may_have_its_own_parameters(llm):
    outputs = llm.generate([ids(PROMPT)] * 3, [greedy(n) for n in (1, 5, 2)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 5, 2]


def test_defaults_draw_sixteen_tokens(llm):
    (output,) = llm.generate({"prompt_token_ids": tiny.prompts(3, [5])[0]})
    assert output.outputs[0].finish_reason in ("length", "stop", "error")
    assert len(output.outputs[0].token_ids) <= 16


def test_continuations_of_a_prompt_have_seeds_of_their_own(llm):
    params = SamplingParams(n=3, seed=40, max_tokens=8, top_k=50, ignore_eos=True)
    (output,) = llm.generate(ids(PROMPT), params)
    assert [c.index for c in output.outputs] == [0, 1, 2]
    tokens = [c.token_ids for c in output.outputs]
    assert len({tuple(t) for t in tokens}) == 3
    for i, wanted in enumerate(tokens):
        alone = dataclasses.replace(params, n=1, seed=40 + i)
        assert llm.generate(ids(PROMPT), alone)[0].outputs[0].token_ids == wanted


def test_without_a_seed_two_requests_differ(llm):
    params = SamplingParams(max_tokens=8, top_k=50, ignore_eos=True)
    one, two = llm.generate([ids(PROMPT)] * 2, params)
    assert one.outputs[0].token_ids != two.outputs[0].token_ids


def test_the_end_token_ends_unless_it_is_ignored(llm, oracle):
    whole = oracle.greedy(PROMPT, 8)
    first = whole.index(llm._model.config.eos_token_ids[0])
    (ended,) = llm.generate(ids(PROMPT), greedy(8, ignore_eos=False))
    completion = ended.outputs[0]
    assert completion.token_ids == whole[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    (ignored,) = llm.generate(ids(PROMPT), greedy(8))
    assert ignored.outputs[0].token_ids == whole


def test_max_model_len_ends_what_has_no_limit(llm):
    outputs = llm.generate([ids(PROMPT), ids(PROMPT * 3 + PROMPT[:3])], greedy(None))
    lengths = [len(o.outputs[0].token_ids) for o in outputs]
    assert lengths == [MAX_MODEL_LEN - 20, 1]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


def test_a_poisoned_prompt_fails_and_the_next_one_does_not(llm):
    outputs = llm.generate([ids([5, tiny.POISON, 6]), ids(PROMPT)], greedy())
    assert [o.outputs[0].finish_reason for o in outputs] == ["error", "length"]
    assert outputs[0].finished and outputs[0].outputs[0].text == ""


# Step by step


def test_outputs_can_be_read_while_they_grow(llm):
    (group,) = llm.submit(ids(PROMPT), greedy(6))
    lengths = []
    while not group[0].finished:
        report = llm.step()
        output = llm.output(group)
        assert output.finished == (group[0] in report.finished)
        lengths.append(len(output.outputs[0].token_ids))
    # The first token is seen when the second step is on its way.
    assert lengths == [0, 1, 2, 3, 4, 5, 6]


def test_an_aborted_request_keeps_what_it_has(llm):
    (group,) = llm.submit(ids(PROMPT), greedy(20))
    while len(group[0].output_token_ids) < 3:
        llm.step()
    assert llm.abort(group[0].request_id) and not llm.abort(group[0].request_id)
    output = llm.output(group)
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 3


def test_generate_leaves_other_requests_to_go_on(llm):
    (group,) = llm.submit(ids(PROMPT), greedy(30))
    llm.generate(ids(PROMPT), greedy(2))
    assert not group[0].finished and group[0].output_token_ids
    while not group[0].finished:
        llm.step()


# Mistakes


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        ("", "prompt 1 is empty"),
        (ids([]), "prompt 1 is empty"),
        (ids([5] * MAX_MODEL_LEN), "prompt 1 has 64 tokens but max_model_len=64"),
        ("x" * 100, "prompt 1 has 100 tokens but max_model_len=64"),
        (ids([5, 512, -1]), r"prompt 1 has token ids \[512, -1\].*0\.\.511"),
        ({"prompt": "x"}, r"prompt 1 has the keys \['prompt'\]"),
        ({"prompt_token_ids": [5], "extra": 1}, "prompt 1 has the keys"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_starts(llm, prompt, wanted):
    before = llm._engine.steps, llm._num_requests
    with pytest.raises(ValueError, match=wanted):
        llm.generate([ids(PROMPT), prompt, ids(PROMPT)], greedy())
    assert not llm._engine.has_work
    assert (llm._engine.steps, llm._num_requests) == before


def test_no_prompts_are_refused(llm):
    with pytest.raises(ValueError, match="no prompts came"):
        llm.generate([])


def test_a_list_of_parameters_of_another_length_is_refused(llm):
    with pytest.raises(ValueError, match="2 prompts came with 3 sampling_params"):
        llm.generate([ids(PROMPT)] * 2, [greedy()] * 3)


# Looking in


def test_the_effective_configuration_names_what_was_decided(llm):
    config = llm.config
    assert (config.policy, config.pin_bits, config.dtype) == (
        "pagedweight",
        BITS,
        "float32",
    )
    assert (config.max_model_len, config.max_num_seqs) == (MAX_MODEL_LEN, 4)
    assert (config.max_num_batched_tokens, config.block_size) == (32, 16)
    assert config.seed == 3 and config.frame_bytes == 2048
    # Two layers of 16 tokens, key and value of four heads of 32 in float32.
    assert config.kv_block_bytes == 2 * 16 * 2 * 4 * 32 * 4


def test_the_precision_map_has_a_number_for_every_page(llm):
    bits = llm.precision_map()
    assert bits.shape == (2, 8, 2) and (bits == BITS).all()
    bits[:] = 0
    assert (llm.precision_map() == BITS).all(), "the map is a view of the table"
    assert llm.mean_bits == BITS


def test_pinning_is_one_event(llm):
    (event,) = llm.events()
    assert (event.plan_id, event.reason, event.outcome) == (1, "pin_bits", "committed")
    assert (event.pages_up, event.pages_down, event.mean_bits) == (32, 0, BITS)
    assert event.freed_bytes == -2 * 8 * 3 * BITS * 2048
    assert event.feasible and event.seconds_to_commit >= 0


def test_memory_adds_up_at_every_step(llm):
    (group,) = llm.submit(ids(PROMPT), greedy(32))
    used = []
    while not group[0].finished:
        llm.step()
        report = llm.memory_report()
        parts = dataclasses.asdict(report)
        budget = parts.pop("budget")
        assert sum(parts.values()) == budget == 8 * 2**20
        assert min(parts.values()) >= 0
        used.append(report.kv)
    # 20 tokens are two blocks of 16, 51 are four; the last step has freed them.
    block = llm.config.kv_block_bytes
    assert sorted(set(used)) == [0, 2 * block, 3 * block, 4 * block]
    assert report.planes == 2 * 8 * 3 * BITS * 2048


# A Hugging Face folder as it is


@pytest.fixture(scope="module", params=tiny.NAMES)
def dense(request) -> Iterator[LLM]:
    with serve(
        tiny.folder(request.param),
        policy="bf16",
        dtype="float32",
        memory_budget="16MiB",
        max_model_len=64,
        max_num_seqs=2,
        max_num_batched_tokens=32,
    ) as llm:
        yield llm


def test_a_hugging_face_folder_is_served_as_it_is(dense):
    """From the files to the log probabilities of both prompts, in chunks of 32."""
    name = dense.config.model.split("/")[-1]
    reference = tiny.reference(name)
    prompts = reference["input_ids"].tolist()
    outputs = dense.generate([ids(p) for p in prompts], greedy(1, prompt_logprobs=0))
    exact = scipy.special.log_softmax(reference["logits"].astype(np.float64), axis=-1)
    for prompt, output, wanted in zip(prompts, outputs, exact, strict=True):
        got = [
            p[t].logprob
            for p, t in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
        ]
        np.testing.assert_allclose(got, wanted[range(47), prompt[1:]], atol=1e-5)
        assert output.outputs[0].token_ids == [int(wanted[-1].argmax())]
        assert output.precision.mean_bits == 16
    assert dense.mean_bits == 16 and dense.events() == []
    report = dense.memory_report()
    assert report.planes == report.side_tables == 0
    dense.check_integrity()


def test_what_needs_pages_or_a_tokenizer_says_so(dense):
    with pytest.raises(ValueError, match="no precision map"):
        dense.precision_map()
    with pytest.raises(
        ValueError, match=r"has no tokenizer\.json; pass prompt_token_ids"
    ):
        dense.generate("text")
    with pytest.raises(ValueError, match=r"stop='x' needs a tokenizer.*stop_token_ids"):
        dense.generate(ids([5]), SamplingParams(stop="x"))
