"""Are ties those linears that receive the same tensor in a probe, in any model?"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from models import batch, build
from own_loop import CONFIG, Loop, take_steps
from small import checkpoint_activations, tiny_llama, tokens
from torch import Tensor, nn

from snip_hf import SnipConfig, SnipController, convert_model, estimate_divergence
from snip_hf.estimation import divergence
from snip_hf.estimation.memory import Savings
from snip_hf.estimation.ties import SharedInputs, ties_of, usual_ties
from snip_hf.layers.state import snip_linears
from snip_hf.records.load import load_run
from snip_hf.reporting.run_report import reason_table

LLAMA = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
Ties = tuple[tuple[str, ...], ...]


def ties_in(model: nn.Module, inputs: dict[str, Tensor]) -> Ties:
    return estimate_divergence(model, inputs).ties


def as_sets(ties: Ties) -> set[frozenset[str]]:
    return {frozenset(tie) for tie in ties}


@pytest.mark.parametrize(
    ("family", "expected"),
    [("llama", LLAMA), ("qwen2", LLAMA), ("opt", (("q_proj", "k_proj", "v_proj"),)), ("gpt-neox", ())],
)
def test_ties_are_found_in_the_models_of_a_family(family: str, expected: Ties) -> None:
    model = build(family)
    assert as_sets(ties_in(model, batch())) == as_sets(expected)
    convert_model(model, fp4_config())
    assert as_sets(usual_ties(snip_linears(model))) == as_sets(expected)


@pytest.mark.parametrize("by", ["the user", "the probe"])
def test_ties_are_found_where_blocks_run_again_in_the_backward_pass(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama().train()
    if by == "the user":
        checkpoint_activations(model, reentrant=False)
    else:
        blocks = [f"model.layers.{index}" for index in range(len(model.model.layers))]
        monkeypatch.setattr(divergence, "find_savings", lambda *given: Savings(blocks))
    assert as_sets(ties_in(model, tokens())) == as_sets(LLAMA)


class Crossed(nn.Module):
    """Two blocks whose q and k see one tensor, and whose v sees it in the first block alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 8), nn.Linear(8, 17)
        self.layers = nn.ModuleList([nn.ModuleDict({name: nn.Linear(8, 8) for name in "qkv"}) for _ in range(2)])

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x = self.embed(input_ids)
        first, second = self.layers
        y = first["q"](x) + first["k"](x) + first["v"](x)
        y = second["q"](y) + second["k"](y) + second["v"](y + 1)
        return {"loss": nn.functional.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())}


def test_names_that_are_not_tied_alike_everywhere_are_left_apart() -> None:
    assert ties_in(Crossed(), tokens()) == ()
    assert ties_of([["a.q", "a.k"]], ["a.q", "a.k", "b.q"]) == ()


def test_a_tensor_that_is_written_to_between_two_layers_is_another_one() -> None:
    shared, x = SharedInputs(), torch.zeros(2)
    shared.add("a.q", x)
    shared.add("a.k", x)
    x += 1
    shared.add("a.v", x)
    assert shared.groups() == [["a.q", "a.k"], ["a.v"]]


def test_a_tensor_in_the_memory_of_one_that_is_gone_is_another_one() -> None:
    shared = SharedInputs()
    for name in ("a.q", "a.k"):
        shared.add(name, torch.zeros(2))
    assert shared.groups() == [["a.q"], ["a.k"]]


def test_a_layer_that_is_called_twice_is_in_no_group() -> None:
    shared, x = SharedInputs(), torch.zeros(2)
    for name in ("a.q", "a.k", "a.q"):
        shared.add(name, x)
    assert [name for group in shared.groups() for name in group] == ["a.k"]


class Refusing(nn.Module):
    """Runs on tensors with values alone, as a kernel does that reads memory, and counts its calls."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        assert type(x) is Tensor and x.device.type == "cpu" and x.data_ptr() != 0
        self.calls += 1
        y: Tensor = self.inner(x)
        return y


def test_a_run_runs_no_module_before_training_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    model = tiny_llama(hidden=32)
    norm = model.model.norm = Refusing(model.model.norm)
    config = SnipConfig.from_dict({**CONFIG.to_dict(), "ties": "auto"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    controller = SnipController(model, optimizer, config, output_dir=tmp_path)
    assert norm.calls == 0
    ids = torch.arange(24).view(2, 12)
    take_steps(model, optimizer, controller, [{"input_ids": ids, "labels": ids}] * 4)
    controller.close()
    plan = json.loads((tmp_path / "snip" / "plan.json").read_text())
    assert plan["provenance"]["config"]["ties"] == "auto"
    for row in plan["assignment"]:
        block = row.rpartition(".")[0]
        if row.endswith("up_proj"):
            assert plan["assignment"][row] == plan["assignment"][f"{block}.gate_proj"]


def test_ties_that_a_probe_finds_replace_the_usual_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    loop = Loop(SnipConfig.from_dict({**CONFIG.to_dict(), "ties": "auto"}), tmp_path)
    for block in loop.model.model.layers:  # whose v does not see what q and k see
        block.self_attn.v_proj.register_forward_pre_hook(lambda module, args: (args[0] * 1,))
    loop.run(4)
    assert loop.controller is not None
    found = (("q_proj", "k_proj"), ("gate_proj", "up_proj"))
    assert loop.controller.state_dict()["ties"] == [list(tie) for tie in found]
    assert loop.controller.state_dict()["config"]["ties"] == "auto"
    assert "share their formats: q_proj, k_proj; gate_proj, up_proj." in caplog.text
    run = load_run(tmp_path)
    reasons = reason_table(run)
    assert run.config["ties"] == "auto" and reasons is not None
    assert "0 q_proj:forward x 2" in map(str, reasons.columns[1].cells)
    twin = Loop(SnipConfig.from_dict({**CONFIG.to_dict(), "ties": "auto"}))
    assert twin.controller is not None
    twin.controller.load_state_dict(loop.controller.state_dict())
    assert twin.controller.state_dict()["ties"] == loop.controller.state_dict()["ties"]
    twin.controller.close()
    loop.controller.close()
