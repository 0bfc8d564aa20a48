"""Sharded weights: FSDP2 prefetches them unless the user has set that up, and passes use them on the mesh's device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from small import tiny_llama
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

from snip_hf import SnipCallback, convert_model
from snip_hf.integrations.reference_model import ReferenceModel
from snip_hf.parallel.sharding import compute_device, gather_ahead
from snip_hf.training.checks import check_model

pytestmark = pytest.mark.usefixtures("alone")


def sharded(layers: int = 3, together: int = 1) -> tuple[Any, list[Any]]:
    """Returns a tiny Llama and its blocks, of which FSDP2 shards so many together."""
    model = tiny_llama(hidden=16, layers=layers)
    mesh, blocks = init_device_mesh("cpu", (1,)), list(model.model.layers)
    for first in range(0, layers, together):
        fully_shard(blocks[first : first + together], mesh=mesh)
    return fully_shard(model, mesh=mesh), blocks


def ahead(blocks: list[Any]) -> tuple[list[list[int]], list[list[int]]]:
    """Returns which blocks each one gathers ahead in a forward and in a backward pass."""
    states = [block._get_fsdp_state() for block in blocks]
    forward = [[states.index(other) for other in state._states_to_forward_prefetch] for state in states]
    return forward, [[states.index(other) for other in state._states_to_backward_prefetch] for state in states]


def test_offloaded_weights_are_used_on_the_devices_of_their_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = sharded()[0].lm_head.weight
    assert compute_device(weight) == compute_device(torch.zeros(1)) == torch.device("cpu")
    monkeypatch.setattr(weight.device_mesh, "_device_type", "cuda")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert compute_device(weight) == torch.device("cuda", 3)


def test_experts_whose_weights_are_gathered_one_by_one_are_not_probed() -> None:
    """Ranks run different experts, and would gather different weights at once."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].up = nn.Linear(16, 16)
    model.layers[0].experts = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
    named, partitioned = copy.deepcopy(model), copy.deepcopy(model)
    convert_model(named, fp4_config(skip_modules=("*.experts.*",)))
    for one in (model, partitioned):
        convert_model(one, fp4_config())
        check_model(one)
    for one in (model, named):
        fully_shard(one, mesh=init_device_mesh("cpu", (1,)))
    partitioned.layers[0].up.weight.ds_tensor = torch.zeros(0)  # as DeepSpeed's ZeRO-3 marks it
    check_model(named)
    for one in (model, partitioned):
        with pytest.raises(ValueError) as caught:
            check_model(one)
        assert str(caught.value) == (
            "The expert 'layers.0.experts.0' is a layer of its own whose weight FSDP2 or ZeRO-3 shards. The probe "
            "gathers a weight when its layer runs, but the ranks run different experts. Name the experts in "
            "skip_modules, use DDP or ZeRO-2, or use a policy that needs no probe, such as policy='layer-position'."
        )


def test_a_reference_model_in_shards_is_refused() -> None:
    controller: Any = None
    with pytest.raises(ValueError, match=r"sharded by FSDP2 or DeepSpeed; only a whole model .*reference='high'\)\.$"):
        ReferenceModel(sharded()[0], fp4_config(), controller)


def test_each_block_gathers_that_of_the_next_one_and_the_pass_is_the_same() -> None:
    model, blocks = sharded()
    ids = torch.arange(8).reshape(1, 8)
    expected = model(input_ids=ids, labels=ids).loss
    assert gather_ahead(model) == 2
    assert ahead(blocks) == ([[1], [2], []], [[], [0], [1]])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert torch.equal(loss, expected) and all(p.grad is not None for p in model.parameters())


def test_blocks_that_are_compiled_one_by_one_gather_ahead_too() -> None:
    model, blocks = sharded()
    for index, block in enumerate(blocks):
        model.model.layers[index] = torch.compile(block, backend="eager")
    assert gather_ahead(model) == 2
    assert ahead(blocks) == ([[1], [2], []], [[], [0], [1]])


def test_blocks_that_are_sharded_together_gather_those_of_the_next_blocks() -> None:
    model, blocks = sharded(layers=5, together=2)
    ids = torch.arange(8).reshape(1, 8)
    expected = model(input_ids=ids, labels=ids).loss
    assert gather_ahead(model) == 2
    assert ahead(blocks[::2]) == ([[1], [2], []], [[], [0], [1]])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert torch.equal(loss, expected) and all(p.grad is not None for p in model.parameters())


def test_settings_that_a_user_gave_blocks_stay() -> None:
    model, blocks = sharded()
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    assert gather_ahead(model) == 0
    assert ahead(blocks) == ([[1, 2], [], []], [[], [], []])
    model, blocks = sharded()
    blocks[2].set_modules_to_backward_prefetch(blocks[:1])
    assert gather_ahead(model) == 0
    assert ahead(blocks) == ([[], [], []], [[], [], [0]])


def test_blocks_that_are_not_sharded_are_told_nothing() -> None:
    assert gather_ahead(tiny_llama(hidden=16, layers=2)) == 0
    half = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    fully_shard(half[0], mesh=init_device_mesh("cpu", (1,)))
    assert gather_ahead(half) == 0


def test_a_trainer_with_the_callback_trains_with_blocks_that_gather_ahead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, blocks = sharded()
    row = {"input_ids": list(range(8)), "labels": list(range(8))}
    caplog.set_level("INFO", "snip_hf")
    args = TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", use_cpu=True)
    Trainer(model, args, train_dataset=[row] * 8, callbacks=[SnipCallback(fp4_config(policy="uniform-fp8"))]).train()
    assert ahead(blocks)[0] == [[1], [2], []]
    assert "FSDP2 gathers the weights of 2 blocks while the one before each runs" in caplog.text
