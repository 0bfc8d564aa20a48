"""JSON lines of measurements: appended one by one, read back after an interrupted run, with their origin."""

from __future__ import annotations

import gzip
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

Line = dict[str, Any]


def append_line(path: Path | None, line: Mapping[str, Any]) -> None:
    """Appends a line to a file, if there is one."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_lines(path: Path) -> list[Line]:
    """Returns the lines of a file (also a compressed one); [] if there is no file. Drops an unfinished last line.

    Raises:
        ValueError: a line is not JSON.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    complete = text.rpartition("\n")[0]
    return [_parsed(path, number, line) for number, line in enumerate(complete.splitlines(), 1)]


def drop_unfinished_line(path: Path) -> None:
    """Cuts off the half line that a killed run may have left at the end of a file."""
    if path.exists():
        with path.open("r+b") as file:
            file.truncate(file.read().rfind(b"\n") + 1)


def _parsed(path: Path, number: int, text: str) -> Line:
    try:
        line: Line = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}: line {number} is not JSON ({error.msg}): {text[:40]!r}. Delete this line; the same command "
            "measures it again."
        ) from error
    return line


def origin_of(device: str | torch.device) -> Line:
    """Returns the origin of a measurement: commit, machine, threads, torch version and command."""
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    cuda = torch.device(device).type == "cuda"
    return {
        "commit": commit or None,
        "machine": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} ({os.cpu_count()} cores)",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "command": shlex.join(["python", *(os.path.relpath(sys.argv[0]), *sys.argv[1:])]),
    }


def table(columns: Mapping[str, tuple[str, str]], rows: list[Line]) -> str:
    """Returns rows as a Markdown table, and below it the errors of rows that failed.

    Args:
        columns: field -> (head of its column, format of its values).
        rows: a missing or None value is shown as "-".
    """
    lines = [f"| {' | '.join(head for head, _ in columns.values())} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        if "error" not in row:
            values = [(row.get(name), form) for name, (_, form) in columns.items()]
            lines.append(f"| {' | '.join('-' if value is None else form.format(value) for value, form in values)} |")
    for row in rows:
        if "error" in row:
            identity = ", ".join(str(value) for name, value in row.items() if name in columns)
            lines += ["", f"Failed: {identity}: {row['error']}"]
    return "\n".join(lines)
