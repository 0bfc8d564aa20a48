"""Runs the recipe of a pipeline, four stages on two processes. Started by the tests.

Arguments: a folder, for rank<N>.pt with what was seen.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comparing import read_run
from configs import fp4_config
from pipeline import Training
from pipeline_case import CHUNKS, CONFIG, LAST, ROWS, STAGES, STEPS, batch_of
from torch import Tensor

from snip_hf import SnipConfig, SnipController
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.pipeline import Pipeline
from snip_hf.training import setup


def train(
    training: Training, config: SnipConfig, folder: Path | None, steps: int
) -> tuple[SnipController, list[Any], dict[str, dict[str, str]]]:
    """Returns the controller, the losses (None where they are not known) and layer -> formats at the end."""
    parameters = [parameter for part in training.parts for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    controller = SnipController(training.parts, optimizer, config, output_dir=folder, pipeline=Pipeline(training.run))
    losses = []
    for step in range(1, steps + 1):
        batch = batch_of(step)
        controller.capture(batch)
        loss = training.run(batch)
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
        losses.append(None if loss is None else float(loss))
    in_force = {name: layer.formats for part in training.parts for name, layer in snip_linears(part).items()}
    controller.close()
    return controller, losses, in_force


def chunk_gradients(training: Training, fmt: str) -> list[Tensor]:
    """Returns chunk -> the gradient that the last layer hands on, of chunks that are all alike; empty elsewhere."""
    parameters = [parameter for part in training.parts for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    config = fp4_config(policy=f"uniform-{fmt}", stages=STAGES)
    controller = SnipController(training.parts, optimizer, config, pipeline=Pipeline(training.run))
    seen: list[Tensor] = []
    handles = [
        layer.register_full_backward_hook(lambda layer, gradients, of_outputs: seen.append(gradients[0].clone()))
        for part in training.parts
        for name, layer in snip_linears(part).items()
        if name == LAST
    ]
    alike = {name: tensor[:1].expand(ROWS, -1).contiguous() for name, tensor in batch_of(1).items()}
    controller.capture(alike)
    training.run(alike)
    optimizer.zero_grad()
    controller.close()
    for handle in handles:
        handle.remove()
    return seen


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    training = Training(STAGES, CHUNKS, torch.device("cpu"))
    found: dict[str, Any] = {
        "weights": {name: tensor.clone() for part in training.parts for name, tensor in part.state_dict().items()},
        "model_config": training.parts[0].config.to_dict(),
    }
    controller, found["losses"], found["in_force"] = train(training, fp4_config(**CONFIG), folder / "plan", STEPS)
    found["plan"] = {name: dict(row) for name, row in controller.plan.assignment.items()}
    found["shares"] = controller.plan.stage_fp4_fractions
    found["stages"] = controller.plan.stages
    if dist.get_rank() == 0:
        _, losses, tables = read_run(folder / "plan" / "snip")
        found["probe_loss"], found["table"] = losses[1], tables[1]
    found["chunks"] = {fmt: chunk_gradients(training, fmt) for fmt in ("fp8", "fp4")}
    controller, *_ = train(training, fp4_config(**CONFIG, policy="snip-paper"), folder / "noise", 2)
    found["noise plan"] = {name: dict(row) for name, row in controller.plan.assignment.items()}
    if dist.get_rank() == 0:
        found["noise table"] = read_run(folder / "noise" / "snip")[2][1]
    # Names of one block, which one process has alone.
    skipping = fp4_config(**CONFIG, skip_modules=("model.layers.7.*",), solver_time_limit=5)
    try:
        setup.RANK_GRACE = 10.0
        controller, *_ = train(training, skipping, None, 2)
        found["skipping"] = list(controller.plan.assignment)
    except Exception as error:
        found["skipping"] = f"{type(error).__name__}: {error}"
    torch.save(found, folder / f"rank{dist.get_rank()}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
