"""Sequences are cut from all files, and bad text is named by file and line."""

import json
from pathlib import Path

import numpy as np
import pytest
from hf_folders import save_tokenizer
from tokenizers import Tokenizer

from checkpoints_tools import texts


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    save_tokenizer(tmp_path / "tokenizer.json")
    return Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


def save_texts(path: Path, *lines: str) -> Path:
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def cut(files: list[Path], tokenizer: Tokenizer, count: int, length: int) -> list[str]:
    sequences = texts.cut_sequences(
        files, tokenizer, vocab_size=300, num_sequences=count, sequence_tokens=length
    )
    assert sequences.shape == (count, length)
    assert sequences.dtype == np.int32
    return [tokenizer.decode(s.tolist()) for s in sequences]


def test_files_take_turns(tmp_path, tokenizer):
    one = save_texts(tmp_path / "1.jsonl", "aaaabbbbcccc", "dddd")
    two = save_texts(tmp_path / "2.jsonl", "wwww", "xxxxyyyyzz")
    came = cut([one, two], tokenizer, 5, 4)
    assert came == ["aaaa", "wwww", "bbbb", "xxxx", "cccc"]


def test_sequences_are_spread_over_a_file(tmp_path, tokenizer):
    file = save_texts(tmp_path / "1.jsonl", "aaaabbbb", "ccccddddeeee")
    assert cut([file], tokenizer, 2, 4) == ["aaaa", "cccc"]


def test_a_folder_stands_for_its_files(tmp_path):
    one, two = save_texts(tmp_path / "1.jsonl"), save_texts(tmp_path / "2.jsonl")
    assert texts.find_files(str(tmp_path)) == [one, two]
    assert texts.find_files(f"{two}, {one}") == [two, one]
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl does not exist"):
        texts.find_files(f"{one},{tmp_path / 'none.jsonl'}")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="empty does not exist or has no"):
        texts.find_files(str(tmp_path / "empty"))


def test_too_little_text_says_how_much_is_wanted(tmp_path, tokenizer):
    file = save_texts(tmp_path / "1.jsonl", "aaaabbbb")
    with pytest.raises(ValueError, match=r"has 8 tokens but 3 sequences of 4 need 12"):
        cut([file], tokenizer, 3, 4)


@pytest.mark.parametrize("line", ['{"txt": "a"}', "not json", '{"text": 5}', '["a"]'])
def test_a_line_without_text_is_named(tmp_path, tokenizer, line):
    file = save_texts(tmp_path / "1.jsonl", "aaaa")
    file.write_text(file.read_text() + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"1\.jsonl:3 is not a line"):
        cut([file], tokenizer, 2, 4)


def test_tokens_of_another_model_are_refused(tmp_path, tokenizer):
    file = save_texts(tmp_path / "1.jsonl", "zzzz")
    with pytest.raises(ValueError, match="vocab_size=50; use the tokenizer of this"):
        texts.cut_sequences(
            [file], tokenizer, vocab_size=50, num_sequences=1, sequence_tokens=4
        )


@pytest.mark.parametrize(("count", "length"), [(0, 8), (1, 1)])
def test_no_sequences_are_refused(tmp_path, tokenizer, count, length):
    file = save_texts(tmp_path / "1.jsonl", "zzzz")
    with pytest.raises(ValueError, match=f"num_sequences={count} and sequence_tokens"):
        cut([file], tokenizer, count, length)
