"""Is a process of forks set up for its device, GPUs without an index included?"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_forks import write_recipe
from torch.cuda._utils import _get_device_index

from eval.bakeoff import fork_steps
from eval.bakeoff.fork_device import check_graphs, set_up_device


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for two GPUs; the indices that a process makes its own."""
    own: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # What torch.cuda.set_device does before it asks the driver: it refuses a device without an index.
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: own.append(_get_device_index(device)))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode, warn_only: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    return own


@pytest.mark.parametrize(("index", "kind", "expected"), [(0, "cuda", 0), (3, "cuda", 1), (4, "cuda:1", 1)])
def test_processes_take_turns_on_gpus_unless_one_is_named(
    two_gpus: list[int], index: int, kind: str, expected: int
) -> None:
    assert set_up_device(index, kind) == torch.device("cuda", expected)
    assert two_gpus == [expected]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.utils.deterministic.fill_uninitialized_memory is False


def test_a_cpu_is_taken_as_it_is(two_gpus: list[int]) -> None:
    assert set_up_device(1, "cpu") == torch.device("cpu")
    assert two_gpus == [] and "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_graphs_are_refused_on_a_cpu_alone() -> None:
    check_graphs(True, "cuda:1")
    check_graphs(False, "cpu")
    with pytest.raises(ValueError, match=r"forks\.cuda_graph=True on the device 'cpu'; expected 'cuda'"):
        check_graphs(True, "cpu")


class _AskedForText(Exception):
    """What a process does after its device is set up."""


def test_all_processes_of_the_benchmark_of_steps_are_set_up_on_one_gpu_as_workers_are(
    two_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def random_text(*_: Any) -> None:
        raise _AskedForText

    monkeypatch.setattr(fork_steps, "random_text", random_text)
    options = Namespace(device="cuda", steps=2)
    recipe: Any = Namespace(base=Namespace(sequences=1))
    with pytest.raises(_AskedForText):
        fork_steps._measure(3, recipe, options, Path(), None, None)
    assert two_gpus == [0] and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_the_benchmark_of_steps_refuses_graphs_on_a_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [str(write_recipe(tmp_path, [{"format": "bf16"}])), "--output", str(tmp_path / "steps.jsonl")]
    with pytest.raises(SystemExit):
        fork_steps.main([*command, "--device", "cpu", "--override", "forks.cuda_graph=true"])
    assert "forks.cuda_graph=True on the device 'cpu'; expected 'cuda'" in capfd.readouterr().err
    assert not (tmp_path / "steps.jsonl").exists()
