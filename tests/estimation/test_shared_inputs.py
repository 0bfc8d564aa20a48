"""Are ties those linears that receive the same tensor, in any model, and does looking for them leave no trace?"""

from __future__ import annotations

import logging

import pytest
import torch
from models import LAYERS, build
from small import tiny_llama, tiny_lm
from torch import Tensor, nn

from snip_hf import SnipConfig, SnipController, convert_model
from snip_hf.estimation.shared_inputs import find_ties
from snip_hf.policies.setting import Setting
from snip_hf.policies.ties import siblings

LLAMA = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", LLAMA),
        ("qwen2", LLAMA),
        ("opt", (("q_proj", "k_proj", "v_proj"),)),
        ("gpt-neox", ()),
    ],
)
def test_ties_are_found_in_the_models_of_a_family(family: str, expected: tuple[tuple[str, ...], ...]) -> None:
    model = build(family)
    convert_model(model, SnipConfig())
    assert {frozenset(tie) for tie in find_ties(model)} == {frozenset(tie) for tie in expected}
    assert LAYERS == 2


class Counting(nn.Module):
    """A norm that writes to its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.norm(x.mT).mT


def test_looking_for_ties_leaves_no_trace() -> None:
    model = tiny_llama(hidden=32, attention_dropout=0.5).train()
    model.model.norm = Counting()
    convert_model(model, SnipConfig())
    before = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    assert find_ties(model) == LLAMA
    assert torch.equal(torch.rand(4), expected)
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(type(tensor) in (nn.Parameter, Tensor) for tensor in after.values())


class Crossed(nn.Module):
    """Two blocks whose q and k see one tensor, and whose v sees it in the first block alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.ModuleDict({name: nn.Linear(8, 8) for name in "qkv"}) for _ in range(2)])

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        first, second = self.layers
        y = first["q"](x) + first["k"](x) + first["v"](x)
        return second["q"](y) + second["k"](y) + second["v"](y + 1)


def test_names_that_are_not_tied_alike_everywhere_are_left_apart() -> None:
    model = Crossed()
    convert_model(model, SnipConfig())
    assert find_ties(model) == ()


def test_a_model_that_does_not_run_without_values_is_searched_for_names(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    model = tiny_llama(hidden=32)
    convert_model(model, SnipConfig())

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.tensor(args[0].tolist()),)

    model.model.embed_tokens.register_forward_pre_hook(look)
    assert find_ties(model) == LLAMA
    assert caplog.messages[-1].startswith("snip-hf: ties are those of names, (('q_proj', 'k_proj', 'v_proj'), ")


def test_a_run_puts_the_ties_that_it_finds_into_its_plans_and_states(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "snip_hf")
    model = tiny_llama(hidden=32)
    controller = SnipController(model, torch.optim.AdamW(model.parameters()), SnipConfig(ties="auto"))
    assert next(text for text in caplog.messages if "same input" in text) == (
        "snip-hf: linears that take the same input, and so share their formats: q_proj, k_proj, v_proj; gate_proj, "
        "up_proj."
    )
    assert controller.config.ties == LLAMA
    assert controller.state_dict()["config"]["ties"] == [list(tie) for tie in LLAMA]
    controller.close()
    again = SnipController(model, torch.optim.AdamW(model.parameters()), SnipConfig(ties=LLAMA))
    again.load_state_dict(controller.state_dict())
    again.close()


def test_a_model_without_shared_inputs_has_no_ties() -> None:
    model = tiny_lm()
    controller = SnipController(model, torch.optim.AdamW(model.parameters()), SnipConfig(ties="auto"))
    assert controller.config.ties == ()
    controller.close()


def test_ties_that_nobody_has_found_are_an_error() -> None:
    config = SnipConfig.preset("hopper")
    flops = {"layers.0.q": {"forward": 1.0, "grad_input": 1.0, "grad_weight": 1.0}}
    with pytest.raises(ValueError, match=r"^ties='auto' has to be found in the model first, "):
        siblings(Setting(config, flops, (("layers.0.q",),)))
