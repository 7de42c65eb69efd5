"""Perplexity: windows, likelihoods and intervals against NumPy and scipy."""

import json

import numpy as np
import pytest
import scipy.special
import tiny

from pagedweight_jax.evaluation import perplexity
from pagedweight_jax.serving.llm import LLM

BITS = 4


@pytest.fixture(scope="module")
def llm() -> LLM:
    with tiny.llm(tiny.paged_model(), tiny.options(pin_bits=BITS)) as llm:
        yield llm


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "letters.jsonl"
    lines = [
        {"domain": "long", "text": "abcdefghij" * 9},
        {"domain": "short", "text": "klmno"},
        {"text": "no domain of its own"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def test_windows_cover_every_document_once_and_do_not_overlap(llm, texts):
    windows = perplexity.cut_windows(perplexity.read_texts([texts]), llm, 40)
    assert [len(w.token_ids) for w in windows] == [40, 40, 10, 5, 20]
    assert [w.domain for w in windows] == ["long"] * 3 + ["short", "letters"]
    ids = llm.tokenizer.encode("abcdefghij" * 9).ids
    assert sum((w.token_ids for w in windows[:3]), ()) == tuple(ids)


def test_scores_equal_those_of_a_full_forward_pass(llm, texts):
    oracle = tiny.Oracle(BITS)
    windows = perplexity.cut_windows(perplexity.read_texts([texts]), llm, 40)
    for window, nll in zip(windows, perplexity.score(llm, windows), strict=True):
        logits = oracle.logits(window.token_ids)[:-1]
        logprobs = scipy.special.log_softmax(logits.astype(np.float64), axis=-1)
        targets = np.array(window.token_ids[1:])
        expected = -logprobs[np.arange(len(targets)), targets].sum()
        assert nll == pytest.approx(expected, abs=1e-3), window


def test_result_is_json_and_joins_domains_by_tokens(llm, texts):
    result = perplexity.evaluate(llm, [texts], window_tokens=40)
    assert json.loads(json.dumps(result)) == result
    parts = result["domains"].values()
    weights = [part["num_tokens"] for part in parts]
    logs = [np.log(part["perplexity"]) for part in parts]
    joined = np.exp(np.average(logs, weights=weights))
    assert result["perplexity"]["perplexity"] == pytest.approx(joined)
    assert result["mean_bits"] == BITS
    memory = dict(result["memory_bytes"])
    assert memory.pop("budget") == sum(memory.values())


def test_interval_has_the_width_of_the_standard_error():
    rng = np.random.default_rng(0)
    counts = np.full(400, 100.0)
    sums = 100 * rng.normal(3.0, 0.4, 400)
    result = perplexity.bootstrap(sums, counts)
    error = 0.4 / np.sqrt(400)
    assert result.perplexity == pytest.approx(np.exp(sums.sum() / counts.sum()))
    width = np.log(result.high / result.low)
    assert width == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert result.low < result.perplexity < result.high


def test_bad_data_is_named(llm, tmp_path, texts):
    with pytest.raises(FileNotFoundError, match=r"missing\.jsonl does not exist"):
        list(perplexity.read_texts([tmp_path / "missing.jsonl"]))
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine"}\n{"txt": 1}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2 is not a JSON object"):
        list(perplexity.read_texts([bad]))
    with pytest.raises(ValueError, match="window_tokens=64 must be between 2 and 63"):
        perplexity.cut_windows(perplexity.read_texts([texts]), llm, 64)
    with pytest.raises(ValueError, match="no text of at least two"):
        perplexity.cut_windows([("d", "a")], llm, 40)
