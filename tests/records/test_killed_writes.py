"""The last good state is readable after a process was killed, or a call failed, at any instant of a write."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from events import start_event
from fault_runs import in_a_process
from huggingface_hub.utils import filter_repo_objects
from processes import wait_until

from snip_hf import json_io
from snip_hf.json_io import append_json_line, read_json, remove_temporaries, write_json_atomic

# The module alone, so that a process takes milliseconds and not seconds to start.
ALONE = f"""
import os, sys, types
sys.modules["snip_hf"] = types.ModuleType("snip_hf")
sys.modules["snip_hf"].__path__ = [{str(Path(json_io.__file__).parent)!r}]
from snip_hf import json_io
path = sys.argv[1]
def document(number): return {{"number": number, "text": str(number) * 20000}}
"""
WRITE = "number = 0\nwhile True:\n    number += 1\n    json_io.write_json_atomic(path, document(number))\n"
APPEND = "number = 0\nwhile True:\n    number += 1\n    json_io.append_json_line(path, document(number))\n"
CALLS = ["open", "write", "flush", "fsync", "replace"]


def whole(document: Any) -> int:
    """The number of a document that is complete."""
    assert document["text"] == str(document["number"]) * 20000
    return int(document["number"])


def killed_after(program: str, path: Path, seconds: float) -> None:
    """Lets a process write until `seconds` after its first write, and kills it by SIGKILL."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ALONE + program, str(path)])
    try:
        end = time.monotonic() + 60
        while not path.exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.001)
        time.sleep(seconds)
    finally:
        process.kill()
        process.wait()


def test_a_process_killed_at_any_instant_leaves_a_whole_file(tmp_path: Path) -> None:
    rng = random.Random(0)
    numbers, leftovers = [], 0
    began = time.monotonic()
    write_json_atomic(tmp_path / "plan.json", {"text": "1" * 20000})
    writes = max(0.03, 5 * (time.monotonic() - began))  # seconds in which this disk takes several
    for run in range(30):
        path = tmp_path / str(run) / "plan.json"
        path.parent.mkdir()
        killed_after(WRITE, path, rng.uniform(0, writes))
        numbers.append(whole(read_json(path)))
        others = [other for other in path.parent.iterdir() if other != path]
        leftovers += len(others)
        assert len(others) <= 1
        remove_temporaries(path.parent, "plan.json")
        assert list(path.parent.iterdir()) == [path]
    assert max(numbers) > 1
    assert leftovers > 0  # some were killed in the middle of a write


def test_a_process_killed_at_any_instant_leaves_whole_lines_and_at_most_one_broken(tmp_path: Path) -> None:
    rng = random.Random(1)
    for run in range(20):
        path = tmp_path / f"{run}.jsonl"
        killed_after(APPEND, path, rng.uniform(0, 0.03))
        *lines, rest = path.read_bytes().split(b"\n")
        assert [whole(json.loads(line)) for line in lines] == list(range(1, len(lines) + 1))
        assert json.dumps({"number": len(lines) + 1, "text": str(len(lines) + 1) * 20000}).encode().startswith(rest)


# The process ends at the call, before or after it has done its work, without a word to anybody.
DYING = """
json_io.write_json_atomic(path, document(1))
call, when = sys.argv[2:]
def dying(real):
    def die(*args, **kwargs):
        if when == "after": real(*args, **kwargs)
        os._exit(9)
    return die
if call == "open": json_io.open = dying(open)
elif call in ("write", "flush"):
    class File:
        def __init__(self, *args): self.file = open(*args)
        def __enter__(self): return self
        def __exit__(self, *exception): self.file.close()
        def __getattr__(self, name): return (dying if name == call else (lambda real: real))(getattr(self.file, name))
    json_io.open = File
else: setattr(os, call, dying(getattr(os, call)))
json_io.write_json_atomic(path, document(2))
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_a_process_that_dies_at_a_call_leaves_the_old_file_or_the_new_one(call: str, when: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", ALONE + DYING, str(path), call, when])
    assert done.returncode == 9
    assert whole(read_json(path)) == (2 if (call, when) == ("replace", "after") else 1)


class _File:
    """A file of which one method fails."""

    def __init__(self, file: Any, call: str, fail: Callable[..., Any]) -> None:
        self.file, self.call, self.fail = file, call, fail

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *exception: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return self.fail if name == self.call else getattr(self.file, name)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_leaves_the_old_file_and_nothing_else(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_json_atomic(path, {"number": 1})

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    if call in ("fsync", "replace"):
        monkeypatch.setattr(os, call, fail)
    else:
        opened = fail if call == "open" else lambda *args: _File(open(*args), call, fail)  # noqa: SIM115
        monkeypatch.setattr(json_io, "open", opened, raising=False)
    with pytest.raises(OSError) as caught:
        write_json_atomic(path, {"number": 2})
    assert caught.value.errno == code
    monkeypatch.undo()
    assert read_json(path) == {"number": 1}
    assert list(tmp_path.iterdir()) == [path]
    write_json_atomic(path, {"number": 3})
    assert read_json(path) == {"number": 3}


def test_file_and_folder_are_on_the_disk_before_and_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order, so that a power loss finds the old file or the whole new one."""
    calls: list[Any] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file))[1])
    monkeypatch.setattr(os, "replace", lambda *args: (calls.append("rename"), replace(*args))[1])
    write_json_atomic(tmp_path / "plan.json", {})
    assert calls[0].startswith(f"{tmp_path}/.plan.json.")
    assert calls[1:] == ["rename", str(tmp_path)]
    calls.clear()
    append_json_line(tmp_path / "history.jsonl", {})
    assert calls == [str(tmp_path / "history.jsonl")]


