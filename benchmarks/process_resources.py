"""What a process holds (memory, descriptors, threads, processes, files), counted, and whether it grows.

`leaks_under_faults.py` counts between refreshes and judges at the end.
"""

from __future__ import annotations

import ctypes
import gc
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch
from scipy.stats import theilslopes

# Part of the counts that is left out before they are judged.
WARM_UP = 0.25
MARK = "SNIP_SOAK"
"""Variable in the environment of all that a trainer starts."""
RESOURCES: dict[str, float | None] = {
    # What the C library has given out, the precise figure of the two. RSS also grows while its pools fill up and come
    # apart: a plain DDP loop of this model, without snip-hf, adds 1 to 1.5 MiB in its first 1,000 steps.
    "memory (malloc), KiB": 256.0,
    "memory (RSS), KiB": 2048.0,
    "CUDA memory, KiB": 1024.0,
    "Python objects": 100.0,
    "file descriptors": 0.0,
    "threads": 0.0,
    "processes started": 0.0,
    "files in snip/": 0.0,
    "files in the temporary folder": 0.0,
    "divergence tables": None,
    "history, KiB": None,
}
"""Name -> what may be added per 1,000 steps; None: it grows by design, one table and one line per refresh."""


def rank() -> int:
    """Returns which of the launched processes this is."""
    return int(os.environ.get("RANK", "0"))


@contextmanager
def own_traces(temporary: Path) -> Iterator[str]:
    """Gives this process a temporary folder of its own, and all that it starts a mark, which it yields."""
    temporary.mkdir()
    mark = secrets.token_hex(8)
    with mock.patch.object(tempfile, "tempdir", str(temporary)), mock.patch.dict(os.environ, {MARK: mark}):
        yield mark


def counted(folder: Path, mark: str, device: str) -> dict[str, int]:
    """Returns how much of each resource this process holds now, without what only waits to be collected."""
    gc.collect()
    own = psutil.Process()
    started = {child.pid for child in own.children(recursive=True)} | set(marked(mark))
    files = [path.name for path in (folder / "faulty" / "snip").glob("*")] if rank() == 0 else []
    tables = sum(name.startswith("divergence-") for name in files)
    history = folder / "faulty" / "snip" / "history.jsonl"
    counts = {
        "memory (RSS), KiB": own.memory_info().rss // 1024,
        "Python objects": len(gc.get_objects()),
        "file descriptors": own.num_fds(),
        "threads": own.num_threads(),
        "processes started": len(started),
        "files in snip/": len(files) - tables,
        "files in the temporary folder": len(list((folder / "tmp").iterdir())),
        "divergence tables": tables,
        "history, KiB": history.stat().st_size // 1024 if history.exists() else 0,
    }
    allocated = in_malloc()
    if allocated is not None:
        counts["memory (malloc), KiB"] = allocated
    if device == "cuda":
        counts["CUDA memory, KiB"] = torch.cuda.memory_allocated() // 1024
    return counts


class _MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc; "e" is hblkhd, which is mapped by itself, "uordblks" what is in use of the pools."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in (*"abcdefg", "uordblks", "fordblks", "keepcost"))


def in_malloc() -> int | None:
    """Returns the KiB in use of all that was allocated by malloc, in all its pools; None without glibc 2.33."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return None
    mallinfo.restype = _MallInfo
    found = mallinfo()
    return int(found.uordblks + found.e) // 1024


def marked(mark: str) -> Iterator[int]:
    """Yields the ids of all processes that this one started, also of those that lost their parent since."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                yield process.pid


def judged(steps: Sequence[int], values: Sequence[int], allowed: float | None) -> dict[str, Any]:
    """Returns how a resource grew after the warm-up, by Theil and Sen's line, and whether that is flat.

    What is counted one by one, of which nothing may be added, must also not be more in the last third than it was in
    the first: a line may miss what happens rarely.
    """
    first = int(WARM_UP * len(steps))
    at, counts = np.array(steps[first:]), np.array(values[first:])
    slope, _, low, high = (1e3 * float(figure) for figure in theilslopes(counts, at))
    third = max(1, len(at) // 3)
    added = int(counts[-third:].max() - counts[:third].max())
    is_flat = None
    if allowed is not None:
        # Over fewer than 1,000 steps a slope is mostly noise: as much may be added there as over 1,000.
        is_flat = slope * min(1.0, float(at[-1] - at[0]) / 1e3) <= allowed and (allowed > 0 or added <= 0)
    return {
        "after_warm_up": int(counts[0]),
        "at_end": int(counts[-1]),
        "per_1000_steps": slope,
        "between_95": [low, high],
        "allowed_per_1000_steps": allowed,
        "flat": is_flat,
        "steps": list(steps),
        "values": list(values),
    }
