"""The format of fast-sums.yaml: `fp8-delayed` whose backward GEMMs have fast sums, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import Tensor

from snip_hf import formats, register_format
from snip_hf.kernels.tensor_scaled import exponents, operators
from snip_hf.numerics.formats import NumberFormat

_FAST = replace(formats["fp8-delayed"], name="fp8-delayed-fast", label="FP8 delayed, fast sums", colour="#44aa99")
register_format(_FAST)
_set_formats, _sums_fast = exponents.HostView.set_formats, operators.sums_fast
_fast: WeakKeyDictionary[exponents.HostView, tuple[bool, ...]] = WeakKeyDictionary()


def set_formats(view: exponents.HostView, formats: Sequence[NumberFormat]) -> None:
    _set_formats(view, formats)
    _fast[view] = tuple(format == _FAST for format in formats)


def sums_fast(record: Tensor | None, gemm: int) -> bool:
    view = None if record is None else exponents.view_of(record)
    return _sums_fast(record, gemm) or (view in _fast and _fast[view][gemm])


exponents.HostView.set_formats = set_formats  # type: ignore[method-assign]
operators.sums_fast = sums_fast
