"""A burst of requests against a memory budget, and what was seen while it ran."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pagedweight_jax.engine.engine import StepReport
from pagedweight_jax.engine.request import SamplingParams
from pagedweight_jax.serving.llm import LLM, MemoryReport

PROMPTS = (
    "Once upon a time",
    "The king said unto",
    "Returns a new",
    "NAME\n git",
    "A small",
    "Note that the",
    "In the beginning",
    "The function takes",
    "SYNOPSIS\n",
    "She had always",
    "To install the package,",
    "Computer science: the study of",
    "And it came to pass",
    "The following example shows",
    "This module provides",
    "My dear sister,",
)

SHORTEST_TOKENS, LONGER_BY = 64, 9
"""Each answer is a little longer than the one before, so the burst swells and ebbs."""


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One step, as the display and the picture show it."""

    seconds: float
    report: StepReport
    memory: MemoryReport
    bits: np.ndarray | None  # [layers, experts, 2]


@dataclass(kw_only=True)
class Trace:
    """What was seen of a burst, step by step."""

    label: str
    frames: list[Frame] = field(default_factory=list)
    num_finished: int = 0
    num_preemptions: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    most_running: int = 0
    steps_of_burst: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, over the burst."""
        return self.num_tokens / self.seconds

    @property
    def bits(self) -> np.ndarray:
        """Mean bits after each step of the burst."""
        frames = self.frames[: self.steps_of_burst]
        return np.array([frame.report.mean_bits for frame in frames])


def run_burst(
    llm: LLM, label: str, show: Callable[[Trace], None], prompts: tuple[str, ...]
) -> Trace:
    """Sends all prompts at once and steps until every one is finished and settled."""
    trace = Trace(label=label)
    params = [
        SamplingParams(
            temperature=0.8,
            top_p=0.95,
            max_tokens=SHORTEST_TOKENS + LONGER_BY * i,
            ignore_eos=True,
        )
        for i in range(len(prompts))
    ]
    start = time.monotonic()
    groups = llm.submit(list(prompts), params)
    requests = [request for group in groups for request in group]
    while any(not request.finished for request in requests):
        _record(llm, trace, llm.step(), start)
        show(trace)
    trace.seconds = time.monotonic() - start
    trace.steps_of_burst = len(trace.frames)
    trace.num_finished = sum(r.finish_reason == "length" for r in requests)
    trace.num_preemptions = sum(r.num_preemptions for r in requests)
    trace.num_tokens = sum(len(r.output_token_ids) for r in requests)
    for _ in range(8):  # the calm after the burst: planes come back
        _record(llm, trace, llm.step(), start)
        show(trace)
    llm.settle()
    _record(llm, trace, llm.step(), start)
    show(trace)
    return trace


def _record(llm: LLM, trace: Trace, report: StepReport, start: float) -> None:
    trace.most_running = max(trace.most_running, report.running)
    trace.frames.append(
        Frame(
            seconds=time.monotonic() - start,
            report=report,
            memory=llm.memory_report(),
            bits=llm.precision_map(),
        )
    )
