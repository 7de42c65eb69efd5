"""What the results of a step mean for a request: tokens, log probabilities, the end."""

import time

from tokenizers import Tokenizer

from pagedweight_jax.engine.outputs import hits_stop_text
from pagedweight_jax.engine.request import (
    FinishReason,
    Logprob,
    PositionLogprobs,
    Request,
)
from pagedweight_jax.engine.sampling import TokenLogprobs
from pagedweight_jax.engine.scheduler import Chunk


def take_token(
    request: Request,
    token: int,
    logprobs: TokenLogprobs | None,
    row: int,
    tokenizer: Tokenizer | None,
) -> FinishReason | None:
    """Appends the token that a step sampled for a request.

    Args:
      request: whose oldest token in flight it is.
      token: the token.
      logprobs: of the step's rows, if any of them wants some.
      row: of the request.
      tokenizer: for stop texts and decoded logprobs.
    Returns:
      Why the request ends with it, if it does.
    """
    request.token_ids.append(token)
    request.num_in_flight -= 1
    if request.first_token_seconds is None:
        request.first_token_seconds = time.monotonic()
    if request.params.logprobs is not None:
        assert logprobs is not None
        request.cumulative_logprob += float(logprobs.logprob[row])
        count = request.params.logprobs
        request.logprobs.append(_position(logprobs, row, token, count, tokenizer))
    return _finish_reason(request, token, tokenizer)


def _finish_reason(
    request: Request, token: int, tokenizer: Tokenizer | None
) -> FinishReason | None:
    if token in request.stop_token_ids:
        given = tuple(request.params.stop_token_ids or ())
        request.stop_reason = token if token in given else None
        return "stop"
    if tokenizer is not None:
        text = hits_stop_text(request, tokenizer)
        if text is not None:
            request.stop_reason = text
            return "stop"
    seen = len(request.token_ids) - request.num_prompt_tokens
    return "length" if seen >= request.max_tokens else None


def lacks_prompt_logprobs(chunk: Chunk) -> bool:
    """Whether a chunk computes prompt log probabilities that its request wants."""
    request = chunk.request
    wanted = request.params.prompt_logprobs is not None
    return wanted and len(request.prompt_logprobs) < request.num_prompt_tokens


def predicted_prompt_tokens(chunk: Chunk) -> list[int]:
    """Returns the prompt tokens that a chunk's positions predict."""
    stop = min(chunk.stop, chunk.request.num_prompt_tokens - 1)
    return chunk.request.prompt_token_ids[chunk.start + 1 : stop + 1]


def take_prompt_logprobs(
    chunk: Chunk, logprobs: TokenLogprobs, first: int, tokenizer: Tokenizer | None
) -> None:
    """Appends the log probabilities of the prompt tokens that a chunk predicts.

    Those that the request has already are skipped: it was preempted after them.

    Args:
      chunk: a prefill row of a request that wants them.
      logprobs: of the step's prefill tokens.
      first: where the row begins among them.
      tokenizer: for decoded logprobs.
    """
    request = chunk.request
    count = request.params.prompt_logprobs
    assert count is not None
    for i, token in enumerate(predicted_prompt_tokens(chunk)):
        if len(request.prompt_logprobs) == chunk.start + i + 1:
            position = _position(logprobs, first + i, token, count, tokenizer)
            request.prompt_logprobs.append(position)


def _position(
    logprobs: TokenLogprobs,
    row: int,
    token: int,
    count: int,
    tokenizer: Tokenizer | None,
) -> PositionLogprobs:
    """Builds the logprobs of one position: the token itself and the best ones."""

    def decoded(token: int) -> str | None:
        if tokenizer is None:
            return None
        return tokenizer.decode([token], skip_special_tokens=False)

    ids = logprobs.top_ids[row, :count].tolist()
    values = logprobs.top_logprobs[row, :count].tolist()
    position = {
        i: Logprob(value, rank + 1, decoded(i))
        for rank, (i, value) in enumerate(zip(ids, values, strict=True))
    }
    own = Logprob(float(logprobs.logprob[row]), int(logprobs.rank[row]), decoded(token))
    return {**position, token: own}
