"""Two processes under DeepSpeed note what they see of their weights. Started with `accelerate launch`.

Arguments: a folder, for `rank<N>.pt` with {scenario: what `train` returns}.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import zero_scenarios
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from zero_scenarios import SCENARIOS, STEPS, Scenario

from snip_hf.estimation.batch import Batch
from snip_hf.estimation.passes import run_pass
from snip_hf.optimizers.deepspeed_zero import ZeroOptimizer, find_zero
from snip_hf.parallel.sharding import whole
from snip_hf.parallel.zero3 import partitions_as_shards


def train(scenario: Scenario, watch: bool) -> dict[str, Any]:
    """Returns the weights after some steps, and what was seen before each of them if somebody watched."""
    AcceleratorState._reset_state(reset_partial_state=False)
    unset_hf_deepspeed_config()  # under ZeRO-3 models are built in parts, with other random numbers
    model, adamw = zero_scenarios.model_and_optimizer()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=scenario.config()))
    assert accelerator.num_processes == zero_scenarios.RANKS
    data = DataLoader(zero_scenarios.rows(), batch_size=zero_scenarios.ROWS)
    engine, optimizer, _ = accelerator.prepare(model, adamw, data)
    zero = find_zero(optimizer)  # as from a Trainer's callback
    assert zero is not None
    seen: list[dict[str, Any]] = []
    handle = None
    if watch:
        assert type(find_zero(adamw, engine)) is type(find_zero(adamw, accelerator))
        assert isinstance(zero, ZeroOptimizer)
        batch = Batch.of(zero_scenarios.batch(0, 0, accelerator.process_index))

        def look() -> None:
            with partitions_as_shards(model):
                run_pass(model, batch, {})
                seen.append(observe(zero, dict(model.named_parameters())))

        handle = zero.before_step(look)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = zero_scenarios.learning_rate(step) * group["relative"]
        for micro_batch in range(scenario.micro_batches):
            with accelerator.accumulate(engine):
                loss = engine(**zero_scenarios.batch(step, micro_batch, accelerator.process_index)).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    count = len(seen)
    if handle is not None:
        assert "step" in vars(engine.optimizer)
        handle.remove()
        assert "step" not in vars(engine.optimizer)
    with partitions_as_shards(model):
        weights = {name: whole(weight.detach()).clone() for name, weight in model.named_parameters()}
    engine.destroy()
    return {"seen": seen, "weights": weights, "looks": count, "class": type(engine.optimizer).__name__}


def observe(zero: ZeroOptimizer, weights: dict[str, Any]) -> dict[str, Any]:
    factor = zero.clip_factor()
    answers, gradients = zero.responses(weights), zero.gradients(weights, factor)
    found: dict[str, Any] = {"factor": factor, "rule": zero.rule}
    for name, weight in weights.items():
        at = zero.context(weight)
        found[name] = {
            "gradient": whole(zero.gradient(weight)).clone(),
            "group": {key: value for key, value in at.group.items() if key != "params"},
            "state": {key: whole(value).clone() for key, value in at.state.items()},
            "weight": whole(at.parameter).clone(),
            "update": answers[name].gathered().update(whole(gradients[name])),
        }
    return found


if __name__ == "__main__":
    # Of inference only. DeepSpeed compiles it for 45 processor seconds wherever it was installed anew.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Left alone, Accelerate takes each of DeepSpeed's processes on CPUs for the only one.
    PartialState(backend="gloo")
    found = {}
    for name, scenario in SCENARIOS.items():
        found[name] = train(scenario, watch=True) | {"unwatched": train(scenario, watch=False)["weights"]}
    rank = torch.distributed.get_rank()
    torch.save(found, Path(sys.argv[1]) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()
