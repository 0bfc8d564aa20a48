"""How parsers of command lines take a config's fields: as text, with the help that stands under each field.

transformers' `HfArgumentParser` calls the type of a field, as `typing.get_type_hints` tells it, with the text of an
argument, and takes the keywords of `add_argument` from the field's metadata.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

from .field_values import is_none
from .json_io import parse_json

_Config = TypeVar("_Config", bound=type)


@dataclass(frozen=True)
class _Reader:
    """Takes the place of a field's type: returns the value that a text stands for."""

    form: str
    """What is expected, for help and errors."""
    read: Callable[[str], Any]
    takes_none: bool

    def __call__(self, text: str) -> Any:
        text = text.strip()
        if self.takes_none and is_none(text):
            return None
        try:
            return self.read(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} is not understood; expected {self.form}.") from error


def _items(text: str, separator: str = ",") -> list[str]:
    return [item.strip() for item in text.split(separator)] if text else []


def _list_or(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns a function that reads JSON's lists too."""
    return lambda text: parse_json(text.encode()) if text.startswith("[") else read(text)


def _names(text: str) -> list[str]:
    return _items(text)


def _lists(text: str) -> list[list[str]]:
    return [_items(part) for part in _items(text, ";")]


def _shares(text: str) -> float | list[tuple[int, float]]:
    if ":" not in text:
        return float(text)
    pairs = [item.split(":") for item in _items(text)]
    return [(int(step), float(share)) for step, share in pairs]


def _stages(text: str) -> int | list[list[str]]:
    return int(text) if text.lstrip("+-").isdigit() else _lists(text)


def _ties(text: str) -> str | list[list[str]]:
    return _lists(text) if "," in text or not text else text


_JSON = ", or lists in JSON"
# What a field is annotated with -> what its text is, and how it is read. Other types are read by the parser itself.
_FORMS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "float | tuple[Share, ...] | None": (f"0.75, or 1:0.9,800:0.5 as STEP:SHARE{_JSON}", _list_or(_shares)),
    "int | tuple[tuple[str, ...], ...] | None": (f"a number, or a,b;c,d for two lists{_JSON}", _list_or(_stages)),
    "str | tuple[tuple[str, ...], ...]": (f"auto, or a,b;c,d for two lists{_JSON}", _list_or(_ties)),
    "tuple[str, ...]": (f"a,b for two names{_JSON}", _list_or(_names)),
    "int | None": ("an integer", int),
    "float | None": ("a number", float),
}


def takes_arguments(config: _Config) -> _Config:
    """Makes a dataclass with `field_types` one that parsers take; a decorator.

    Type checkers and readers see the annotations of the source; at run time some of them are `_Reader`s.
    """
    own = inspect.get_annotations(config)
    for field in dataclasses.fields(config):
        if field.name not in own:
            continue
        annotation = config.field_types[field.name]  # type: ignore[attr-defined]
        reader = None
        if annotation in _FORMS:
            form, read = _FORMS[annotation]
            takes_none = "None" in annotation
            reader = config.__annotations__[field.name] = _Reader(
                f"{form}, or none" if takes_none else form, read, takes_none
            )
        field.metadata = MappingProxyType(_Metadata(config, field.name, reader))
    return config


@dataclass(frozen=True, eq=False)
class _Metadata(Mapping[str, Any]):
    """The metadata of a field: its help, looked up when a parser asks for it."""

    config: type
    name: str
    reader: _Reader | None

    def _values(self) -> dict[str, str]:
        text = field_help(self.config).get(self.name)
        if text is None:
            return {}
        form = "" if self.reader is None else f" Given as {self.reader.form}."
        return {"help": f"{text}{form}".replace("%", "%%")}

    def __getitem__(self, key: str) -> Any:
        return self._values()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def copy(self) -> dict[str, str]:
        """As that of a mapping proxy, which the parser of TRL calls."""
        return self._values()


@cache
def field_help(config: type) -> dict[str, str]:
    """Returns the text that stands under each field in the source of a class; nothing where there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(config))
    except (OSError, TypeError):
        return {}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for node, below in zip(definition.body, definition.body[1:], strict=False):
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
            found[node.target.id] = " ".join(str(below.value.value).split())  # type: ignore[attr-defined]
    return found
