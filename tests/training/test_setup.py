"""Refusals at the start, and Liger's functions outside compiled graphs."""

from __future__ import annotations

import copy
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from configs import fp4_config
from small import tiny_llama
from thread_ranks import on_ranks
from torch import Tensor, nn

from snip_hf import convert_model
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.probe import ProbeSettings, run_probe
from snip_hf.layers.selection import skip_reasons
from snip_hf.parallel.ranks import Processes
from snip_hf.training import setup
from snip_hf.training.checks import check_equal, check_model, check_parts, deciding_fields
from snip_hf.training.setup import keep_liger_out_of_graphs


def test_stages_in_bf16_are_refused() -> None:
    check_parts([tiny_llama()])
    with pytest.raises(ValueError, match=r"parameter 'weight' is torch\.bfloat16; the probe runs its passes in FP32"):
        check_parts([nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)])


def test_passes_of_a_pipeline_under_autocast_are_refused() -> None:
    model = tiny_llama()
    convert_model(model, fp4_config())
    tokens = torch.randint(50, (2, 16))

    def run(kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**kwargs).loss

    with pytest.raises(ValueError, match=r"leave autocast out of what Pipeline\.run does"):
        run_probe(model, Batch.of({"input_ids": tokens, "labels": tokens}), {}, ProbeSettings(0), Processes(run=run))


def test_layers_of_all_stages_are_in_the_order_of_the_blocks_and_the_head_is_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = ("linear_1", "layers.0.fc", "layers.2.fc"), ("layers.1.fc", "layers.3.fc", "lm_head")
    monkeypatch.setattr(setup, "linear_flops", lambda rank: {layer: {"forward": 1.0} for layer in parts[rank]})
    expected = ["linear_1", *(f"layers.{number}.fc" for number in range(4)), "lm_head"]
    assert on_ranks(2, lambda ranks: list(setup.flops_of_all(ranks.rank, ranks))) == [expected] * 2


def test_fsdp_1_is_refused() -> None:
    wrapper = type("FullyShardedDataParallel", (nn.Module,), {})()
    with pytest.raises(ValueError, match=r"FSDP version 1, which flattens the weights\. Use version 2"):
        check_model(nn.ModuleList([wrapper]))


def test_layers_on_which_another_forward_is_set_are_left_alone_and_the_reason_is_said() -> None:
    model = tiny_llama()
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = layer.forward
    reason = skip_reasons(model, fp4_config())["model.layers.0.mlp.up_proj"]
    assert reason is not None and "another forward function" in reason
    assert "model.layers.0.mlp.up_proj" not in convert_model(model, fp4_config())


def test_another_configuration_on_another_rank_is_refused() -> None:
    configs = [fp4_config(), fp4_config(seed=1, solver_time_limit=5.0)]
    message = "Rank 1 differs from rank 0: seed is 1 on rank 1 and 0 on rank 0. Expected the same config, model, plan"
    with pytest.raises(ValueError, match=message):
        on_ranks(2, lambda ranks: check_equal(deciding_fields(configs[ranks.rank]), ranks))


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
    monkeypatch.setattr(setup, "FIRST_SAFE_TORCH", "999")
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
    assert keep_liger_out_of_graphs(block, LOG) == 1
    graphs, result = traced(block)
    assert torch.equal(result, expected)
    assert len(before) == 1 and len(graphs) == 2
    # The weight 2 * x is multiplied with is an input of no graph; that of the block's own norm still is.
    uses = [sum(node.op == "placeholder" and "weight" in node.name for node in graph.graph.nodes) for graph in graphs]
    assert uses == [0, 1]


def test_norms_are_kept_out_once_and_copies_have_their_own_weight(block: Block) -> None:
    assert keep_liger_out_of_graphs(block, LOG) == 1
    assert keep_liger_out_of_graphs(block, LOG) == 0
    copied = copy.deepcopy(block)
    with torch.no_grad():
        copied.norm.weight.zero_()
    assert torch.equal(copied(torch.ones(4)), -torch.ones(4))


def test_the_rotary_embedding_of_liger_is_kept_out(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    def liger_rotary_pos_emb() -> None:
        pass

    liger_rotary_pos_emb.__module__ = "liger_kernel.transformers.rope"
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", liger_rotary_pos_emb)
    assert keep_liger_out_of_graphs(block, LOG) == 2
    assert globals()["apply_rotary_pos_emb"]._torchdynamo_disable


def test_a_torch_that_analyses_the_kernels_traces_them(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "FIRST_SAFE_TORCH", "2.0")
    assert keep_liger_out_of_graphs(block, LOG) == 0
