"""Part `linears`: one linear, forward and backward."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial

import probe_cost
import torch
from torch import nn

from snip_hf import SnipConfig, convert_model
from snip_hf.kernels.backend import select_backend
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.gemms import GEMMS

from .measuring import (
    autocast,
    compared,
    compiler,
    guarded,
    milliseconds,
    release,
)
from .setting import (
    BF16,
    OURS_ALONE,
    Row,
)
from .torchao_recipes import TORCHAO


def linears_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    recipes = [recipe for recipe in (*OURS_ALONE, *TORCHAO) if recipe in options.recipes]
    for size in options.linears:
        rows = []
        for recipe in (BF16, *recipes, BF16):
            identity = {"recipe": recipe, "out_features": size[0], "in_features": size[1], "tokens": options.tokens}
            rows += guarded(identity, partial(linear, recipe, size, options), options)
        yield from compared(rows, "ms")


def linear(recipe: str, size: tuple[int, int], options: argparse.Namespace) -> Iterator[Row]:
    """Times forward and backward of one compiled linear; the weight is quantized once per pass in every recipe."""
    device = options.device
    release(device)
    torch.manual_seed(options.seed)
    model = nn.Sequential(nn.Linear(size[1], size[0], bias=False, device=device))
    if recipe in TORCHAO:
        TORCHAO[recipe](model)
    if recipe in OURS_ALONE:
        convert_model(model, SnipConfig())
    layers = snip_linears(model)
    for layer in layers.values():
        layer.set_formats(dict.fromkeys(GEMMS, OURS_ALONE[recipe]))
    kernels = select_backend("auto", device)
    kernels.before_pass(layers, everything=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(options.tokens, size[1], device=device, dtype=dtype, requires_grad=True)
    g = torch.randn(options.tokens, size[0], device=device, dtype=dtype)
    run, inputs = torch.compile(model, **compiler("default")), [x, *model.parameters()]

    def call() -> None:
        with autocast(device):
            y = run(x)
        torch.autograd.grad(y, inputs, g)
        kernels.before_pass(layers, everything=True)

    began = time.perf_counter()
    call()
    probe_cost.wait(device)
    first = time.perf_counter() - began
    yield {"ms": milliseconds(call, device), "first_s": first}
