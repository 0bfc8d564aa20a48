"""The kernels that steps launch, those of a run's first step and those under a plan, on tensors without memory.

In the first step no operand has an exponent, so that a launch of its own finds its scales. A run starts in a format
that does not fold as a rule. Under its first plan operands whose formats fold take their parameters from the exponent
in force, in kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...numerics.formats import FORMATS
from ...numerics.gemms import OPERANDS
from .folding import fold_of, table_on
from .gated_operators import LAYERS, folded_gated, folded_gated_gradients
from .layouts import empty_layouts
from .operators import find_scales, launch_fold
from .records import FIELDS

_META = torch.device("meta")
_ACTIVATION, _GRADIENT, _WEIGHT = range(3)  # as in `gemms.OPERANDS`


class _Operand(NamedTuple):
    """An operand as steps fold it."""

    operand: int
    shape: tuple[int, int]
    dtype: torch.dtype
    gemms: tuple[int, int]
    counts: bool = True


def first_calls(
    layers: Sequence[Mapping[str, Any]], gates: Sequence[int], tokens: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Gives each part of a first step, in its order: name and what to call.

    Args:
        layers, tokens: as `fold_calls` takes them.
        gates: C of each width of gated MLPs.
    """
    for layer in layers:
        yield f"folding of {layer}", partial(_fold_first, _of_forward(layer, tokens))
    for channels in gates:
        yield f"folding behind {channels} gates", partial(_gate, channels, tokens)
    for layer in layers:
        yield f"folding of {layer} backward", partial(_fold_first, _of_backward(layer, tokens))
    for channels in gates:
        yield f"folding behind {channels} gates backward", partial(_gate_backward, channels, tokens)


def fold_calls(
    layers: Sequence[Mapping[str, Any]], tokens: int, formats: Sequence[str]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Gives each part's name and what to call.

    Args:
        layers: the (O, I) of the weight, "shape", its "dtype", and whether the optimizer updates it, "is_trained".
        tokens: of a micro-batch.
        formats: those that a plan chooses from.
    """
    if all(fold_of(FORMATS[name]) is None for name in formats):
        return
    for layer in layers:
        yield f"folding of {layer} under a plan", partial(_fold, layer, tokens)


def _of_forward(layer: Mapping[str, Any], tokens: int) -> Iterator[_Operand]:
    (outputs, inputs), weight = layer["shape"], getattr(torch, layer["dtype"])
    for gemms in ((0, 2), (0, -1)) if layer["is_trained"] else ((0, -1),):
        yield _Operand(_ACTIVATION, (tokens, inputs), torch.bfloat16, gemms)
    for gemms in ((0, 1), (0, -1)):
        yield _Operand(_WEIGHT, (outputs, inputs), weight, gemms)


def _of_backward(layer: Mapping[str, Any], tokens: int) -> Iterator[_Operand]:
    (outputs, inputs), weight = layer["shape"], getattr(torch, layer["dtype"])
    by_weight = 2 if layer["is_trained"] else -1
    yield _Operand(_GRADIENT, (tokens, outputs), torch.bfloat16, (1, by_weight))
    if layer["is_trained"]:
        # Folded in the backward pass, an activation was counted in the forward one.
        yield _Operand(_ACTIVATION, (tokens, inputs), torch.bfloat16, (-1, 2), counts=False)
    yield _Operand(_WEIGHT, (outputs, inputs), weight, (-1, 1))


def _fold_first(operands: Iterator[_Operand]) -> None:
    for one in operands:
        x, record = torch.empty(one.shape, dtype=one.dtype, device=_META), _record()[one.operand]
        outputs = empty_layouts(x, *one.gemms)
        find_scales(x, _state(), (record, table_on(_META)), one.gemms, one.counts, outputs)
        launch_fold(x, _state(), record, one.operand, one.counts, outputs)


def _fold(layer: Mapping[str, Any], tokens: int) -> None:
    for one in (*_of_forward(layer, tokens), *_of_backward(layer, tokens)):
        x, record = torch.empty(one.shape, dtype=one.dtype, device=_META), _record()[one.operand]
        known = table_on(_META), one.gemms
        launch_fold(x, _state(), record, one.operand, one.counts, empty_layouts(x, *one.gemms), known=known)


def _gate(channels: int, tokens: int) -> None:
    gate, up = (torch.empty(tokens, channels, dtype=torch.bfloat16, device=_META) for _ in range(2))
    folded_gated(gate, up, table_on(_META), (_state(), _record()), True, by_kernel=True)


def _gate_backward(channels: int, tokens: int) -> None:
    grad, gate, up = (torch.empty(tokens, channels, dtype=torch.bfloat16, device=_META) for _ in range(3))
    layers = [tensor for _ in range(LAYERS) for tensor in (_state(), _record())]
    folded_gated_gradients(grad, gate, up, table_on(_META), layers, (True, True), by_kernel=True)


def _state() -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=_META)


def _record() -> Tensor:
    return torch.empty(len(OPERANDS), FIELDS, dtype=torch.int64, device=_META)
