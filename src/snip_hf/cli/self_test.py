"""A small case of all that training does: it rounds in every format, and probes, plans and applies in a tiny model."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..config import SnipConfig
from ..numerics.formats import FORMATS
from ..numerics.rounding import quantize
from ..planning.plan import PrecisionPlan
from ..training.controller import SnipController

# Of random numbers; the coarsest built-in format's is 0.15. What is rounded to zero, or to another scale, is 1 off.
_MOST_ERROR = 0.5
_SEED = 1
_STEPS, _TARGET, _TOKENS = 3, 0.75, 64
# Of rounding in sums of FLOPs.
_TOLERANCE = 1e-9


class SelfTestFailed(Exception):
    """The self-test found something wrong; the message says what."""


@dataclass(frozen=True)
class Trained:
    """What the tiny model's training left."""

    plan: PrecisionPlan
    loss: float
    """Of the last step, in the formats of the plan."""


def rounding_error(name: str) -> float:
    """Returns the error of random weights that are rounded to a format, relative to their norm.

    Raises:
        SelfTestFailed: it is larger than any format's, or not finite.
    """
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(_SEED))
    error = float((quantize(x, name, "weight", seed=_SEED) - x).norm() / x.norm())
    if not error < _MOST_ERROR:  # nor NaN
        raise SelfTestFailed(
            f"Rounding to {FORMATS[name].label} ({name}) has an error of {error:.2g}, expected less than {_MOST_ERROR}."
        )
    return error


def _tiny_llama() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=_TOKENS
    )


def train_tiny_model() -> Trained:
    """Trains a Llama of two blocks on the CPU for three steps, with a refresh at the first one.

    Raises:
        SelfTestFailed: the plan misses its target, is not in force, or the loss is not finite.
    """
    with torch.random.fork_rng(devices=[]), _without_logs():
        torch.manual_seed(_SEED)
        model = LlamaForCausalLM(_tiny_llama())
        batch = {"input_ids": torch.randint(_TOKENS, (2, 16))}
        batch["labels"] = batch["input_ids"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = SnipConfig(target_fp4_fraction=_TARGET, first_refresh=1, apply_delay=1)
        controller = SnipController(model, optimizer, config, max_steps=_STEPS)
        for step in range(1, _STEPS + 1):
            controller.capture(batch)
            loss = model(**batch).loss
            loss.backward()
            controller.before_optimizer_step(step)
            optimizer.step()
            optimizer.zero_grad()
            controller.after_step(step)
        plan = controller.plan
        controller.close()
    if plan.fp4_fraction < _TARGET - _TOLERANCE:
        raise SelfTestFailed(f"The plan has {plan.fp4_fraction:.4f} in FP4, expected at least {_TARGET}.")
    if not math.isfinite(loss.item()):
        raise SelfTestFailed(f"The loss in the plan's formats is {loss.item()}, expected a finite one.")
    return Trained(plan, loss.item())


@contextmanager
def _without_logs() -> Iterator[None]:
    """Inside, the package logs errors alone: what a run warns of is not so here."""
    logger = logging.getLogger("snip_hf")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
