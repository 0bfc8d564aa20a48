"""Trains models that transformers shards itself. Started by the tests in several processes, or called in one.

Arguments: a folder with the model in `model/`, which gets rank<N>.pt with {name: what became of the run}; names of
`SIZES` for loops, or with "trainer-" for runs of the Trainer and of DDP.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from comparing import read_run
from configs import fp4_config
from devices import join, trainers_that_split
from loops import plan_of
from small import text
from tiny_runs import SCHEDULE
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

from snip_hf import SnipCallback, SnipController
from snip_hf.json_io import read_json, write_json_atomic
from snip_hf.parallel.sharding import own_part, whole

STEPS, SAVE = 6, 2  # in the middle of the refresh of step 1 or 2, which is applied two steps later
SIZES = {
    "fsdp": {"fsdp_size": 2},
    "hsdp": {"fsdp_size": 2, "dp_replicate_size": 2},
    "tp": {"tp_size": 2},
    "fsdp-tp": {"fsdp_size": 2, "tp_size": 2},
}
PROBED = {"first_refresh": 1, "start_format": "bf16"}
"""Before the probe nothing is rounded, so that its table can be compared closely."""
UNIFORM = ("fp4", "fp8", "mxfp4")
ROWS, LENGTH = 4, 128  # of all ranks together; one tile, so that whole tiles are of one rank


def load(folder: Path, sizes: dict[str, int]) -> Any:
    """Loads the model, sharded if there are sizes."""
    sharding = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, **sharding)


def loop(
    folder: Path, name: str, sizes: dict[str, int], resumes: bool = False, steps: int = STEPS, **config: Any
) -> dict[str, Any]:
    """Trains in a plain loop, on all ranks or in this process; the run that is not resumed saves.

    Args:
        config: changes of the configuration.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    shards = 1 if name == "disagreeing" else sizes.get("tp_size", 1)
    model = load(folder, sizes)
    # A large eps: Adam makes whole steps of gradients that differ in their last bits alone where both are tiny.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    chosen = fp4_config(**{**SCHEDULE, "target_fp4_fraction": 0.5, "probe_tokens": None, **config})
    controller = SnipController(model, optimizer, chosen, output_dir=folder / name, max_steps=steps)
    parts = [parameter.detach() for parameter in model.parameters()]
    saved = folder / f"{name}-rank{rank}"
    if resumes:
        state = torch.load(saved / "tensors.pt", weights_only=True)
        for part, value in zip(parts, state["weights"], strict=True):
            own_part(part).copy_(value)
        optimizer.load_state_dict(state["optimizer"])
        controller.load_state_dict(read_json(saved / "snip.json"))
    losses = []
    while controller.step < steps:
        step, own = controller.step + 1, slice(rank // shards * ROWS * shards // ranks, None)
        batch = {key: value[own][: ROWS * shards // ranks] for key, value in text(ROWS, LENGTH, step).items()}
        controller.capture(batch)
        loss = model(**batch).loss
        loss.backward()
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
        losses.append(_mean(loss.detach()))
        if step == SAVE and not resumes:
            saved.mkdir(parents=True)
            weights = [own_part(part).clone() for part in parts]
            torch.save({"weights": weights, "optimizer": optimizer.state_dict()}, saved / "tensors.pt")
            write_json_atomic(saved / "snip.json", controller.state_dict())
    controller.close()
    return {"losses": losses, **_found(model, controller, folder / name)}


def by_trainer(folder: Path, name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Trains by the Trainer on all ranks, under DDP without sizes, or in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    model = load(folder, sizes)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    rows = text(64, 32)["input_ids"]
    arguments = TrainingArguments(
        str(folder / name),
        max_steps=STEPS,
        save_strategy="no",
        per_device_train_batch_size=4 * sizes.get("tp_size", 1) // ranks,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        adam_epsilon=1e-4,  # as in `loop`
        use_cpu=True,
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
    )
    callback = SnipCallback(fp4_config(**{**SCHEDULE, **PROBED}, target_fp4_fraction=0.5), keep_formats=True)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train()
    assert callback.controller is not None
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return {"losses": losses, **_found(model, callback.controller, folder / name)}


def _found(model: nn.Module, controller: SnipController, folder: Path) -> dict[str, Any]:
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    return {
        "plan": plan_of(controller),
        "weights": {key: whole(value.detach()).clone() for key, value in model.named_parameters()},
        "kinds": {type(parameter.data).__name__ for parameter in model.parameters()},
        "tables": read_run(folder / "snip")[2] if is_first else {},
    }


def _refusal(folder: Path, sizes: dict[str, int]) -> str:
    """Returns the error of ranks that split the model and see different rows."""
    try:
        loop(folder, "disagreeing", sizes)
    except ValueError as error:
        return str(error)
    return ""


def _mean(loss: Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return float(loss)


def main() -> None:
    folder = Path(sys.argv[1])
    join(sys.argv)
    found: dict[str, Any] = {}
    for name in sys.argv[2:]:
        sizes, config = SIZES[name.removeprefix("trainer-")], {}
        if name.startswith("trainer-"):
            with trainers_that_split():
                found[name] = by_trainer(folder, name, sizes)
            if "tp_size" not in sizes:
                found["ddp"] = by_trainer(folder, "ddp", {})
            continue
        if "tp_size" in sizes:
            config = PROBED
            found |= {fmt: loop(folder, fmt, sizes, steps=2, policy=f"uniform-{fmt}") for fmt in UNIFORM}
            found["disagreeing"] = _refusal(folder, sizes)
        found[name] = loop(folder, name, sizes, **config)
        found[f"{name}-resumed"] = loop(folder, name, sizes, resumes=True, **config)
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
