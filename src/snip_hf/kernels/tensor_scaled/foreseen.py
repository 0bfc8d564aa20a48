"""The kernels that steps launch under a plan with folded formats, and under none before, on tensors without memory.

A run starts in a format that does not fold as a rule. Under its first plan operands whose formats fold take their
parameters from the exponent in force, in kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ...numerics.formats import FORMATS
from ...numerics.gemms import OPERANDS
from .folding import fold_of, table_on
from .layouts import empty_layouts
from .operators import launch_fold
from .records import FIELDS

_META = torch.device("meta")
_ACTIVATION, _GRADIENT, _WEIGHT = range(3)  # as in `gemms.OPERANDS`


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
        yield f"folding of {layer}", partial(_fold, layer, tokens)


def _fold(layer: Mapping[str, Any], tokens: int) -> None:
    (outputs, inputs), weight = layer["shape"], getattr(torch, layer["dtype"])
    by_weight = 2 if layer["is_trained"] else -1
    activation = (_ACTIVATION, (tokens, inputs), torch.bfloat16)
    # Folded in the backward pass, an activation was counted in the forward one.
    _launch(*activation, (0, by_weight))
    _launch(*activation, (0, -1))
    if layer["is_trained"]:
        _launch(*activation, (-1, 2), counts=False)
    _launch(_GRADIENT, (tokens, outputs), torch.bfloat16, (1, by_weight))
    for gemms in ((0, 1), (0, -1), (-1, 1)):
        _launch(_WEIGHT, (outputs, inputs), weight, gemms)


def _launch(
    operand: int, shape: tuple[int, int], dtype: torch.dtype, gemms: tuple[int, int], counts: bool = True
) -> None:
    x = torch.empty(shape, dtype=dtype, device=_META)
    state = torch.empty(0, dtype=torch.int64, device=_META)
    record = torch.empty(len(OPERANDS), FIELDS, dtype=torch.int64, device=_META)[operand]
    launch_fold(x, state, record, operand, counts, empty_layouts(x, *gemms), known=(table_on(_META), gemms))
