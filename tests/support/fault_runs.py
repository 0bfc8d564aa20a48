"""The run that tests of faults disturb."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from configs import fp4_config
from tiny_runs import SCHEDULE, Run, train

CONFIG = fp4_config(**SCHEDULE)
SHORT = {"max_steps": 8}
SAVING = {"save_strategy": "steps", "save_steps": 1}


def undisturbed(folder: Path) -> Run:
    """Refreshes at steps 2 and 6, applied after 4 and 8, and a checkpoint after each of its 8 steps."""
    run = train(folder, CONFIG, **SHORT, **SAVING)
    assert [(line["step"], line["applied_step"]) for line in run.refreshes] == [(2, 4), (6, 8)]
    return run


def in_a_process(program: str, *words: Any, code: int = 0) -> str:
    """Runs a program in a Python of its own, with the modules of the tests; returns what it prints."""
    tests = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (tests, tests / "support")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), path]))
    command = [sys.executable, "-W", "ignore", "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == code, done.stderr
    return done.stdout
