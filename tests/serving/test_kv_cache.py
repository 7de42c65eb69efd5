"""The type of stored keys and values: its size, and what it does to results."""

import numpy as np
import pytest
import scipy.special
import tiny

from pagedweight_jax import SamplingParams
from pagedweight_jax.serving.sizing import kv_layout

ROUNDING = {"bfloat16": 0.01, "fp8_e4m3": 0.05}  # of log probabilities, on average


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "itemsize"),
    [
        ("float32", "auto", 4),
        ("auto", "auto", 2),
        ("float32", "bfloat16", 2),
        ("bfloat16", "fp8_e4m3", 1),
    ],
)
def test_a_stored_value_takes_its_bytes(dtype, kv_cache_dtype, itemsize):
    config = tiny.paged_model().config
    kv = kv_layout(config, dtype, 16, kv_cache_dtype)
    values = 2 * config.num_kv_heads * config.head_dim
    assert kv.row_words * 4 == values * itemsize


@pytest.mark.parametrize("kv_cache_dtype", ["bfloat16", "fp8_e4m3"])
def test_log_probabilities_move_by_the_rounding_only(kv_cache_dtype):
    prompt = tiny.prompts(4, [50])[0]
    exact = scipy.special.log_softmax(tiny.Oracle(6).logits(prompt), axis=-1)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    chosen = tiny.options(kv_cache_dtype=kv_cache_dtype, max_num_batched_tokens=16)
    with tiny.llm(tiny.paged_model(), chosen) as llm:
        (output,) = llm.generate({"prompt_token_ids": list(map(int, prompt))}, params)
    got = [
        position[token].logprob
        for position, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    error = np.abs(np.array(got) - exact[np.arange(49), prompt[1:]])
    assert 0 < error.mean() < ROUNDING[kv_cache_dtype], error
