"""Perplexity of a served model: what the engine itself predicts, page by page.

Texts are cut into windows that do not overlap; every token but the first of a window
is predicted from the tokens before it in the window. The perplexity is the exponential
of the mean negative log likelihood, and its interval comes from drawing windows with
replacement (bootstrap), because tokens of one window are not independent.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64

from pagedweight_jax.engine.outputs import RequestOutput
from pagedweight_jax.engine.request import SamplingParams
from pagedweight_jax.evaluation.provenance import provenance
from pagedweight_jax.serving.llm import LLM, TokensPrompt

_BATCH_WINDOWS = 32


@dataclass(frozen=True, kw_only=True)
class Window:
    """Tokens of one document, and the domain that it belongs to."""

    domain: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """A perplexity with its 95 % bootstrap interval."""

    perplexity: float
    low: float
    high: float
    num_tokens: int
    num_windows: int


def read_texts(files: Sequence[str | Path]) -> Iterator[tuple[str, str]]:
    """Yields (domain, text) of the lines of JSON Lines files.

    The domain is the line's field "domain", or else the name of the file.

    Raises:
      FileNotFoundError: if a file does not exist.
      ValueError: if a line is not JSON or has no field "text".
    """
    for file in files:
        path = Path(file)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; give a JSON Lines file")
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                record = json.loads(line)
                yield str(record.get("domain", path.stem)), record["text"]
            except (json.JSONDecodeError, KeyError, AttributeError, TypeError):
                raise ValueError(
                    f"{path}:{number} is not a JSON object with a field 'text'"
                ) from None


def cut_windows(
    texts: Iterable[tuple[str, str]], llm: LLM, window_tokens: int
) -> list[Window]:
    """Tokenizes documents and cuts them; a rest of one token is left out.

    Raises:
      ValueError: if the window is longer than a sequence may be, or nothing is left.
    """
    limit = llm.config.max_model_len - 1
    if not 2 <= window_tokens <= limit:
        raise ValueError(
            f"window_tokens={window_tokens} must be between 2 and {limit}, one less"
            " than max_model_len"
        )
    if llm.tokenizer is None:
        raise ValueError(f"{llm.config.model} has no tokenizer.json; add it")
    windows = []
    for domain, text in texts:
        ids = llm.tokenizer.encode(text).ids
        for start in range(0, len(ids), window_tokens):
            part = tuple(ids[start : start + window_tokens])
            if len(part) > 1:
                windows.append(Window(domain=domain, token_ids=part))
    if not windows:
        raise ValueError("the data holds no text of at least two tokens")
    return windows


def negative_log_likelihood(output: RequestOutput) -> float:
    """Returns the sum over all prompt tokens but the first, in nats.

    Raises:
      ValueError: if the model computed no number.
    """
    total = 0.0
    positions = output.prompt_logprobs or []
    for token, position in zip(output.prompt_token_ids, positions, strict=True):
        if position is not None:
            total -= position[token].logprob
    if not math.isfinite(total):
        raise ValueError("the model computed log probabilities that are not numbers")
    return total


def score(llm: LLM, windows: Sequence[Window]) -> Float64[np.ndarray, "windows"]:
    """Returns the summed negative log likelihood of every window."""
    params = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False
    )
    sums = []
    for start in range(0, len(windows), _BATCH_WINDOWS):
        prompts: list[str | TokensPrompt] = [
            {"prompt_token_ids": list(w.token_ids)}
            for w in windows[start : start + _BATCH_WINDOWS]
        ]
        outputs = llm.generate(prompts, params)
        sums += [negative_log_likelihood(output) for output in outputs]
    return np.array(sums)


def bootstrap(
    sums: Float64[np.ndarray, "windows"],
    counts: Float64[np.ndarray, "windows"],
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Perplexity:
    """Joins windows to a perplexity and its 95 % interval."""
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, len(sums), (resamples, len(sums)))
    means = sums[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.exp(np.quantile(means, [0.025, 0.975]))
    return Perplexity(
        perplexity=float(np.exp(sums.sum() / counts.sum())),
        low=float(low),
        high=float(high),
        num_tokens=int(counts.sum()),
        num_windows=len(sums),
    )


def evaluate(
    llm: LLM, files: Sequence[str | Path], *, window_tokens: int = 1024
) -> dict[str, Any]:
    """Measures the perplexity of each domain and of all.

    Returns:
      A JSON-able result: perplexities with intervals, bytes by kind, bits of the
      pages, and what it was measured with.
    """
    windows = cut_windows(read_texts(files), llm, window_tokens)
    memory = asdict(llm.memory_report())
    sums = score(llm, windows)
    counts = np.array([len(w.token_ids) - 1.0 for w in windows])
    domains = np.array([w.domain for w in windows])
    names = sorted(set(domains.tolist()))
    by_domain = {n: bootstrap(sums[domains == n], counts[domains == n]) for n in names}
    return {
        "perplexity": asdict(bootstrap(sums, counts)),
        "domains": {name: asdict(value) for name, value in by_domain.items()},
        "window_tokens": window_tokens,
        "config": asdict(llm.config) | {"model": Path(llm.config.model).name},
        "memory_bytes": memory,
        "mean_bits": llm.mean_bits,
        "data": [Path(file).name for file in files],
        "measured_with": provenance(),
    }
