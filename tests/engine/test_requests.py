"""Sampling parameters: what is refused, and how."""

import dataclasses

import pytest

from pagedweight_jax.engine.request import SamplingParams


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1, 1, 0)
    assert params.max_tokens == 16 and params.seed is None and not params.ignore_eos


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("n", 0, "at least 1"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", float("nan"), "at least 0"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("top_p", 1.01, r"in \(0, 1\]"),
        ("top_p", float("nan"), r"in \(0, 1\]"),
        ("top_k", -2, "at least 1, or 0"),
        ("max_tokens", 0, "at least 1"),
        ("logprobs", -1, r"0\.\.20"),
        ("logprobs", 21, r"0\.\.20"),
        ("prompt_logprobs", 21, r"0\.\.20"),
    ],
)
def test_a_value_out_of_range_is_named(name, value, wanted):
    with pytest.raises(ValueError, match=rf"{name}=.* must be .*{wanted}"):
        SamplingParams(**{name: value})


def test_a_stop_text_that_cannot_work_is_refused():
    with pytest.raises(ValueError, match="no effect with detokenize=False"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(ValueError, match="empty text"):
        SamplingParams(stop=["x", ""])


@pytest.mark.parametrize(
    ("given", "texts"), [(None, ()), ("x", ("x",)), (["x", "y"], ("x", "y"))]
)
def test_stop_is_one_text_or_several(given, texts):
    assert SamplingParams(stop=given).stop_texts == texts


def test_unknown_options_are_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"\['best_of', 'min_p'\].*temperature"):
        SamplingParams.of(temperature=0.0, min_p=0.1, best_of=2)
    known = {f.name: f.default for f in dataclasses.fields(SamplingParams)}
    assert SamplingParams.of(**known) == SamplingParams()
