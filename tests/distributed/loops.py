"""A plain training loop on one or several processes, which tests of saving and of faults stop and disturb.

Every rank takes its rows of each step's batch, so that one process trains on what several train on together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from configs import fp4_config
from devices import accelerator, device
from safetensors.torch import load_file
from small import text, tiny_llama
from tiny_runs import SCHEDULE
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from snip_hf import SnipConfig, SnipController, convert_model
from snip_hf.json_io import read_json, write_json_atomic

ROWS, LENGTH = 4, 128  # of all ranks together; one tile, so that whole tiles are of one rank
# FP32, which no other backend computes in.
CONFIG = fp4_config(target_fp4_fraction=0.9, probe_tokens=None, backend="emulated", **SCHEDULE)
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Loop:
    """Trains on all ranks of the process group, or in this process if there is none.

    Args:
        folder: gets `snip/`.
        wrapper: "ddp" or "fsdp2", where there are several ranks.
        seed: of the weights; other ones show that they were loaded.
        in_bf16: whether the model is wider and computes in BF16, as FP8 tensor cores want it.
    """

    def __init__(
        self,
        folder: Path,
        config: SnipConfig = CONFIG,
        wrapper: str = "ddp",
        dropout: float = 0.0,
        seed: int = 0,
        in_bf16: bool = False,
    ) -> None:
        precision = "bf16" if in_bf16 else "no"
        self.accelerator = accelerator(wrapper, mixed_precision=precision, state_dict_type="SHARDED_STATE_DICT")
        self.rank, self.ranks = self.accelerator.process_index, self.accelerator.num_processes
        hidden = 128 if in_bf16 else 32
        self.bare = tiny_llama(seed, hidden=hidden, layers=2, attention_dropout=dropout).train().to(device())
        convert_model(self.bare, config)
        # A large eps: Adam makes whole steps of gradients that differ in their last bits alone where both are tiny.
        optimizer = torch.optim.AdamW(self.bare.parameters(), lr=1e-2, eps=1e-4)
        torch.manual_seed(7 + self.rank)
        self.model, self.optimizer = self.accelerator.prepare(self.bare, optimizer)
        self.controller = SnipController(self.model, self.optimizer, config, self.accelerator, folder)
        self.losses: dict[int, float] = {}
        self.plans: dict[int, dict[str, dict[str, str]]] = {}

    @property
    def at(self) -> int:
        """The optimizer step that is under way, or comes next."""
        return self.controller.step + 1

    def run(self, until: int) -> Loop:
        """Trains up to and with this step."""
        while self.at <= until:
            self._take_step(self.at)
        return self

    def close(self) -> dict[str, Any]:
        """Ends the run and returns what became of it; the same on all ranks."""
        self.controller.close()
        return {"losses": self.losses, "plans": self.plans, "weights": self.weights()}

    def weights(self) -> dict[str, Tensor]:
        """Returns whole copies. Collective where they are sharded."""
        found: dict[str, Tensor] = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        return {name: tensor.clone() for name, tensor in found.items()}

    def batch(self, step: int) -> dict[str, Tensor]:
        rows = slice(self.rank * ROWS // self.ranks, (self.rank + 1) * ROWS // self.ranks)
        return {name: tensor[rows].to(device()) for name, tensor in text(ROWS, LENGTH, step).items()}

    def capture(self, batch: dict[str, Tensor]) -> None:
        self.controller.capture(batch)

    def after_backward(self) -> None:
        """Does nothing; tests replace it to spoil gradients."""

    def _take_step(self, step: int) -> None:
        batch = self.batch(step)
        self.capture(batch)
        loss = self.model(**batch).loss
        self.accelerator.backward(loss)
        self.after_backward()
        self.controller.before_optimizer_step(step)
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        finite = [torch.isfinite(_own(gradient)).all() for gradient in gradients]
        figures = torch.stack([loss.detach(), torch.stack(finite).all().logical_not().to(loss.dtype)])
        if self.ranks > 1:
            dist.all_reduce(figures)
        if figures[1] > 0:  # as careful loops do
            self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.controller.after_step(step)
        self.losses[step] = float(figures[0]) / self.ranks
        self.plans[step] = plan_of(self.controller)

    def save(self, folder: Path) -> None:
        """Saves as Accelerate does, under FSDP2 in shards; and whole, as plain transformers reads it."""
        self.accelerator.save_state(str(folder / "accelerate"))
        weights = get_model_state_dict(self.model, options=_WHOLE)
        moments = get_optimizer_state_dict(self.model, self._inner, options=_WHOLE)
        if self.rank == 0:
            self.bare.save_pretrained(folder / "whole", state_dict=weights)
            torch.save(moments, folder / "whole" / "optimizer.pt")
            write_json_atomic(folder / "snip_state.json", self.controller.state_dict())
        self.accelerator.wait_for_everyone()

    def load(self, folder: Path, how: str) -> Loop:
        """Goes on from a folder of `save`.

        Args:
            how: "accelerate" on as many ranks, or from one process under DDP; "whole" on any number; "shards" on one.
        """
        if how == "accelerate":
            self.accelerator.load_state(str(folder / "accelerate"))
        elif how == "whole":
            weights = load_file(folder / "whole" / "model.safetensors")
            moments = torch.load(folder / "whole" / "optimizer.pt", weights_only=True)
            set_model_state_dict(self.model, weights, options=_WHOLE)
            set_optimizer_state_dict(self.model, self._inner, moments, options=_WHOLE)
        else:
            weights, moments = get_model_state_dict(self.bare), get_optimizer_state_dict(self.bare, self._inner)
            for name, part, state in (("pytorch_model_fsdp", "model", weights), ("optimizer", "optimizer", moments)):
                dcp.load({part: state}, checkpoint_id=folder / "accelerate" / f"{name}_0", no_dist=True)
            set_model_state_dict(self.bare, weights)
            set_optimizer_state_dict(self.bare, self._inner, moments)
        self.controller.load_state_dict(read_json(folder / "snip_state.json"))
        return self

    @property
    def _inner(self) -> torch.optim.Optimizer:
        inner: torch.optim.Optimizer = self.optimizer.optimizer
        return inner


def plan_of(controller: SnipController) -> dict[str, dict[str, str]]:
    return {name: dict(row) for name, row in controller.plan.assignment.items()}


def history(folder: Path) -> list[dict[str, Any]]:
    """Returns the refreshes and checks in the history of a run, without what was measured."""
    lines = [json.loads(line) for line in (folder / "snip" / "history.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["event"] != "coverage"]
    return [{key: line[key] for key in line if key not in ("seconds", "memory_mib")} for line in lines[1:]]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives an attribute another value for the time of the context."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
