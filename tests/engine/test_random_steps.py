"""2,000 random steps under memory pressure, all ledgers checked after each.

The number of steps in flight changes as well.
"""

import dataclasses
import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
import tiny

from pagedweight_jax.engine.request import Request, SamplingParams
from pagedweight_jax.paging import planner
from pagedweight_jax.paging.planner import PlannerLimits, Watermarks
from pagedweight_jax.serving.llm import LLM

SEED = 11
STEPS = 2000
LIMITS = PlannerLimits()
MARKS = Watermarks(low_blocks=1, high_blocks=4, dwell_steps=6)
PARENT_BITS = 6


def make(transfers: tiny.Transfers) -> LLM:
    """Parent bits leave room for 8 blocks, the floors for 27; 64 may be wanted."""
    model = tiny.paged_model()
    chosen = tiny.options(block_size=4, watermarks=MARKS, limits=LIMITS)
    smallest = tiny.smallest_budget(model, chosen)
    budget = smallest + 52 * 2048
    chosen = dataclasses.replace(chosen, memory_budget=budget)
    return tiny.llm(model, chosen, put=transfers)


@dataclass
class World:
    """What the test did, and what must hold after every step."""

    llm: LLM
    transfers: tiny.Transfers
    rng: np.random.Generator
    requests: list[Request] = field(default_factory=list)
    wanted: dict[str, str] = field(default_factory=dict)  # finish reason by id
    load: float = 0.3

    def act(self, step: int) -> None:
        if step % 100 == 0:  # calm and stormy weather, slow and failing copies
            self.load = float(self.rng.choice([0.0, 0.1, 0.3, 0.9]))
            self.llm._engine._max_steps_in_flight = int(self.rng.choice([1, 2, 4]))
            self.transfers.delay = int(self.rng.choice([0, 0, 3, 20]))
            self.transfers.fails = float(self.rng.choice([0.0, 0.0, 0.3, 1.0]))
            self.transfers.refused = float(self.rng.choice([0.0, 0.0, 0.5]))
        if self.rng.random() < self.load and len(self.unfinished()) < 12:
            self.submit()
        if self.rng.random() < 0.03 and self.unfinished():
            request = self.rng.choice(np.array(self.unfinished(), object))
            assert self.llm.abort(request.request_id)
            self.wanted[request.request_id] = "abort"

    def unfinished(self) -> list[Request]:
        return [r for r in self.requests if not r.finished]

    def submit(self) -> None:
        prompt = self.rng.integers(3, tiny.POISON, self.rng.integers(1, 50)).tolist()
        poisoned = self.rng.random() < 0.03
        if poisoned:
            prompt[self.rng.integers(len(prompt))] = tiny.POISON
        params = SamplingParams(
            max_tokens=int(self.rng.integers(1, 15)),
            temperature=float(self.rng.choice([0.0, 1.0])),
            top_k=100,  # never the poisoned token
            logprobs=int(self.rng.integers(0, 3)) if self.rng.random() < 0.2 else None,
            prompt_logprobs=1 if self.rng.random() < 0.1 else None,
        )
        ((request,),) = self.llm.submit({"prompt_token_ids": prompt}, params)
        self.requests.append(request)
        self.wanted[request.request_id] = "error" if poisoned else "length"

    def step(self, step: int) -> None:
        where = f"seed {SEED}, step {step}"
        engine = self.llm._engine
        statistics, before = engine.statistics, self.llm.precision_map()
        self.llm.step()
        self.llm.check_integrity()
        after = self.llm.precision_map()
        floors = planner.floors(tiny.sensitivity(), statistics, LIMITS)
        lowered = after < before
        assert (after[lowered] >= floors[lowered]).all(), f"{where}: below the floors"
        assert after.min() >= 3, f"{where}: a page has no use"
        self.check_promises(where)
        for request in self.requests:
            assert request.num_computed <= request.num_tokens, where
            assert request.token_ids[: request.num_prompt_tokens] == (
                request.prompt_token_ids
            ), where

    def check_promises(self, where: str) -> None:
        """Planes that are wanted have frames to come to, unless floors forbid it."""
        built = self.llm._running
        queued, free = built.migrator.num_queued_frames, built.allocator.num_free
        feasible = built.migrator.records[-1].feasible
        assert queued <= free or not feasible, f"{where}: {queued} for {free} frames"


def check_dwell(llm: LLM) -> None:
    """Raising waits after every change; only missing blocks do not wait."""
    events = [e for e in llm.events() if e.step > 1]  # what came before is the start
    for before, after in itertools.pairwise(events):
        waited = after.step - before.step
        assert waited >= MARKS.dwell_steps or after.reason == "kv_demand", after


@pytest.mark.slow
def test_two_thousand_random_steps():
    rng = np.random.default_rng(SEED)
    transfers = tiny.Transfers(rng)
    llm = make(transfers)
    assert llm.precision_map().min() == PARENT_BITS
    world, means = World(llm, transfers, rng), set()
    for step in range(STEPS):
        world.act(step)
        world.step(step)
        means.add(llm.mean_bits)
    check_dwell(llm)
    transfers.recover()
    while world.unfinished():
        world.step(STEPS)
    got = {r.request_id: r.finish_reason for r in world.requests}
    assert got == world.wanted, "a request was lost or ended otherwise"
    for request in world.requests:
        if request.finish_reason == "length":
            assert len(request.output_token_ids) == request.max_tokens
    # The weather was bad enough to mean something.
    reasons, outcomes = set(got.values()), {e.outcome for e in llm.events()}
    assert reasons == {"length", "error", "abort"}
    assert outcomes >= {"committed", "superseded", "failed"}
    assert sum(r.num_preemptions for r in world.requests) > 10
    assert len(means) > 20
    llm.settle()
    assert (llm.precision_map() == PARENT_BITS).all()
    assert llm.memory_report().kv == 0
    # After all its travels every plane is where the table says.
    oracle = tiny.Oracle(PARENT_BITS)
    for prompt in tiny.prompts(SEED, (5, 20)):
        params = SamplingParams(temperature=0.0, max_tokens=6)
        (output,) = llm.generate({"prompt_token_ids": prompt}, params)
        assert output.outputs[0].token_ids == oracle.greedy(prompt, 6)
    llm.close()
