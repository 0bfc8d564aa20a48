"""The text of a model card: a section of ours in it, and its metadata."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import ModelCard
from torch import nn

from ..json_io import open_regular
from .model_card import as_text

# Bytes of a model card.
_MOST_BYTES = 2**24
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")


def read_card(path: Path) -> str:
    """Returns the text of a card; raises OSError for what is no file, and ValueError for what is larger than any."""
    with open_regular(path) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"{path} is larger than {_MOST_BYTES} bytes, which no model card is.")
    return data.decode("utf-8-sig").replace("\r\n", "\n")


def new_card(title: str, library: str) -> str:
    """Returns a card without any text."""
    return f"---\nlibrary_name: {library}\n---\n\n# {as_text(title)}\n"


def with_section(card: str, section: str, marks: tuple[str, str]) -> str:
    """Returns a card with a section in place of its earlier version, else at the end.

    Args:
        card: all else stays.
        section: begins and ends with the marks.
        marks: by which an earlier version is found.
    """
    section = section.strip()
    earlier = re.compile(re.escape(marks[0]) + r".*?" + re.escape(marks[1]), re.DOTALL)
    # A function, so that a backslash in the section stays one.
    card, replaced = earlier.subn(lambda _: section, card, count=1)
    return card if replaced else f"{card.rstrip()}\n\n{section}\n"


def with_metadata(card: str, tags: Iterable[str], base_model: str | None) -> str:
    """Returns a card with further tags and, unless it names one already, the base model.

    Raises:
        ValueError: the metadata are none.
    """
    try:
        parsed = ModelCard(card)
    except TypeError as error:  # of metadata of another type than it expects, such as `tags: 7`
        raise ValueError(f"the metadata of README.md cannot be read: {error}.") from error
    present = parsed.data.get("tags") or []
    missing = [tag for tag in tags if tag not in present]
    is_new_base = base_model is not None and not parsed.data.get("base_model")
    if not missing and not is_new_base:
        return card
    if missing:
        parsed.data["tags"] = [*present, *missing]
    if is_new_base:
        parsed.data["base_model"] = base_model
    return str(parsed.content)


def base_model_of(model: nn.Module) -> str | None:
    """Returns the name on the Hub of what a model was made from; None: it is new, or comes from a folder."""
    return repository_name(getattr(getattr(model, "config", None), "_name_or_path", None))


def repository_name(name: object) -> str | None:
    """Returns a name that may be one of the Hub's; None for others, and for folders that are here."""
    is_one = isinstance(name, str) and _REPOSITORY.fullmatch(name) and not os.path.isdir(name)
    return str(name) if is_one else None
