"""The data of a run: text from the Hub, files or the standard library, split by document and packed."""

from __future__ import annotations

import glob
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Features, IterableDataset, List, Value, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from .recipe import DataSection, TokenizerSection

Documents = Dataset | IterableDataset
"""A dataset with the one column "text", a document per row."""

# Folders of the standard library that hold test fixtures, tables and vendored wheels rather than readable source.
_NOT_SOURCE = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "encodings", "__pycache__"}
_READERS = {"jsonl": "json", "json": "json", "parquet": "parquet"}
_COMPRESSED = {"gz", "xz", "bz2", "zst"}
_DOCUMENTS_PER_BATCH = 64
_ROW = Features({"input_ids": List(Value("int32"))})


def load_documents(section: DataSection) -> tuple[Documents, Documents]:
    """Returns disjoint training and held-out documents.

    Raises:
        FileNotFoundError: a path or glob that matches no file.
        ValueError: files of more than one kind, or a text column that is not there.
    """
    fraction = section.validation_fraction
    if section.source == "python-stdlib":
        train, held_out = _standard_library(), None
    elif section.source == "files":
        held_out_files = _matching(section.validation_files)
        train = _read_files([f for f in _matching(section.files) if f not in held_out_files], section)
        held_out = _read_files(held_out_files, section) if held_out_files else None
    else:
        load = partial(load_dataset, section.dataset, section.dataset_config, streaming=section.streaming)
        train = load(split=section.split)
        held_out = load(split=section.validation_split) if section.validation_split else None
    train = _one_column(train, section)
    if fraction is None:
        return train, _one_column(held_out, section)
    held_out = train.filter(partial(_is_held_out, fraction=fraction), input_columns="text")
    return train.filter(partial(_is_kept, fraction=fraction), input_columns="text"), held_out


