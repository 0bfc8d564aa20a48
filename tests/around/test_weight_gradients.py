"""The arms of benchmarks/weight_gradients.py differ in the rounding of weight gradients, and in nothing else."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import torch
import weight_gradients
from shared import texts
from small import convert_in_formats
from torch import nn
from weight_gradients import ARMS, BF16, FP32, in_arm

from snip_hf import SnipConfig


def one_layer(arm: str | None) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    """A linear in an arm (None: as it is) and its input, after a pass; and its output."""
    torch.manual_seed(0)
    block = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(48, 32, bias=False)])})
    model = nn.Sequential()
    model.add_module("model", block)
    if arm:
        in_arm(model, arm)
    [linear] = block["layers"]
    x = torch.randn(4, 24, 48, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    y.float().square().sum().backward()
    return linear, x, y


def gradient(linear: nn.Module) -> torch.Tensor:
    assert isinstance(linear.weight, nn.Parameter) and linear.weight.grad is not None
    return linear.weight.grad


def test_outputs_and_gradients_of_inputs_are_those_of_a_plain_linear_to_the_bit() -> None:
    _, x, y = one_layer(None)
    for arm in ARMS:
        _, other, same = one_layer(arm)
        assert torch.equal(y, same)
        assert x.grad is not None and other.grad is not None and torch.equal(x.grad, other.grad)


def test_one_arm_has_the_sums_and_the_other_their_rounding_to_bf16() -> None:
    sums, rounded = (gradient(one_layer(arm)[0]) for arm in (FP32, BF16))
    assert sums.dtype == rounded.dtype == torch.float32
    assert torch.equal(rounded, sums.bfloat16().float()) and not torch.equal(rounded, sums)


def test_plain_linears_round_their_weight_gradients_under_autocast() -> None:
    plain = gradient(one_layer(None)[0])
    assert torch.equal(plain, plain.bfloat16().float())


def test_emulated_layers_round_them_too() -> None:
    """So runs on the emulated backend do not differ from their BF16 baseline in this."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(128, 128, bias=False)})])})
    convert_in_formats(model, SnipConfig(policy="uniform-fp8", backend="emulated", start_format="fp8"))
    layer = model["layers"][0]["up"]
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(128, 128)).float().square().sum().backward()
    found = gradient(layer)
    assert torch.equal(found, found.bfloat16().float())


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["weight_gradients.py", *arguments])
    weight_gradients.main()


def test_a_fork_is_run_once_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The text of a test. " * 4000, encoding="utf-8")
    output = tmp_path / "lines.jsonl"
    arguments = ["run", "--device", "cpu", "--text", str(text), "--hidden", "32", "--blocks", "1", "--rows", "1"]
    arguments += ["--steps", "2", "--held-out", "2", "--points", "1", "--output", str(output), "--seeds"]
    run([*arguments, "1"], monkeypatch)
    run([*arguments, "2"], monkeypatch)
    lines = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [(line["seed"], line["point"]) for line in lines] == [(0, 1), (1, 1)]
    assert all(1e-3 < line["gradient_error"] < 3e-3 for line in lines)
    run(["report", str(output)], monkeypatch)
    assert "| 1 + 2 | 2 | " in capsys.readouterr().out


def test_both_arms_start_from_the_same_state() -> None:
    ids = torch.randint(texts.VOCABULARY, (8, texts.LENGTH), generator=torch.Generator().manual_seed(0))
    options = argparse.Namespace(hidden=32, blocks=1, rows=1, device="cpu")
    trainee = weight_gradients.Trainee(options, texts.Text(ids[:6], ids[6:]), seed=0)
    trainee.train(1, decays=False)
    kept, before = trainee.kept(), trainee.held_out_loss(2)
    trainee.train(2, decays=True)
    assert trainee.held_out_loss(2) != before and trainee.step == 3
    trainee.put_back(kept)
    assert trainee.held_out_loss(2) == before and trainee.step == 1
