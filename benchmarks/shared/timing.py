"""Clocks, peak memory, and measurements that may fail without ending the benchmark."""

from __future__ import annotations

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._dynamo.utils import counters

from .lines import Line

BF16 = "BF16"
WARM_UP = 3
"""Steps before those that are timed."""


def guarded(identity: Line, measure: Callable[[], Iterable[Line]], deadline: float) -> list[Line]:
    """Returns the rows that `measure` yields, merged with `identity`. An error becomes the last row.

    Args:
        identity: the fields that name the measurement.
        measure: yields rows.
        deadline: `time.monotonic()` after which nothing is begun.
    """
    rows = []
    try:
        if time.monotonic() > deadline:
            raise TimeoutError("not begun: --minutes are over")
        for figures in measure():
            rows.append(identity | figures)
            print(json.dumps(rows[-1]), flush=True)
    except Exception as error:
        traceback.print_exc()
        rows.append(identity | {"error": f"{type(error).__name__}: {error}"[:300]})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def compared(rows: Sequence[Line]) -> list[Line]:
    """Returns the rows of one model, with speed and peak memory relative to its BF16 rows (their median)."""
    baseline = [row for row in rows if row["recipe"] == BF16 and "step_ms" in row]
    result = []
    for row in rows:
        if baseline and "step_ms" in row:
            row = row | {"speedup": statistics.median(other["step_ms"] for other in baseline) / row["step_ms"]}
            if row.get("peak_gib"):
                row["peak_ratio"] = row["peak_gib"] / statistics.median(other["peak_gib"] for other in baseline)
        result.append(row)
    return result


def mark(device: torch.device) -> Any:
    """Returns the present point in the device's time: a CUDA event, or seconds on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(start: Any, end: Any) -> float:
    """Returns the time between two marks. A GPU must have reached both."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clocked(device: torch.device, function: Callable[[], Any]) -> float:
    """Returns the seconds of a call, including the device's work that it starts."""
    wait(device)
    began = time.perf_counter()
    function()
    wait(device)
    return time.perf_counter() - began


def release(device: torch.device) -> None:
    """Frees memory and compiled code of earlier measurements."""
    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated(device: torch.device, reserved: bool = False) -> int:
    """Returns the bytes of all tensors, or the memory that torch has reserved for tensors."""
    if device.type != "cuda":
        return 0
    return torch.cuda.memory_reserved(device) if reserved else torch.cuda.memory_allocated(device)


def peak(device: torch.device, reserved: bool = False) -> int:
    """Returns the largest `allocated` since `reset_peak`."""
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_reserved(device) if reserved else torch.cuda.max_memory_allocated(device)


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def graph_counts() -> Line:
    """Returns how many graphs torch.compile made and how many graph breaks it met since `release`."""
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
