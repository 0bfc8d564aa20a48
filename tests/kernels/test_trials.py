"""Is a trial of kernels that passed not repeated on the same kind of GPU, and one that failed tried again?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import snip_hf
from snip_hf.kernels import trials
from snip_hf.numerics.formats import FORMATS

GPU = torch.device("cuda")


class FakeTrial:
    """A trial of kernels that may round wrongly; counts how often it ran."""

    def __init__(self) -> None:
        self.is_wrong = False
        self.runs = 0

    def __call__(self, trial: str = "fake", format: str = "mxfp4", device: torch.device = GPU) -> str | None:
        return trials.fault_of(trial, FORMATS[format], device, self.encode, self.products)

    def encode(self, by_kernel: bool | None) -> dict[str, list[Tensor]]:
        self.runs += by_kernel is None
        return {"weight": [torch.tensor([1.0]), torch.tensor([float(self.is_wrong and by_kernel is None)])]}

    def products(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        yield "forward", torch.ones(2, 2), torch.ones(2, 2)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTrial:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    use_gpu(monkeypatch, "NVIDIA H100 80GB HBM3")
    return FakeTrial()


def use_gpu(monkeypatch: pytest.MonkeyPatch, name: str, major: int = 9) -> None:
    found = SimpleNamespace(name=name, major=major, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def test_a_trial_that_passed_is_not_repeated_for_the_same_kernels_format_versions_and_gpu(
    trial: FakeTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [trial(), trial(), trial.runs] == [None, None, 1]
    for change in (lambda: trial("others"), lambda: trial(format="fp8-tensor")):
        assert [change(), change()] == [None, None]
    assert trial.runs == 3
    changes: list[tuple[Any, str, str]] = [(torch, "__version__", "2.99"), (snip_hf, "__version__", "9")]
    changes.append((pytest.importorskip("triton"), "__version__", "9.9"))
    for module, attribute, value in changes:
        with monkeypatch.context() as patch:
            patch.setattr(trials if module is snip_hf else module, attribute, value)
            before = trial.runs
            assert [trial(), trial(), trial.runs] == [None, None, before + 1]
    use_gpu(monkeypatch, "NVIDIA H200")
    before = trial.runs
    assert [trial(), trial(), trial.runs] == [None, None, before + 1]


def test_a_format_of_the_same_name_but_another_content_is_tried(trial: FakeTrial) -> None:
    other = dataclasses.replace(FORMATS["mxfp4"], scale_rule="ceil")
    assert trials.passed_file("fake", other, GPU) != trials.passed_file("fake", FORMATS["mxfp4"], GPU)


def test_a_trial_that_failed_is_tried_again(trial: FakeTrial) -> None:
    trial.is_wrong = True
    assert all("the kernel and the reference round differently (weight)" in str(trial()) for _ in range(2))
    trial.is_wrong = False
    assert [trial(), trial(), trial.runs] == [None, None, 3]


def test_a_cache_that_cannot_be_written_repeats_the_trial(trial: FakeTrial, tmp_path: Path) -> None:
    (tmp_path / "snip_hf").write_text("a file where the folder should be")
    assert [trial(), trial(), trial.runs] == [None, None, 2]


def test_trials_on_a_cpu_are_not_cached(trial: FakeTrial, tmp_path: Path) -> None:
    assert [trial(device=torch.device("cpu")) for _ in range(2)] == [None, None]
    assert trial.runs == 2 and not any(tmp_path.iterdir())
