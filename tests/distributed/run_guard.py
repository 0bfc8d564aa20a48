"""Trains under a guard on all ranks; one of them alone sees that something is wrong. Started by the tests.

Arguments: a folder, for rank<N>.pt with what `main` notes; "nccl" for GPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from configs import fp4_config
from devices import join, on_gpu
from loops import Loop
from tiny_runs import SCHEDULE, arguments, data, model_with_dropout
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback

from snip_hf import SnipCallback, SnipConfig, restore_model
from snip_hf.layers.state import snip_linears
from snip_hf.training import guard

EMULATED = {"backend": "emulated"}  # FP32, which no other backend computes in
OPTIONS: dict[str, Any] = {**SCHEDULE, **EMULATED, "guard_patience": 3}
guard.WINDOW, guard.SPIKE = 8, 20.0
RAISING = fp4_config(guard="raise", **OPTIONS)


class Provoke(TrainerCallback):
    """Adds to the loss of some steps on the second rank, which leaves the gradients alone; notes the formats."""

    def __init__(self, model: Any, added: dict[int, float]) -> None:
        self.step, self.added = 0, added if dist.get_rank() == 1 else {}
        self.formats: dict[int, list[str]] = {}
        inner = model.loss_function
        model.loss_function = lambda **kwargs: inner(**kwargs) + self.added.get(self.step, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step = state.global_step + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        layers = snip_linears(kwargs["model"]).values()
        self.formats[state.global_step] = sorted({name for layer in layers for name in layer.formats.values()})


def trained(folder: Path, config: SnipConfig, added: dict[int, float], **changes: Any) -> dict[str, Any]:
    """Trains under DDP."""
    model = model_with_dropout()
    provoke = Provoke(model, added)
    args = arguments(
        folder, learning_rate=1e-3, max_steps=8, gradient_accumulation_steps=2, use_cpu=not on_gpu(), **changes
    )
    trainer = Trainer(model, args, train_dataset=data(), callbacks=[SnipCallback(config), provoke])
    trainer.train()
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    return {"formats": provoke.formats, "weights": weights}


def norms(folder: Path, wrapper: str) -> list[float]:
    """Returns the gradient norms of three steps as the guard saw them, under DDP or sharded by FSDP2."""
    config = fp4_config(policy="bf16", guard="raise", **EMULATED)
    loop = Loop(folder / f"{wrapper}{dist.get_rank()}", config, wrapper)
    loop.run(3)
    found: list[float] = loop.controller.state_dict()["guard"]["recent"]["gradient norm"]
    loop.close()
    return found


def plain_again(folder: Path) -> dict[str, Any]:
    """Restores a model that FSDP2 shards, and runs it: in the formats, and plain."""
    loop = Loop(folder / f"plain{dist.get_rank()}", fp4_config(policy="uniform-fp4", **EMULATED), "fsdp2")
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(float(loop.model(**loop.batch(1)).loss))
        restore_model(loop.bare)
    # Parameters of the root stay gathered after a pass without gradients.
    sharded = all(isinstance(parameter, DTensor) for parameter in loop.bare.model.layers.parameters())
    return {"losses": losses, "sharded": sharded, "layers": len(snip_linears(loop.bare))}


def main() -> None:
    folder = Path(sys.argv[1])
    join(sys.argv)
    found = {
        "raised": trained(folder / "raised", RAISING, {6: 1e4}),
        "plain": plain_again(folder),
        "norms": {wrapper: norms(folder, wrapper) for wrapper in ("ddp", "fsdp2")},
    }
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
