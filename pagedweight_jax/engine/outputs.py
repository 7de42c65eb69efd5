"""What a finished request returns; names and fields are vLLM's, plus the precision."""

from dataclasses import dataclass

from tokenizers import Tokenizer

from pagedweight_jax.engine.request import (
    FinishReason,
    PositionLogprobs,
    Request,
)


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """At which precision a prompt was served.

    Attributes:
      mean_bits: committed bits of the average expert weight over the request's steps;
        16 for experts that are not quantised.
      plan_ids: plans that were adopted while it ran.
    """

    mean_bits: float
    plan_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Seconds on the engine's clock, and how often the request lost its place."""

    arrival_seconds: float
    first_token_seconds: float | None
    finished_seconds: float | None
    num_preemptions: int


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and all its continuations."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    precision: Precision
    num_cached_tokens: int = 0


def find_stop(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Returns (start, stop text) of the stop text that comes first in ``text``."""
    found = [(text.find(stop), stop) for stop in stops]
    return min((hit for hit in found if hit[0] >= 0), default=None)


def hits_stop_text(request: Request, tokenizer: Tokenizer) -> str | None:
    """Returns the stop text that the newest token completed, if there is one.

    Only the tail is decoded: a character takes at most four tokens.
    """
    stops = request.params.stop_texts
    if not stops:
        return None
    window = 4 * max(len(stop) for stop in stops) + 4
    tail = request.output_token_ids[-window:]
    text = tokenizer.decode(
        tail, skip_special_tokens=request.params.skip_special_tokens
    )
    hit = find_stop(text, stops)
    return hit[1] if hit else None


def output_text(request: Request, tokenizer: Tokenizer | None) -> str:
    """Decodes the output and cuts it at the stop text that ended it."""
    params = request.params
    if tokenizer is None or not params.detokenize:
        return ""
    text = tokenizer.decode(
        request.output_token_ids, skip_special_tokens=params.skip_special_tokens
    )
    if isinstance(request.stop_reason, str):
        hit = find_stop(text, (request.stop_reason,))
        if hit:
            keep = params.include_stop_str_in_output
            return text[: hit[0] + (len(hit[1]) if keep else 0)]
    return text


def completion(
    request: Request, index: int, tokenizer: Tokenizer | None
) -> CompletionOutput:
    """Builds the output of one continuation."""
    wants_logprobs = request.params.logprobs is not None
    return CompletionOutput(
        index=index,
        text=output_text(request, tokenizer),
        token_ids=list(request.output_token_ids),
        cumulative_logprob=request.cumulative_logprob if wants_logprobs else None,
        logprobs=list(request.logprobs) if wants_logprobs else None,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def request_output(
    request_id: str, requests: list[Request], tokenizer: Tokenizer | None
) -> RequestOutput:
    """Joins the continuations of one prompt."""
    first = requests[0]
    steps = sum(r.num_steps for r in requests)
    firsts = [r.first_token_seconds for r in requests if r.first_token_seconds]
    lasts = [r.finished_seconds for r in requests if r.finished_seconds]
    return RequestOutput(
        request_id=request_id,
        prompt=first.prompt,
        prompt_token_ids=list(first.prompt_token_ids),
        prompt_logprobs=(
            list(first.prompt_logprobs)
            if first.params.prompt_logprobs is not None
            else None
        ),
        outputs=[completion(r, i, tokenizer) for i, r in enumerate(requests)],
        finished=all(r.finished for r in requests),
        metrics=RequestMetrics(
            arrival_seconds=first.arrival_seconds,
            first_token_seconds=min(firsts, default=None),
            finished_seconds=max(lasts, default=None),
            num_preemptions=sum(r.num_preemptions for r in requests),
        ),
        precision=Precision(
            mean_bits=sum(r.bits_times_steps for r in requests) / max(1, steps),
            plan_ids=tuple(sorted(set().union(*(r.plan_ids for r in requests)))),
        ),
    )
