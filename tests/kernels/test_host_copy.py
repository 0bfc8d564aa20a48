"""Do numbers reach a device as they were when the host sent them, although it goes on?"""

from __future__ import annotations

import pytest
import torch

from snip_hf.kernels.launching import on_device

CUDA = torch.device("cuda")


def test_on_the_host_nothing_is_copied() -> None:
    numbers = torch.arange(4)
    assert on_device(numbers, torch.device("cpu")) is numbers


@pytest.mark.gpu
def test_what_the_host_writes_afterwards_does_not_reach_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    pin = torch.Tensor.pin_memory
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.numel()) or pin(self))
    numbers = torch.arange(64).view(32, 2)
    torch.cuda._sleep(2 * 10**8)  # about a tenth of a second, in which nothing is copied
    column, whole = on_device(numbers[:, 1], CUDA), on_device(numbers, CUDA)
    is_ahead = not torch.cuda.current_stream().query()
    numbers.zero_()
    assert is_ahead and pinned == [32, 64]
    assert column.is_contiguous() and column.tolist() == list(range(1, 64, 2))
    assert whole.flatten().tolist() == list(range(64))
