"""Calibration texts: read, tokenised, and cut into sequences of one length."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

_OVERSAMPLING = 16  # times as many tokens as are needed are read at most


def find_files(calibration: str) -> list[Path]:
    """Returns the files that ``calibration`` names.

    Args:
      calibration: a file, several with commas between, or a folder of .jsonl files.
    Raises:
      FileNotFoundError: if one does not exist, or a folder has none.
    """
    files: list[Path] = []
    for name in calibration.split(","):
        path = Path(name.strip())
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not found or not found[0].is_file():
            raise FileNotFoundError(
                f"calibration text {path} does not exist or has no .jsonl files; give"
                ' files with lines such as {"text": "..."}'
            )
        files += found
    return files


def cut_sequences(
    files: list[Path],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    num_sequences: int,
    sequence_tokens: int,
) -> Int32[np.ndarray, "{num_sequences} {sequence_tokens}"]:
    """Cuts sequences out of the files, taking one from each file in turn.

    The documents of a file follow each other, each as the tokenizer writes it (with
    its beginning-of-text token, if it has one); sequences are spread evenly over the
    first part of this stream.

    Raises:
      ValueError: if there is too little text, a line has no text, or a token is not
        in the model's vocabulary.
    """
    if num_sequences < 1 or sequence_tokens < 2:
        raise ValueError(
            f"num_sequences={num_sequences} and sequence_tokens={sequence_tokens}, but"
            " wanted at least 1 sequence of 2 tokens"
        )
    wanted = [len(range(i, num_sequences, len(files))) for i in range(len(files))]
    cut = [
        _cut_file(file, tokenizer, count, sequence_tokens)
        for file, count in zip(files, wanted, strict=True)
    ]
    order = [cut[i % len(files)][i // len(files)] for i in range(num_sequences)]
    sequences = np.stack(order).astype(np.int32)
    if sequences.max() >= vocab_size:
        raise ValueError(
            f"the tokenizer gives token {sequences.max()} but the model has vocab_size="
            f"{vocab_size}; use the tokenizer of this model"
        )
    return sequences


def _cut_file(
    file: Path, tokenizer: Tokenizer, count: int, length: int
) -> list[np.ndarray]:
    """Cuts ``count`` sequences out of one file, evenly spread."""
    stream: list[int] = []
    for text in _read_texts(file):
        stream += tokenizer.encode(text).ids
        if len(stream) >= _OVERSAMPLING * count * length:
            break
    available = len(stream) // length
    if available < count:
        raise ValueError(
            f"{file} has {len(stream)} tokens but {count} sequences of {length} need"
            f" {count * length}; give more text, or lower num_sequences or"
            " sequence_tokens"
        )
    starts = [i * available // count * length for i in range(count)]
    return [np.array(stream[start : start + length]) for start in starts]


def _read_texts(file: Path) -> Iterator[str]:
    """Yields the "text" fields of a file that are not empty."""
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (json.JSONDecodeError, KeyError, TypeError):
                text = None
            if not isinstance(text, str):
                raise ValueError(
                    f'{file}:{number} is not a line such as {{"text": "..."}}: '
                    f"{line.strip()[:60]!r}"
                )
            if text:
                yield text
