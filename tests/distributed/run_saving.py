"""Saves and resumes runs on all ranks. Started by the tests in several processes.

Arguments: a folder, which gets rank<N>.pt with {name: what became of the run}; "nccl" for GPUs. Without that, the
folder has `one/`, which one process saved.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from configs import fp4_config
from devices import NCCL, join
from loops import CONFIG, Loop, plan_of
from tiny_runs import SCHEDULE, train
from transformers import TrainerCallback

from snip_hf import SnipCallback
from snip_hf.integrations.trainer_loss import find_trainer

STEPS = 8
# The step of the checkpoint. Refreshes at steps 2 and 6 are applied after steps 4 and 8: in the middle of one.
SAVED = 3
# Saved run -> the way in which as many ranks load it again.
WRAPPERS = {"ddp": ("accelerate", 0.1), "fsdp2": ("accelerate", 0.0), "fsdp2-whole": ("whole", 0.0)}
# On GPUs: what is saved -> wrapper, dropout, and further settings of the loop. "hopper" has
# the backend that "auto" takes for the formats of the preset.
HOPPER = fp4_config(probe_tokens=None, **SCHEDULE)
ON_GPUS: dict[str, tuple[str, float, dict[str, Any]]] = {
    "ddp": ("ddp", 0.1, {"config": CONFIG}),
    "fsdp2": ("fsdp2", 0.0, {"config": CONFIG}),
    "hopper": ("ddp", 0.0, {"config": HOPPER, "in_bf16": True}),
}


def uninterrupted(folder: Path, wrapper: str, dropout: float = 0.0, **options: Any) -> dict[str, Any]:
    """Trains and saves, each rank into a folder of its own but for the checkpoints.

    Args:
        options: further ones of the loop.
    """
    run = Loop(folder / f"rank{_rank()}", wrapper=wrapper, dropout=dropout, **options)
    run.run(SAVED).save(folder / "checkpoint")
    return run.run(STEPS).close()


def resumed(
    saved: Path, folder: Path, how: str, wrapper: str = "ddp", dropout: float = 0.0, **options: Any
) -> dict[str, Any]:
    """Goes on from a checkpoint with other weights, whose rank 0 left its history where it had been."""
    if _rank() == 0:
        shutil.copytree(saved / "rank0", folder / "rank0")
    run = Loop(folder / f"rank{_rank()}", wrapper=wrapper, dropout=dropout, seed=1, **options)
    return run.load(saved / "checkpoint", how).run(STEPS).close()


class SavesEarly(TrainerCallback):
    """Saves a checkpoint at the end of a step before SNIP's callback, which ends the step on all ranks."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = find_trainer(state)
        if trainer is not None and state.global_step == 4:
            trainer._save_checkpoint(trainer.model, trial=None)


def trainers(folder: Path) -> dict[str, Any]:
    """Trains under the Trainer; then the second rank sees another file system, without a `snip_state.json`."""
    config, saving = (
        fp4_config(**SCHEDULE),
        {"save_strategy": "steps", "save_steps": 6, "max_steps": 6, "gradient_accumulation_steps": 2},
    )
    first = SnipCallback(config, keep_formats=True)
    whole = train(folder / "shared", callback=first, trainer={"callbacks": [SavesEarly(), first]}, **saving)
    dist.barrier()
    own = folder / f"rank{_rank()}"
    here = shutil.copytree(folder / "shared" / "checkpoint-4", own / "checkpoint-4")
    if _rank() == 0:
        shutil.copytree(folder / "shared" / "snip", own / "snip")
    else:
        (here / "snip_state.json").unlink()
    callback = SnipCallback(config)
    again = train(own, callback=callback, resume=here, **saving)
    assert callback.controller is not None and whole.callback is not None and whole.callback.controller is not None
    return {
        # Step 4 is logged after the checkpoint was saved, whose run so lacks it.
        "losses": [
            [line for line in run.trainer.state.log_history if "loss" in line and line["step"] != 4]
            for run in (whole, again)
        ],
        "plans": [plan_of(run.callback.controller) for run in (whole, again)],
        "weights": [
            {name: tensor.clone() for name, tensor in run.model.state_dict().items()} for run in (whole, again)
        ],
    }


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def over_gloo(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (how, dropout) in WRAPPERS.items():
        wrapper = name.removesuffix("-whole")
        saved = folder / wrapper
        if wrapper == name:
            found[name] = uninterrupted(saved, wrapper, dropout)
        again = f"{name}-resumed"
        found[again] = resumed(saved, folder / again, how, wrapper, dropout)
    for wrapper, how in (("ddp", "accelerate"), ("fsdp2", "whole")):
        again = f"one-{wrapper}-resumed"
        found[again] = resumed(folder / "one", folder / again, how, wrapper)
    found["trainer"] = trainers(folder / "trainer")
    return found


def on_gpus(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (wrapper, dropout, options) in ON_GPUS.items():
        saved, again = folder / name, f"{name}-resumed"
        found[name] = uninterrupted(saved, wrapper, dropout, **options)
        found[again] = resumed(saved, folder / again, "accelerate", wrapper, dropout, **options)
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    join(sys.argv)
    found = on_gpus(folder) if NCCL in sys.argv else over_gloo(folder)
    torch.save(found, folder / f"rank{_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
