"""Forks of tiny models on random words."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import nn

from eval.bakeoff.fork_cells import Contender, Fork
from eval.bakeoff.fork_recipe import ForkRecipe, ForkRun
from eval.bakeoff.fork_run import run_fork
from eval.bakeoff.fork_text import ForkText

CPU = torch.device("cpu")
SNIP = {"policy": "snip", "formats": ["nvfp4", "mxfp8"], "granularity": "gemm", "target_fp4_fraction": 0.75}
BF16 = Contender("bf16", "all", {})
# What makes a committed recipe tiny.
TINY = [
    # The exact ones take most of a second to load.
    "snip.solver=greedy",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=48",
    "model.config.num_hidden_layers=1",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
    "training.steps=5",
    "training.sequences=2",
    "training.warmup_steps=1",
    "training.compile=false",
    "forks.base_seeds=[0]",
    "forks.points=[2]",
    "forks.steps=3",
]


def write_recipe(folder: Path, cells: list[dict[str, Any]], **changes: Any) -> Path:
    """A recipe of one tiny model on 4,000 random words, in a file."""
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    rng = random.Random(0)
    for name in ("train", "held-out"):
        (folder / f"{name}.txt").write_text(" ".join(rng.choice(words) for _ in range(4000)), encoding="utf-8")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    recipe = {
        "data": {
            "source": "files",
            "files": [str(folder / "train.txt")],
            "validation_files": [str(folder / "held-out.txt")],
            "sequence_length": 32,
            "validation_sequences": 4,
        },
        "train_sequences": 60,
        "tokenizer": {"vocab_size": 300},
        "model": {"model_type": "llama", "config": shape},
        "training": {"learning_rate": 3e-3, "steps": 20, "sequences": 4, "warmup_steps": 2},
        "forks": {"base_seeds": [0], "points": [3, 6], "data_seeds": [0], "steps": 4},
        "snip": {"backend": "emulated", "solver": "greedy"},
        "cells": cells,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | changes, sort_keys=False), encoding="utf-8")
    return path


def random_text(sequences: int = 12, length: int = 64) -> ForkText:
    rng = np.random.default_rng(0)
    return ForkText(*(rng.integers(0, 300, (count, length)).astype(np.uint16) for count in (sequences, 4)), 300, 0)


def forked(
    recipe: ForkRecipe,
    text: ForkText,
    contender: Contender,
    fork: Fork,
    folder: Path,
    *lengths: int,
    device: torch.device = CPU,
) -> list[dict[str, Any]]:
    """Runs a contender in a fork and returns what its lines say; by default of the recipe's longest length."""
    lengths = lengths or (max(steps for cell in recipe.cells for steps in cell.lengths),)
    run = ForkRun(contender, fork, {steps: str(steps) for steps in lengths})
    return [found for _, found in run_fork(recipe, text, run, device, folder)]


class StandIn:
    """What a CUDA graph does, on a CPU: takes tensors when it is captured, and writes them at each replay.

    `parameters` are those whose gradients the captured work leaves in `grad`.
    """

    def __init__(self) -> None:
        self.parameters: list[nn.Parameter] = []
        self.captures = self.replays = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        work()
        kept = [parameter.grad for parameter in self.parameters]
        for gradient in kept:
            assert gradient is not None
            gradient.fill_(torch.nan)

        def replay() -> None:
            self.replays += 1
            for parameter in self.parameters:
                parameter.grad = None
            work()
            for parameter, gradient in zip(self.parameters, kept, strict=True):
                assert gradient is not None and parameter.grad is not None
                gradient.copy_(parameter.grad)

        return replay
