"""`benchmarks/first_run.py` on a machine that has no GPU: what it says, how it exits, what its block holds."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import first_run
import pytest
import torch
from first_run import milliseconds_per_step
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

    cpu = torch.device("cpu")
    assert first_run.line_of("nvfp4", fails, cpu) == "nvfp4 RuntimeError: out of memory"
    assert first_run.line_of("nvfp4", lambda: "1.0 ms", cpu) == "nvfp4 1.0 ms"


CUDA_ERROR = "CUDA error: an illegal memory access was encountered"


def test_a_check_that_loses_the_gpu_is_the_last_one_and_the_block_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def multiply(left: object, right: object, dtype: torch.dtype) -> Tensor:
        tried.append(left)
        raise RuntimeError(f"{CUDA_ERROR}\nCompile with ...")

    monkeypatch.setattr(operators, "multiply", multiply)
    monkeypatch.setattr(first_run, "is_lost", lambda device: bool(tried))
    assert first_run.main(["--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert len(tried) == 1 and out.count(CUDA_ERROR) == 1
    *_, failed, empty, lost, fence = out.splitlines()
    assert failed == f"{first_run.parse([]).formats[0]:14} WRONG  RuntimeError: {CUDA_ERROR}"
    assert (empty, lost, fence) == ("", first_run.LOST, "```")


@pytest.mark.parametrize("where", ["in a line", "between lines"])
def test_a_part_that_loses_the_gpu_ends_the_parts_and_keeps_the_lines_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    def fails() -> str:
        raise RuntimeError(CUDA_ERROR)

    def part(options: argparse.Namespace, device: torch.device) -> Iterator[str]:
        yield "part, ms"
        yield first_run.line_of("fp8", fails, device) if where == "in a line" else fails()
        yield first_run.line_of("bf16", lambda: "2.0", device)

    lines: list[str] = []
    monkeypatch.setattr(first_run, "is_lost", lambda device: True)
    with pytest.raises(first_run.GpuIsLost) as error:
        first_run.run_part(part, first_run.parse([]), torch.device("cpu"), lines)
    assert lines == ["part, ms"]
    expected = {"in a line": "fp8", "between lines": "part ended:"}[where]
    assert str(error.value) == f"{expected} RuntimeError: {CUDA_ERROR}"


def test_a_part_that_fails_otherwise_leaves_the_others_to_run() -> None:
    def part(options: argparse.Namespace, device: torch.device) -> Iterator[str]:
        yield "part, ms"
        raise ValueError("no clock")

    lines: list[str] = []
    first_run.run_part(part, first_run.parse([]), torch.device("cpu"), lines)
    assert lines == ["part, ms", "part ended: ValueError: no clock"]


def test_the_model_of_the_steps_trains_in_every_format() -> None:
    cpu = torch.device("cpu")
    losses = {name: milliseconds_per_step(name, cpu, quick=True)[1] for name in ("bf16", "nvfp4", "mxfp8")}
    assert 0 < losses["bf16"] < 10
    assert losses["nvfp4"] != losses["bf16"] and losses["nvfp4"] == pytest.approx(losses["bf16"], rel=0.05)
    with pytest.raises(ValueError, match="expected the name of a format"):
        milliseconds_per_step("nothing", cpu, quick=True)
