"""What the engine answers, at fixed bits, against a full forward pass."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
import tiny
from engine_cases import steps_in_flight

from pagedweight_jax.engine.request import Request, SamplingParams
from pagedweight_jax.serving.build import Built

ATOL = 1e-4  # of log probabilities: sums in float32, in another order

# Around the borders of blocks (16), rows (64), steps (128) and the longest sequence.
LENGTHS = (1, 2, 15, 16, 17, 33, 63, 64, 65, 100, 120)


def greedy(max_tokens: int = 8, **options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def sampled(seed: int, max_tokens: int = 8, **options) -> SamplingParams:
    """Draws from the likelier half of the tokens, so never the poisoned one."""
    likely = {"top_k": 100} | options
    return SamplingParams(seed=seed, max_tokens=max_tokens, **likely)


def serve(built: Built, requests: Sequence[Request]) -> list[list[int]]:
    tiny.run(built.engine, requests)
    return [r.output_token_ids for r in requests]


def test_greedy_answers_equal_a_full_forward_pass(roomy, oracle):
    """More requests than places, so prefills and decodes mix in most steps."""
    prompts = tiny.prompts(1, LENGTHS)
    requests = [tiny.request(str(i), p, greedy()) for i, p in enumerate(prompts)]
    got = serve(roomy, requests)
    for prompt, tokens in zip(prompts, got, strict=True):
        wanted = oracle.greedy(prompt, 8)
        assert tokens == wanted, f"prompt of {len(prompt)} tokens, seed 1"
    assert {r.finish_reason for r in requests} == {"length"}


def check_position(
    position: dict, token: int, logits: np.ndarray, count: int, where: str
) -> None:
    exact = scipy.special.log_softmax(logits.astype(np.float64))
    order = np.argsort(-exact)
    assert set(position) == {*order[:count].tolist(), token}, where
    ranks = scipy.stats.rankdata(-exact, method="min")
    for each, value in position.items():
        assert abs(value.logprob - exact[each]) < ATOL, where
        assert value.rank == ranks[each], where


@pytest.mark.parametrize("count", [0, 3])
def test_logprobs_equal_a_full_forward_pass(roomy, oracle, count):
    """With prompts of several rows and several steps, and with sampled tokens."""
    options = {"logprobs": count, "prompt_logprobs": count}
    requests = [
        tiny.request(f"{i}", p, sampled(i, temperature=0.8, **options))
        for i, p in enumerate(tiny.prompts(2, (1, 2, 16, 33, 65, 120)))
    ]
    serve(roomy, requests)
    for request in requests:
        logits = oracle.logits(request.token_ids)
        positions = [*request.prompt_logprobs, *request.logprobs]
        assert len(positions) == len(request.token_ids)
        assert positions[0] is None, "nothing predicts the first token"
        for i in range(1, len(positions)):
            where = f"request {request.request_id}, position {i}"
            token = request.token_ids[i]
            check_position(positions[i], token, logits[i - 1], count, where)
        total = sum(p[t].logprob for p, t in _generated(request))
        assert abs(request.cumulative_logprob - total) < 1e-5


def _generated(request: Request) -> list[tuple[dict, int]]:
    return list(zip(request.logprobs, request.output_token_ids, strict=True))


def contents(request: Request) -> tuple:
    return (
        request.token_ids,
        request.finish_reason,
        request.prompt_logprobs,
        request.logprobs,
        request.cumulative_logprob,
    )


def mixed_requests() -> list[Request]:
    params = [
        greedy(20, logprobs=2, prompt_logprobs=1),
        sampled(5, 20, logprobs=2),
        sampled(6, 20, top_k=20, top_p=0.9, prompt_logprobs=0),
    ]
    return [
        tiny.request(str(i), prompt, params[i % 3])
        for i, prompt in enumerate(tiny.prompts(3, (9, 30, 17, 40, 3, 25, 12, 38)))
    ]


def test_two_runs_at_fixed_bits_are_identical(roomy):
    first, second = mixed_requests(), mixed_requests()
    serve(roomy, first)
    serve(roomy, second)
    for one, two in zip(first, second, strict=True):
        assert contents(one) == contents(two), f"request {one.request_id}"


def test_a_seed_decides_whatever_else_runs(roomy):
    together = mixed_requests()
    serve(roomy, together)
    for wanted in together:
        alone = mixed_requests()[int(wanted.request_id)]
        serve(roomy, [alone])
        assert alone.token_ids == wanted.token_ids, f"request {wanted.request_id}"


def test_preemption_changes_nothing(roomy, tight):
    """FIELD.md T1; and prompts in chunks of 32 are the same as in one of 64."""
    wanted, got = mixed_requests(), mixed_requests()
    serve(roomy, wanted)
    serve(tight, got)
    assert not sum(r.num_preemptions for r in wanted)
    assert sum(r.num_preemptions for r in got) >= 3, "the pool is not tight"
    for one, two in zip(wanted, got, strict=True):
        assert one.token_ids == two.token_ids, f"request {one.request_id}"
        assert one.finish_reason == two.finish_reason
        positions = [[*r.prompt_logprobs, *r.logprobs, {0: None}] for r in (one, two)]
        for a, b in zip(*positions, strict=True):
            assert (a is None) == (b is None)
            assert list(a or {}) == list(b or {})
        assert abs(one.cumulative_logprob - two.cumulative_logprob) < ATOL


def test_a_tiny_pool_always_makes_progress(tight):
    """FIELD.md T2: 200 requests through memory for one."""
    rng = np.random.default_rng(4)
    lengths = rng.integers(1, 50, 200)
    requests = [
        tiny.request(str(i), p, sampled(i, int(rng.integers(1, 12))))
        for i, p in enumerate(tiny.prompts(4, lengths))
    ]

    def progress(report) -> None:
        work = report.decode_tokens + report.prefill_tokens
        did = work or report.preempted or report.finished
        assert did, f"step {report.step} did nothing"
        assert report.kv_blocks_used + report.kv_blocks_free <= 16

    tiny.run(tight.engine, requests, after_step=progress, max_steps=5000)
    for request in requests:
        assert request.finish_reason == "length", f"request {request.request_id}"
        assert len(request.output_token_ids) == request.max_tokens
    assert sum(r.num_preemptions for r in requests) > 20


def test_the_last_request_may_fill_the_pool(tight, oracle):
    """FIELD.md T3: alone with all the memory that there is."""
    prompt = tiny.prompts(5, [40])[0]
    request = tiny.request("0", prompt, greedy(24))
    used = []
    tiny.run(
        tight.engine, [request], after_step=lambda r: used.append(r.kv_blocks_free)
    )
    assert request.output_token_ids == oracle.greedy(prompt, 24)
    assert min(used) == 0, "the sequence did not fill the pool"


def test_a_request_with_nan_fails_alone(roomy, oracle):
    """The poisoned prompt shares its steps, its experts and then its frames."""
    sound = tiny.prompts(6, (20, 40, 20))
    poisoned = [*sound[0][:10], tiny.POISON, *sound[0][10:]]
    requests = [
        tiny.request("sound", sound[1], greedy()),
        tiny.request("poisoned", poisoned, greedy(logprobs=1, prompt_logprobs=1)),
        tiny.request("also sound", sound[2], greedy()),
    ]
    serve(roomy, requests)
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    assert requests[1].output_token_ids == []
    assert requests[0].output_token_ids == oracle.greedy(sound[1], 8)
    assert requests[2].output_token_ids == oracle.greedy(sound[2], 8)


def seed_that_draws(token: int, position: int) -> int:
    """A seed whose noise alone chooses a token, which is what great heat leaves."""

    def chosen(seed):
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jnp.argmax(jax.random.gumbel(key, (tiny.VOCAB_SIZE,), jnp.float32))

    seeds = jnp.arange(5000, dtype=jnp.uint32)
    found = np.flatnonzero(np.asarray(jax.jit(jax.vmap(chosen))(seeds)) == token)
    return int(found[0])


def test_a_token_that_breaks_the_model_ends_the_request_in_decode(roomy, oracle):
    prompts = tiny.prompts(7, [12, 12])
    hot = SamplingParams(
        temperature=1e9, max_tokens=20, seed=seed_that_draws(tiny.POISON, 4)
    )
    request = tiny.request("0", prompts[0], hot)
    neighbour = tiny.request("1", prompts[1], greedy(20))
    serve(roomy, [request, neighbour])
    assert request.finish_reason == "error"
    assert len(request.output_token_ids) == 5
    assert request.output_token_ids[-1] == tiny.POISON
    assert neighbour.output_token_ids == oracle.greedy(neighbour.prompt_token_ids, 20)


def test_nan_in_freed_frames_never_reaches_another_request(tight, oracle):
    """The pool is full of a broken request's NaN before the next ones use it."""
    prompt = tiny.prompts(9, [60])[0]
    broken = tiny.request("broken", [tiny.POISON, *prompt], greedy())
    tight.engine.add(broken)
    tight.engine.step()
    frames = set(tight.allocator.frames_of("kv").tolist())
    tiny.run(tight.engine, [])
    assert broken.finish_reason == "error"
    prompts = tiny.prompts(10, (13, 21, 3))
    requests = [tiny.request(str(i), p, greedy()) for i, p in enumerate(prompts)]
    for request in requests:
        tight.engine.add(request)
    tight.engine.step()
    assert set(tight.allocator.frames_of("kv").tolist()) <= frames
    tiny.run(tight.engine, [])
    for request in requests:
        wanted = oracle.greedy(request.prompt_token_ids, 8)
        assert request.output_token_ids == wanted, f"request {request.request_id}"


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_abort_frees_everything_in_every_state(tight, which, steps):
    """Waiting, in the middle of the prefill, decoding: the others go on."""
    prompts = tiny.prompts(11, (40, 12, 30))
    requests = [tiny.request(str(i), p, greedy(4)) for i, p in enumerate(prompts)]
    for request in requests:
        tight.engine.add(request)
    for _ in range(steps):
        tight.engine.step()
    was_done = requests[which].finished
    assert tight.engine.abort(str(which)) != was_done
    tight.engine.check_integrity()
    assert not tight.engine.abort(str(which)), "it was aborted twice"
    tiny.run(tight.engine, [])
    for i, request in enumerate(requests):
        aborted = i == which and not was_done
        assert request.finish_reason == ("abort" if aborted else "length")
        assert len(request.output_token_ids) == 4 or aborted


