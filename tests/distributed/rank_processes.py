"""Starts several processes that train together, and makes sure that none outlives its test."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from unittest import mock

import psutil
import torch
from devices import NCCL
from torch.distributed import TCPStore

# Imports take longest, so the ranks are forked from one process that has imported what all of them use.
IMPORTED = get_context("forkserver")
IMPORTED.set_forkserver_preload(["torch", "accelerate", "transformers.trainer", "snip_hf"])
TESTS = Path(__file__).parents[1]
RECIPES = TESTS.parent / "recipes"
TAIL = 3000  # characters of each log that a failure shows


@dataclass(frozen=True)
class Ended:
    """The exit statuses and logs of the processes."""

    codes: tuple[int | None, ...]
    """Rank -> exit status; None: it was still running when time was up."""
    logs: tuple[str, ...]

    @property
    def broke_memory(self) -> bool:
        """True if a memory fault ended one of them; no Python code causes one."""
        return any(code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS) for code in self.codes)


class _Started(subprocess.Popen[bytes]):
    """A rank in a new process."""

    def __init__(self, script: Path, words: list[str], environment: dict[str, str], log: Path) -> None:
        command = [sys.executable, str(script), *words]
        with log.open("wb") as file:
            super().__init__(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


class _Forked:
    """A rank in a process that was forked."""

    def __init__(self, script: Path, words: list[str], environment: dict[str, str], log: Path) -> None:
        self._process: ForkServerProcess = IMPORTED.Process(target=_run, args=(script, words, environment, log))
        with mock.patch.dict(os.environ, environment):  # of the first, imports read some
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


_Rank = _Started | _Forked


def _run(script: Path, words: list[str], environment: dict[str, str], log: Path) -> None:
    """Runs a script as `_Started` does."""
    os.setsid()
    with log.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()
    gc.freeze()  # each training of a Trainer collects all garbage, which takes 0.4 s with all modules
    warnings.simplefilter("ignore")
    sys.argv = [str(script), *words]
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    runpy.run_path(str(script), run_name="__main__")


def start_ranks(script: str | Path, *words: object, folder: Path, ranks: int = 2, timeout: float = 280) -> Ended:
    """Runs a script of this folder in so many processes with the environment that torchrun gives, each with its log.

    NCCL refuses ranks of one host that share a GPU, so with a single GPU each rank poses as a host.

    Args:
        script: name of a file here, or a path.
        words: its arguments.
        folder: gets the logs.
        ranks: number of processes.
        timeout: seconds after which all are killed.
    """
    folders = os.pathsep.join(map(str, (TESTS, TESTS / "support", TESTS / "distributed", RECIPES)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONFAULTHANDLER"] = "1"  # says in the log where a crash was
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [folders, os.environ.get("PYTHONPATH")]))
    # As torchrun does, this process keeps the store. A port that a rank is to open later may be taken by then.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    path = Path(__file__).parent / script
    arguments = list(map(str, words))
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"log-{rank}.txt" for rank in range(ranks)]
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    if torch.cuda.device_count() == 1:
        alone = {"LOCAL_RANK": "0", "NCCL_SOCKET_IFNAME": "lo"}
        places = [{**place, **alone, "NCCL_HOSTID": place["RANK"]} for place in places]
    # A process that has forked cannot use a GPU.
    start = _Started if NCCL in arguments else _Forked
    running: list[_Rank] = []
    try:
        for place, log in zip(places, logs, strict=True):
            running.append(start(path, arguments, environment | place, log))
        deadline = time.monotonic() + timeout
        # A rank that waits for one that failed would wait to the end.
        while time.monotonic() < deadline and any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                time.sleep(2)
                break
            time.sleep(0.05)
        codes = tuple(process.poll() for process in running)
    finally:
        for process in running:
            _kill_all(process)
    return Ended(codes, tuple(log.read_text(errors="replace") for log in logs))


def assert_succeeded(ended: Ended) -> None:
    for rank, (code, log) in enumerate(zip(ended.codes, ended.logs, strict=True)):
        assert code == 0, f"rank {rank}, exit status {code}:\n{log[-TAIL:]}"


def _kill_all(process: _Rank) -> None:
    """Kills a process and all that it started."""
    alive = []
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):  # one that was forked is reaped where it was
            alive = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    with contextlib.suppress(ProcessLookupError):  # what outlived a process that ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
