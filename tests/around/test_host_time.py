"""What `benchmarks/host_time.py` times."""

from __future__ import annotations

from typing import Any

import host_time
import pytest
import torch

from snip_hf.kernels import launching


def test_operators_launch_one_kernel_again_and_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    class Counting(host_time.Compiled):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments: launched.append(len(grid))

    monkeypatch.setattr(launching, "_COMPILED", {})
    monkeypatch.setattr(host_time, "Compiled", Counting)
    found = {}
    with host_time.nothing_launched(), torch.no_grad():
        for name, call in host_time.by_operator().items():
            call()
            launched.clear()
            call()
            found[name] = len(launched)
    assert found == {name: int(name != "product") for name in found}
    assert len(found) == 6


def test_the_least_of_the_rounds_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.004, 1.0, 1.001, 2.0, 2.003])
    monkeypatch.setattr(host_time.time, "thread_time", lambda: next(times))
    assert host_time.microseconds(lambda: None, 10, 3) == pytest.approx(100.0)
