"""Writes JSON files atomically, and reads them strictly into dataclasses."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .text import printable

SCHEMA_VERSION = 1
"""Version of the layout of all files. Raise it with a change that other versions cannot read."""
# The largest files of a run are tables of divergences: 68 MB by GEMM for the 45,032 linears of DeepSeek-V3.
MAX_JSON_BYTES = 128 * 2**20
# Indentation would double the size of larger documents, and triple the time that training waits for them.
_MAX_INDENTED = 2**16


def write_json_atomic(path: str | os.PathLike[str], document: Any) -> None:
    """Writes `json_bytes`, see `write_atomic`.

    Raises:
        OSError: the file cannot be written; the old file stays.
        ValueError, TypeError: as `json_bytes`.
    """
    write_atomic(path, json_bytes(document))


def json_bytes(document: Any) -> bytes:
    """Returns `document` as JSON, indented unless it is large.

    Raises:
        ValueError, TypeError: it is not JSON data (without NaN and infinity), or is too large to be read back.
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    if len(text) <= _MAX_INDENTED:
        text = json.dumps(document, indent=1, allow_nan=False)
    _check_size(len(text))
    return f"{text}\n".encode()


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a temporary file next to `path`, syncs it and renames it, so that `path` is never a partial file."""
    path = Path(path)
    # A random name, because containers that share a folder may have equal process ids.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # Without this, a power failure may undo the rename. Some file systems cannot sync a folder.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def append_json_line(path: str | os.PathLike[str], document: Any) -> None:
    """Appends one line of JSON to a file, which stays unchanged after an error.

    Raises:
        OSError: the file cannot be written.
        ValueError, TypeError: `document` is not JSON data, or is too large to be read back.
    """
    data = json.dumps(document, allow_nan=False).encode() + b"\n"
    _check_size(len(data))
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(file).st_size
        try:
            while data:
                data = data[os.write(file, data) :]
            os.fsync(file)
        except BaseException:
            os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Reads one JSON document.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large or not JSON; the message does not name the file.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"the file is larger than {MAX_JSON_BYTES} bytes.")
    return parse_json(data)


def parse_json(data: bytes) -> Any:
    """Parses UTF-8 JSON; raises ValueError for anything else, and for NaN and infinity."""
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON, perhaps truncated (line {error.lineno}: {error.msg}).") from error


def from_json(kind: Any, value: Any, where: str = "") -> Any:
    """Converts JSON data to a type, strictly: unknown fields are refused, and so are missing ones without a default.

    Supports dataclasses, str, int, float, bool, None, Any, Literal, unions, sequences (as tuples, unless the type is a
    list) and mappings from names.

    Args:
        kind: the type.
        value: JSON data.
        where: path of the value in its document, for messages.

    Raises:
        ValueError: the data does not have the type; names the field, its value and the expectation.
    """
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    for option in options:
        if _fits(option, value):
            return _converted(option, value, where)
    raise ValueError(f"{where or 'the document'} is {short(value)}, expected {' or '.join(map(_name, options))}.")


def check_schema(version: object) -> None:
    """Raises ValueError for the `schema_version` of another layout."""
    if version != SCHEMA_VERSION:
        raise ValueError(f"schema_version is {short(version)}, expected {SCHEMA_VERSION}.")


def short(value: object) -> str:
    """Returns a short `repr` for messages; of a container, only the size."""
    if isinstance(value, Mapping | list | tuple):
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)}"
    return printable(repr(value), 60)


def _fits(kind: Any, value: Any) -> bool:
    """Returns True if a value has the JSON type of a type, without checking the contents of containers."""
    if kind in (Any, object):
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value < math.inf
    if kind in (int, bool, types.NoneType):
        return type(value) is kind
    if kind is str:
        return isinstance(value, str)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return isinstance(value, list | tuple if _is_sequence(kind) else Mapping)


def _converted(kind: Any, value: Any, where: str) -> Any:
    if kind is float:
        return float(value)
    if not isinstance(value, list | tuple | Mapping) or kind in (Any, object):
        return value
    arguments = get_args(kind)
    if isinstance(value, Mapping):
        if is_dataclass(kind):
            return _record(kind, value, where)
        inside = arguments[1] if arguments else Any
        return {name: from_json(inside, item, f"{where}[{printable(name)!r}]") for name, item in value.items()}
    if len(arguments) == 2 and arguments[1] is not ...:
        if len(value) != 2:
            raise ValueError(f"{where} is {short(value)}, expected two values.")
        return tuple(from_json(inside, item, where) for inside, item in zip(arguments, value, strict=True))
    items = [from_json(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value)]
    return items if get_origin(kind) is list else tuple(items)


def _record(kind: Any, value: Mapping[str, Any], where: str) -> Any:
    hints, inside = _hints(kind), f"{where}." if where else ""
    for name in value:
        if name not in hints:
            raise ValueError(f"{where or 'it'} has an unknown entry {short(name)}; expected {', '.join(hints)}.")
    for field in fields(kind):
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{where or 'it'} has no entry {field.name!r}.")
    return kind(**{name: from_json(hints[name], item, inside + name) for name, item in value.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind) if field.init}


def _is_sequence(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple, Sequence)


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    names = {str: "text", int: "an integer", float: "a finite number", bool: "true or false", types.NoneType: "null"}
    return names.get(kind, "a list" if _is_sequence(kind) else "an object")


def _check_size(size: int) -> None:
    if size > MAX_JSON_BYTES:
        raise ValueError(f"{size} bytes of JSON are not written, because at most {MAX_JSON_BYTES} can be read back.")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is not a JSON number.")
