"""Trains under TRL's trainers on all ranks, saves, and goes on from the checkpoint. Started by the tests.

Argument: a folder, for rank<N>.pt with {case: {"whole" and "resumed": what `_found` notes}}.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from trl_runs import CONFIG, TRLRun, run, saved_model

from snip_hf import SnipCallback
from snip_hf.layers.state import snip_linears

# Case -> trainer, whether adapters are trained. Refreshes at step 2, applied after step 4, and at step 6.
CASES = {"SFT of adapters": ("SFT", True), "DPO": ("DPO", False), "DPO of adapters": ("DPO", True)}
SAVED = 3
"""The step of the checkpoint, in the middle of a refresh."""
STEPS = 8


def train(folder: Path, case: str, model: str, resume: Path | None = None) -> dict[str, Any]:
    """Trains to the end, from the beginning or from a checkpoint."""
    trainer, has_adapters = CASES[case]
    callback = SnipCallback(CONFIG)
    how: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED}
    if has_adapters:
        from peft import LoraConfig

        how["more"] = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    return _found(run(folder, trainer, callback=callback, model=model, resume=resume, **how), callback)


def _found(trained: TRLRun, callback: SnipCallback) -> dict[str, Any]:
    assert callback.controller is not None
    reference = getattr(trained.trainer, "ref_model", None)
    return {
        "ranks": trained.trainer.accelerator.num_processes,
        "logged": trained.logged,
        "plan": {layer: dict(formats) for layer, formats in callback.controller.plan.assignment.items()},
        "refreshes": [(line["step"], line["status"]) for line in trained.refreshes] if dist.get_rank() == 0 else [],
        "weights": {name: tensor.clone() for name, tensor in trained.trainer.model.state_dict().items()},
        "reference": {} if reference is None else {n: layer.formats for n, layer in snip_linears(reference).items()},
    }


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    found = {}
    for case in CASES:
        own = folder / case.replace(" ", "-")
        if dist.get_rank() == 0:
            saved_model(own / "model")
        dist.barrier()
        found[case] = {"whole": train(own, case, str(own / "model"))}
        dist.barrier()
        checkpoint = own / f"checkpoint-{SAVED}"
        found[case]["resumed"] = train(own, case, str(own / "model"), checkpoint)
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
