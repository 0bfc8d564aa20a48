"""`benchmarks/first_run.py` on a machine that has no GPU: what it says, how it exits, what its block holds."""

from __future__ import annotations

import first_run
import pytest
import torch
from first_run_step import milliseconds_per_step
from torch import Tensor

from snip_hf.kernels import emulated
from snip_hf.kernels.blackwell import operators
from snip_hf.numerics.formats import FORMATS


def test_without_a_gpu_it_says_what_it_needs_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert first_run.main([]) == 1
    said = capsys.readouterr().out
    assert "expected a CUDA device of compute capability 10.x or 12.x (Blackwell)" in said
    assert "--device cpu" in said


def test_on_another_gpu_it_says_which_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert first_run.main(["--quick"]) == 1
    assert "the GPU has compute capability 9.0" in capsys.readouterr().out


def test_on_a_cpu_it_checks_every_format_and_times_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert first_run.main(["--device", "cpu"]) == 0
    _, block, _ = capsys.readouterr().out.split("```")
    found = [line.split()[:2] for line in block.splitlines() if "bytes" in line]
    assert found == [[name, "ok"] for name in first_run.parse([]).formats]
    assert "products" not in block and "torch 2." in block and "compute capability" not in block


def test_a_wrong_product_is_a_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def multiply(left: object, right: object, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError("MXFP4 is not in this build\nmore")

    monkeypatch.setattr(operators, "multiply", multiply)
    assert first_run.main(["--device", "cpu", "--formats", "mxfp4"]) == 1
    assert "mxfp4          WRONG  NotImplementedError: MXFP4 is not in this build\n" in capsys.readouterr().out


def test_the_products_that_it_times_are_the_three_gemms() -> None:
    for name in ("nvfp4", "bf16"):
        size, device = (24, 40, 32), torch.device("cpu")
        given = first_run.operands(FORMATS[name], device, size)
        expected = [
            emulated.forward_gemm(given.x, given.weight, None, given.state),
            emulated.grad_input_gemm(given.grad_output, given.weight, given.state),
            emulated.grad_weight_gemm(given.grad_output, given.x, given.state),
        ]
        for call, wanted in zip(first_run.gemm_calls(name, size, device), expected, strict=True):
            torch.testing.assert_close(call(), wanted, rtol=1e-2, atol=1e-2)


def test_a_part_that_fails_is_a_line_of_the_block() -> None:
    def fails() -> str:
        raise RuntimeError("out of memory")

    assert first_run.line_of("nvfp4", fails) == "nvfp4 RuntimeError: out of memory"
    assert first_run.line_of("nvfp4", lambda: "1.0 ms") == "nvfp4 1.0 ms"


def test_the_model_of_the_steps_trains_in_every_format() -> None:
    cpu = torch.device("cpu")
    losses = {name: milliseconds_per_step(name, cpu, quick=True)[1] for name in ("bf16", "nvfp4", "mxfp8")}
    assert 0 < losses["bf16"] < 10
    assert losses["nvfp4"] != losses["bf16"] and losses["nvfp4"] == pytest.approx(losses["bf16"], rel=0.05)
    with pytest.raises(ValueError, match="expected the name of a format"):
        milliseconds_per_step("nothing", cpu, quick=True)
