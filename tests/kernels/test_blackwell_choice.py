"""When the backend "blackwell" is chosen, and the trial that it must pass before."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snip_hf import SnipConfig, SnipController
from snip_hf.kernels import backend as backend_module
from snip_hf.kernels import blackwell, trials
from snip_hf.kernels.backend import BACKENDS, select_backend, why_emulated
from snip_hf.kernels.blackwell import backend as blackwell_backend
from snip_hf.kernels.blackwell import operators, packing
from snip_hf.kernels.blackwell.backend import BLACKWELL, Blackwell
from snip_hf.kernels.emulated import EMULATED

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretends to be a machine with a GPU, where trials find what `faults` says."""

    def pretend(
        capability: tuple[int, int] = (10, 0),
        cuda: str | None = "13.0",
        available: bool = True,
        triton: bool = True,
        faults: dict[str, str] | None = None,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(backend_module, "find_spec", lambda name: object() if triton else None)
        monkeypatch.setattr(blackwell_backend, "fault", lambda name, device: (faults or {}).get(name))

    return pretend


@pytest.mark.parametrize("capability", [(10, 0), (10, 3), (12, 0), (12, 1)], ids=str)
def test_auto_takes_it_on_blackwell_for_the_formats_that_it_knows(
    machine: Callable[..., None], capability: tuple[int, int]
) -> None:
    machine(capability)
    for formats in (("nvfp4", "mxfp8"), ("mxfp4-rht", "mxfp8", "bf16"), ("nvfp4-46", "nvfp4")):
        assert select_backend("auto", "cuda", formats) is BLACKWELL
        assert why_emulated(torch.device("cuda"), formats) is None
    for formats, unknown in ((("fp4", "fp8"), "fp4"), (("nvfp4", "fp8"), "fp8"), (("nvfp4", "mxfp6"), "mxfp6")):
        assert select_backend("auto", "cuda", formats) is EMULATED
        reason = f"its kernels do not know the format {unknown!r}"
        assert why_emulated(torch.device("cuda"), formats) == reason
        with pytest.raises(ValueError, match=f"backend='blackwell' cannot run: {reason}"):
            select_backend("blackwell", "cuda", formats)


def test_a_trial_that_fails_leaves_the_run_emulated_and_says_why(machine: Callable[..., None]) -> None:
    machine(faults={"mxfp4": "the trial of 'mxfp4' failed: NotImplementedError: no such kernel"})
    assert select_backend("auto", "cuda", ("nvfp4", "mxfp8")) is BLACKWELL
    assert select_backend("auto", "cuda", ("mxfp4", "mxfp8")) is EMULATED
    reason = "the trial of 'mxfp4' failed: NotImplementedError: no such kernel"
    assert why_emulated(torch.device("cuda"), ("mxfp4", "mxfp8")) == reason
    with pytest.raises(ValueError, match=r"no such kernel\. Use backend='auto' or 'emulated'"):
        select_backend("blackwell", "cuda", ("mxfp4", "mxfp8"))


@pytest.mark.parametrize(
    ("made_up", "lacks"),
    [
        ({"available": False}, "the model is on 'cuda', expected a CUDA device of compute capability 10.x or 12.x"),
        ({"capability": (9, 0)}, "the GPU has compute capability 9.0, expected a CUDA device of"),
        ({"capability": (11, 0)}, "the GPU has compute capability 11.0, expected"),
        ({"cuda": None}, "torch is not built for CUDA"),
        ({"cuda": "12.6"}, "torch is built for CUDA 12.6, expected at least 12.8"),
        ({"triton": False}, "the package triton is not installed"),
    ],
    ids=str,
)
def test_missing_requirements_are_named(machine: Callable[..., None], made_up: dict[str, Any], lacks: str) -> None:
    machine(**made_up)
    found = BLACKWELL.lacks(torch.device("cuda"))
    assert found is not None and found.startswith(lacks)
    assert select_backend("auto", "cuda", ("nvfp4",)) is EMULATED


def test_off_the_gpu_the_reason_in_the_log_is_that_of_the_first_backend_with_kernels_for_the_formats() -> None:
    assert why_emulated(CPU, ("nvfp4",)) == BLACKWELL.lacks(CPU)
    assert why_emulated(CPU, ("fp4", "fp8")) == BACKENDS["hopper"].lacks(CPU)
    assert why_emulated(CPU, ("nvfp4", "int8")) == "no other backend has kernels for nvfp4, int8 together"
    assert BLACKWELL.lacks(CPU) == (
        "the model is on 'cpu', expected a CUDA device of compute capability 10.x or 12.x (Blackwell)"
    )


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_a_trial_passes_where_all_is_well(name: str) -> None:
    assert blackwell_backend.fault.__wrapped__(name, CPU) is None


def test_a_trial_notices_wrong_products_other_bytes_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = blackwell_backend.fault.__wrapped__
    multiply = operators.multiply
    with monkeypatch.context() as patch:
        patch.setattr(operators, "multiply", lambda left, right, dtype: multiply(left, right, dtype) * 1.01)
        expected = "the trial of 'nvfp4' failed: forward is 0.0099 off the reference, expected less than 0.005"
        assert fault("nvfp4", CPU) == expected
    with monkeypatch.context() as patch:
        patch.setattr(operators, "multiply", lambda left, right, dtype: multiply(left, right, dtype) * torch.nan)
        assert "forward is nan off the reference" in fault("nvfp4", CPU)
    with monkeypatch.context() as patch:

        def broken(*arguments: object) -> Tensor:
            raise NotImplementedError("not on this GPU\nmore")

        patch.setattr(operators, "multiply", broken)
        assert fault("mxfp4", CPU) == "the trial of 'mxfp4' failed: NotImplementedError: not on this GPU"
    quantize = blackwell_backend.quantize

    def other(*arguments: Any, by_kernel: bool | None = None) -> packing.Packed:
        packed = quantize(*arguments, by_kernel=False)
        if by_kernel is None:
            packed.data[0, 0] ^= 1
        return packed

    monkeypatch.setattr(blackwell_backend, "quantize", other)
    assert "its kernel rounds" not in (found := fault("mxfp8", CPU)) and "round differently" in found


def test_a_trial_that_loses_the_gpu_stops_the_run_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulation could not run there either."""

    def broken(*arguments: object) -> Tensor:
        raise RuntimeError("CUDA error: an illegal instruction was encountered\nmore")

    monkeypatch.setattr(operators, "multiply", broken)
    monkeypatch.setattr(trials, "is_lost", lambda device: True)
    with pytest.raises(RuntimeError) as error:
        blackwell_backend.fault.__wrapped__("mxfp4", CPU)
    assert str(error.value) == (
        "The trial of the format 'mxfp4' on cpu ended with RuntimeError: CUDA error: an illegal instruction was "
        "encountered. Nothing runs on this GPU until the process ends. Start again with backend='emulated', or with "
        "other formats."
    )


def test_a_gpu_is_lost_if_the_smallest_tensor_fails_but_not_if_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not trials.is_lost(CPU)
    for error, lost in ((RuntimeError("CUDA error"), True), (torch.OutOfMemoryError("full"), False)):

        def fails(*sizes: int, error: Exception = error, **options: Any) -> Tensor:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(torch, "zeros", fails)
            assert trials.is_lost(CPU) is lost


def test_the_notice_says_that_it_was_written_without_the_hardware() -> None:
    weight = torch.zeros(1)
    warns, text = BLACKWELL.notice(weight, "bf16", False)
    assert not warns and "benchmarks/first_run.py" in text and "written without one" in text
    assert BLACKWELL.notice(weight, "fp16", False)[0]


def test_the_first_line_of_its_documentation_says_that_it_has_not_run() -> None:
    assert (blackwell.__doc__ or "").startswith("Not run on Blackwell")
    assert isinstance(BLACKWELL, Blackwell) and not BLACKWELL.is_emulation


def test_a_run_logs_why_its_own_formats_are_emulated(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the default ones, which a uniform policy does not use."""
    monkeypatch.setattr(Blackwell, "lacks", lambda self, device: None)
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(32, 32)])})
    config = SnipConfig(policy="uniform-fp8")
    caplog.set_level(logging.INFO)
    SnipController(model, torch.optim.SGD(model.parameters(), 0.1), config)
    assert "slower than BF16 (its kernels do not know the format 'fp8')" in caplog.text
