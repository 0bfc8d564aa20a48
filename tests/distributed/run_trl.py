"""Trains under TRL's trainers on all ranks, saves, and goes on from the checkpoint. Started by the tests.

Argument: a folder, for rank<N>.pt with {case: {"whole" and, if one of `RESUMED`, "resumed": what `_found` notes}}.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import half_attention
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from devices import trainers_that_shard, trainers_that_split
from trl_runs import CONFIG, TRLRun, run, saved_model

from snip_hf import SnipCallback
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.sharding import is_sharded, whole


class Case(NamedTuple):
    """A training: its trainer, with or without adapters and shards."""

    trainer: str
    has_adapters: bool = False
    shards: bool = False
    """By FSDP2; the ranks have copies otherwise, under DDP."""
    has_packs: bool = False
    """In single rows, as long as the texts of a rank are together."""
    has_parts: bool = False
    """Of rows that the ranks share by context parallelism."""


# Refreshes at step 2, applied after step 4, and at step 6.
CASES = {
    "SFT": Case("SFT"),
    "DPO": Case("DPO"),
    "DPO of adapters": Case("DPO", has_adapters=True),
    "SFT in shards": Case("SFT", shards=True),
    "DPO in shards of adapters": Case("DPO", has_adapters=True, shards=True),
    "SFT of packs": Case("SFT", has_packs=True),
    "SFT in shards of packs": Case("SFT", shards=True, has_packs=True),
    "SFT in shards of parts": Case("SFT", shards=True, has_parts=True),
}
RESUMED = ("DPO", "DPO in shards of adapters", "SFT in shards of parts")
SAVED = 3
"""The step of the checkpoint, in the middle of a refresh."""
STEPS = 8


def train(folder: Path, case: str, model: str, resume: Path | None = None) -> dict[str, Any]:
    """Trains to the end, from the beginning or from a checkpoint."""
    trainer, has_adapters, shards, has_packs, has_parts = CASES[case]
    callback = SnipCallback(CONFIG, keep_formats=True)
    how: dict[str, Any] = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": SAVED}
    if has_adapters:
        from peft import LoraConfig

        how["more"] = {"peft_config": LoraConfig(r=4, target_modules="all-linear")}
    if shards:
        how |= {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    if has_packs:
        how |= {"padding_free": True, "max_length": None}
    if has_packs and not shards:  # which have no autocast on CPUs
        how |= {"bf16": True, "model_init_kwargs": {"attn_implementation": half_attention.NAME}}
    if has_parts:
        how |= {"parallelism_config": ParallelismConfig(cp_size=2), "pad_to_multiple_of": 4}
    splitting = trainers_that_split() if has_parts else nullcontext()
    with half_attention.registered(), splitting, trainers_that_shard() if shards else nullcontext():
        return _found(run(folder, trainer, callback=callback, model=model, resume=resume, **how), callback)


def _found(trained: TRLRun, callback: SnipCallback) -> dict[str, Any]:
    assert callback.controller is not None
    reference = getattr(trained.trainer, "ref_model", None)
    model = trained.trainer.model
    return {
        "ranks": trained.trainer.accelerator.num_processes,
        "logged": trained.logged,
        "plan": {layer: dict(formats) for layer, formats in callback.controller.plan.assignment.items()},
        "coverage": callback.controller.coverage and callback.controller.coverage.to_dict(),
        "refreshes": [(line["step"], line["status"]) for line in trained.refreshes] if dist.get_rank() == 0 else [],
        "are_sharded": {is_sharded(parameter) for parameter in model.parameters()},
        "weights": {name: whole(tensor).clone() for name, tensor in model.state_dict().items()},
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
        if case in RESUMED:
            found[case]["resumed"] = train(own, case, str(own / "model"), own / f"checkpoint-{SAVED}")
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
