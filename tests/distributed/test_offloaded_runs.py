"""A run whose shards FSDP2 keeps in host memory is the one whose shards it does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import LOSS, WEIGHT, equal_share, errors, read_run
from configs import fp4_config
from loops import plan_of
from small import text, tiny_llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from trainings import SCHEDULE

from snip_hf import SnipController

STEPS = 6
# At steps 1 and 5. Before the first one nothing is rounded.
CONFIG = fp4_config(**SCHEDULE, start_format="bf16", target_fp4_fraction=0.5, backend="emulated")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """A device of which this process is the only rank. On a GPU it has no other backend than NCCL."""
    kind: str = request.param
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if kind == "cuda":
        torch.cuda.init()  # or a mesh warns that no device was chosen
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield kind
    dist.destroy_process_group()


def run(folder: Path, device: str, policy: OffloadPolicy, freezes: bool) -> dict[str, Any]:
    """Trains in a plain loop.

    Args:
        freezes: whether a swapped weight is frozen. The probe then compares the updates of all that is trained.
    """
    # The backward pass of "sdpa" on GPUs adds in no fixed order.
    model: nn.Module = tiny_llama(hidden=128, layers=2, attn_implementation="eager")
    model.model.layers[1].self_attn.q_proj.requires_grad_(not freezes)
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=init_device_mesh(device, (1,)), offload_policy=policy)
    # A large eps: Adam makes whole steps of gradients that differ in their last bits alone where both are tiny.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    controller = SnipController(model, optimizer, CONFIG, output_dir=folder, max_steps=STEPS)
    losses = []
    for step in range(1, STEPS + 1):
        batch = {name: tensor.to(device) for name, tensor in text(4, 128, step).items()}
        controller.capture(batch)
        loss = model(**batch).loss
        loss.backward()
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
        losses.append(loss.item())
    controller.close()
    assert controller.coverage is not None
    return {
        "devices": {parameter.device.type for parameter in model.parameters()},
        "losses": losses,
        "plan": plan_of(controller),
        "tables": read_run(folder / "snip")[2],
        "coverage": controller.coverage.to_dict(),
    }


@pytest.mark.parametrize("freezes", [False, True], ids=["all", "some"])
def test_a_run_with_offloading_is_the_one_without_it(device: str, freezes: bool, tmp_path: Path) -> None:
    """The optimizer of a GPU's shards in host memory steps on the CPU, which rounds in other ways."""
    theirs = run(tmp_path / "kept", device, OffloadPolicy(), freezes)
    ours = run(tmp_path / "offloaded", device, CPUOffloadPolicy(pin_memory=device == "cuda"), freezes)
    assert ours.pop("devices") == {"cpu"} and theirs.pop("devices") == {device}
    assert {fmt for row in theirs["plan"].values() for fmt in row.values()} == {"fp4", "fp8"}
    assert list(theirs["tables"]) == [1, 5]
    if device == "cpu":
        assert ours == theirs
        return
    assert ours["coverage"] == theirs["coverage"]
    assert ours["losses"][0] == theirs["losses"][0]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    assert equal_share([ours["plan"]], [theirs["plan"]]) > 0.9
    for step, bound in ((1, 1e-6), (5, 0.1)):
        for column in (LOSS, WEIGHT):
            assert max(errors(ours["tables"][step], theirs["tables"][step], column)) < bound
