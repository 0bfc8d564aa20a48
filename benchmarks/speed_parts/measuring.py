"""How a call is timed, what is freed before it, and what becomes of one that fails."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import probe_cost
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from snip_hf.kernels.backend import Backend
from snip_hf.kernels.hopper.backend import HOPPER
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS

from . import setting
from .setting import BF16, Row


def guarded(identity: Row, measure: Callable[[], Iterable[Row]], options: argparse.Namespace) -> list[Row]:
    """Returns what `measure` yields, each with what it is of, and the error at which it ended; prints them at once."""
    rows = []
    try:
        if time.monotonic() > options.deadline:
            raise TimeoutError("not begun: --minutes are over")
        for figures in measure():
            rows.append(identity | figures)
            print(json.dumps(rows[-1]), flush=True)
    except Exception as error:
        rows.append(identity | {"error": described(error)})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Returns the median time of a call: on a GPU its own, its cache emptied before each."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, warmup=10, rep=60, return_mode="median"))
    call()
    return statistics.median(1e3 * probe_cost.clocked(device, call) for _ in range(3))


def mark(device: torch.device) -> Any:
    """Returns a point in the GPU's time, or the time on a CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(start: Any, end: Any) -> float:
    """Returns the time between two marks, which the GPU must have passed."""
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def replayed(call: Callable[[], Any]) -> Callable[[], None]:
    """Returns the call as a CUDA graph, which is launched faster than its kernels run; without a GPU as it is."""
    call()
    if not torch.cuda.is_available():
        return call
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def release(device: torch.device) -> None:
    """Frees what earlier measurements left, and forgets what was compiled."""
    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def compiler(mode: str) -> dict[str, Any]:
    return {"backend": setting.COMPILER} if mode == "default" else {"backend": setting.COMPILER, "mode": mode}


def autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def state_of(fmt: str, device: torch.device) -> Tensor:
    """Returns a layer's state with all GEMMs in one format and any key, on the only rank."""
    return torch.tensor([*[FORMATS[fmt].code] * len(GEMMS), 1234567891234, 0, 1], device=device)


def require_hopper(device: torch.device) -> None:
    _require(HOPPER, device)


def require_tensor_scaled(device: torch.device) -> None:
    _require(TENSOR_SCALED, device)


def _require(backend: Backend, device: torch.device) -> None:
    lacks = backend.lacks(device)
    if lacks is not None:
        raise RuntimeError(lacks)


def compared(rows: Sequence[Row], timed: str) -> list[Row]:
    """Returns the rows of one size with their speed, and peak memory if they have one, in those of BF16."""
    result = []
    for row in rows:
        baseline = [
            other
            for other in rows
            if other["recipe"] == BF16 and timed in other and other.get("accumulation") == row.get("accumulation")
        ]
        if baseline and timed in row:
            row = row | {"speedup": statistics.median(other[timed] for other in baseline) / row[timed]}
            if row.get("peak_gib"):
                row["peak_ratio"] = row["peak_gib"] / statistics.median(other["peak_gib"] for other in baseline)
        result.append(row)
    return result
