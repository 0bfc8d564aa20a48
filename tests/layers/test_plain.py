"""A swapped layer computes exactly like its original module until it gets formats."""

from __future__ import annotations

import copy
from typing import Any

import expert_models
import pytest
import torch
from configs import fp4_config
from conv1d_twins import gpt2
from slow_cases import slow
from small import tiny_llama
from torch import Tensor, nn

from snip_hf import SnipController
from snip_hf.layers.convert import SnipLinearConfig, convert_model, quantize_
from snip_hf.layers.state import set_step, snip_linears
from snip_hf.numerics.gemms import GEMMS

MODELS: dict[str, Any] = {
    "llama": lambda: tiny_llama(hidden=32),
    "Conv1D": gpt2,
    "experts": lambda: expert_models.build("qwen3-moe"),
    "experts of one's own implementation": lambda: _eager(expert_models.build("gpt-oss")),
}


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def _eager(model: Any) -> Any:
    model.set_experts_implementation("eager")
    return model


def loss_and_gradients(model: nn.Module, autocast: bool = False) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(**batch()).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_gives_the_bits_of_the_plain_one_until_it_gets_formats(name: str, autocast: bool) -> None:
    model = MODELS[name]()
    expected = loss_and_gradients(model, autocast)
    convert_model(model, fp4_config(start_format="fp4"))
    layers = snip_linears(model)
    set_step(layers, 0, 1, 0)
    assert same(loss_and_gradients(model, autocast), expected)
    assert same(loss_and_gradients(copy.deepcopy(model), autocast), expected)
    for layer in layers.values():
        layer.set_formats(dict.fromkeys(GEMMS, "fp4"))
    assert not torch.equal(loss_and_gradients(model, autocast)[0], expected[0])
    for layer in layers.values():
        layer.compute_plainly()
    assert same(loss_and_gradients(model, autocast), expected)
    assert {name for layer in layers.values() for name in layer.formats.values()} == {"bf16"}


def test_formats_that_are_asked_for_with_torchao_s_quantize_are_in_force_at_once() -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    quantize_(model, SnipLinearConfig(start_format="fp4"), lambda module, name: name == "0")
    assert not torch.equal(model(x), expected)


@pytest.mark.parametrize("name", ["linear", slow("llama"), slow("experts")])
def test_plans_compile_nothing_and_plainness_is_one_more_graph(name: str) -> None:
    model: Any = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 32)])})
    run, x = model["layers"][0], torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    if name != "linear":
        model, x = MODELS[name](), batch()["input_ids"]
        run = model
    plain = torch.compile(copy.deepcopy(run), backend="aot_eager", fullgraph=True)
    convert_model(model, fp4_config())
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)

    def output(of: Any) -> Tensor:
        with torch.no_grad():
            found = of(x)
        return found if isinstance(found, Tensor) else found.logits

    expected = output(plain)
    torch._dynamo.utils.counters.clear()
    assert torch.equal(output(compiled), expected)
    for formats in ("fp8", "fp4", None):
        for layer in snip_linears(model).values():
            if formats is None:
                layer.compute_plainly()
            else:
                layer.set_formats(dict.fromkeys(GEMMS, formats))
        assert torch.equal(output(compiled), expected) == (formats is None)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_loop_s_layers_are_plain_before_its_controller_and_after_its_end() -> None:
    model = tiny_llama(hidden=32)
    config = fp4_config(policy="uniform-fp4")
    with torch.no_grad():
        expected = model(**batch()).loss
        convert_model(model, config)
        assert torch.equal(model(**batch()).loss, expected)
        controller = SnipController(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
        during = model(**batch()).loss
        assert not torch.equal(during, expected)
        controller.close()
        assert torch.equal(model(**batch()).loss, expected)
        controller.plan.apply(model)  # as the user asks
        assert torch.equal(model(**batch()).loss, during)
        controller.close()
        assert torch.equal(model(**batch()).loss, during), "a run that has ended owns no layers"
