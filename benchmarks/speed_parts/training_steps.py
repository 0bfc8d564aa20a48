"""Parts `models` and `refresh`: whole training steps, and what a refresh costs in them."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import probe_cost
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig, SnipController
from snip_hf.kernels.tensor_scaled import operators
from snip_hf.numerics.gemms import GEMMS

from . import setting
from .measuring import (
    allocated,
    autocast,
    compared,
    compiler,
    guarded,
    mark,
    milliseconds_between,
    peak,
    release,
)
from .setting import ACCUMULATING, BF16, OURS, WARM_UP, Row
from .switches import CHANGES, turn_on
from .torchao_recipes import TORCHAO

_SUMS = dict(operators.FAST_SUMS)


class Training:
    """A Llama in training under a recipe, as a plain loop would do it: always on the same one or two micro-batches.

    A configuration of snip-hf is a recipe too.
    """

    def __init__(
        self,
        shape: Sequence[int],
        batch: tuple[int, int],
        recipe: str | SnipConfig,
        seed: int,
        device: torch.device,
        whole: bool = False,
        **compiling: Any,
    ) -> None:
        self.model = build_model(shape, batch[1], seed, device)
        if recipe in TORCHAO:
            TORCHAO[recipe](self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.controller = None
        operators.FAST_SUMS.update(dict.fromkeys(GEMMS, True) if recipe in setting.FAST_SUMS else _SUMS)
        if isinstance(recipe, str):
            turn_on(setting.WITH_CHANGES.get(recipe, CHANGES))
        if recipe in OURS:
            by_name = {"backend": "tensor-scaled"} if device.type == "cuda" and "formats" in OURS[recipe] else {}
            recipe = SnipConfig(**OURS[recipe], **by_name, seed=seed)
        if isinstance(recipe, SnipConfig):
            self.controller = SnipController(self.model, self.optimizer, recipe)
        self.call = torch.compile(self.model, **compiling) if whole else self.model
        for layer in () if whole else self.model.model.layers:
            layer.compile(**compiling)
        tokens = torch.randint(self.model.config.vocab_size, (2, *batch), device=device)
        self.batches = [{"input_ids": ids, "labels": ids} for ids in tokens]
        self.device, self.number = device, 0

    def step(self, accumulation: int = 1) -> Tensor:
        """Does one optimizer step, and returns the loss of its last micro-batch."""
        self.number += 1
        for batch in self.batches[:accumulation]:
            torch.compiler.cudagraph_mark_step_begin()
            if self.controller is not None:
                self.controller.capture(batch)
            with autocast(self.device):
                loss = self.call(**batch).loss
            (loss / accumulation).backward()
        if self.controller is not None:
            self.controller.before_optimizer_step(self.number)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.controller is not None:
            self.controller.after_step(self.number)
        return loss.detach().clone()  # CUDA graphs write over theirs.


def build_model(shape: Sequence[int], length: int, seed: int, device: torch.device) -> LlamaForCausalLM:
    """Returns a Llama in training mode.

    Args:
        shape: as in `setting.MODELS`; a sixth number is the vocabulary's size.
        length: tokens of its longest text.
        seed: of its weights.
        device: where it is made.
    """
    hidden, inner, layers, heads, key_heads, *vocabulary = shape
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": key_heads, "attn_implementation": "sdpa"}
    words = {"vocab_size": vocabulary[0] if vocabulary else setting.VOCABULARY}
    torch.manual_seed(seed)
    with device:
        config = LlamaConfig(**words, **sizes, **attention, max_position_embeddings=length, use_cache=False)
        return LlamaForCausalLM(config).train()


def models_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    recipes = [recipe for recipe in (*OURS, *TORCHAO) if recipe in options.recipes]
    for name in options.models:
        rows = []
        for recipe in (BF16, *recipes, BF16):
            rows += guarded({"model": name, "recipe": recipe}, partial(train, name, recipe, options), options)
        yield from compared(rows, "step_ms")


def train(name: str, recipe: str, options: argparse.Namespace) -> Iterator[Row]:
    """Times steps without waiting for any; memory and losses are those of the timed steps."""
    device = options.device
    release(device)
    before = allocated(device)
    batch = (options.rows, options.length)
    training = Training(setting.MODELS[name], batch, recipe, options.seed, device, **compiler(options.mode))
    accumulating = recipe in ACCUMULATING and not options.quick
    for accumulation, steps in ((1, options.steps), (2, options.steps // 2))[: 1 + accumulating]:
        first = probe_cost.clocked(device, partial(training.step, accumulation))
        for _ in range(WARM_UP - 1):
            training.step(accumulation)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        marks = [mark(device)]
        for _ in range(steps):
            loss = training.step(accumulation)
            marks.append(mark(device))
        probe_cost.wait(device)
        taken = statistics.median(map(milliseconds_between, marks, marks[1:]))
        yield {
            "accumulation": accumulation,
            "step_ms": taken,
            "tokens_per_s": 1e3 * accumulation * options.tokens / taken,
            "peak_gib": (peak(device) - before) / 2**30,
            "loss": float(loss),
            "first_s": first,
            "backend": None if training.controller is None else training.controller.backend,
            **graph_counts(),
        }


def graph_counts() -> Row:
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def refresh_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    yield from guarded({}, partial(refresh, options, found), options)


def refresh(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    """Times `probe_cost`'s refresh, without compiling its 22 layers as one: the step is that of part models."""
    one = {"model": "TinyLlama-1.1B", "recipe": BF16, "accumulation": 1}
    steps = [row["step_ms"] for row in found if row.items() >= one.items() and "step_ms" in row]
    if not steps:
        steps = [next(train(one["model"], BF16, options))["step_ms"]]
    release(options.device)
    given = ["--device", str(options.device), "--steps", "3", "--refreshes", "1" if options.quick else "2"]
    [figures] = probe_cost.measure("1B", probe_cost.parser().parse_args(given))
    step = statistics.median(steps) / 1e3
    yield {**figures, "eager_step": figures["step"], "step": step, "refresh_steps": figures["refresh"] / step}
