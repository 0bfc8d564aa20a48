"""Keeps Liger's norms and rotary embedding out of compiled graphs, where torch would corrupt their weights.

Before 2.13, torch.compile cannot analyse Liger's kernels and assumes that they write to every argument. Inductor then
reuses the memory of a norm's weight, and of the rotary embedding's cosines, in the backward pass (docs/hopper.md).
"""

from __future__ import annotations

import logging
import sys
from types import MethodType

import torch
from torch import nn
from torch.torch_version import TorchVersion

FIRST_SAFE_TORCH = "2.13"
_PACKAGE = "liger_kernel"
_ROTARY = "apply_rotary_pos_emb"


def keep_out_of_graphs(model: nn.Module, log: logging.Logger) -> int:
    """Makes torch.compile call Liger's norms and rotary embedding instead of tracing them; returns how many it found.

    Args:
        model: without wrappers, before its first compiled pass.
        log: says that it was done.
    """
    if _PACKAGE not in sys.modules or TorchVersion(torch.__version__) >= FIRST_SAFE_TORCH:
        return 0
    # Modules with children, Liger's MLPs, hand their kernels nothing that outlives the graph.
    norms = [module for module in model.modules() if not any(module.children()) and _is_ligers(module.forward)]
    for norm in norms:
        function = norm.forward.__func__  # type: ignore[attr-defined]
        norm.forward = MethodType(torch.compiler.disable(function), norm)
    files = {name: sys.modules[name] for name in {type(module).__module__ for module in model.modules()}}
    rotary = [file for file in files.values() if _is_ligers(getattr(file, _ROTARY, None))]
    for file in rotary:
        setattr(file, _ROTARY, torch.compiler.disable(getattr(file, _ROTARY)))
    if norms or rotary:
        log.info(
            "snip-hf: Liger's norms and rotary embedding run outside compiled graphs, since torch %s would corrupt "
            "their weights inside (from torch %s on it does not).",
            torch.__version__,
            FIRST_SAFE_TORCH,
        )
    return len(norms) + len(rotary)


def _is_ligers(function: object) -> bool:
    """Returns True for a function of Liger's that is not kept out of graphs yet."""
    is_out = getattr(function, "_torchdynamo_disable", False)
    return not is_out and str(getattr(function, "__module__", "")).startswith(f"{_PACKAGE}.")
