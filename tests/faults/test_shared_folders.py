"""Does a run leave alone what others keep in its folder: earlier runs, runs at the same time, and the user?"""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import warnings
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
from snip_hf.json_io import append_json_line, write_json_atomic
from snip_hf.records import lock
from snip_hf.records import lock as lock_module
from snip_hf.records import run_folder as run_folder_module
from snip_hf.records.load import load_run
from snip_hf.records.lock import take
from snip_hf.records.run_folder import RunFolder
from snip_hf.training import controller as controller_module
from snip_hf.training import gradients

START = start_event()
TABLE = DivergenceTable(1.0, (Divergence("a", "layer", "fp4", 1.0, 1.0, 1.0),))
PLAN = small_plan()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def record(folder: RunFolder) -> None:
    """What a short run writes."""
    folder.clear()
    folder.save_plan(PLAN)
    folder.append(START)
    folder.write_divergences(2, TABLE)


def controller(folder: Path, **options: Any) -> SnipController:
    model = model_with_dropout()
    return SnipController(model, torch.optim.AdamW(model.parameters()), CONFIG, output_dir=folder, **options)


@pytest.mark.parametrize(
    "where",
    [(controller_module, "check_alike"), (gradients, "OptimizerWatch"), (controller_module, "PipelineChunks")],
)
def test_a_run_that_cannot_start_gives_the_folder_back_although_its_error_is_kept(
    where: tuple[Any, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(*where, refuse)
    with pytest.raises(ValueError, match="no") as kept:
        controller(tmp_path)
    assert not (tmp_path / "_snip.lock").exists()
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
        assert f"snip-hf: moved what an earlier run recorded in {tmp_path / 'snip'} to {earlier / 'snip'}." in (
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
    assert not list(tmp_path.glob("_snip*"))
    assert [line["applied_step"] for line in resumed.refreshes] == [4, 8]
    assert resumed.losses == undisturbed.losses


def test_a_move_that_was_cut_short_is_completed_by_the_next_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    record(folder)
    folder.write_divergences(6, TABLE)
    before = contents(tmp_path / "snip")
    # As a process that was killed after the first file leaves it.
    target = tmp_path / "_snip-earlier-1" / "snip"
    target.mkdir(parents=True)
    shutil.move(tmp_path / "snip" / "divergence-2.json", target)
    record(RunFolder(tmp_path))
    assert contents(target) == before


def test_a_record_that_cannot_be_moved_aside_is_not_mixed_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record(RunFolder(tmp_path))
    before = contents(tmp_path)

    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_folder_module.shutil, "move", fail)
    second = RunFolder(tmp_path)
    record(second)
    second.cut(1, None, START)
    monkeypatch.undo()
    assert {name: data for name, data in contents(tmp_path).items() if "earlier" not in name} == before
    assert len(caplog.messages) == 1 and "No space left on device" in caplog.messages[0]
    assert "records nothing" in caplog.messages[0]


# ---------------------------------------------------------------------------------------------------- at the same time

# The module alone, so that a process takes milliseconds and not seconds to start.
ALONE = f"""
import sys, types
from pathlib import Path
sys.modules["snip_hf"] = types.ModuleType("snip_hf")
sys.modules["snip_hf"].__path__ = [{str(Path(lock.__file__).parents[1])!r}]
from snip_hf.records.lock import HeldError, take
"""
HOLD = """
lock = take(Path(sys.argv[1], "_snip.lock"))
print("held", flush=True)
sys.stdin.read()
"""


def alone(program: str, *words: Path) -> list[str]:
    return [sys.executable, "-c", ALONE + program, *map(str, words)]


def holding(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the folder until it is killed or its input ends."""
    process = subprocess.Popen(alone(HOLD, folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def held_by(folder: Path) -> str:
    """Who holds the folder, as another process finds; "" for nobody."""
    program = """
try:
    take(Path(sys.argv[1], "_snip.lock"))
except HeldError as error:
    print(error)
"""
    return subprocess.run(alone(program, folder), capture_output=True, text=True, check=True).stdout.strip()


US = f"process {os.getpid()} on {os.uname().nodename}"


def test_a_run_into_the_folder_of_a_running_one_is_refused_at_the_start(tmp_path: Path, undisturbed: Run) -> None:
    shutil.copytree(undisturbed.folder / "snip", tmp_path / "snip")
    before = contents(tmp_path / "snip")
    process = holding(tmp_path)
    try:
        for begin in (lambda: controller(tmp_path), lambda: train(tmp_path, CONFIG, **SHORT)):
            with pytest.raises(ValueError) as caught:
                begin()
            assert str(caught.value) == (
                f"Another run is writing into {tmp_path / 'snip'} (process {process.pid} on {os.uname().nodename}). "
                "Wait until it has ended, or give this run an output_dir of its own."
            )
            assert contents(tmp_path / "snip") == before
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    # Whom the system killed holds nothing any more.
    controller(tmp_path).close()
    assert not list(tmp_path.glob("_snip*"))


def test_a_run_that_ended_leaves_no_lock(tmp_path: Path) -> None:
    train(tmp_path, CONFIG, **SHORT | {"max_steps": 1})
    process = holding(tmp_path)
    assert [path.name for path in tmp_path.glob("_snip*")] == ["_snip.lock"]
    process.communicate("")
    assert process.returncode == 0
    assert not list(tmp_path.glob("_snip*"))


def test_a_run_of_the_same_process_that_was_not_closed_is_replaced_and_records_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = RunFolder(tmp_path)
    first.hold()
    record(first)
    second = RunFolder(tmp_path)
    second.hold()
    record(second)
    before = contents(tmp_path)
    first.append(refresh_event(2))
    first.save_plan(PLAN)
    first.clear()
    first.release()
    assert contents(tmp_path) == before
    (message,) = caplog.messages
    assert message.startswith(f"snip-hf: {tmp_path / 'snip'} belongs to a later run of this process")
    second.append(refresh_event(2))
    assert [line["event"] for line in history(tmp_path)] == ["start", "refresh"]
    assert held_by(tmp_path) == US


class _Interrupt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise RuntimeError("interrupted")


def test_after_a_run_that_an_error_ended_the_same_process_trains_into_the_folder_again(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="interrupted") as caught:  # kept, as a notebook does, and its frames with it
        train(tmp_path, CONFIG, callbacks=[_Interrupt()], **SHORT)
    run = train(tmp_path, CONFIG, **SHORT | {"max_steps": 4})
    assert [line["applied_step"] for line in run.refreshes] == [4]
    assert caught.value is not None


def test_a_run_that_nobody_refers_to_gives_its_folder_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.hold()
    assert held_by(tmp_path) == US
    del folder
    gc.collect()
    assert held_by(tmp_path) == ""
    assert not list(tmp_path.glob("_snip*"))


def test_a_forked_process_neither_holds_the_folder_nor_gives_it_back(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.hold()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns where there are threads
        child = os.fork()
    if not child:
        os.close(writer)
        del folder
        gc.collect()
        os.read(reader, 1)  # until the parent has given the folder back
        os._exit(0)
    os.close(reader)
    assert held_by(tmp_path) == US
    folder.release()
    assert held_by(tmp_path) == ""
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0


def test_one_of_many_gets_the_lock_at_a_time(tmp_path: Path) -> None:
    """Lock files are removed and made anew all the time, and nobody holds one that is gone."""
    path = tmp_path / "lock"
    program = """
path, inside = Path(sys.argv[1]), Path(sys.argv[2])
done = 0
while done < 100:
    try:
        lock = take(path)
    except HeldError:
        continue
    inside.touch(exist_ok=False)
    inside.unlink()
    lock.release()
    done += 1
"""
    command = alone(program, path, tmp_path / "inside")
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert not list(tmp_path.iterdir())


def test_where_files_cannot_be_locked_a_run_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "flock", refuse)
    run = train(tmp_path, CONFIG, **SHORT | {"max_steps": 4})
    assert [line["applied_step"] for line in run.refreshes] == [4]
    (message,) = [message for message in caplog.messages if "lock" in message]
    assert message == (
        f"snip-hf: could not lock {tmp_path}, training goes on; do not start a second run there: "
        "[Errno 37] No locks available"
    )
    monkeypatch.setattr(lock_module, "fcntl", None)
    with pytest.raises(OSError, match="no fcntl"):
        take(tmp_path / "lock")


# ---------------------------------------------------------------------------------------------- wherever the process is


class _ChangeFolder(TrainerCallback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            os.chdir(self.folder)


def test_a_run_that_changes_to_another_folder_goes_on_with_its_record_and_its_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    config = fp4_config(**SCHEDULE, budget="measured", timing_file="times.json")
    train(Path("out"), config, callbacks=[_ChangeFolder(tmp_path / "there")], **SHORT)
    assert Path.cwd() == tmp_path / "there"
    assert list(Path.cwd().iterdir()) == []
    assert [line["event"] for line in history(tmp_path / "here" / "out")] == ["start", "refresh", "refresh"]
    assert {path.name for path in (tmp_path / "here").iterdir()} == {"out", "times.json"}


# -------------------------------------------------------------------------------------------------- files of the user

THEIRS = [
    *["divergence-notes.json", "divergence-7-copy.json", "divergence-\u00b2.json", "divergence-.json", "plan-old.json"],
    *["history.jsonl.bak", ".notes.json.0123456789abcdef.tmp", ".plan.json.tmp", ".plan.json.old.tmp", "README.md"],
]


def test_files_of_the_user_stay_in_the_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    record(folder)
    snip = tmp_path / "snip"
    for name in THEIRS:
        (snip / name).write_text("mine")
    (snip / ".plan.json.0123456789abcdef.tmp").write_text("of a killed run")
    (snip / "divergence-9.json").mkdir()
    (snip / "divergence-10.json").symlink_to(snip / "README.md")
    RunFolder(tmp_path).clear()
    RunFolder(tmp_path).cut(0, None, START)
    theirs = [*THEIRS, "divergence-9.json", "divergence-10.json"]
    assert sorted(path.name for path in snip.iterdir()) == sorted([*theirs, "history.jsonl", "plan.json"])
    assert all((snip / name).read_text() == "mine" for name in THEIRS)


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_permissions_of_files_that_are_replaced_stay(mode: int, tmp_path: Path) -> None:
    snip = tmp_path / "snip"
    names = ("plan.json", "history.jsonl")

    def modes(folder: Path) -> set[int]:
        return {stat.S_IMODE((folder / name).stat().st_mode) for name in names}

    folder = RunFolder(tmp_path)
    record(folder)
    for name in names:
        (snip / name).chmod(mode)
    folder.save_plan(PLAN)
    folder.append(refresh_event(9))
    folder.cut(8, None, START)
    assert modes(snip) == {mode}
    record(RunFolder(tmp_path))
    assert modes(snip) == modes(tmp_path / "_snip-earlier-1" / "snip") == {mode}
    write_json_atomic(tmp_path / "state.json", {})
    (tmp_path / "state.json").chmod(mode)
    write_json_atomic(tmp_path / "state.json", {"a": 1})
    assert stat.S_IMODE((tmp_path / "state.json").stat().st_mode) == mode


@pytest.mark.parametrize("target", ["victim", "nothing"])
def test_links_are_neither_written_through_nor_replaced(
    target: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "victim").write_text(json.dumps(START.to_record()) + "\n")
    snip = tmp_path / "out" / "snip"
    snip.mkdir(parents=True)
    names = ("plan.json", "history.jsonl", "divergence-2.json", "state.json")
    for name in names:
        (snip / name).symlink_to(tmp_path / target)
    record(RunFolder(tmp_path / "out"))
    RunFolder(tmp_path / "out").cut(0, None, START)
    with pytest.raises(OSError, match="symbolic link"):
        write_json_atomic(snip / "state.json", {})
    with pytest.raises(OSError):
        append_json_line(snip / "history.jsonl", {})
    assert sorted(path.name for path in snip.iterdir()) == sorted(names)
    assert all((snip / name).is_symlink() for name in names)
    assert (tmp_path / "victim").read_text() == json.dumps(START.to_record()) + "\n"
    assert not (tmp_path / "nothing").exists()
    assert len(caplog.messages) == 4 and all("could not write" in message for message in caplog.messages)


def test_two_threads_that_train_into_one_folder_do_not_mix_their_histories(tmp_path: Path) -> None:
    """The later one has the folder."""
    first = controller(tmp_path)
    first.start()
    made: list[SnipController] = []
    thread = threading.Thread(target=lambda: made.append(controller(tmp_path)))
    thread.start()
    thread.join()
    made[0].start()
    before = contents(tmp_path / "snip")
    first.start()
    first.close()
    assert contents(tmp_path / "snip") == before
    made[0].close()
