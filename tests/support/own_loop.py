"""A training loop without the Trainer, which drives a controller itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from configs import fp4_config
from small import text, tiny_llama
from tiny_runs import SCHEDULE, one_thread
from torch import Tensor, nn

from snip_hf import SnipConfig, SnipController
from snip_hf.layers.state import snip_linears

CONFIG = fp4_config(target_fp4_fraction=0.75, **SCHEDULE)


def take_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    controller: SnipController,
    batches: Iterable[Mapping[str, Tensor]],
    **captured: Tensor,
) -> list[float]:
    """Takes a step on each batch, of which the controller gets more; returns the losses."""
    losses = []
    for step, batch in enumerate(batches, controller.step + 1):
        controller.capture({**batch, **captured})
        loss = model(**batch).loss
        loss.backward()
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
        losses.append(loss.item())
    return losses


class Loop:
    """A training loop without Trainer: AdamW and clipping; with or without Accelerate."""

    def __init__(
        self,
        config: SnipConfig | None = CONFIG,
        folder: Path | None = None,
        accelerator: Accelerator | None = None,
        accumulation: int = 1,
        max_norm: float = 0.5,
        dropout: float = 0.1,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self.model: Any = model or tiny_llama(hidden=32, attention_dropout=dropout)
        self.optimizer: Any = optimizer or torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.accelerator, self.accumulation, self.max_norm = accelerator, accumulation, max_norm
        if accelerator is not None:
            self.model, self.optimizer = accelerator.prepare(self.model, self.optimizer)
        self.controller = None
        if config is not None:
            self.controller = SnipController(self.model, self.optimizer, config, accelerator, folder)
        self.step = 0
        self.losses: list[float] = []
        torch.manual_seed(0)

    def run(self, until: int) -> Loop:
        with one_thread():
            while self.step < until:
                self.one_step()
        return self

    def one_step(self) -> None:
        self.step += 1
        for micro_batch in range(self.accumulation):
            batch = self.batch(self.accumulation * self.step + micro_batch)
            if self.controller is not None:
                self.controller.capture(batch)
            with nullcontext() if self.accelerator is None else self.accelerator.accumulate(self.model):
                loss = self.loss_of(batch)
                self.losses.append(loss.item())
                if self.accelerator is None:
                    (loss / self.accumulation).backward()
                else:
                    self.accelerator.backward(loss)
        self.clip()
        if self.controller is not None:
            self.controller.before_optimizer_step(self.step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.controller is not None:
            self.controller.after_step(self.step)

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.model(**batch)["loss"]
        return loss

    def batch(self, index: int) -> dict[str, Tensor]:
        return text(2, 24, index=index)

    def clip(self) -> None:
        if self.accelerator is None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        else:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_norm)

    def formats(self) -> dict[str, dict[str, str]]:
        return {name: layer.formats for name, layer in snip_linears(self.model).items()}
