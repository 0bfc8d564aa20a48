"""Trains a tiny model by the Trainer, and compares what two runs did."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from small import tiny_llama
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from snip_hf import SnipCallback, SnipConfig
from snip_hf.estimation.divergence import divergences_at
from snip_hf.planning.solver import ilp
from snip_hf.planning.solver.process import SolverProcess
from snip_hf.training import refresh

transformers.logging.disable_progress_bar()

# hull-greedy answers in a tenth of the time of the others; which solver runs makes no difference to these tests.
FAST = {"solver": "greedy"}
# Refreshes at steps 2, 6, 10, applied after steps 4, 8, 12.
SCHEDULE = {"first_refresh": 2, "refresh_every": 4, "apply_delay": 2, **FAST}
STEPS = 12


@dataclass
class Run:
    """A training run: its folder, Trainer and callback."""

    folder: Path
    trainer: Trainer
    callback: SnipCallback | None

    @property
    def model(self) -> LlamaForCausalLM:
        return self.trainer.model

    @property
    def losses(self) -> dict[int, tuple[float, float]]:
        """Step -> (loss, gradient norm before clipping)."""
        return {
            line["step"]: (line["loss"], line["grad_norm"]) for line in self.trainer.state.log_history if "loss" in line
        }

    @property
    def eval_losses(self) -> list[float]:
        return [line["eval_loss"] for line in self.trainer.state.log_history if "eval_loss" in line]

    @property
    def history(self) -> list[dict[str, Any]]:
        return history(self.folder)

    @property
    def refreshes(self) -> list[dict[str, Any]]:
        return refreshes(self.folder)


def history(folder: Path) -> list[dict[str, Any]]:
    """The start and the refreshes."""
    lines = [json.loads(line) for line in (folder / "snip" / "history.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] != "coverage"]


def refreshes(folder: Path) -> list[dict[str, Any]]:
    return [line for line in history(folder) if line["event"] == "refresh"]


def without_seconds(value: Any) -> Any:
    """JSON data without the measured times, which alone may differ between two runs."""
    if isinstance(value, dict):
        return {key: without_seconds(item) for key, item in value.items() if key != "seconds"}
    return [without_seconds(item) for item in value] if isinstance(value, list) else value


def model_with_dropout(**options: Any) -> LlamaForCausalLM:
    return tiny_llama(hidden=32, attention_dropout=0.1, **options)


def data(rows: int = 38, length: int = 24) -> list[dict[str, list[int]]]:
    """Random tokens; every row has another number of labels, so that the mean over tokens is not that over rows.

    38 rows are 19 micro-batches of 2: with accumulation over 2, the last step of an epoch has one micro-batch only.
    """
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 128, (rows, length), generator=generator).tolist()
    return [{"input_ids": row, "labels": [-100] * (index % 9) + row[index % 9 :]} for index, row in enumerate(tokens)]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    values: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(folder), **values | changes)


def prepare(
    folder: Path,
    config: SnipConfig | None = None,
    *,
    callback: SnipCallback | None = None,
    callbacks: Iterable[TrainerCallback] = (),
    model: nn.Module | None = None,
    trainer: dict[str, Any] | None = None,
    trainer_class: type[Trainer] = Trainer,
    **changes: Any,
) -> Run:
    """A real Trainer that has not trained yet, with SNIP if there is a config or a callback.

    Args:
        config: of a callback that leaves the model in the formats of the plan, which the tests look at.
        callbacks: run after SNIP's.
        trainer: further arguments of the Trainer, which is a `trainer_class`.
        changes: of the `TrainingArguments` above.
    """
    if config is not None:
        callback = SnipCallback(config, keep_formats=True)
    built = trainer_class(
        **{
            "model": model if model is not None else model_with_dropout(),
            "args": arguments(folder, **changes),
            "train_dataset": data(),
            "eval_dataset": data(6),
            "callbacks": [*([] if callback is None else [callback]), *callbacks],
            **(trainer or {}),
        }
    )
    return Run(folder, built, callback)


def train(folder: Path, config: SnipConfig | None = None, *, resume: str | Path | None = None, **options: Any) -> Run:
    """Trains what `prepare` builds of the options, on one thread."""
    run = prepare(folder, config, **options)
    with one_thread():
        run.trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return run


@contextmanager
def one_thread() -> Iterator[None]:
    """Matrices this small are several times slower on two threads, which wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are not equal to the bit."""
    return [
        name for name in {**one, **other} if not (name in one and name in other and torch.equal(one[name], other[name]))
    ]


def solve_with(monkeypatch: Any, *programs: str) -> list[SolverProcess]:
    """Lets the controller's solver be a Python program; returns the list of processes that is filled as they start.

    Args:
        programs: for the first refresh, the second, ...; "" is the real solver; the last one stays.
    """
    start = SolverProcess.start
    started: list[SolverProcess] = []

    def run_program(problem: dict[str, Any]) -> SolverProcess:
        program = programs[min(len(started), len(programs) - 1)]
        started.append(start(problem, [sys.executable, "-S", "-c", program] if program else None))
        return started[-1]

    monkeypatch.setattr(SolverProcess, "start", run_program)
    return started


def begun_late(monkeypatch: Any, folder: Path) -> str:
    """Returns the program of a solver that begins half a second after training began to wait for it."""
    result, begin = SolverProcess.result, folder / "begin"

    def result_later(process: SolverProcess, timeout: float = math.inf) -> Any:
        threading.Timer(0.5, begin.touch).start()
        return result(process, timeout)

    monkeypatch.setattr(SolverProcess, "result", result_later)
    waiting = f"import os, runpy, time\nwhile not os.path.exists({str(begin)!r}): time.sleep(0.01)\n"
    return f"{waiting}runpy.run_path({ilp.__file__!r}, run_name='__main__')"


def noted_divergences(monkeypatch: Any) -> list[dict[str, Any]]:
    """Returns a list that fills with the keywords of each estimate that the controller asks for."""
    calls: list[dict[str, Any]] = []

    def note(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return divergences_at(*args, **kwargs)

    monkeypatch.setattr(refresh, "divergences_at", note)
    return calls
