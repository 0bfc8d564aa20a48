"""Work of one process done by several: forks of it take tasks in turn (ours).

For a process without a CUDA context, whose tasks leave nothing in memory but entries of one mapping.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence

_MOST, _CORES = 4, 4
_NUMBER = 4  # bytes of a task's number
# What a pipe holds.
_MOST_TASKS = 2**16 // _NUMBER
_MOST_SAID = 2000


def processes_here() -> int:
    """Returns how many processes may compile beside training: one per four cores, four at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST, cores // _CORES))


class SideBySide:
    """Tasks that forks of this process run, and this one too as far as it helps. The first ones are run first.

    What fails is said on stderr. A fork that ends too soon takes one task with it, and what it would have told of its
    others.

    Args:
        tasks: what to run, each once.
        results: what tasks write to, texts; gets what they have written in forks.
        forks: how many.
        begin: called in each fork, with the id of this process.
    """

    def __init__(
        self, tasks: Sequence[Callable[[], object]], results: dict[str, str], forks: int, begin: Callable[[int], object]
    ) -> None:
        self._tasks, self._results, self._begin = tasks[:_MOST_TASKS], results, begin
        self._turns, given = os.pipe()
        os.write(given, b"".join(number.to_bytes(_NUMBER, "big") for number in range(len(self._tasks))))
        os.close(given)
        self._forks: list[tuple[int, int]] = []
        try:
            for _ in range(min(forks, len(self._tasks))):
                self._forks.append(self._fork())
        except OSError as error:  # too many processes: fewer do
            print(f"{len(self._forks)} forks: {type(error).__name__}: {error}", file=sys.stderr)

    def help(self) -> None:
        """Takes tasks until none is left to begin."""
        while number := os.read(self._turns, _NUMBER):
            task = self._tasks[int.from_bytes(number, "big")]
            try:
                task()
            except Exception as error:
                print(f"{type(error).__name__}: {error}: {task}"[:_MOST_SAID], file=sys.stderr)

    def end(self) -> None:
        """Waits until all tasks are done."""
        self.help()
        os.close(self._turns)
        for fork, told in self._forks:
            with open(told) as answer:
                text = answer.read()
            os.waitpid(fork, 0)
            with contextlib.suppress(ValueError):  # of one that died
                self._results.update(json.loads(text))

    def _fork(self) -> tuple[int, int]:
        """Returns the fork's id and where it tells its results."""
        parent, left = os.getpid(), signal.getitimer(signal.ITIMER_REAL)[0]
        told, tells = os.pipe()
        sys.stderr.flush()
        try:
            fork = os.fork()
        except OSError:
            os.close(told)
            os.close(tells)
            raise
        if fork > 0:
            os.close(tells)
            return fork, told
        try:
            signal.setitimer(signal.ITIMER_REAL, left)  # a fork has none of its own
            self._begin(parent)
            self.help()
            with open(tells, "w") as answer:
                json.dump(self._results, answer)
        finally:  # also where the disk is full, and nothing can be said
            os._exit(0)
