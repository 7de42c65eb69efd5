"""A request: what was asked for, and how far it has come."""

import time
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_LOGPROBS = 20

_INTEGERS = ("n", "top_k", "seed", "max_tokens", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt; names and defaults are vLLM's.

    Attributes:
      n: continuations of each prompt.
      temperature: 0 is greedy.
      top_p: smallest set of tokens whose probability reaches this; 1 keeps all.
      top_k: most likely tokens to choose from; 0 or -1 keeps all.
      seed: makes a request's samples independent of the other requests; None
        derives one from the engine's seed.
      stop: texts that end the continuation; they are cut off.
      stop_token_ids: tokens that end the continuation, besides the model's own.
      ignore_eos: go on after the model's end-of-sequence token.
      max_tokens: tokens to generate at most; None for as many as fit.
      logprobs: alternatives to report for each generated token, at most 20; 0
        reports the chosen token alone.
      prompt_logprobs: the same for each token of the prompt.
      detokenize: make text; without it `stop` cannot work.
      skip_special_tokens: leave special tokens out of the text.
      include_stop_str_in_output: do not cut the stop text off.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: str | tuple[str, ...] | list[str] | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name in _INTEGERS:
            value = getattr(self, name)
            whole = value is None or isinstance(value, Integral)
            _require(whole, name, value, "a whole number")
        _require(self.n >= 1, "n", self.n, "at least 1")
        _require(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(
            self.top_k >= -1, "top_k", self.top_k, "at least 1, or 0 or -1 for all"
        )
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "at least 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            allowed = value is None or 0 <= value <= MAX_LOGPROBS
            _require(allowed, name, value, f"None or in 0..{MAX_LOGPROBS}")
        if self.stop_texts and not self.detokenize:
            raise ValueError(
                f"stop={self.stop!r} has no effect with detokenize=False; use"
                " stop_token_ids or leave detokenize on"
            )
        if any(not text for text in self.stop_texts):
            raise ValueError(f"stop={self.stop!r} holds an empty text; remove it")

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop texts as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @classmethod
    def of(cls, **options: object) -> "SamplingParams":
        """Builds parameters from a mapping, naming every option that is unknown."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(options) - known)
        if unknown:
            raise ValueError(
                f"sampling options {unknown} are not supported; known are"
                f" {sorted(known)}"
            )
        return cls(**options)  # pyright: ignore[reportArgumentType]


def _require(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r} must be {wanted}")


@dataclass(frozen=True)
class Logprob:
    """Log probability of a token, before temperature and filters.

    Attributes:
      rank: 1 for the most likely token.
      decoded_token: its text; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]


@dataclass(kw_only=True, eq=False)
class Request:
    """One continuation in progress; part of the Scheduler's state.

    ``token_ids`` is prompt and output in one, as far as the host has seen it;
    ``num_in_flight`` more are being sampled by steps that are enqueued. The first
    ``num_computed`` of all these have their keys and values in the pool by the time the
    next step runs. Everything else follows from these three.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    arrival_seconds: float = field(default_factory=time.monotonic)

    token_ids: list[int] = field(default_factory=list)
    num_in_flight: int = 0
    num_computed: int = 0
    slot: int | None = None  # on the device, while it runs
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    first_token_seconds: float | None = None
    finished_seconds: float | None = None
    num_preemptions: int = 0
    bits_times_steps: float = 0.0  # sum over its steps of the mean committed bits
    num_steps: int = 0
    plan_ids: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.token_ids = self.token_ids or list(self.prompt_token_ids)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing predicts the first token

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output, those in flight included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Tokens whose keys and values no step computes yet."""
        return self.num_tokens - self.num_computed

    @property
    def decodes(self) -> bool:
        """Whether only the newest token is left to compute; a fresh prompt prefills."""
        return self.num_computed > 0 and self.num_pending == 1

    @property
    def all_in_flight(self) -> bool:
        """Whether its last token is sampled already, or will be by an enqueued step."""
        return self.num_output_tokens >= self.max_tokens

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None
