"""How JSON files are written in one stroke and read strictly.

A plan or a state may come from the Hub, or from a disk that filled up: what is read is bounded, complete
and unambiguous.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

# A plan of a 405B model (882 linears) makes about 300 kB; one of 45,032 linears (DeepSeek-V3) about 14 MB.
MAX_JSON_BYTES = 64 * 2**20


def write_json_atomic(path: str | os.PathLike[str], document: Any) -> None:
    """Writes `document` as JSON in one stroke: temporary file beside `path`, fsync, rename.

    Raises:
        OSError: it cannot be written; what was at `path` is still there.
        ValueError, TypeError: `document` is not JSON data (NaN and infinity are not); nothing is written.
    """
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: str | os.PathLike[str], max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Reads one JSON document strictly: UTF-8, no duplicate keys, no NaN or infinity, a bounded size.

    Raises:
        OSError: the file cannot be read.
        ValueError: anything else; the message says what is wrong, not which file it is.
    """
    with open(path, "rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"the file is larger than {max_bytes} bytes.")
    return parse_json(data)


def parse_json(data: bytes) -> Any:
    """`read_json` for bytes already in memory, such as one line of a history file."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text (byte {error.start}).") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON, perhaps truncated (line {error.lineno}: {error.msg}).") from error
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        key, count = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key[:60]!r} occurs {count} times in one object.")
    return mapping


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is not a JSON number.")
