"""A text as shuffled sequences of token ids, cut into training and held-out parts.

Legend: B sequences, L = LENGTH tokens each.
"""

from __future__ import annotations

import argparse
import lzma
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor

VOCABULARY = 2048
LENGTH = 256


@dataclass(frozen=True)
class Text:
    """Sequences of token ids, (count, LENGTH) int64, shuffled, on the device of the run."""

    train: Tensor
    held_out: Tensor

    def batch(self, index: int, rows: int, held_out: bool = False) -> dict[str, Tensor]:
        """Returns micro-batch `index` of B = rows sequences; starts again after the last sequence."""
        part = self.held_out if held_out else self.train
        taken = part[(torch.arange(rows, device=part.device) + index * rows) % len(part)]
        return {"input_ids": taken, "labels": taken}


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --text and --device."""
    parser.add_argument("--text", type=Path, help="text (.txt, .xz) or token ids (.npy); default: Python's own source")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def load_text(path: Path | None, device: str, held_out: float = 0.1, tokenizer: Tokenizer | None = None) -> Text:
    """Returns the text of a file, cut into sequences and shuffled."""
    ids = torch.from_numpy(token_ids(path, tokenizer).astype(np.int64))
    sequences = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    sequences = sequences[torch.randperm(len(sequences), generator=torch.Generator().manual_seed(0))].to(device)
    border = int(len(sequences) * (1 - held_out))
    return Text(sequences[:border], sequences[border:])


def token_ids(path: Path | None, tokenizer: Tokenizer | None = None) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Returns the ids of a text. Without a tokenizer a byte-level BPE is trained on its beginning."""
    if path is not None and path.suffix == ".npy":
        return np.load(path)
    pieces = _pieces(path)
    encodings = (tokenizer or train_tokenizer(path)).encode_batch(pieces)
    return np.concatenate([np.array(encoding.ids, np.uint32) for encoding in encodings])


def train_tokenizer(path: Path | None) -> Tokenizer:
    """Returns a byte-level BPE of `VOCABULARY` tokens, trained on the beginning of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_pieces(path)[:500], trainer)
    return tokenizer


def _pieces(path: Path | None) -> list[str]:
    """Returns a text in pieces of 10,000 characters."""
    if path is None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = "".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    elif path.suffix == ".xz":
        with lzma.open(path, "rt", encoding="utf-8") as stream:
            text = stream.read()
    else:
        text = path.read_text(encoding="utf-8")
    return [text[start : start + 10_000] for start in range(0, len(text), 10_000)]
