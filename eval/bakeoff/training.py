"""One run of a bake-off, trained and measured: a plain loop, in which runs of one seed share all random numbers.

Legend: B sequences of L tokens. Weights are FP32. On CUDA the products run under BF16 autocast, on a CPU in FP32; what
the plan quantizes is quantized either way. Runs of one model and seed start from the same weights and see the same
sequences in the same order, whatever their policy.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import get_cosine_with_min_lr_schedule_with_warmup

from recipes.parts.model import build_model
from recipes.parts.recipe import ModelSection
from snip_hf import SnipController, restore_model
from snip_hf.kernels.host_copy import on_device
from snip_hf.numerics.formats import FORMATS, UNQUANTIZED
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PrecisionPlan
from snip_hf.records.load import load_run

from .compiling import compile_layers
from .grid import Spec, TrainingSection
from .plans import letters_of

if TYPE_CHECKING:
    from .text import Text

# A step is a spike if its loss is so many standard deviations above the mean of so many steps before it.
_SPIKE_DEVIATIONS, _SPIKE_STEPS = 6.0, 50
# A run has diverged if its training or validation loss ends so far above its own lowest one, in nats.
_DIVERGED_BY = 0.5
_ROWS_PER_EVALUATION = 32


class Run:
    """One training run, from its first step to its last.

    Args:
        spec: what is trained.
        section: the model.
        training: how.
        text: on what.
        device: where.
        state: file from which a run that starts late takes the state to start from, or where it leaves it for others.
    """

    def __init__(
        self,
        spec: Spec,
        section: ModelSection,
        training: TrainingSection,
        text: Text,
        device: torch.device,
        state: Path,
    ) -> None:
        self.spec, self.training, self.text, self.device = spec, training, text, device
        self._state = state
        torch.manual_seed(spec.seed)
        self.model = build_model(section, text.tokenizer).to(device).train()
        self.optimizer = adamw(self.model, spec.learning_rate, training)
        self.schedule = get_cosine_with_min_lr_schedule_with_warmup(
            self.optimizer, training.warmup_steps, spec.steps, min_lr_rate=0.1
        )
        order = np.random.default_rng(spec.seed).permutation(len(text.train))
        self._order = np.resize(order, spec.steps * training.sequences).reshape(spec.steps, training.sequences)
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16, enabled=device.type == "cuda")
        self.losses: list[float] = []
        """Of every step trained here."""
        self.validation: list[tuple[int, float]] = []
        """Step, loss under the arithmetic in force."""
        self._windows: list[tuple[int, int, float]] = []
        """First and last step, seconds; between two points of the curve."""

    def train(self) -> dict[str, Any]:
        """Trains to the end, or until the loss is no longer finite, and returns the run's line."""
        began = time.perf_counter()
        self._continue_from(self.spec.start_step)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with tempfile.TemporaryDirectory() as folder:
            controller = None
            if self.spec.snip.policy != "bf16":
                controller = SnipController(self.model, self.optimizer, self.spec.snip, output_dir=folder)
                controller.step = self.spec.start_step
            self._compile()
            self._steps(self.spec.start_step, self.spec.steps, controller)
            found = self._losses(controller)
            found |= self._speed([]) if controller is None else self._decisions(controller, Path(folder))
        return found | {"seconds": time.perf_counter() - began}

    def _losses(self, controller: SnipController | None) -> dict[str, Any]:
        """Returns the losses at the end; the model is left unquantized."""
        as_trained = self.evaluate()
        high_precision = as_trained
        if controller is not None:
            controller.close()
            restore_model(self.model)
            high_precision = self.evaluate()
        curve = self._curve()
        finished = len(self.losses) == self.spec.steps - self.spec.start_step
        blew_up = any(ends_above_its_lowest(points) for points in (curve, [*self.validation, (0, as_trained)]))
        return {
            "parameters": self.model.num_parameters(),
            "tokens": self._tokens * self.spec.steps,
            "loss": {"plan": _rounded(as_trained), "high_precision": _rounded(high_precision)},
            "training_curve": curve,
            "validation_curve": _points(self.validation),
            "diverged": blew_up or not finished,
            "spikes": count_spikes(self.losses),
        }

    def _decisions(self, controller: SnipController, folder: Path) -> dict[str, Any]:
        """Returns what the policy decided and what that cost."""
        history = load_run(folder)
        refreshes = [refresh for refresh in history.refreshes if refresh.applied_step is not None]
        waited = [sum(refresh.seconds.get(name) or 0.0 for name in ("probe", "waited")) for refresh in refreshes]
        letters = letters_of(
            name for _, plan in history.plans for row in plan.assignment.values() for name in row.values()
        )
        under_way = [(refresh.step, refresh.applied_step or refresh.step) for refresh in refreshes]
        return self._speed(under_way) | {
            "backend": controller.backend,
            "fp4_fraction": controller.plan.fp4_fraction,
            "layers": list(controller.plan.assignment),
            "letters": letters,
            "shares": flop_shares(controller.plan),
            "plans": [
                {"step": step, "fp4_fraction": round(plan.fp4_fraction, 6), "formats": _in_letters(plan, letters)}
                for step, plan in history.plans
            ],
            "refresh_seconds": waited,
            "kept": [refresh.reason for refresh in history.refreshes if refresh.applied_step is None],
        }

    def _speed(self, refreshes: list[tuple[int, int]]) -> dict[str, Any]:
        """Returns the median time of a step, of windows without compilation and refreshes, and the peak memory.

        Args:
            refreshes: first and last step of each.
        """
        undisturbed = [
            1e3 * seconds / (last - first + 1)
            for first, last, seconds in self._windows[1:]
            if not any(begin <= last and first <= end for begin, end in refreshes)
        ]
        step_ms = statistics.median(undisturbed) if undisturbed else None
        cuda = self.device.type == "cuda"
        return {
            "step_ms": step_ms,
            "tokens_per_second": None if step_ms is None else 1e3 * self._tokens / step_ms,
            "peak_mib": torch.cuda.max_memory_allocated(self.device) / 2**20 if cuda else None,
            "backend": None,
            "fp4_fraction": 0.0,
            "layers": [],
            "letters": {},
            "shares": {UNQUANTIZED.name: 1.0},
            "plans": [],
            "refresh_seconds": [],
            "kept": [],
        }

    @property
    def _tokens(self) -> int:
        """Of a step."""
        return self.training.sequences * self.text.train.shape[1]

    def _continue_from(self, step: int) -> None:
        """Brings model, optimizer and schedule to where unquantized training of this seed is after so many steps."""
        if step == 0:
            return
        path = self._state
        if not path.exists():
            self._compile()
            self._steps(0, step, None)
            parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
            state = {name: part.state_dict() for name, part in parts.items()}
            if not math.isfinite(self.losses[-1]):
                raise ValueError(f"The unquantized training diverged before step {step}, at which this run starts.")
            partial_path = path.with_suffix(f".{time.time_ns()}")  # another worker may be at the same state
            torch.save(state, partial_path)
            partial_path.replace(path)
            self.losses.clear()
            self.validation.clear()
            self._windows.clear()
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def _compile(self) -> None:
        """Compiles the decoder layers, one graph for all of them."""
        if self.device.type == "cuda" and self.training.compile:
            compile_layers(self.model)

    def _steps(self, start: int, end: int, controller: SnipController | None) -> None:
        """Trains from after step `start` to step `end`, or until the loss is no longer finite."""
        pending: list[Tensor] = []
        began = time.perf_counter()
        for step in range(start + 1, end + 1):
            pending.append(self._step(step, self._batch(self.text.train[self._order[step - 1]]), controller))
            if step % self.training.log_every and step != end:
                continue
            self.losses += torch.stack(pending).tolist()
            self._windows.append((step - len(pending) + 1, step, time.perf_counter() - began))
            pending.clear()
            if not math.isfinite(self.losses[-1]):
                return
            if step % self.training.evaluate_every == 0:
                self.validation.append((step, self.evaluate()))
            began = time.perf_counter()

    def _step(self, step: int, batch: dict[str, Tensor], controller: SnipController | None) -> Tensor:
        if controller is not None:
            controller.capture(batch)
        with self._autocast():
            loss = self.model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.training.max_grad_norm)
        if controller is not None:
            controller.before_optimizer_step(step)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        if controller is not None:
            controller.after_step(step)
        return loss.detach()

    def _batch(self, sequences: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        ids = on_device(torch.from_numpy(sequences.astype(np.int64)), self.device)
        return {"input_ids": ids, "labels": ids}

    def _curve(self) -> list[tuple[int, float]]:
        """Returns step and mean training loss of the steps up to it, one point every `log_every` steps."""
        every, start = self.training.log_every, self.spec.start_step
        chunks = (self.losses[i : i + every] for i in range(0, len(self.losses), every))
        return _points((start + i * every + len(chunk), statistics.fmean(chunk)) for i, chunk in enumerate(chunks))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the mean validation loss under the arithmetic in force."""
        self.model.eval()
        rows = np.array_split(self.text.validation, math.ceil(len(self.text.validation) / _ROWS_PER_EVALUATION))
        with self._autocast(), _uncompiled(self.device):
            losses = [self.model(**self._batch(part)).loss.double() * len(part) for part in rows]
        self.model.train()
        return float(torch.stack(losses).sum()) / len(self.text.validation)


def adamw(model: nn.Module, learning_rate: float, training: TrainingSection) -> torch.optim.AdamW:
    """Returns AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": training.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, training.adam_beta2), fused=fused)


def count_spikes(losses: list[float]) -> int:
    """Returns how often the loss jumped far above what it was before; steps in a row are one spike (ours)."""
    spikes, inside = 0, False
    for step in range(_SPIKE_STEPS, len(losses)):
        before = losses[step - _SPIKE_STEPS : step]
        bound = statistics.fmean(before) + _SPIKE_DEVIATIONS * statistics.pstdev(before)
        above = not losses[step] <= bound  # NaN is above everything
        spikes += above and not inside
        inside = above
    return spikes


def ends_above_its_lowest(curve: Sequence[tuple[int, float]]) -> bool:
    """Returns True if a loss diverged; NaN did."""
    losses = [loss for _, loss in curve]
    return bool(losses) and not losses[-1] <= min(losses) + _DIVERGED_BY


def _in_letters(plan: PrecisionPlan, letters: Mapping[str, str]) -> str:
    """Returns three letters per layer: the formats of its GEMMs."""
    return "".join(letters[formats[gemm]] for formats in plan.assignment.values() for gemm in GEMMS)


def flop_shares(plan: PrecisionPlan) -> dict[str, float]:
    """Returns format -> share of the linears' FLOPs, with six decimals, for the formats that a plan uses."""
    total, shares = 0.0, dict.fromkeys(FORMATS, 0.0)
    for layer, formats in plan.assignment.items():
        for gemm, name in formats.items():
            shares[name] += plan.flops[layer][gemm]
            total += plan.flops[layer][gemm]
    return {name: round(share / total, 6) for name, share in shares.items() if share > 0}


def _rounded(loss: float) -> float | None:
    """Returns a loss as lines hold it: runs differ in the third digit after the point."""
    return round(loss, 6) if math.isfinite(loss) else None


def _points(curve: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the finite points of a curve."""
    return [(step, round(loss, 6)) for step, loss in curve if math.isfinite(loss)]


@contextlib.contextmanager
def _uncompiled(device: torch.device) -> Iterator[None]:
    """Spares the compilation of layers for evaluation, which is a small part of a run."""
    if device.type != "cuda":
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
