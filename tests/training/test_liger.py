"""Liger's kernels are not traced where torch would take them for writers of their weights."""

from __future__ import annotations

import copy
import logging
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from snip_hf.training import liger
from snip_hf.training.liger import keep_out_of_graphs

LOG = logging.getLogger("test")


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def of_liger(self: Norm, x: Tensor) -> Tensor:
    return 2 * x * self.weight


of_liger.__module__ = "liger_kernel.transformers.rms_norm"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.own = Norm(), Norm()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.norm(x + 1) - 1)


@pytest.fixture
def block(monkeypatch: pytest.MonkeyPatch) -> Iterator[Block]:
    """A block with a norm that Liger has patched, under a torch that does not analyse its kernels."""
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setattr(liger, "FIRST_SAFE_TORCH", "999")
    block = Block()
    block.norm.forward = types.MethodType(of_liger, block.norm)
    torch._dynamo.reset()
    yield block
    torch._dynamo.reset()


def traced(block: Block) -> tuple[list[torch.fx.GraphModule], Tensor]:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        return graphs, torch.compile(block, backend=backend)(torch.arange(4.0))


def test_norms_of_liger_are_in_no_graph(block: Block) -> None:
    before, expected = traced(block)
    torch._dynamo.reset()
    assert keep_out_of_graphs(block, LOG) == 1
    graphs, result = traced(block)
    assert torch.equal(result, expected)
    assert len(before) == 1 and len(graphs) == 2
    # The weight 2 * x is multiplied with is an input of no graph; that of the block's own norm still is.
    uses = [sum(node.op == "placeholder" and "weight" in node.name for node in graph.graph.nodes) for graph in graphs]
    assert uses == [0, 1]


def test_norms_are_kept_out_once_and_copies_have_their_own_weight(block: Block) -> None:
    assert keep_out_of_graphs(block, LOG) == 1
    assert keep_out_of_graphs(block, LOG) == 0
    copied = copy.deepcopy(block)
    with torch.no_grad():
        copied.norm.weight.zero_()
    assert torch.equal(copied(torch.ones(4)), -torch.ones(4))


def test_the_rotary_embedding_of_liger_is_kept_out(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    def liger_rotary_pos_emb() -> None:
        pass

    liger_rotary_pos_emb.__module__ = "liger_kernel.transformers.rope"
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", liger_rotary_pos_emb)
    assert keep_out_of_graphs(block, LOG) == 2
    assert globals()["apply_rotary_pos_emb"]._torchdynamo_disable


def test_a_torch_that_analyses_the_kernels_traces_them(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "FIRST_SAFE_TORCH", "2.0")
    assert keep_out_of_graphs(block, LOG) == 0
