"""Commands whose output nobody reads to the end end without a traceback."""

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

from snip_hf.cli import NO_READER, main

PROBLEM = {
    "groups": [{"name": "a", "options": [{"name": "fp8", "cost": 0.0, "weight": 0.0}]}],
    "constraints": [{"name": "stage 0", "groups": None, "minimum": 0.0}],
    "ties": [],
    "solver": "greedy",
    "time_limit": 10.0,
    "relative_gap": 1e-4,
}
COMMANDS = (
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
        try:
            assert main(command) == NO_READER
        except SystemExit as stop:  # from rich
            assert stop.code == 1
    said = capsys.readouterr().err
    assert "snip-hf:" not in said and "pipe" not in said


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_the_interpreter_says_nothing_either(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "snip_hf", "recipe", "list"]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=120, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (NO_READER, b"")
