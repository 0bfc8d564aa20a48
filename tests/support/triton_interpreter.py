"""Triton kernels under Triton's interpreter, in a process of their own: whether Triton interprets is settled when it is
imported."""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch


def dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def correct_the_interpreter() -> None:
    """Gives Triton's interpreter subnormal BF16 numbers: its own way to FP32 takes them for others."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def widened(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if (source, target) == (tl.bfloat16, tl.float32):
            return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return convert(data, source, target, rounding_mode)

    interpreter._convert_float = widened


@contextmanager
def interpreting() -> Iterator[ProcessPoolExecutor]:
    """A pool of one process that has TRITON_INTERPRET=1."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        # NumPy's word on what is computed of infinities and NaN, and not used.
        patch.setenv("PYTHONWARNINGS", "ignore::RuntimeWarning")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=correct_the_interpreter)
        pool.submit(os.getpid).result()  # started, with the variables set
    yield pool
    pool.shutdown()
