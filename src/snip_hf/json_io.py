"""How JSON files are written in one stroke and read strictly.

A plan or a state may come from the Hub, or from a disk that filled up: what is read is bounded, complete
and unambiguous. A process may be killed, or the power fail, at any instant: what was written before is still there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

# A plan of a 405B model (882 linears) makes about 300 kB; one of 45,032 linears (DeepSeek-V3) about 14 MB.
MAX_JSON_BYTES = 64 * 2**20
# The deepest file of ours, a state with a configuration inside its plan, has 7 levels. Bounded, because code that
# compares or prints a document recurses.
MAX_DEPTH = 32
# Reading an integer takes time with the square of its length, and 10**309 is no float any more.
MAX_DIGITS = 40


def write_json_atomic(path: str | os.PathLike[str], document: Any) -> None:
    """Writes `document` as JSON in one stroke, see `write_atomic`.

    Raises:
        OSError: it cannot be written; what was at `path` is still there.
        ValueError, TypeError: `document` is not JSON data (NaN and infinity are not); nothing is written.
    """
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    write_atomic(path, text.encode())


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file in one stroke: temporary file beside `path`, fsync, rename, fsync of the folder.

    A process killed in between leaves the old file, and perhaps the temporary one (`remove_temporaries`).

    Raises:
        OSError: it cannot be written; what was at `path` is still there.
    """
    path = Path(path)
    # Random: containers that share a folder may have the same process ids.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    # Without it a rename may be lost with the power. Not every file system can; the new file is in place by now.
    with contextlib.suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_temporaries(folder: Path, name: str = "*") -> None:
    """Removes what killed processes left of `write_atomic`, of the files of this name, which only this one writes."""
    for path in folder.glob(f".{name}.*.tmp"):
        path.unlink(missing_ok=True)


def append_json_line(path: str | os.PathLike[str], document: Any) -> None:
    """Adds one line of JSON to a file; all of it or, on an error, nothing.

    A process killed in between leaves a last line without its end.

    Raises:
        OSError: it cannot be written, or `path` is not a regular file.
        ValueError, TypeError: `document` is not JSON data; nothing is written.
    """
    left = memoryview(json.dumps(document, allow_nan=False).encode() + b"\n")
    file = _open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(file).st_size
        try:
            while left:
                left = left[os.write(file, left) :]
            os.fsync(file)
        except BaseException:
            # Half a line would spoil the next one too.
            os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Reads one JSON document strictly: UTF-8, no duplicate keys, finite numbers, bounded size, depth and integers.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
        ValueError: anything else; the message says what is wrong, not which file it is.
    """
    with open_regular(path) as file:
        # Twice: a file that is too large is not read at all, and one that grows is read no further.
        too_large = os.fstat(file.fileno()).st_size > max_bytes
        data = b"" if too_large else file.read(max_bytes + 1)
    if too_large or len(data) > max_bytes:
        raise ValueError(f"the file is larger than {max_bytes} bytes.")
    return parse_json(data)


def parse_json(data: bytes) -> Any:
    """`read_json` for bytes already in memory, such as one line of a history file."""
    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON, perhaps truncated (line {error.lineno}: {error.msg}).") from error
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply.") from error
    _check_depth(document)
    return document


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading; raises OSError for anything else, where reading might never end."""
    return open(_open_regular(path, os.O_RDONLY), "rb")


def _open_regular(path: str | os.PathLike[str], flags: int) -> int:
    # Opening a pipe would wait for whoever is at its other end.
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), 0o666)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, "It is not a regular file", os.fspath(path))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        key, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key[:60]!r} occurs {count} times in one object.")
    return mapping


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is not a JSON number.")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"it holds {text[:60]}, which is too large for a number.")
    return value


def _bounded(text: str) -> int:
    digits = len(text.lstrip("-"))
    if digits > MAX_DIGITS:
        raise ValueError(f"it holds an integer of {digits} digits, which is too large for a number.")
    return int(text)


def _check_depth(document: Any) -> None:
    level: list[Any] = [[document]]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise ValueError("its JSON is nested too deeply.")
