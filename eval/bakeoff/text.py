"""The text that all runs of a grid are trained and measured on, prepared once and kept as arrays."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from recipes.parts.data import load_documents, load_tokenizer, pack
from recipes.parts.recipe import DataSection

from .grid import Grid
from .paths import expanded


@dataclass(frozen=True)
class Text:
    """Training and validation sequences, (count, L), in any integer type."""

    train: np.ndarray[Any, Any]
    validation: np.ndarray[Any, Any]
    tokenizer: PreTrainedTokenizerBase


def prepare_text(grid: Grid, cache: Path) -> None:
    """Trains the tokenizer and packs the text, unless that was done before."""
    folder, section = _text_folder(grid, cache), _here(grid.data)
    if (folder / "tokenizer").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    documents = load_documents(section)
    tokenizer = load_tokenizer(grid.tokenizer, None, documents[0])
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.int32
    for name, rows in zip(("train", "validation"), pack(*documents, tokenizer, section), strict=True):
        np.save(folder / f"{name}.npy", np.array(rows.with_format("numpy")["input_ids"][:], dtype))
    tokenizer.save_pretrained(folder / "tokenizer")


def load_text(grid: Grid, cache: Path) -> Text:
    """Returns what `prepare_text` left."""
    folder = _text_folder(grid, cache)
    train, validation = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "validation"))
    return Text(train, validation, AutoTokenizer.from_pretrained(folder / "tokenizer"))


def _here(section: DataSection) -> DataSection:
    """Returns where the text lies on this machine: $NAME in a path is the environment's."""
    paths = {name: expanded(getattr(section, name)) for name in ("files", "validation_files")}
    return replace(section, **paths)


def _text_folder(grid: Grid, cache: Path) -> Path:
    text = json.dumps([asdict(_here(grid.data)), asdict(grid.tokenizer)], sort_keys=True)
    return cache / f"text-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
