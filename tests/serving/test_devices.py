"""Pinned float32 serving gives the same tokens on every device."""

import json

import pytest
import tiny

from pagedweight_jax.engine.request import SamplingParams
from pagedweight_jax.serving.llm import serve

EXPECTED = json.loads((tiny.FIXTURES / "demo_tokens.json").read_text())


@pytest.mark.slow
def test_tokens_are_those_that_an_h200_computed():
    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    sampled = SamplingParams(temperature=0.8, max_tokens=64, seed=7)
    options = {"memory_budget": "160MiB", "max_model_len": 256, "pin_bits": 5}
    with serve("demo", dtype="float32", **options) as llm:
        for name, params in (("greedy", greedy), ("sampled", sampled)):
            outputs = llm.generate(EXPECTED["prompts"], params)
            tokens = [output.outputs[0].token_ids for output in outputs]
            assert tokens == EXPECTED[name], name