def test_an_unknown_request_is_not_aborted(roomy):
    assert not roomy.engine.abort("nobody")


@pytest.mark.parametrize("depth", [1, 2])
def test_the_report_tells_what_the_step_did(tight, depth):
    requests = [
        tiny.request(str(i), p, greedy(3))
        for i, p in enumerate(tiny.prompts(12, (24, 24)))
    ]
    for request in requests:
        tight.engine.add(request)
    with steps_in_flight(tight, depth):
        reports = [tight.engine.step() for _ in range(4 + depth - 1)]
    late = [()] * (depth - 1)
    computed = [(r.prefill_tokens, r.decode_tokens) for r in reports]
    # One prefill row a step; the first request decodes beside the second's prefill.
    assert computed == [(24, 0), (24, 1), (0, 2), (0, 1), *[(0, 0)] * (depth - 1)]
    finished = [tuple(r.request_id for r in report.finished) for report in reports]
    assert finished == [*late, (), (), ("0",), ("1",)]
    # Blocks are free as soon as the last step that needs them is enqueued.
    assert [r.kv_blocks_used for r in reports][:4] == [12, 13, 7, 0]
    assert [(r.running, r.waiting) for r in reports][:4] == [
        *((2, 0), (2, 0), (1, 0), (0, 0))
    ]
    in_flight = [depth - 1] * 4 + [0] * (depth - 1)
    assert [r.steps_in_flight for r in reports] == in_flight
    assert {r.mean_bits for r in reports} == {5.0}
