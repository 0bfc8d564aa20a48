"""Starts several processes that train together, and makes sure that none outlives its test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch.distributed import TCPStore

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


def start_ranks(script: str, *words: object, folder: Path, ranks: int = 2, timeout: float = 280) -> Ended:
    """Runs a script of this folder in so many processes with the environment that torchrun gives, each with its log.

    NCCL refuses ranks of one host that share a GPU, so with a single GPU each rank poses as a host.

    Args:
        script: name of a file here.
        words: its arguments.
        folder: gets the logs.
        ranks: number of processes.
        timeout: seconds after which all are killed.
    """
    path = os.pathsep.join(map(str, (TESTS, TESTS / "support", TESTS / "distributed", RECIPES)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    environment["PYTHONFAULTHANDLER"] = "1"  # says in the log where a crash was
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    # As torchrun does, this process keeps the store. A port that a rank is to open later may be taken by then.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(ranks)}
    environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, words)]
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"log-{rank}.txt" for rank in range(ranks)]
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    if torch.cuda.device_count() == 1:
        alone = {"LOCAL_RANK": "0", "NCCL_SOCKET_IFNAME": "lo"}
        places = [{**place, **alone, "NCCL_HOSTID": place["RANK"]} for place in places]
    running: list[subprocess.Popen[bytes]] = []
    try:
        for place, log in zip(places, logs, strict=True):
            with log.open("wb") as file:
                running.append(
                    subprocess.Popen(
                        command,
                        env=environment | place,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
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


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all that it started."""
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
