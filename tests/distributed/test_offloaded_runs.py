"""Runs whose shards FSDP2 keeps in host memory equal runs without offloading."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparing import LOSS, WEIGHT, equal_share, errors, read_run
from configs import fp4_config
from loops import plan_of
from slow_cases import slow
from small import text, tiny_llama
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Muon, Optimizer, RMSprop
from torch.utils._pytree import tree_leaves, tree_map
from trainings import SCHEDULE

from snip_hf import SnipController

STEPS = 6
# At steps 1 and 5. Before the first one nothing is rounded.
CONFIG = fp4_config(**SCHEDULE, start_format="bf16", target_fp4_fraction=0.5, backend="emulated")
HOST = torch.device("hpu", 0)
"""Stands for host memory, as CPUs stand for GPUs."""
Make = Callable[[list[nn.Parameter]], Optimizer]


class InHostMemory(Tensor):
    """A tensor that reports `HOST`, though torch itself takes it for one of the CPU.

    Operations with the CPU's tensors fail, as between host memory and a GPU, and so do collectives, as over NCCL.
    """

    device = property(lambda self: HOST)  # type: ignore[assignment]
    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: Tensor) -> InHostMemory:
        made: InHostMemory = Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), dtype=held.dtype)
        made.held = held
        return made

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(args[0], torch.device):
            return self if args[0] == HOST else self.held.clone()
        return super().to(*args, **kwargs)

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor) and not isinstance(one, cls)]
        assert not any(one.dim() for one in others), f"{func} between devices"
        assert "c10d" not in func.namespace, f"{func} of shards in host memory"
        args, kwargs = tree_map(lambda one: one.held if isinstance(one, cls) else one, (args, kwargs or {}))
        return tree_map(lambda one: cls(one) if isinstance(one, Tensor) else one, func(*args, **kwargs))


@contextmanager
def in_host_memory(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Keeps weights, gradients and the optimizer's state on `HOST` inside the context."""
    parameters = list(model.parameters())
    states = (value for state in optimizer.state.values() for value in state.values())
    every = [*parameters, *(one.grad for one in parameters), *states]
    shards = [(one, one._local_tensor) for one in every if isinstance(one, DTensor)]
    for shard, part in shards:
        shard._local_tensor = InHostMemory(part)
    try:
        yield
    finally:
        for shard, part in shards:
            shard._local_tensor = part


@pytest.fixture
def gloo() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def nccl() -> Iterator[None]:
    """A process group without a backend for CPUs."""
    torch.cuda.init()  # or a mesh warns that no device was chosen
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def adamw(parameters: list[nn.Parameter]) -> AdamW:
    # A large eps: Adam makes whole steps of tiny gradients, though they differ only in their last bits.
    return AdamW(parameters, lr=1e-3, eps=1e-4)


def run(
    folder: Path,
    device: str,
    offloading: OffloadPolicy | None = None,
    make: Make = adamw,
    freezes: bool = False,
    around: Callable[[nn.Module, Optimizer], AbstractContextManager[None]] = lambda *_: nullcontext(),
    policy: str = "snip",
) -> dict[str, Any]:
    """Trains in a plain loop.

    Args:
        offloading: FSDP2's policy; None: shards stay on the device.
        make: returns the optimizer of trained matrices, and of the other parameters if it takes them.
        freezes: whether a swapped weight is frozen. The probe then compares the updates of all that is trained.
        around: context of the probe.
        policy: SNIP's.
    """
    # The backward pass of "sdpa" on GPUs adds in no fixed order.
    model: nn.Module = tiny_llama(hidden=128, layers=2, attn_implementation="eager")
    model.model.layers[1].self_attn.q_proj.requires_grad_(not freezes)
    for module in [*model.model.layers, model]:
        fully_shard(module, mesh=init_device_mesh(device, (1,)), offload_policy=offloading or OffloadPolicy())
    optimizer = make(list(model.parameters()))
    config = replace(CONFIG, policy=policy)
    controller = SnipController(model, optimizer, config, output_dir=folder, max_steps=STEPS)
    losses = []
    for step in range(1, STEPS + 1):
        batch = {name: tensor.to(device) for name, tensor in text(4, 128, step).items()}
        controller.capture(batch)
        loss = model(**batch).loss
        loss.backward()
        with around(model, optimizer):
            controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
        losses.append(loss.item())
    controller.close()
    assert controller.coverage is not None
    found = {
        "devices": {parameter.device.type for parameter in model.parameters()},
        "losses": losses,
        "plan": plan_of(controller),
        "tables": read_run(folder / "snip")[2],
        "coverage": controller.coverage.to_dict(),
    }
    assert list(found["tables"]) == [1, 5]
    return found


def muon(parameters: list[nn.Parameter]) -> Optimizer:
    return Muon([one for one in parameters if one.dim() == 2], lr=1e-3)


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(
    ("make", "freezes", "policy"),
    [
        (adamw, False, "snip"),
        slow(adamw, True, "snip"),
        slow(muon, False, "snip"),
        slow(RMSprop, False, "snip"),
        *[slow(adamw, False, policy) for policy in ("fisher", "hessian-trace", "greedy", "kl")],
    ],
)
def test_a_probe_finds_in_host_memory_what_it_finds_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make, freezes: bool, policy: str
) -> None:
    monkeypatch.setattr(torch.cpu, "current_device", lambda: 0)  # as a GPU's; this one returns "cpu"
    theirs = run(tmp_path / "kept", "cpu", None, make, freezes, policy=policy)
    monkeypatch.setattr(DTensor, "device", property(lambda self: self._local_tensor.device))
    assert run(tmp_path / "held", "cpu", None, make, freezes, in_host_memory, policy) == theirs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("nccl")
@pytest.mark.parametrize("freezes", [False, True], ids=["all", "some"])
def test_a_gpus_run_with_offloading_is_the_one_without_it(freezes: bool, tmp_path: Path) -> None:
    """The optimizer of shards in host memory steps on the CPU, which rounds in other ways."""
    theirs = run(tmp_path / "kept", "cuda", freezes=freezes)
    ours = run(tmp_path / "offloaded", "cuda", CPUOffloadPolicy(), freezes=freezes)
    assert theirs["devices"] == {"cuda"} and ours["devices"] == {"cpu"}
    assert ours["coverage"] == theirs["coverage"]
    assert ours["losses"][0] == theirs["losses"][0]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
    assert equal_share([ours["plan"]], [theirs["plan"]]) > 0.9
    for step, bound in ((1, 1e-6), (5, 0.1)):
        for column in (LOSS, WEIGHT):
            assert max(errors(ours["tables"][step], theirs["tables"][step], column)) < bound
