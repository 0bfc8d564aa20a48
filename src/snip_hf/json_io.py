"""JSON files, written atomically and parsed strictly.

A plan or a state may come from the Hub, or from a disk that filled up: what is read is bounded, complete
and unambiguous. A process may be killed, or the power fail, at any instant: what was written before is still there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import stat
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

# A plan of a 405B model (882 linears) makes about 300 kB. Of 45,032 linears (DeepSeek-V3) by GEMM, a plan makes 26 MB
# with measured times, a state in the middle of a refresh 67 MB, a table of divergences 68 MB.
MAX_JSON_BYTES = 128 * 2**20
# Each value takes memory, however short it is written; that table has 4 million.
MAX_VALUES = 10**7
# Longer documents are written without indentation, which would double them.
_MAX_INDENTED = 2**20
# The deepest file of ours, a state with a configuration inside its plan, has 7 levels. Bounded, because code that
# compares or prints a document recurses.
MAX_DEPTH = 32
# Reading an integer takes time with the square of its length, and 10**309 is no float any more.
MAX_DIGITS = 40


def write_json_atomic(path: str | os.PathLike[str], document: Any) -> None:
    """Writes `document` as JSON in one stroke, see `write_atomic`.

    Raises:
        OSError: it cannot be written; what was at `path` is still there.
        ValueError, TypeError: `document` is not JSON data (NaN and infinity are not), or larger than what `read_json`
            takes; nothing is written.
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)
    if len(text) <= _MAX_INDENTED:
        text = json.dumps(document, indent=1, allow_nan=False)
    data = f"{text}\n".encode()
    _check_readable(path, data)
    write_atomic(path, data)


def write_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a file in one stroke: temporary file beside `path`, fsync, rename, fsync of the folder.

    A file that is replaced passes its permissions on. A process killed in between leaves the old file, and perhaps the
    temporary one (`remove_temporaries`).

    Raises:
        OSError: it cannot be written, or `path` is a symbolic link; what was at `path` is still there.
    """
    path = Path(path)
    mode = _mode(path)
    # Random: containers that share a folder may have the same process ids.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            if mode not in (None, stat.S_IMODE(os.fstat(file.fileno()).st_mode)):
                os.fchmod(file.fileno(), mode)
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


def _mode(path: Path) -> int | None:
    """Returns the permissions of the file at `path`, None if there is none; raises OSError for a symbolic link."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(mode):
        # Neither written through, to wherever it points, nor replaced: somebody put it there for a reason.
        raise OSError(errno.ELOOP, "It is a symbolic link, which is not written to", os.fspath(path))
    return stat.S_IMODE(mode)


def remove_temporaries(folder: Path, *names: str) -> None:
    """Removes what killed processes left of `write_atomic`, of the files of these names or globs."""
    for path in folder.iterdir():
        found = re.fullmatch(r"\.(.+)\.[0-9a-f]{16}\.tmp", path.name)
        if found and any(fnmatchcase(found[1], name) for name in names):
            path.unlink(missing_ok=True)


def append_json_line(path: str | os.PathLike[str], document: Any, mode: int = 0o666) -> None:
    """Adds one line of JSON to a file; all of it or, on an error, nothing.

    A process killed in between leaves a last line without its end.

    Args:
        path: the file.
        document: JSON data.
        mode: permissions of a file that is not there yet, less those of the umask.

    Raises:
        OSError: it cannot be written, or `path` is not a regular file.
        ValueError, TypeError: `document` is not JSON data, or larger than what a reader takes; nothing is written.
    """
    data = json.dumps(document, allow_nan=False).encode() + b"\n"
    _check_readable(path, data)
    left = memoryview(data)
    file = _open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), mode)
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
    if problem := _too_many(data):
        raise ValueError(f"{problem}, expected at most {MAX_VALUES}.")
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


def _open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    # Opening a pipe would wait for whoever is at its other end.
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0), mode)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return file
    os.close(file)
    code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(code, "It is not a regular file", os.fspath(path))


def _check_readable(path: str | os.PathLike[str], data: bytes) -> None:
    """Raises ValueError for a document that `read_json` would refuse by its size."""
    problem = f"it takes {len(data)} bytes" if len(data) > MAX_JSON_BYTES else _too_many(data)
    if problem:
        name = ascii(os.path.basename(path))
        raise ValueError(
            f"{name} is not written, since it could not be read back: {problem}; the most are {MAX_JSON_BYTES} bytes "
            f"and {MAX_VALUES} values."
        )


def _too_many(data: bytes) -> str | None:
    """Says how many values JSON text has, if these are too many: at most one before each comma and in each bracket."""
    count = sum(map(data.count, (b",", b"[", b"{")))
    return f"it has {count} values" if count > MAX_VALUES else None


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
