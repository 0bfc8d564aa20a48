"""A run leaves alone what else is in its folder: earlier runs, runs at the same time, the user's files."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from configs import fp4_config
from events import refresh_event, small_plan, start_event
from fault_runs import CONFIG, SHORT
from tiny_runs import SCHEDULE, Run, history, model_with_dropout, train
from transformers import TrainerCallback

from snip_hf import SnipController
from snip_hf.estimation.table import Divergence, DivergenceTable
from snip_hf.records import run_folder as run_folder_module
from snip_hf.records.load import load_run
from snip_hf.records.run_folder import RunRecord
from snip_hf.training import controller as controller_module
from snip_hf.training import gradients

LOG = logging.getLogger("snip_hf.of_the_test")
START = start_event()
TABLE = DivergenceTable(1.0, (Divergence("a", "layer", "fp4", 1.0, 1.0, 1.0),))
PLAN = small_plan()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def record(folder: RunRecord) -> None:
    """Writes the files of a short run."""
    folder.clear()
    folder.save_plan(PLAN)
    folder.add(START)
    folder.write_divergences(2, TABLE)


def controller(folder: Path, **options: Any) -> SnipController:
    model = model_with_dropout()
    return SnipController(model, torch.optim.AdamW(model.parameters()), CONFIG, output_dir=folder, **options)


@pytest.mark.parametrize(
    "where", [(controller_module, "check_alike"), (gradients, "check_optimizer"), (controller_module, "PipelineChunks")]
)
def test_a_run_that_cannot_start_gives_the_folder_back_although_its_error_is_kept(
    where: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(*where, refuse)
    with pytest.raises(ValueError, match="no") as kept:
        controller(tmp_path)
    process = holding(tmp_path)
    process.communicate("")
    assert process.returncode == 0
    assert kept.tb is not None


# ----------------------------------------------------------------------------------------------------- one by one


def test_a_second_run_moves_the_record_of_the_first_aside_where_it_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "snip_hf")
    run = train(tmp_path, CONFIG, **SHORT)
    assert {"plan.json", "history.jsonl", "divergence-2.json", "divergence-6.json"} == set(contents(tmp_path / "snip"))
    for number, applied in ((1, [4, 8]), (2, [4])):
        before = contents(tmp_path / "snip")
        later = train(tmp_path, CONFIG, **SHORT | {"max_steps": 4})
        earlier = tmp_path / f"_snip-earlier-{number}"
        assert contents(earlier / "snip") == before
        assert f"snip-hf: moved the records of an earlier run from {tmp_path / 'snip'} to {earlier / 'snip'}." in (
            caplog.messages
        )
        read = load_run(earlier)
        assert [refresh.applied_step for refresh in read.refreshes] == applied
        assert read.plans[-1][1].assignment == run.callback.controller.plan.assignment
        run = later
    assert [line["event"] for line in history(tmp_path)] == ["start", "refresh"]


def test_a_resumed_run_moves_nothing_aside(undisturbed: Run, tmp_path: Path) -> None:
    for name in ("snip", "checkpoint-6"):
        shutil.copytree(undisturbed.folder / name, tmp_path / name)
    resumed = train(tmp_path, CONFIG, resume=tmp_path / "checkpoint-6", **SHORT)
    assert not list(tmp_path.glob("_snip-earlier*"))
    assert [line["applied_step"] for line in resumed.refreshes] == [4, 8]
    assert resumed.losses == undisturbed.losses


def test_a_line_that_a_crash_left_broken_is_cut_when_the_run_goes_on(tmp_path: Path) -> None:
    folder = RunRecord(tmp_path, True, LOG)
    record(folder)
    with (tmp_path / "snip" / "history.jsonl").open("a") as file:
        file.write('{"event": "refr')
    folder.cut(1, None, START)
    assert history(tmp_path) == [START.to_record()]


def test_a_record_that_cannot_be_moved_aside_is_not_mixed_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record(RunRecord(tmp_path, True, LOG))
    before = contents(tmp_path)

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder_module.os, "replace", fail)
    second = RunRecord(tmp_path, True, LOG)
    record(second)
    second.cut(1, None, START)
    monkeypatch.undo()
    assert {name: data for name, data in contents(tmp_path).items() if "earlier" not in name} == before
    assert len(caplog.messages) == 1 and "No space left on device" in caplog.messages[0]
    assert "records nothing" in caplog.messages[0]


# ---------------------------------------------------------------------------------------------------- at the same time

HOLD = """
import sys
from filelock import FileLock
lock = FileLock(sys.argv[1] + "/_snip.lock")
lock.acquire(timeout=0)
print("held", flush=True)
sys.stdin.read()
"""


def holding(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the folder until it is killed or its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_run_into_the_folder_of_a_running_one_is_refused_at_the_start(tmp_path: Path, undisturbed: Run) -> None:
    shutil.copytree(undisturbed.folder / "snip", tmp_path / "snip")
    before = contents(tmp_path / "snip")
    process = holding(tmp_path)
    try:
        for begin in (lambda: controller(tmp_path), lambda: train(tmp_path, CONFIG, **SHORT)):
            with pytest.raises(ValueError) as caught:
                begin()
            assert str(caught.value) == (
                f"Another run is writing to {tmp_path / 'snip'}. Wait until it has ended, or give this run its "
                "own output_dir."
            )
            assert contents(tmp_path / "snip") == before
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    # A process that the system killed holds nothing any more.
    controller(tmp_path).close()


def test_a_run_that_ended_holds_no_lock(tmp_path: Path) -> None:
    train(tmp_path, CONFIG, **SHORT | {"max_steps": 1})
    process = holding(tmp_path)
    process.communicate("")
    assert process.returncode == 0


def test_a_run_of_the_same_process_that_was_not_closed_is_replaced_and_records_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = RunRecord(tmp_path, True, LOG)
    first.hold()
    record(first)
    second = RunRecord(tmp_path, True, LOG)
    second.hold()
    record(second)
    before = contents(tmp_path)
    first.add(refresh_event(2))
    first.save_plan(PLAN)
    first.clear()
    first.release()
    assert contents(tmp_path) == before
    (message,) = caplog.messages
    assert message.startswith(f"snip-hf: a later run of this process writes to {tmp_path / 'snip'}")
    second.add(refresh_event(2))
    assert [line["event"] for line in history(tmp_path)] == ["start", "refresh"]


class _Interrupt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("interrupted")


def test_after_a_run_that_an_error_ended_the_same_process_trains_into_the_folder_again(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="interrupted") as caught:  # kept, as a notebook does, and its frames with it
        train(tmp_path, CONFIG, callbacks=[_Interrupt()], **SHORT)
    run = train(tmp_path, CONFIG, **SHORT | {"max_steps": 4})
    assert [line["applied_step"] for line in run.refreshes] == [4]
    assert caught.value is not None


def test_if_files_cannot_be_locked_a_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder_module.FileLock, "acquire", refuse)
    run = train(tmp_path, CONFIG, **SHORT | {"max_steps": 4})
    assert [line["applied_step"] for line in run.refreshes] == [4]
    (message,) = [message for message in caplog.messages if "lock" in message]
    assert message == (
        f"snip-hf: could not lock {tmp_path}, training continues; do not start a second run there: "
        "[Errno 37] No locks available"
    )


# ---------------------------------------------------------------------------------------------- wherever the process is


class _ChangeFolder(TrainerCallback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            os.chdir(self.folder)


def test_a_run_that_changes_to_another_folder_goes_on_with_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    train(Path("out"), fp4_config(**SCHEDULE), callbacks=[_ChangeFolder(tmp_path / "there")], **SHORT)
    assert Path.cwd() == tmp_path / "there"
    assert list(Path.cwd().iterdir()) == []
    assert [line["event"] for line in history(tmp_path / "here" / "out")] == ["start", "refresh", "refresh"]
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"out"}
