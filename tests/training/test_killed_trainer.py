"""A run that was killed in a refresh resumes bit for bit, and its solver does not outlive it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fault_runs import CONFIG, SAVING, SHORT, in_a_process
from processes import alive, members, wait_until
from tiny_runs import Run, differing, solve_with, train, weights, without_seconds
from transformers import TrainerCallback

from snip_hf.planning.solver import ilp

# Seconds that a solver may outlive its trainer: a quarter to notice, the rest for a busy machine.
BOUND = 20.0
# ilp.py itself, but that it never finds a solution and ignores SIGTERM.
HANGING = """
import signal, sys, time
sys.path.insert(0, {folder!r})
import ilp
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ilp.solve = lambda problem: time.sleep(600)
ilp.main()
"""

# Trains, and is killed by SIGKILL after the save of step 3, while the solver runs.
PROGRAM = """
import os, signal, sys
from pathlib import Path
from fault_runs import CONFIG, SAVING, SHORT
from tiny_runs import train
from transformers import TrainerCallback
import snip_hf.planning.solver.process
from snip_hf import SnipCallback
folder, hanging = Path(sys.argv[1]), sys.argv[2]

class Killer(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 3:
            process = callback.controller._run.refresher.pending.process._process
            assert process.poll() is None
            (folder / "pid").write_text(str(process.pid))
            os.kill(os.getpid(), signal.SIGKILL)

snip_hf.planning.solver.process.ilp.__file__ = hanging
callback = SnipCallback(CONFIG)
train(folder, callback=callback, callbacks=[Killer()], **SHORT, **SAVING)
"""


@pytest.mark.slow
def test_a_run_that_was_killed_in_a_refresh_goes_on_to_the_bit_and_its_solver_ends(
    undisturbed: Run, tmp_path: Path
) -> None:
    stub = tmp_path / "hanging.py"
    stub.write_text(HANGING.format(folder=str(Path(ilp.__file__).parent)))
    in_a_process(PROGRAM, tmp_path, stub, code=-signal.SIGKILL)
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: not alive(pid) and members(pid) == [], BOUND)
    resumed = train(tmp_path, CONFIG, resume=tmp_path / "checkpoint-3", **SHORT, **SAVING)
    assert resumed.losses == undisturbed.losses
    assert differing(weights(resumed.model), weights(undisturbed.model)) == []
    assert without_seconds(resumed.history) == without_seconds(undisturbed.history)


class Breaks(TrainerCallback):
    """Ends training after step 3."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_a_solver_ends_at_once_when_an_error_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error, the frames that it holds, the Trainer and the model all stay, as in a notebook."""
    started = solve_with(monkeypatch, "import time; time.sleep(600)")
    with pytest.raises(KeyboardInterrupt) as caught:
        train(tmp_path, CONFIG, callbacks=[Breaks()], **SHORT)
    assert caught.value.__traceback__ is not None
    wait_until(lambda: members(started[0]._process.pid) == [], 10.0)


@pytest.mark.parametrize("how", ["is killed", "is killed before its solver has begun", "leaves by os._exit"])
def test_the_solvers_process_ends_with_the_one_that_waits_for_it(how: str, tmp_path: Path) -> None:
    """Runs without torch, so that only the time to notice is measured."""
    stub = tmp_path / "hanging.py"
    late = "import time; time.sleep(1)\n" if "before" in how else ""
    stub.write_text(late + HANGING.format(folder=str(Path(ilp.__file__).parent)))
    program = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-I', {str(stub)!r}, str(os.getpid()), '600'],"
        " stdin=open(os.devnull), start_new_session=True)\n"
        "print(child.pid, flush=True); sys.stdin.readline(); os._exit(0)"
    )
    stub.write_text(stub.read_text().replace("import ilp\n", "import ilp\nilp.json.loads = lambda text: {}\n"))
    command = [sys.executable, "-S", "-c", program]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None and parent.stdin is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    if "os._exit" in how:
        parent.stdin.write(b"\n")
    else:
        os.kill(parent.pid, signal.SIGKILL)
    parent.stdin.close()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: members(pid) == [], BOUND)


def test_a_solver_whose_trainer_lives_is_left_alone(tmp_path: Path) -> None:
    problem = {
        "groups": [{"name": "a", "options": [{"name": "fp8", "cost": 1.0, "weight": 0.0}]}],
        "constraints": [],
        "solver": "greedy",
    }
    command = [sys.executable, ilp.__file__, str(os.getpid()), "60"]
    done = subprocess.run(command, input=json.dumps(problem), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"] == {"a": "fp8"}
