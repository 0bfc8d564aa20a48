"""Starts several processes that train together, and makes sure that none outlives its test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

TESTS = Path(__file__).parents[1]
RECIPES = TESTS.parent / "recipes"
_TAIL = 3000  # characters of each log that a failure shows


@dataclass(frozen=True)
class Ended:
    """What became of the processes."""

    codes: tuple[int | None, ...]
    """Rank -> exit status; None: it was still running when time was up."""
    logs: tuple[str, ...]

    @property
    def broke_memory(self) -> bool:
        """Whether one of them was ended by a fault of its memory, which no Python code makes."""
        return any(code in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS) for code in self.codes)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def launch_ranks(script: str, *words: object, folder: Path, ranks: int = 2, timeout: float = 280) -> None:
    """Runs a script of this folder in so many processes, started by `accelerate launch` on gloo.

    Raises:
        AssertionError: one of them failed, or time was up; with the end of their log.
    """
    config = RECIPES / "accelerate" / "ddp.yaml"
    settings = [f"--config_file={config}", f"--num_processes={ranks}", "--dynamo_backend=no"]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", *settings, f"--main_process_port={free_port()}"]
    ended = _run([[*launcher, *_program(script, words)]], [{}], folder, timeout)
    assert ended.codes == (0,), f"exit status {ended.codes[0]}:\n{ended.logs[0][-_TAIL:]}"


def start_ranks(
    script: str, *words: object, folder: Path, ranks: int = 2, timeout: float = 280, until: int | None = None
) -> Ended:
    """Runs a script of this folder in so many processes with the environment that torchrun gives, each with its log.

    Args:
        script: name of a file here.
        words: its arguments.
        folder: gets the logs.
        ranks: number of processes.
        timeout: seconds after which all are killed.
        until: rank whose end is waited for, after which the others are killed; None: the end of all.
    """
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    own = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return _run([[sys.executable, *_program(script, words)]] * ranks, own, folder, timeout, until)


def assert_succeeded(ended: Ended) -> None:
    for rank, (code, log) in enumerate(zip(ended.codes, ended.logs, strict=True)):
        assert code == 0, f"rank {rank}, exit status {code}:\n{log[-_TAIL:]}"


def _program(script: str, words: Sequence[object]) -> list[str]:
    return [str(Path(__file__).with_name(script)), *map(str, words)]


def _run(
    commands: Sequence[Sequence[str]],
    settings: Sequence[dict[str, str]],
    folder: Path,
    timeout: float,
    until: int | None = None,
) -> Ended:
    path = os.pathsep.join(map(str, (TESTS, TESTS / "support", TESTS / "distributed", RECIPES)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONFAULTHANDLER"] = "1"  # says in the log where a crash was
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"log-{index}.txt" for index in range(len(commands))]
    running: list[subprocess.Popen[bytes]] = []
    files: list[IO[bytes]] = []
    try:
        for command, own, log in zip(commands, settings, logs, strict=True):
            files.append(log.open("wb"))
            running.append(
                subprocess.Popen(
                    command,
                    env=environment | own,
                    stdin=subprocess.DEVNULL,
                    stdout=files[-1],
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
        awaited = running if until is None else [running[until]]
        deadline = time.monotonic() + timeout
        # Who waits for a rank that failed would wait to the end.
        while time.monotonic() < deadline and any(process.poll() is None for process in awaited):
            if until is None and any(process.poll() for process in running):
                time.sleep(2)
                break
            time.sleep(0.05)
        codes = tuple(process.poll() for process in running)
    finally:
        for process in running:
            _kill_all(process)
        for file in files:
            file.close()
    return Ended(codes, tuple(log.read_text(errors="replace") for log in logs))


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it started; torchrun's agent gives each rank a process group of its own."""
    alive = []
    if process.poll() is None:
        alive = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    for child in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    with contextlib.suppress(ProcessLookupError):  # what outlived a process that ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
