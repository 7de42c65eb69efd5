"""Several steps in flight: the host learns of tokens late, and nobody can tell."""

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest
import tiny
from engine_cases import steps_in_flight

from pagedweight_jax.engine.engine import StepReport
from pagedweight_jax.engine.request import Request, SamplingParams
from pagedweight_jax.serving.build import Built

ATOL = 1e-4  # of log probabilities: sums in float32, in another order
TOKENIZER = tiny.tokenizer()


def greedy(max_tokens: int = 8, **options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


@dataclass(frozen=True)
class Workload:
    """Requests, the step before which each arrives, and after which one is aborted."""

    requests: list[Request]
    arrivals: list[int]
    aborts: dict[int, str]

    def run(self, built: Built, depth: int) -> list[StepReport]:
        reports = []
        left = list(zip(self.arrivals, self.requests, strict=True))
        with steps_in_flight(built, depth):
            while left or built.engine.has_work:
                step = len(reports)
                while left and left[0][0] <= step:
                    built.engine.add(left.pop(0)[1])
                reports.append(built.engine.step())
                built.engine.check_integrity()
                assert reports[-1].steps_in_flight < depth
                if step in self.aborts:
                    built.engine.abort(self.aborts[step])
        assert built.engine.step().steps_in_flight == 0
        return reports


def random_params(rng: np.random.Generator) -> SamplingParams:
    options = {"max_tokens": int(rng.integers(1, 20)), "seed": int(rng.integers(99))}
    if rng.random() < 0.4:
        options |= {"temperature": 0.0}
    else:  # never the poisoned token
        options |= {
            "temperature": 0.9,
            "top_k": 100,
            "top_p": float(rng.uniform(0.5, 1)),
        }
    if rng.random() < 0.3:
        options |= {"logprobs": int(rng.integers(0, 4))}
    if rng.random() < 0.2:
        options |= {"prompt_logprobs": int(rng.integers(0, 3))}
    if rng.random() < 0.4:  # a sixteenth of all tokens stops
        options |= {"stop_token_ids": rng.integers(3, 511, 32).tolist()}
    if rng.random() < 0.3:
        options |= {"stop": ["e", "ab", "t"]}
    return SamplingParams(**options)


def random_workload(seed: int, *, abort: bool) -> Workload:
    rng = np.random.default_rng(seed)
    prompts = tiny.prompts(seed, rng.integers(1, 40, 24))
    requests = []
    for i, prompt in enumerate(prompts):
        if rng.random() < 0.1:
            prompt[rng.integers(len(prompt))] = tiny.POISON
        requests.append(tiny.request(str(i), prompt, random_params(rng)))
    arrivals = np.sort(rng.integers(0, 60, len(requests))).tolist()
    victims = rng.choice(len(requests), 4, replace=False) if abort else []
    aborts = {arrivals[v] + int(rng.integers(0, 6)): str(v) for v in victims}
    return Workload(requests, arrivals, aborts)


def assert_same_positions(one: list, two: list, where: str) -> None:
    assert len(one) == len(two), where
    for a, b in zip(one, two, strict=True):
        assert (a is None) == (b is None), where
        assert list(a or {}) == list(b or {}), where
        values = [[p.logprob for p in (each or {}).values()] for each in (a, b)]
        np.testing.assert_allclose(*values, rtol=0, atol=ATOL, err_msg=where)


def assert_same(one: Request, two: Request, where: str) -> None:
    assert one.token_ids == two.token_ids, where
    assert one.finish_reason == two.finish_reason, where
    assert one.stop_reason == two.stop_reason, where
    assert_same_positions(one.logprobs, two.logprobs, where)
    assert_same_positions(one.prompt_logprobs, two.prompt_logprobs, where)
    assert abs(one.cumulative_logprob - two.cumulative_logprob) < ATOL, where


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("memory", ["tight", "roomy"])
def test_tokens_do_not_depend_on_the_steps_in_flight(request, memory, seed):
    """The law: whatever is asked for, however it ends, preempted or not."""
    built = request.getfixturevalue(memory)
    at_once, *deeper = [random_workload(seed, abort=False) for _ in range(3)]
    at_once.run(built, 1)
    reasons = {r.finish_reason for r in at_once.requests}
    assert reasons >= {"length", "stop"}
    if memory == "tight":
        assert sum(r.num_preemptions for r in at_once.requests), "memory is not tight"
    for depth, workload in zip((2, 4), deeper, strict=True):
        workload.run(built, depth)
        for one, two in zip(at_once.requests, workload.requests, strict=True):
            where = f"seed {seed}, depth {depth}, request {one.request_id}"
            assert_same(one, two, where)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_an_abort_leaves_a_part_of_the_answer_and_everybody_else_alone(tight, depth):
    whole, cut = (random_workload(7, abort=a) for a in (False, True))
    whole.run(tight, 1)
    cut.run(tight, depth)
    aborted = [r for r in cut.requests if r.finish_reason == "abort"]
    assert aborted
    for one, two in zip(whole.requests, cut.requests, strict=True):
        if two in aborted:
            assert one.token_ids[: len(two.token_ids)] == two.token_ids
        else:
            assert_same(one, two, f"depth {depth}, request {one.request_id}")


def lengths_only(seed: int) -> Workload:
    workload = random_workload(seed, abort=False)
    plain = [
        tiny.request(
            r.request_id,
            [min(t, tiny.POISON - 1) for t in r.prompt_token_ids],
            dataclasses.replace(r.params, stop=None, stop_token_ids=None),
        )
        for r in workload.requests
    ]
    return dataclasses.replace(workload, requests=plain)


def test_no_step_is_computed_in_vain_where_the_end_is_known(tight):
    """Not even where memory is short: the same steps in the same order."""
    steps = []
    for depth in (1, 2, 4):
        workload = lengths_only(8)
        reports = workload.run(tight, depth)
        made = [
            (r.decode_tokens, r.prefill_tokens, [p.request_id for p in r.preempted])
            for r in reports
        ]
        steps.append([step for step in made if step != (0, 0, [])])
    assert steps[0] == steps[1] == steps[2]
    assert any(preempted for *_, preempted in steps[0])


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_stop_costs_at_most_the_steps_that_were_in_flight(roomy, depth):
    prompt = tiny.prompts(9, [20])[0]
    plain = tiny.request("plain", prompt, greedy(30))
    tiny.run(roomy.engine, [plain])
    stop = plain.output_token_ids[9]
    count = plain.output_token_ids.index(stop) + 1
    request = tiny.request("stops", prompt, greedy(30, stop_token_ids=[stop]))
    reports = Workload([request], [0], {}).run(roomy, depth)
    assert request.output_token_ids == plain.output_token_ids[:count]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    decoded = sum(r.decode_tokens for r in reports)
    assert decoded - (count - 1) == depth - 1


def test_blocks_of_a_stopped_request_serve_others_while_its_surplus_runs(tight, oracle):
    """They are free when the stop is found; a step that writes them is in flight.

    The next requests take the same frames in the next step, and their keys and values
    are written after the surplus.
    """
    prompt = tiny.prompts(10, [40])[0]
    plain = tiny.request("plain", prompt, greedy(20))
    tiny.run(tight.engine, [plain])
    stop = plain.output_token_ids[12]
    stops = tiny.request("stops", prompt, greedy(20, stop_token_ids=[stop]))
    others = [
        tiny.request(str(i), p, greedy(10))
        for i, p in enumerate(tiny.prompts(11, (30, 20)))
    ]
    with steps_in_flight(tight, 3):
        for each in (stops, *others):
            tight.engine.add(each)
        while not stops.finished:
            frames = set(tight.allocator.frames_of("kv").tolist())
            report = tight.engine.step()
        assert (report.steps_in_flight, report.kv_blocks_used) == (2, 0)
        tight.engine.step()
        frames &= set(tight.allocator.frames_of("kv").tolist())
        tiny.run(tight.engine, [])
    assert frames, "the others have other frames"
    for each in others:
        assert each.output_token_ids == oracle.greedy(each.prompt_token_ids, 10)


def test_the_host_runs_ahead_of_what_it_has_seen(roomy):
    request = tiny.request("0", tiny.prompts(12, [10])[0], greedy(10))
    seen = []
    with steps_in_flight(roomy, 3):
        roomy.engine.add(request)
        while roomy.engine.has_work:
            roomy.engine.step()
            seen.append((len(request.output_token_ids), request.num_output_tokens))
    assert seen[:4] == [(0, 1), (0, 2), (1, 3), (2, 4)]
    assert seen[-1] == (10, 10)


def test_statistics_take_every_step_once(roomy):
    """They arrive late, and none is lost when the last request ends."""
    landed = []
    observe = type(roomy.engine)._observe

    def counting(self, step, results) -> None:
        landed.append(step.num_tokens)
        observe(self, step, results)

    workload = lengths_only(13)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(roomy.engine), "_observe", counting)
        reports = workload.run(roomy, 3)
    enqueued = [r.decode_tokens + r.prefill_tokens for r in reports]
    assert landed == [count for count in enqueued if count]
