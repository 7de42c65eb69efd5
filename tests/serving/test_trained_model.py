"""A trained model against Hugging Face, token for token."""

import pytest
import tiny

from pagedweight_jax.engine.request import SamplingParams
from pagedweight_jax.serving.llm import serve

MODEL = tiny.FIXTURES.parents[2] / "shared" / "models" / "qwen2_moe-35m"


@pytest.mark.skipif(
    not MODEL.is_dir(),
    reason="the trained model shared/models/qwen2_moe-35m is not beside this clone",
)
def test_greedy_continuations_equal_hugging_face():
    """Six prompts at once, 64 tokens each, in float32; see fixtures/make_greedy.py."""
    cases = tiny.greedy_cases()
    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with serve(MODEL, policy="bf16", dtype="float32", max_model_len=128) as llm:
        outputs = llm.generate([case["prompt"] for case in cases], greedy)
    for case, output in zip(cases, outputs, strict=True):
        assert output.prompt_token_ids == case["prompt_token_ids"], case["prompt"]
        assert output.outputs[0].token_ids == case["token_ids"], case["prompt"]
