"""Compilation of a model in parts: one graph for all decoder layers, and one more for each way to run their linears."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from snip_hf.policies.stages import block_of

# Plain and quantized linears, each backend, each pattern of BF16, other batches: one process runs many contenders. By
# default torch runs uncompiled what is beyond 8 graphs, and a contender's numbers would depend on those before it. As
# many as torch lets a function have in all.
_GRAPHS = 256


def compile_parts(model: Any, **options: Any) -> None:
    """Compiles decoder layers, and the loss, which would pass over logits in FP32 many times.

    Args:
        model: a causal LM of transformers. What would need more graphs than there may be fails, and is not run
            uncompiled.
        options: of torch.compile.
    """
    # Each size of a batch has its own graph: one for several would take over those that were there before.
    options = {"dynamic": False} | options
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    compile_layers(model, partial(nn.Module.compile, **options))
    model.loss_function = torch.compile(model.loss_function, **options)


def compile_layers(model: nn.Module, compile: Callable[[nn.Module], object] = nn.Module.compile) -> None:
    """Compiles each decoder layer that is not compiled yet.

    Args:
        model: its blocks with linears are its decoder layers.
        compile: compiles one module in place.
    """
    torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
    linears = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    for block in dict.fromkeys(block_of(name) for name in linears):
        module = model.get_submodule(block)
        if not isinstance(module, nn.Linear) and module._compiled_call_impl is None:
            compile(module)