def test_a_folder_that_cannot_be_synced_does_not_make_a_write_that_is_done_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def refuse_folders(file: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(file)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    write_json_atomic(tmp_path / "plan.json", {"number": 1})
    assert read_json(tmp_path / "plan.json") == {"number": 1}


def test_a_reader_finds_one_of_two_documents_while_they_replace_each_other(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ALONE + WRITE, str(path)])
    try:
        wait_until(path.exists)
        numbers = []

        def looked_at_two() -> bool:
            numbers.append(whole(read_json(path)))
            return numbers[-1] > numbers[0]

        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            looked_at_two()
        wait_until(looked_at_two)
    finally:
        process.kill()
        process.wait()
    assert numbers == sorted(numbers)


# Writes plan, history and tables over and over, cuts the history as a resumed run does, and is killed at some instant;
# then the next run of the folder begins, as a new one or as one that is resumed.
FOLDER = """
import json, os, random, signal, sys, time
from pathlib import Path
from snip_hf.estimation.table import DivergenceTable
from events import records_of
from events import refresh_event, start_event
from snip_hf.records.run_folder import RunFolder
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan
top = Path(sys.argv[1])
row = {"forward": 1.0, "grad_input": 1.0, "grad_weight": 1.0}
plans = [
    PrecisionPlan.uniform({f"layers.{i}": row for i in range(300)}, fmt, [[f"layers.{i}" for i in range(300)]],
                          PlanProvenance(step=1, policy="snip"))
    for fmt in ("fp8", "fp4")
]
class Table:
    loss = 1.0
    def to_records(self): return [{"layer": "a" * 100, "number": n} for n in range(300)]
start = start_event(plans[0])
rng = random.Random(2)
for number in range(int(sys.argv[2])):
    output = top / str(number)
    child = os.fork()
    if not child:
        folder = RunFolder(output)
        folder.clear(); folder.save_plan(plans[0]); folder.append(start)
        for step in range(1, 10**6):
            folder.write_divergences(step, Table())
            folder.save_plan(plans[step % 2])
            folder.append(refresh_event(step, reason="y" * 20000))
            if step % 3 == 0:
                folder.cut(step - 1, None, start)
    snip = output / "snip"
    while not (snip / "history.jsonl").exists() or not (snip / "history.jsonl").stat().st_size:
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert PrecisionPlan.load(snip / "plan.json").fp4_fraction in (0.0, 1.0)
    for table in snip.glob("divergence-*.json"):
        assert len(records_of(json.loads(table.read_text()))) == 300
    folder = RunFolder(output)
    folder.cut(10**9, None, start)
    lines = [json.loads(line) for line in (snip / "history.jsonl").read_text().splitlines()]
    assert lines[0] == start.to_record()
    steps = [line["step"] for line in lines[1:]]
    assert steps == sorted(steps) and all(line["reason"] == "y" * 20000 for line in lines[1:])
    assert not list(snip.glob(".*")), list(snip.iterdir())
    folder.clear()
    assert {path.name for path in snip.iterdir()} <= {"plan.json"}
print("done")
"""


@pytest.mark.slow
def test_a_run_folder_is_readable_whenever_its_run_was_killed(tmp_path: Path) -> None:
    assert in_a_process(FOLDER, tmp_path, 15).split() == ["done"]


def test_remains_of_a_killed_write_are_removed_by_the_next_run_of_the_folder(tmp_path: Path) -> None:
    from snip_hf.records.run_folder import RunFolder

    for begin in (lambda folder: folder.clear(), lambda folder: folder.cut(1, None, start_event())):
        (tmp_path / "snip").mkdir(exist_ok=True)
        (tmp_path / "snip" / ".plan.json.0123456789abcdef.tmp").write_text("half a pl")
        begin(RunFolder(tmp_path))
        assert list((tmp_path / "snip").glob(".*")) == []


def test_the_trainer_uploads_no_temporary_file_of_a_checkpoint() -> None:
    """A temporary file in a checkpoint's folder is removed with that folder and is not pushed."""
    ignored = ["_*", "checkpoint-*"]  # as in transformers' Trainer
    names = ["checkpoint-3/.snip_state.json.0123456789abcdef.tmp", "config.json"]
    assert list(filter_repo_objects(names, ignore_patterns=ignored)) == ["config.json"]
