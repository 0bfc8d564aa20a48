"""Looks at processes of this machine, and waits for what they do."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path


def alive(pid: int) -> bool:
    """True if the process runs (a zombie does not)."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def members(group: int) -> list[int]:
    """The processes of a process group, without zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            found += [int(stat.parent.name)] if fields[0] != "Z" and int(fields[2]) == group else []
    return found
