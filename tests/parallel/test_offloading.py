"""FSDP2 with shards in host memory: what a probe does with them, it does on the GPUs of the mesh.

The tensors are fake: they have devices and shapes, but no numbers, and torch refuses operations across devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from snip_hf.estimation import moved_weights
from snip_hf.estimation.moved_weights import MovedWeights
from snip_hf.estimation.optimizer_step import OptimizerStep, RelativeUpdates
from snip_hf.optimizers import response
from snip_hf.optimizers.response import responses
from snip_hf.parallel.ranks import Processes
from snip_hf.parallel.sharding import own_part, whole

GPU = torch.device("cuda", 0)
SHAPES = [(4, 8), (5, 8)]
"""Two ranks hold equal parts of the first, and unequal parts of the second."""
Make = Callable[..., Tensor]


@pytest.fixture
def in_host_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes tensors of shapes that two GPUs share and the first one holds its part of in host memory."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: GPU.index)
    # Kernels, sums and generators do not work without a GPU.
    monkeypatch.setattr(response, "SLOPES", {})
    monkeypatch.setattr(moved_weights, "pending_squares", list)
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=lambda seed: None))

    # Optimizer states of other classes than Tensor are taken for quantized ones.
    monkeypatch.setattr(FakeTensor, "dequantize", lambda tensor: tensor, raising=False)

    def make(rows: int, columns: int) -> Tensor:
        mesh._device_type = "cpu"
        part = torch.empty((rows + 1) // 2, columns)
        made = DTensor.from_local(
            part, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, columns)), stride=(columns, 1)
        )
        mesh._device_type = "cuda"
        return made

    with FakeTensorMode():
        yield make
    dist.destroy_process_group()


@pytest.mark.parametrize("shape", SHAPES)
def test_whole_tensors_are_put_together_on_the_gpu(in_host_memory: Make, shape: tuple[int, int]) -> None:
    held = in_host_memory(*shape)
    assert held.device == own_part(held).device == torch.device("cpu")
    assert (whole(held).device, whole(held).shape) == (GPU, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_optimizers_derivative_is_computed_on_the_gpu(in_host_memory: Make, shape: tuple[int, int]) -> None:
    weight, gradient = torch.nn.Parameter(in_host_memory(*shape)), in_host_memory(*shape)
    optimizer = torch.optim.AdamW([weight])
    weight.grad = gradient
    optimizer.step()
    answers = responses(optimizer, {"layer": weight})
    updates = RelativeUpdates(OptimizerStep({"layer": gradient}, answers), {"layer": 1.0})
    factors = updates.pushforward("layer")
    assert isinstance(factors, Tensor) and (factors.device, factors.shape) == (GPU, shape)
    pulled = updates.pullbacks()["layer"](torch.empty(shape, device=GPU))
    assert own_part(pulled).device == GPU and pulled.shape == shape
    own = answers["layer"].of_own_part()
    assert own is not None
    for at in (own.at, answers["layer"].gathered().at):
        assert {one.device for one in (at.parameter, at.state["exp_avg"], at.state["exp_avg_sq"])} == {GPU}


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_are_moved_on_the_gpu(in_host_memory: Make, shape: tuple[int, int]) -> None:
    weight = in_host_memory(*shape)
    moved = MovedWeights({}, {"weight": lambda z: z}, (0, 1, 0), 1e-3, Processes(), others={"weight": weight})
    vars(moved)["epsilon"] = 1e-3  # computed from numbers
    for _ in range(2):
        found = moved.by_parameter()["weight"]
        assert (found.device, found.shape) == (GPU, shape)
        moved.turn()


def test_random_directions_are_drawn_on_the_gpu(in_host_memory: Make) -> None:
    layer: Any = SimpleNamespace(weight=in_host_memory(4, 8), matrices=lambda tensor: (tensor,))
    (drawn,) = moved_weights.random_directions("layer", layer, (0, 1, 0))
    assert (drawn.device, drawn.shape) == (GPU, (4, 8))
