"""Builds and runs controllers of two ranks that do not have the same, and notes with which errors that ends.

Argument: a folder, for rank<N>.json with scenario -> error as text, "" for none; and for the messages of the log.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import half_attention
import torch
import torch.distributed as dist
from configs import fp4_config
from expert_models import CONFIGS
from own_loop import take_steps
from run_distributed_config import EXPERT_PARALLEL
from small import text, tiny_llama
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.distributed import DistributedConfig

from snip_hf import PrecisionPlan, SnipConfig, SnipController, convert_model
from snip_hf.costs.flops import linear_flops
from snip_hf.layers.convert import restore_model
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.ranks import Ranks
from snip_hf.planning.plan import PlanProvenance
from snip_hf.training import setup
from snip_hf.training.checkpoint import weights_fingerprint

BOUND = 3.0
QUICK: dict[str, Any] = {"solver_time_limit": 2.0, "solver": "greedy", "probe_tokens": None}
setup.RANK_GRACE = 1.0
CONFIG = fp4_config(first_refresh=2, apply_delay=0, **QUICK)
RULE = fp4_config(policy="layer-position")


def controller(
    config: SnipConfig = CONFIG,
    frozen: str | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    **options: Any,
) -> SnipController:
    model = tiny_llama(hidden=32, layers=2).to(dtype)
    model.set_attn_implementation(attention)
    if frozen is not None:
        model.get_submodule(frozen).weight.requires_grad_(False)
    kind = options.pop("optimizer", torch.optim.SGD)
    return SnipController(model, kind(model.parameters(), lr=0.1), config, **options)


def controller_of(layers: int) -> SnipController:
    model = tiny_llama(hidden=32, layers=layers)
    return SnipController(model, torch.optim.SGD(model.parameters(), lr=0.1), CONFIG)


def plans(folder: Path) -> SnipController:
    """Each rank has a file of that name in its own file system, with another content."""
    rank = dist.get_rank()
    flops = linear_flops_of(tiny_llama(hidden=32, layers=2))
    provenance = PlanProvenance(step=0, policy="uniform-fp8")
    plan = PrecisionPlan.uniform(flops, "fp4" if rank else "fp8", [list(flops)], provenance)
    own = folder / f"files-of-rank{rank}"
    own.mkdir()
    plan.save(own / "plan.json")
    before = os.getcwd()
    os.chdir(own)
    try:
        return controller(fp4_config(fixed_plan="plan.json", **QUICK))
    finally:
        os.chdir(before)


def linear_flops_of(model: Any) -> Any:
    convert_model(model, CONFIG)
    return linear_flops(model)


def one_rank_restored_a_layer() -> None:
    """Restores a layer in mid-run: both ranks notice at the refresh, which fails; the run goes on."""
    run = controller()
    if dist.get_rank() == 1:
        block = run.model.model.layers[1]
        restore_model(block.mlp)
    _steps(run, 2)


def packs_without_ends() -> None:
    """The last sequence of one rank's packs has no end: both ranks lose the refresh, and the run goes on."""
    ends = [0, 50, 100 if dist.get_rank() else 128]
    with half_attention.registered() as attention:
        run = controller(dtype=torch.bfloat16, attention=attention)
        _steps(run, 3, rows=1, cu_seq_lens_q=torch.tensor(ends, dtype=torch.int32))


def _steps(run: SnipController, last: int, rows: int = 2, **captured: Tensor) -> None:
    batches = [text(rows, 128, dist.get_rank())] * (last - run.step)
    take_steps(run.model, run._source._optimizer, run, batches, **captured)


def states() -> None:
    """The ranks load states with different plans."""
    run = controller()
    state = json.loads(json.dumps(run.state_dict()))
    if dist.get_rank() == 1:
        for formats in state["plan"]["assignment"].values():
            formats["forward"] = "fp4"
    try:
        run.load_state_dict(state)
    finally:
        assert {fmt for layer in snip_linears(run.model).values() for fmt in layer.formats.values()} == {"fp8"}


def sharded() -> None:
    """Checks that the shards of the first rank describe the weights as the whole model does."""
    model = tiny_llama(hidden=32, layers=2)
    expected = weights_fingerprint(model)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    assert dist.get_rank() > 0 or weights_fingerprint(model) == expected


def too_few_batches() -> None:
    """The second rank does one step, the first one a second."""
    run = controller()
    _steps(run, 1)
    if dist.get_rank() == 0:
        _steps(run, 2)


def without_a_controller() -> None:
    if dist.get_rank() == 0:
        controller(fp4_config(**QUICK | {"solver_time_limit": 2.5}))


def shared(
    folder: Path, config: PretrainedConfig, attention: str = "sdpa", snip: SnipConfig = CONFIG, **sizes: int
) -> SnipController:
    """Lets two ranks share a model from a checkpoint by transformers' `DistributedConfig`."""
    if dist.get_rank() == 0:
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    how = DistributedConfig(**{"tp_size": 2, **sizes})
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=how, attn_implementation=attention)
    return SnipController(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), snip)


def spread_by_a_rule(folder: Path) -> None:
    """Trains a model whose experts are spread over the ranks under a policy without a probe."""
    run = shared(folder, CONFIGS["qwen3-moe"], snip=RULE, **EXPERT_PARALLEL)
    assert sum("experts" in name for name in snip_linears(run.model)) == 4
    batch = {name: ids % run.model.config.vocab_size for name, ids in text(2, 32).items()}
    losses = take_steps(run.model, run._source._optimizer, run, [batch] * 3)
    run.close()
    assert losses == sorted(losses, reverse=True)


def changed(**values: int) -> PretrainedConfig:
    config = tiny_llama(hidden=32, layers=2).config
    for name, value in values.items():
        setattr(config, name, value)
    return config


def three_experts() -> PretrainedConfig:
    config = deepcopy(CONFIGS["qwen3-moe"])
    config.num_experts = 3
    return config


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Ranks.log_after = 0.5
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("snip_hf").addHandler(handler)
    scenarios: dict[str, Callable[[], Any]] = {
        "plans": lambda: plans(folder),
        "layers": lambda: controller_of(3 - rank),
        "frozen": lambda: controller(frozen="model.layers.1.mlp.up_proj" if rank else None),
        "refused": lambda: controller(optimizer=torch.optim.Rprop if rank else torch.optim.SGD),
        "max_steps": lambda: controller(max_steps=10 + rank),
        "restored": one_rank_restored_a_layer,
        "packs": packs_without_ends,
        "states": states,
        "sharded": sharded,
        "odd features": lambda: shared(folder / "odd", changed(intermediate_size=45)),
        "one head": lambda: shared(folder / "head", changed(num_key_value_heads=1)),
        "attention": lambda: shared(folder / "attention", changed(), "eager" if rank else "sdpa"),
        "three experts": lambda: shared(folder / "experts", three_experts(), **EXPERT_PARALLEL),
        "stages": lambda: shared(folder / "stages", changed(), snip=RULE, tp_size=1, pp_size=2),
        "experts by a rule": lambda: spread_by_a_rule(folder / "experts"),
        # Last, since who is waited for in vain is lost to the other.
        "batches": too_few_batches,
        "callback": without_a_controller,
    }
    found: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        began, error = time.monotonic(), ""
        messages.clear()
        try:
            scenario()
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        found[name] = {"error": error, "seconds": time.monotonic() - began, "messages": [*messages]}
        dist.barrier()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
