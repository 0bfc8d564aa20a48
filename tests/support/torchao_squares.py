"""torchao's own 16x16 blocks of NVFP4: `TRITON_INTERPRET=1 python torchao_squares.py IN OUT`.

IN holds a list of BF16 tensors (R, C). OUT gets, of each, the scales (R / 16, C / 16), which are E4M3 numbers, and the
elements over scale and tensor's scale, before they become E2M1. Triton's interpreter computes both by the function of
torchao's kernel for Blackwell; the kernel as a whole needs a GPU, since it has instructions of sm_100.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils import _triton
from triton.runtime import interpreter

_PACKAGE = "torchao.prototype.moe_training.nvfp4_training"
# The package is loaded as on a machine without a GPU, then this file and what it needs as on one with.
importlib.import_module(_PACKAGE)
for _name in ("hadamard_utils", "quantize_2d_triton"):
    sys.modules.pop(f"{_PACKAGE}.{_name}", None)
_triton.has_triton = lambda: True
quantize = importlib.import_module(f"{_PACKAGE}.quantize_2d_triton")._nvfp4_2d_quantize
_convert = interpreter._convert_float


def _converted(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    """The interpreter sends ties away from zero, a GPU to even."""
    if (source, target) == (tl.float32, tl.float8e4nv):
        return data.view(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return _convert(data, source, target, rounding_mode)


interpreter._convert_float = _converted


@triton.jit
def kernel(x, amax, scales, scaled, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    found, values = quantize(tl.load(x + places), tl.load(amax), ROWS, COLUMNS)
    blocks = tl.arange(0, ROWS // 16)[:, None] * (COLUMNS // 16) + tl.arange(0, COLUMNS // 16)[None, :]
    tl.store(scales + blocks, found.to(tl.float32))
    tl.store(scaled + places, values)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    scales, scaled = torch.empty(rows // 16, columns // 16), torch.empty(rows, columns)
    # In FP32, since the interpreter misreads subnormal BF16 numbers; it is what the function computes in.
    launch: Any = kernel[(1,)]
    launch(x.float(), x.float().abs().amax().view(1), scales, scaled, rows, columns)
    return scales, scaled


if __name__ == "__main__":
    torch.save([quantized(x) for x in torch.load(sys.argv[1], weights_only=True)], sys.argv[2])
