"""Which kernels does a probe compile after another process has compiled ahead?

A training of a small Llama, in a process of its own. On a CPU the other process is the real one, for a GPU of compute
capability 9.0. The probe then takes the ways of such a GPU, but for launches, which only compile. What kernels would
have written is set to 1. It looks for kernels where Inductor has a process look. Prints a JSON object: what the other
process said, how many kernels the probe asked for, which of these were not in the cache, and how many rows it found.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import triton_cache_dir
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig, SnipController
from snip_hf.estimation import divergence, products
from snip_hf.estimation.replayed_sums import Replays
from snip_hf.kernels import ahead, rounding, split_attention
from snip_hf.training import kernels_ahead, step_probe

HOPPER = (9, 0)


class Filled(TorchFunctionMode):
    """New tensors that nothing was written to are of ones."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.empty, torch.empty_like, Tensor.new_empty) and not result.is_meta:
            result.fill_(1)
        return result


def compile_only(kernel: Any, grid: Any) -> Callable[..., None]:
    def run(*arguments: Any, **options: Any) -> None:
        kernel.warmup(*arguments, grid=grid, **options)

    return run


def take_the_ways_of_a_gpu(asked: list[str]) -> dict[str, str]:
    """Returns what `compile_for` does; `asked` gets the names of all kernels, compiled or found in the cache."""
    os.environ["TRITON_CACHE_DIR"] = triton_cache_dir(0)
    compiled = ahead.compile_for(HOPPER, ahead.cache_folders(0))
    listener = triton.knobs.compilation.listener

    def note(**given: Any) -> None:
        asked.append(given["src"].name)
        listener(**given)

    triton.knobs.compilation.listener = note
    triton.runtime.jit.KernelInterface.__getitem__ = compile_only
    for module in (products, rounding, split_attention):
        module.capability = lambda device: HOPPER
    rounding.has_kernels.cache_clear()
    Replays.on_cuda = classmethod(lambda cls, weights: cls(lambda work: None))
    # Tells nothing of gradients that are made up.
    divergence.without_loss_scale = lambda clip_factor, *rest: clip_factor
    return compiled


def note_compilations(asked: list[str]) -> dict[str, str]:
    """As `take_the_ways_of_a_gpu`, on one."""
    compiled = dict[str, str]()

    def note(*, src: Any, metadata: Any, cache_hit: bool, **rest: Any) -> None:
        asked.append(src.name)
        if not cache_hit:
            compiled[metadata["hash"]] = src.name

    triton.knobs.compilation.listener = note
    return compiled


def probed(
    config: dict[str, Any], model: dict[str, Any], batch: tuple[int, int], dtype: str, device: str = "cpu"
) -> dict[str, Any]:
    llama = LlamaForCausalLM(LlamaConfig(**model)).to(device, getattr(torch, dtype))
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-4)
    controller = SnipController(llama, optimizer, SnipConfig(first_refresh=2, **config), max_steps=50)
    if device == "cpu":
        controller._ahead._may_begin = True
        kernels_ahead.is_compiled = lambda device: True
        kernels_ahead.capability = lambda device: HOPPER
        torch.cuda.device_count = lambda: 1

    def pass_of_step() -> None:
        ids = torch.randint(model["vocab_size"], batch, device=device)
        controller.capture({"input_ids": ids, "labels": ids})
        llama(input_ids=ids, labels=ids).loss.backward()

    pass_of_step()
    controller.before_optimizer_step(1)
    optimizer.step()
    optimizer.zero_grad()
    controller.after_step(1)
    pass_of_step()
    assert controller._ahead._process is not None
    code = controller._ahead._process.wait()
    errors = controller._ahead._files[1]
    errors.seek(0)
    said, asked, tables, divergences_at = errors.read().decode(), list[str](), list[Any](), step_probe.divergences_at
    step_probe.divergences_at = lambda *of, **how: tables.append(divergences_at(*of, **how)) or tables[0]
    missed = take_the_ways_of_a_gpu(asked) if device == "cpu" else note_compilations(asked)
    with Filled() if device == "cpu" else nullcontext():
        controller.before_optimizer_step(2)
    return {
        "code": code,
        "said": said,
        "asked": len(asked),
        "missed": list(missed.values()),
        "rows": sum(len(table.rows) for table in tables),
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    print(json.dumps(probed(**json.loads(sys.argv[1]))))
