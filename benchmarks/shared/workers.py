"""Jobs shared out among worker processes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch.multiprocessing as mp

Work = Callable[[int, argparse.Namespace, Sequence[Any], Any, Any], None]
"""(index of the worker, options, jobs, counter of the jobs that are taken, lock of the output)"""


def share_out(work: Work, options: argparse.Namespace, jobs: Sequence[Any]) -> None:
    """Runs `work` in as many processes as `options.workers` and the jobs ask for; in this one if that is one."""
    context = mp.get_context("spawn")
    taken, lock = context.Value("i", 0), context.Lock()
    if options.workers == 1:
        work(0, options, jobs, taken, lock)
        return
    workers = [
        context.Process(target=work, args=(index, options, jobs, taken, lock))
        for index in range(min(options.workers, len(jobs)))
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
