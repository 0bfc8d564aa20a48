"""Partitions of ZeRO-3 are shown as sharded tensors; a stand-in for DeepSpeed, on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from small import text, tiny_llama
from torch import nn
from torch.distributed.tensor import DTensor

from snip_hf.estimation.batch import Batch
from snip_hf.estimation.passes import run_pass
from snip_hf.parallel.sharding import whole
from snip_hf.parallel.zero3 import has_partitions, partitioned, partitions_as_shards
from snip_hf.training.checkpoint import weights_fingerprint

pytestmark = pytest.mark.usefixtures("alone")


def partition(model: nn.Module) -> None:
    """Leaves parameters and modules as DeepSpeed does between passes."""
    for parameter in model.parameters():
        found: Any = parameter
        found.ds_tensor, found.ds_shape = parameter.detach().flatten().clone(), parameter.shape
        found.ds_process_group = dist.group.WORLD
        parameter.data = torch.empty(0)

    def gather(*_: Any) -> None:
        raise AssertionError("DeepSpeed gathers in a pass of the probe")

    gather.__module__ = "deepspeed.runtime.zero.parameter_offload"
    for module in model.modules():
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(gather)


def test_a_pass_of_the_probe_is_that_of_the_whole_model_and_leaves_partitions_and_hooks() -> None:
    model, batch = tiny_llama(hidden=16), Batch.of(text(2, 8))
    expected, fingerprint = run_pass(model, batch, {}), weights_fingerprint(model)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert not has_partitions(model)
    partition(model)
    before = dict(model.named_parameters())
    with partitions_as_shards(model):
        for name, view in model.named_parameters():
            assert isinstance(view, DTensor) and partitioned(view) is before[name]
            assert torch.equal(whole(view.detach()), weights[name])
        assert torch.equal(run_pass(model, batch, {}), expected)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert all(parameter.numel() == 0 for parameter in before.values())
    assert len(model.lm_head._forward_pre_hooks) == 1
    assert weights_fingerprint(model) == fingerprint
