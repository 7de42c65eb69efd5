"""When a continuation ends, and the text that is left of it."""

import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedweight_jax.engine.outputs import (
    find_stop,
    hits_stop_text,
    output_text,
    request_output,
)
from pagedweight_jax.engine.request import Request, SamplingParams

TOKENIZER = tiny.tokenizer()
PROMPT = tiny.prompts(1, [14])[0]
NUM_TOKENS = 24

# Pieces of two letters, one letter, both bytes of "é" and a special token.
PIECES = [TOKENIZER.token_to_id(t) for t in ("ab", "ba", "aa", "a", "b")]
E_ACUTE = TOKENIZER.encode("é").ids
STOPS = st.sampled_from(["a", "ab", "bb", "aba", "baab", "é", "éa", "aéb", "bbbbb"])
TOKENS = st.lists(
    st.sampled_from([*([p] for p in PIECES), E_ACUTE, [tiny.EOS]]), max_size=25
).map(lambda parts: [t for part in parts for t in part])


def text_of(token_ids: list[int]) -> str:
    return TOKENIZER.decode(token_ids, skip_special_tokens=True)


def answer(**options) -> Request:
    return tiny.request(
        "0", PROMPT, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, **options)
    )


@given(
    tokens=TOKENS, stops=st.lists(STOPS, min_size=1, max_size=3), include=st.booleans()
)
@settings(max_examples=300)
def test_the_first_stop_text_ends_the_text(tokens, stops, include):
    """Token by token, against a search through all of the text at every token."""
    request = answer(stop=stops, include_stop_str_in_output=include)
    for token in tokens:
        request.token_ids.append(token)
        text = text_of(request.output_token_ids)
        places = {s: text.find(s) for s in stops if s in text}
        found = hits_stop_text(request, TOKENIZER)
        assert (found is None) == (not places), f"{text!r}, {stops}"
        if found is not None:
            first = min(places.values())
            assert places[found] == first, f"{text!r}: {found!r} is not the first"
            request.stop_reason = found
            wanted = text[: first + (len(found) if include else 0)]
            assert output_text(request, TOKENIZER) == wanted
            return
    assert output_text(request, TOKENIZER) == text_of(tokens)


def test_find_stop_takes_the_earliest():
    assert find_stop("abcd", ("cd", "b", "x")) == (1, "b")
    assert find_stop("abcd", ("x",)) is None


def test_a_stop_text_across_tokens_is_cut_off(tight):
    plain = answer()
    tiny.run(tight.engine, [plain])
    assert plain.finish_reason == "length" and plain.stop_reason is None
    pieces = [text_of([t]) for t in plain.output_token_ids]
    # The last letter of one token and the first of the next, where both are letters.
    at = next(i for i in range(5, 20) if (pieces[i] + pieces[i + 1]).isalpha())
    stop = pieces[at][-1] + pieces[at + 1][0]
    whole = text_of(plain.output_token_ids)
    start = whole.find(stop)
    for include in (False, True):
        request = answer(stop=stop, include_stop_str_in_output=include)
        tiny.run(tight.engine, [request])
        assert (request.finish_reason, request.stop_reason) == ("stop", stop)
        wanted = whole[: start + (len(stop) if include else 0)]
        assert output_text(request, TOKENIZER) == wanted
        count = len(request.output_token_ids)
        assert request.output_token_ids == plain.output_token_ids[:count]
        assert stop in text_of(request.output_token_ids)
        assert stop not in text_of(request.output_token_ids[:-1])


def test_a_stop_token_ends_with_its_id(tight):
    plain = answer()
    tiny.run(tight.engine, [plain])
    stop = plain.output_token_ids[6]
    request = answer(stop_token_ids=[stop])
    tiny.run(tight.engine, [request])
    first = plain.output_token_ids.index(stop)
    assert request.output_token_ids == plain.output_token_ids[: first + 1]
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)


def test_a_stop_on_the_last_token_counts_as_a_stop(tight):
    plain = answer()
    tiny.run(tight.engine, [plain])
    last = plain.output_token_ids[-1]
    if last in plain.output_token_ids[:-1]:
        raise AssertionError("choose another prompt: the last token is not new")
    request = answer(stop_token_ids=[last])
    tiny.run(tight.engine, [request])
    assert request.finish_reason == "stop"
    assert len(request.output_token_ids) == NUM_TOKENS


def test_special_tokens_are_left_out_unless_asked_for():
    for skip, wanted in ((True, "ab"), (False, "a</s>b")):
        request = answer(skip_special_tokens=skip)
        request.token_ids += [
            TOKENIZER.token_to_id("a"),
            tiny.EOS,
            TOKENIZER.token_to_id("b"),
        ]
        assert output_text(request, TOKENIZER) == wanted


def test_without_detokenizing_there_is_no_text():
    request = answer(detokenize=False)
    request.token_ids += PIECES
    assert output_text(request, TOKENIZER) == ""
    assert output_text(answer(), None) == ""


def test_an_output_holds_only_what_was_asked_for():
    plain = request_output("7", [answer()], TOKENIZER)
    completion = plain.outputs[0]
    assert plain.request_id == "7" and not plain.finished
    assert plain.prompt_token_ids == PROMPT and plain.prompt_logprobs is None
    assert completion.logprobs is None and completion.cumulative_logprob is None
    asked = request_output("7", [answer(logprobs=0, prompt_logprobs=0)], TOKENIZER)
    assert asked.outputs[0].logprobs == [] and asked.prompt_logprobs == [None]
    assert asked.outputs[0].cumulative_logprob == 0