def train_tokenizer(texts: Iterable[str], section: TokenizerSection) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE with `section.vocab_size` tokens; the same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=section.vocab_size,
        special_tokens=[section.eos_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(islice(texts, section.train_documents), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=section.eos_token)


def load_tokenizer(section: TokenizerSection, model_name: str | None, train: Documents) -> PreTrainedTokenizerBase:
    """Returns the given tokenizer, a newly trained one, or (by default) the model's own.

    Raises:
        ValueError: there is no such tokenizer, it has no end-of-document token, or one is to be trained on chats.
    """
    if section.vocab_size is not None:
        _check_text(train)
        return train_tokenizer((row["text"] for row in train), section)
    name = section.name_or_path or model_name
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        missing = "" if Path(str(name)).is_dir() else " is not a folder here, and"
        raise ValueError(f"{name!r}{missing} has no tokenizer that loads: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"The tokenizer {name!r} has no eos_token, which ends every document. Choose another tokenizer."
        )
    return tokenizer


def packed_sequences(
    documents: Iterable[dict[str, str]], tokenizer: PreTrainedTokenizerBase, sequence_length: int
) -> Iterator[dict[str, list[int]]]:
    """Yields the documents' tokens, each document ended by eos, cut into rows of `sequence_length`.

    Every token is in exactly one row, in order; only an incomplete last row is dropped. A row may hold several
    documents, and attention crosses their borders.
    """
    rest: list[int] = []
    rows = iter(documents)
    while batch := [row["text"] for row in islice(rows, _DOCUMENTS_PER_BATCH)]:
        for ids in tokenizer(batch, add_special_tokens=False, verbose=False)["input_ids"]:
            rest += [*ids, tokenizer.eos_token_id]
        full = len(rest) - len(rest) % sequence_length
        for start in range(0, full, sequence_length):
            yield {"input_ids": rest[start : start + sequence_length]}
        rest = rest[full:]


def pack(
    train: Documents, held_out: Documents, tokenizer: PreTrainedTokenizerBase, section: DataSection
) -> tuple[Documents, Dataset]:
    """Returns training and validation data with the one column "input_ids", rows of `section.sequence_length` tokens.

    Training data is a stream if the documents are one; otherwise it is prepared in the cache of `datasets`.

    Raises:
        ValueError: the documents are chats, or the text is shorter than one sequence.
    """
    _check_text(train)
    arguments = {"tokenizer": tokenizer, "sequence_length": section.sequence_length}
    for name, documents in (("training", train), ("held-out", held_out)):
        if next(packed_sequences(documents, **arguments), None) is None:
            raise ValueError(
                f"The {name} text is shorter than one sequence of {section.sequence_length} tokens. "
                "Give more text, hold out another share of it, cut files into documents (data.document_separator), or "
                "lower data.sequence_length."
            )
    validation = Dataset.from_list(
        list(islice(packed_sequences(held_out, **arguments), section.validation_sequences)), _ROW
    )
    kind = IterableDataset if isinstance(train, IterableDataset) else Dataset
    return kind.from_generator(packed_sequences, _ROW, gen_kwargs={"documents": train, **arguments}), validation


def _check_text(documents: Documents) -> None:
    if not isinstance(next(iter(documents), {"text": ""})["text"], str):
        raise ValueError(
            "data.text_column names chats, and recipes train on text. Use TRL's SFTTrainer (docs/trl.md), or compare "
            "settings on chats with eval/compare.py and the tokenizer of a checkpoint."
        )


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Returns "input_ids" and "labels", both (B, T); the model shifts the labels. No token is masked."""
    input_ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": input_ids, "labels": input_ids.clone()}


def _standard_library() -> Dataset:
    """Returns the running Python's source and documentation, one document per file, ordered by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    rows = []
    for path in sorted(p for suffix in ("py", "rst", "txt") for p in root.rglob(f"*.{suffix}")):
        if _NOT_SOURCE.isdisjoint(path.relative_to(root).parts):
            try:
                rows.append({"text": path.read_bytes().decode("utf-8")})
            except UnicodeDecodeError:  # A few files of the library are in other encodings on purpose.
                continue
    return Dataset.from_list([row for row in rows if row["text"]])


def _matching(patterns: Iterable[str]) -> list[str]:
    """Returns the files that match the paths and globs, sorted and unique."""
    found: set[str] = set()
    for pattern in patterns:
        files = [str(Path(f).resolve()) for f in glob.glob(pattern, recursive=True) if Path(f).is_file()]
        if not files:
            raise FileNotFoundError(f"data: {pattern!r} matches no file (looked from {Path.cwd()}).")
        found.update(files)
    return sorted(found)


def _read_files(files: list[str], section: DataSection) -> Documents:
    if not files:
        raise FileNotFoundError("data.files: every file is also in data.validation_files; none is left to train on.")
    readers = {_READERS.get(_suffix(f), "text") for f in files}
    if len(readers) > 1:
        raise ValueError(f"data: files of several kinds ({', '.join(sorted(readers))}); give files of one kind.")
    reader = readers.pop()
    options = {"sample_by": section.sample_by} if reader == "text" else {}
    # Globs are resolved above; a `[` in a path would be one for `datasets`.
    files = [glob.escape(f) for f in files]
    return load_dataset(reader, data_files={"train": files}, split="train", streaming=section.streaming, **options)


def _suffix(file: str) -> str:
    suffixes = [s.lstrip(".") for s in Path(file).suffixes if s.lstrip(".") not in _COMPRESSED]
    return suffixes[-1] if suffixes else ""


def _one_column(rows: Documents, section: DataSection) -> Documents:
    """Returns non-empty documents in the only column "text", cut at the separator if there is one."""
    names = rows.column_names or list(next(iter(rows)))
    if section.text_column not in names:
        raise ValueError(
            f"data.text_column={section.text_column!r} is not in the data; its columns are {', '.join(names)}."
        )
    cut = partial(_cut, column=section.text_column, separator=section.document_separator)
    return rows.map(cut, batched=True, batch_size=_DOCUMENTS_PER_BATCH, remove_columns=names)


def _cut(batch: dict[str, list[Any]], column: str, separator: str | None) -> dict[str, list[str]]:
    """Cuts each text at lines that consist of the separator."""
    texts = [text for text in batch[column] if text]
    if separator is not None:
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(
                f"data.document_separator={separator!r} cuts text, but data.text_column={column!r} has chats, each a "
                "document of its own. Set it to null."
            )
        line = re.compile(rf"^{re.escape(separator)}$", re.MULTILINE)
        texts = [part.strip("\n") for text in texts for part in line.split(text)]
    return {"text": [text for text in texts if text]}


def _is_held_out(text: str | list[Any], fraction: float) -> bool:
    """Decides by a hash of the text, or of a chat's JSON."""
    text = text if isinstance(text, str) else json.dumps(text, sort_keys=True)
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _is_kept(text: str | list[Any], fraction: float) -> bool:
    return not _is_held_out(text, fraction)
