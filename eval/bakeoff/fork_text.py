"""The text that bases and forks see: one file of tokens, made once, that can be copied to another machine.

Legend: N sequences of L tokens.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from .fork_recipe import ForkRecipe
from .paths import expanded

_LARGEST_VOCABULARY = 2**16


@dataclass(frozen=True)
class ForkText:
    """Sequences of tokens and the size of their vocabulary."""

    train: np.ndarray[Any, Any]
    """(N, L), uint16."""
    held_out: np.ndarray[Any, Any]
    """(N, L), uint16."""
    vocab_size: int
    eos_token_id: int
    other: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros((0, 1), np.uint16))
    """(N, L), uint16: text of another kind, for shifts to it; none: (0, 1)."""
    other_held_out: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros((0, 1), np.uint16))
    """(N, L), uint16."""

    @cached_property
    def digest(self) -> str:
        """What tells this text from others."""
        hashed = hashlib.sha256(np.ascontiguousarray(self.train).tobytes())
        for part in (self.held_out, self.other, self.other_held_out):
            hashed.update(np.ascontiguousarray(part).tobytes())
        return hashed.hexdigest()[:12]


def write_text(recipe: ForkRecipe, path: Path) -> ForkText:
    """Trains the tokenizer, packs the text, writes both, the text to `path`, and returns the text.

    Raises:
        ValueError: the text has fewer sequences than the recipe wants, the vocabulary does not fit into 16 bits, or a
            path has a variable that is not set.
    """
    # `datasets` is needed here alone, and not there on every machine that runs forks.
    from recipes.parts.data import load_documents, load_tokenizer, packed_sequences

    section, wanted = recipe.data, recipe.train_sequences
    paths = {name: expanded(getattr(section, name)) for name in ("files", "validation_files")}
    train, held_out = load_documents(replace(section, **paths))
    tokenizer = load_tokenizer(recipe.tokenizer, None, train)
    if len(tokenizer) > _LARGEST_VOCABULARY:
        raise ValueError(f"tokenizer: got {len(tokenizer)} tokens; expected at most {_LARGEST_VOCABULARY}.")
    counts = (wanted, section.validation_sequences)
    rows = [
        [row["input_ids"] for row in islice(packed_sequences(documents, tokenizer, section.sequence_length), count)]
        for documents, count in zip((train, held_out), counts, strict=True)
    ]
    for name, found, count in zip(("train_sequences", "data.validation_sequences"), rows, counts, strict=True):
        if len(found) < count:
            raise ValueError(f"{name}={count}, but the text has {len(found)}. Give more text or ask for fewer.")
    others = _other(recipe, tokenizer)
    text = ForkText(*(np.array(part, np.uint16) for part in rows), len(tokenizer), tokenizer.eos_token_id, *others)
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = np.array([text.vocab_size, text.eos_token_id])
    others = {"other": text.other, "other_held_out": text.other_held_out} if len(text.other) else {}
    np.savez(path, train=text.train, held_out=text.held_out, vocabulary=numbers, **others)
    tokenizer.save_pretrained(tokenizer_folder(path))
    return text


def _other(recipe: ForkRecipe, tokenizer: Any) -> list[np.ndarray[Any, Any]]:
    """Returns the training and the held-out sequences of the other text; nothing if the recipe has none."""
    from recipes.parts.data import load_documents, packed_sequences

    section, count = recipe.other, recipe.other_sequences
    if section is None:
        return []
    train, _ = load_documents(section)
    found = [row["input_ids"] for row in islice(packed_sequences(train, tokenizer, section.sequence_length), count)]
    if len(found) < count:
        raise ValueError(f"other_sequences={count}, but the text has {len(found)}. Give more text or ask for fewer.")
    held_out = recipe.data.validation_sequences
    rows = np.array(found, np.uint16)
    return [rows[:-held_out], rows[-held_out:]]


def tokenizer_folder(path: Path) -> Path:
    """Returns the folder of the tokenizer that made the tokens in a file; benchmarks alone need it."""
    return path.with_suffix(".tokenizer")


def read_text(path: Path) -> ForkText:
    """Returns what `write_text` wrote.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `python -m eval.bakeoff.forks text` writes it.")
    with np.load(path) as parts:
        vocab_size, eos_token_id = parts["vocabulary"].tolist()
        others = [parts[name] for name in ("other", "other_held_out") if name in parts]
        return ForkText(parts["train"], parts["held_out"], vocab_size, eos_token_id, *others)
