"""Commands whose output nobody reads to the end, or that cannot be written, end without a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from llama_plans import make_plan
from written_runs import random_assignments, write_run

from snip_hf.cli import NO_READER, _drop_output, main

PROBLEM = {
    "groups": [{"name": "a", "options": [{"name": "fp8", "cost": 0.0, "weight": 0.0}]}],
    "constraints": [{"name": "stage 0", "groups": None, "minimum": 0.0}],
    "ties": [],
    "solver": "greedy",
    "time_limit": 10.0,
    "relative_gap": 1e-4,
}
COMMANDS = (
    ["--help"],
    ["report", "run"],
    ["report", "run", "--html"],
    ["inspect", "run/snip/plan.json"],
    ["compare", "run", "run"],
    ["export", "plan.json", "--to", "torchao"],
    ["recipe", "list"],
    ["solve", "problem.json"],
    ["doctor"],
)


@pytest.fixture
def stream(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    """A pipe whose reader has gone: buffered, or written at every line."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=request.param) as file:
        yield file


@pytest.mark.parametrize("stream", [-1, 1], indirect=True, ids=["buffered", "by line"])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_whose_reader_has_gone_ends_quietly(
    command: list[str],
    stream: TextIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "run", random_assignments(2))
    make_plan("mxfp8").save(tmp_path / "plan.json")
    (tmp_path / "problem.json").write_text(json.dumps(PROBLEM))
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stream)
        assert main(command) == NO_READER
    said = capsys.readouterr().err
    assert "snip-hf:" not in said and "pipe" not in said


@pytest.mark.parametrize("stream", [1], indirect=True)
def test_an_error_that_nobody_reads_is_no_traceback(stream: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["recipe", "copy", "nothing"]) == NO_READER


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="Linux lists the open files of a process there")
@pytest.mark.parametrize("stream", [-1], indirect=True)
def test_output_that_is_dropped_leaves_no_file_open(stream: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    stream.write("what nobody reads")
    monkeypatch.setattr(sys, "stdout", stream)
    before = sorted(os.listdir("/proc/self/fd"))
    _drop_output()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_the_interpreter_says_nothing_either(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "snip_hf", "recipe", "list"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=120, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (NO_READER, b"")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("command", [["recipe", "list"], ["compare", "run", "run"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_sentence(command: list[str], tmp_path: Path) -> None:
    write_run(tmp_path / "run", random_assignments(2))
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-m", "snip_hf", *command]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, env=environment, timeout=120, check=False
        )
    assert (done.returncode, done.stderr) == (2, b"snip-hf: [Errno 28] No space left on device\n")
