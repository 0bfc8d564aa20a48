"""Which kernels does a probe compile after another process has compiled ahead?

A training of a small Llama on a CPU, in a process of its own. The other process is the real one, for a GPU of compute
capability 9.0. The probe then takes the ways of such a GPU, but for launches, which only compile. What kernels would
have written is set to 1. Prints a JSON object: what the other process said, how many kernels the probe asked for, and
which of these were not in the cache.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
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


def probed(config: dict[str, Any], model: dict[str, Any], batch: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    llama = LlamaForCausalLM(LlamaConfig(**model)).to(dtype)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-4)
    controller = SnipController(llama, optimizer, SnipConfig(first_refresh=2, **config), max_steps=50)
    controller._ahead._may_begin = True
    kernels_ahead.is_compiled = lambda device: True
    kernels_ahead.capability = lambda device: HOPPER
    said, asked, missed, tables = "", [0], list[str](), list[Any]()
    for step in (1, 2):
        ids = torch.randint(model["vocab_size"], batch)
        controller.capture({"input_ids": ids, "labels": ids})
        llama(input_ids=ids, labels=ids).loss.backward()
        if step == 2:
            process = controller._ahead._process
            assert process is not None
            process.process.wait()
            said = process.close()
            compiled = ahead.compile_for(HOPPER, 1)
            for module in (products, rounding, split_attention):
                module.capability = lambda device: HOPPER
            rounding.has_kernels.cache_clear()
            triton.runtime.jit.KernelInterface.__getitem__ = compile_only
            listener = triton.knobs.compilation.listener

            def count(**given: Any) -> None:
                asked[0] += 1
                listener(**given)

            triton.knobs.compilation.listener = count
            # Tells nothing of gradients that are made up.
            divergence.without_loss_scale = lambda clip_factor, *rest: clip_factor
            Replays.on_cuda = classmethod(lambda cls, weights: cls(lambda work: None))
            divergences_at = step_probe.divergences_at
            step_probe.divergences_at = lambda *of, **how: tables.append(divergences_at(*of, **how)) or tables[0]
            with Filled():
                controller.before_optimizer_step(step)
            missed += compiled
            break
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
    return {"said": said, "asked": asked[0], "missed": missed, "rows": sum(len(table.rows) for table in tables)}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    given = json.loads(sys.argv[1])
    given["dtype"] = getattr(torch, given["dtype"])
    print(json.dumps(probed(**given)))
