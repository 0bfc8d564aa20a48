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

from snip_hf import json_io
from snip_hf.json_io import append_json_line, read_json, write_json_atomic

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


@pytest.mark.parametrize("call", ["open", "write", "flush", "fsync", "replace"])
def test_a_call_that_fails_leaves_the_old_file_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_json_atomic(path, {"number": 1})

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if call in ("fsync", "replace"):
        monkeypatch.setattr(os, call, fail)
    else:
        opened = fail if call == "open" else lambda *args: _File(open(*args), call, fail)  # noqa: SIM115
        monkeypatch.setattr(json_io, "open", opened, raising=False)
    with pytest.raises(OSError, match="No space left"):
        write_json_atomic(path, {"number": 2})
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
