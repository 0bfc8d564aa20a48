"""A full disk costs what could not be written, but neither a loss nor older files."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from fault_runs import CONFIG, SAVING, SHORT
from tiny_runs import Run, differing, train, weights, without_seconds
from transformers import TrainerCallback

from snip_hf import PrecisionPlan
from snip_hf import json_io as json_io_module


class _FullDisk(TrainerCallback):
    """Lets `os.write` fail from step 2 to step 5 where the package writes files: plan, history, tables, states."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on, self.failures = False, 0
        monkeypatch.setattr(json_io_module, "os", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, file: int, data: bytes) -> int:
        if not self.on:
            return os.write(file, data)
        self.failures += 1
        os.write(file, data[: len(data) // 2])  # as on a disk, part of it still fits
        raise OSError(errno.ENOSPC, "No space left on device")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.on = 2 <= state.global_step + 1 <= 5


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


def test_a_full_disk_costs_what_could_not_be_written_and_no_loss(
    undisturbed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = _FullDisk(monkeypatch)
    run = train(tmp_path, CONFIG, callbacks=[full], **SHORT, **SAVING)
    monkeypatch.undo()
    assert full.failures > 0
    assert run.losses == undisturbed.losses
    assert differing(weights(run.model), weights(undisturbed.model)) == []
    assert any("No space left on device" in message for message in caplog.messages)
    assert leftovers(tmp_path) == []

    # All files are complete. Those written once the disk had room again equal an undisturbed run's.
    assert without_seconds(run.history[-1]) == without_seconds(undisturbed.history[-1])
    assert run.history[0]["event"] == "start"
    assert PrecisionPlan.load(tmp_path / "snip" / "plan.json").assignment == run.callback.controller.plan.assignment
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_bytes())
    states = {path.parent.name for path in tmp_path.glob("checkpoint-*/snip_state.json")}
    assert {"checkpoint-1", "checkpoint-6", "checkpoint-7", "checkpoint-8"} <= states
    resumed = train(tmp_path, CONFIG, resume=tmp_path / "checkpoint-6", **SHORT, **SAVING)
    assert resumed.losses == undisturbed.losses
    assert differing(weights(resumed.model), weights(undisturbed.model)) == []
