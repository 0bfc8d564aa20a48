"""What does the host do for the linears of a step: microseconds of the processor per operator, and of a compiled layer?

    python benchmarks/host_time.py

Needs no GPU. The Triton kernels and torch's FP8 product are replaced by calls that do nothing, so that what is timed is
Python, the dispatcher and torch's allocations of outputs. The launches themselves (Triton's launcher in C, the CUDA
driver, cuBLAS) are missing. Operators are called as a compiled graph calls them, on tensors of a few KiB. A decoder
layer of Llama's form, at hidden size 64 with 64 tokens, is compiled with Inductor for the CPU, all in MXFP4 with ties.
Its norms and its attention run, and are in its time, which is divided by its seven linears too: two commits differ by
what the host does. Prints a line of JSON each.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig, convert_model
from snip_hf.kernels.tensor_scaled import gated_operators, layouts, operators
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.kernels.tensor_scaled.records import Records
from snip_hf.layers.gated import put_gates
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS

HIDDEN, INTERMEDIATE, TOKENS = 64, 128, 64
LINEARS = 7
TIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
BF16 = torch.bfloat16


class Compiled:
    """Stands for a compiled kernel: as Triton's, it makes a function per launch."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*arguments: Any, stream: Any = None) -> None: ...

        return run


class Kernel:
    """Stands for a kernel in Triton's language."""

    def __init__(self, name: str) -> None:
        self.fn = lambda: None
        self.fn.__name__ = name

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        return lambda *arguments, **options: Compiled()


def product(left: Tensor, right: Tensor, *rest: Any) -> Tensor:
    """Stands for `torch._scaled_mm`."""
    return left.new_empty((left.shape[0], right.shape[1]), dtype=rest[4])


@contextmanager
def nothing_launched() -> Iterator[None]:
    """Has operators do on the CPU what they do on a GPU, but for the launches."""
    with mock.patch.multiple(
        operators,
        fold_kernel=Kernel("fold_kernel"),
        scales_kernel=Kernel("scales_kernel"),
        runs_kernels=lambda x: True,
    ), mock.patch.multiple(
        gated_operators,
        fold_gated_kernel=Kernel("fold_gated_kernel"),
        fold_gated_gradients_kernel=Kernel("fold_gated_gradients_kernel"),
    ), mock.patch.multiple(
        torch.cuda, _exchange_device=lambda index: -1, _maybe_exchange_device=lambda index: -1
    ), mock.patch.object(torch, "_scaled_mm", product):  # fmt: skip
        yield


def microseconds(call: Callable[[], Any], calls: int, repeats: int) -> float:
    """Returns the least of the mean times of many short rounds: other processes only add to it."""
    for _ in range(calls):
        call()
    gc.collect()
    gc.disable()
    found = []
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(calls):
            call()
        found.append((time.thread_time() - start) / calls * 1e6)
    gc.enable()
    return min(found)


def by_operator() -> dict[str, Callable[[], Any]]:
    """Returns what a compiled graph calls for a linear and for a gated MLP, operator by operator."""
    ops, state = torch.ops.snip_hf, torch.tensor([FORMATS["mxfp4"].code] * 3 + [0, 0, 1])
    own = Records.new(torch.device("cpu"))
    own.note.take([FORMATS["mxfp4"]] * 3)
    own.note.known, own.note.steps = [True] * 3, 2
    record, table = own.record, own.table
    x, weight = torch.zeros(TOKENS, HIDDEN, dtype=BF16), torch.zeros(HIDDEN, HIDDEN)
    rows, parameters, columns, _ = layouts.empty_layouts(x, 0, 2)
    fold, multiply = ops.fold_operand.default, ops.tensor_scaled_product.default
    fold_and_multiply, sizes = ops.tensor_scaled_weight_product.default, (TOKENS, HIDDEN)
    keep = [own]
    return {
        "fold, both layouts": lambda: keep and fold(x, state, record, table, 1, [1, 2], True),
        "fold, one layout": lambda: fold(x, state, record, table, 0, [0, -1], True),
        "product": lambda: multiply([rows, parameters, columns, parameters], *sizes, False, BF16, record, 2),
        "product with its weight": lambda: fold_and_multiply(
            [rows, parameters], weight, [state, record, table], 1, [False, True, False], TOKENS, BF16
        ),
        "fold of gate and up": lambda: ops.fold_gated.default(x, x, table, [state, record], True),
        "fold of the gradients of gate and up": lambda: ops.fold_gated_gradients.default(
            x, x, x, table, [state, record] * 3, True, True
        ),
    }


def decoder_layer() -> Callable[[], tuple[float, float]]:
    """Returns a function that runs a compiled decoder layer in MXFP4, and returns the seconds of both passes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config).train()
    convert_model(model, SnipConfig())
    layers = snip_linears(model)
    for layer in layers.values():
        layer.use_backend(TENSOR_SCALED)
        layer.set_formats(dict.fromkeys(GEMMS, "mxfp4"))
        layer.snip_cache.own.note.known, layer.snip_cache.own.note.steps = [True] * 3, 2
    TENSOR_SCALED.share_inputs(layers, [[name for name in layers if name.endswith(tie)] for tie in TIES])
    assert put_gates(model, logging.getLogger(__name__)) == 1
    block: nn.Module = model.model.layers[0]
    block.compile()
    x = torch.randn(1, TOKENS, HIDDEN, requires_grad=True)
    positions = model.model.rotary_emb(x, torch.arange(TOKENS)[None])
    gradient = torch.zeros(1, TOKENS, HIDDEN)

    def run() -> tuple[float, float]:
        start = time.thread_time()
        with torch.autocast("cpu", BF16):
            y = block(x, position_embeddings=positions)
        between = time.thread_time()
        y.backward(gradient)
        end = time.thread_time()
        model.zero_grad()
        return between - start, end - between

    return run


def least(run: Callable[[], tuple[float, float]], steps: int) -> list[float]:
    """Returns the first deciles of forward and backward in microseconds: other processes only add to them."""
    for _ in range(20):
        run()
    found = [run() for _ in range(steps)]
    return [statistics.quantiles(times, n=10)[0] * 1e6 for times in zip(*found, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="of 100 calls of each operator")
    parser.add_argument("--steps", type=int, default=1200, help="of the decoder layer")
    parser.add_argument("--note", default="", help="goes into the lines, such as the commit")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with nothing_launched():
        with torch.no_grad():  # as in a compiled graph
            for name, call in by_operator().items():
                found = round(microseconds(call, 100, asked.rounds), 2)
                print(json.dumps({"operator": name, "us": found, "note": asked.note}), flush=True)
        run = decoder_layer()
        for part, found in zip(("forward", "backward"), least(run, asked.steps), strict=True):
            line = {"layer": part, "us": round(found, 1), "us_per_linear": round(found / LINEARS, 2)}
            print(json.dumps(line | {"note": asked.note}), flush=True)


if __name__ == "__main__":
    main()
