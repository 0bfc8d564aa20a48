"""What rounding weight gradients to BF16 does to the loss, against FP32 sums, with all other arithmetic equal.

    python benchmarks/weight_gradients.py run --output benchmarks/results/weight_gradients_small.jsonl
    python benchmarks/weight_gradients.py run --device cuda --hidden 512 --blocks 8 --rows 32 --points 600 --steps 100 \
        --minutes 9 --output runs/weight_gradients.jsonl
    python benchmarks/weight_gradients.py report benchmarks/results/weight_gradients_small.jsonl

`nn.Linear` under BF16 autocast rounds its weight's gradient to BF16; snip-hf's kernels for Hopper return FP32 sums, and
so a BF16 baseline and a run in FP4 or FP8 there differ in more than the format. Here a Llama trains in BF16 autocast
over FP32 weights to some step, once per seed. From there both arms train on with the same data: products of all linears
in BF16 as ever, and weight gradients summed in FP32, then rounded to BF16 in one arm and not in the other. The learning
rate falls to a tenth over a fork's steps, as at the end of a schedule. A line per fork has both held-out losses and the
error that rounding makes in the gradients of its first step, in norm. A run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from shared import small_models, texts
from shared.json_lines import drop_unfinished_line, read_lines
from shared.origin import origin_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

BF16, FP32 = "bf16", "fp32"
ARMS = (BF16, FP32)
RATE, WARM_UP, LEAST_RATE = 2e-3, 50, 0.1
HELD_OUT_ROWS = 16


class _Linear(torch.autograd.Function):
    """x W^T with operands in x's dtype; the weight's gradient is summed in FP32, and rounded if `rounds`.

    Legend: T tokens, I in_features, O out_features.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rounds: bool) -> Tensor:
        low = weight.to(x.dtype)
        ctx.save_for_backward(x, low)
        ctx.rounds = rounds
        return nn.functional.linear(x, low)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows, inputs = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
        # (O, T) x (T, I): products of BF16 numbers are exact in FP32.
        grad_weight = rows.to(torch.float32).t() @ inputs.to(torch.float32)
        if ctx.rounds:
            grad_weight = grad_weight.to(x.dtype).to(torch.float32)
        return grad_output @ weight, grad_weight, None


class Linear(nn.Linear):
    """A linear of the blocks, without bias, in one of the arms."""

    rounds = True

    def forward(self, input: Tensor) -> Tensor:
        device = input.device.type
        x = input.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else input
        result: Tensor = _Linear.apply(x, self.weight, self.rounds)
        return result


def in_arm(model: nn.Module, arm: str) -> nn.Module:
    """Puts the linears of the blocks into an arm, in place."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            assert module.bias is None
            module.__class__ = Linear
            module.rounds = arm == BF16
    return model


# ------------------------------------------------------------------------------------------------ training


class Trainee:
    """A model, its optimizer and its text, at a step of its training."""

    def __init__(self, options: argparse.Namespace, text: texts.Text, seed: int) -> None:
        torch.manual_seed(seed)
        config = small_models.config("llama", options.hidden, options.blocks)
        self.model: Any = AutoModelForCausalLM.from_config(config).to(options.device).train()
        in_arm(self.model, BF16)
        self.optimizer = small_models.optimizers("adamw", self.model)[0]
        self.rows, self.seed, self.step = options.rows, seed, 0
        self._text, self._device = text, torch.device(options.device).type
        # Every seed has an order of its own.
        self._order = torch.randperm(len(text.train), generator=torch.Generator().manual_seed(seed))

    def train(self, steps: int, decays: bool) -> None:
        """Does more steps, at a rate that warms up, and falls to a tenth over these steps if it decays."""
        for index in range(steps):
            rate = RATE * min(1.0, (self.step + 1) / WARM_UP)
            if decays:
                rate *= 1 - (1 - LEAST_RATE) * (index + 1) / steps
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1

    def backward(self) -> None:
        """Runs the next step's batch."""
        places = self._order[(torch.arange(self.rows) + self.step * self.rows) % len(self._order)]
        ids = self._text.train[places.to(self._text.train.device)]
        with self.autocast():
            loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self._device, torch.bfloat16)

    @torch.no_grad()
    def held_out_loss(self, rows: int) -> float:
        """Returns the mean loss of the first so many held-out sequences."""
        self.model.eval()
        parts = self._text.held_out[:rows].split(HELD_OUT_ROWS)
        with self.autocast():
            losses = [float(self.model(input_ids=part, labels=part).loss) * len(part) for part in parts]
        self.model.train()
        return math.fsum(losses) / sum(len(part) for part in parts)

    def kept(self) -> dict[str, Any]:
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        return copy.deepcopy(parts)

    def put_back(self, kept: dict[str, Any]) -> None:
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(copy.deepcopy(kept["optimizer"]))
        self.step = kept["step"]


def gradient_errors(trainee: Trainee) -> tuple[float, float]:
    """Returns median and largest |rounded - FP32| / |FP32| over the weight gradients of the next step."""
    gradients = {}
    for arm in ARMS:
        in_arm(trainee.model, arm)
        trainee.backward()
        linears = [module for module in trainee.model.modules() if isinstance(module, Linear)]
        gradients[arm] = [linear.weight.grad.clone() for linear in linears if linear.weight.grad is not None]
        trainee.optimizer.zero_grad()
    errors = [float((low - high).norm() / high.norm()) for low, high in zip(*gradients.values(), strict=True)]
    return float(np.median(errors)), max(errors)


def forks(options: argparse.Namespace, text: texts.Text, seed: int, left: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yields a line per point of a seed that is left."""
    trainee = Trainee(options, text, seed)
    for point in left:
        trainee.train(point - trainee.step, decays=False)
        start = trainee.kept()
        median, largest = gradient_errors(trainee)
        line: dict[str, Any] = {"seed": seed, "point": point, "gradient_error": median, "largest_error": largest}
        line["parameters"] = sum(parameter.numel() for parameter in trainee.model.parameters())
        for arm in ARMS:
            trainee.put_back(start)
            in_arm(trainee.model, arm)
            trainee.train(options.steps, decays=True)
            line[arm] = round(trainee.held_out_loss(options.held_out), 6)
        trainee.put_back(start)
        in_arm(trainee.model, BF16)
        yield line


# ------------------------------------------------------------------------------------------------ report


def report(lines: Sequence[dict[str, Any]]) -> str:
    """Returns a row per setting and point: FP32 sums less rounded ones, with the interval over seeds."""
    columns = ("model", "point + steps", "forks", "FP32 less BF16, %", "paired sd", "p", "error of a gradient in norm")
    rows = [columns, ("---",) * len(columns)]
    settings = ("parameters", "tokens", "point", "steps", "machine")
    for key in dict.fromkeys(tuple(line[name] for name in settings) for line in lines):
        of_key = [line for line in lines if tuple(line[name] for name in settings) == key]
        differences = np.array([100 * (line[FP32] / line[BF16] - 1) for line in of_key])
        parameters, tokens, point, steps, machine = key
        cells = [f"{parameters / 1e6:.2g}M, {tokens:,} tokens per step, {machine}", f"{point} + {steps}"]
        rows.append(
            (*cells, *_statistics(differences), f"{np.median([line['gradient_error'] for line in of_key]):.2e}")
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _statistics(differences: np.ndarray[Any, Any]) -> tuple[str, str, str, str]:
    """Returns count, mean with its 95% interval, standard deviation, and p of the paired t-test."""
    count = len(differences)
    if count < 2:
        return str(count), f"{differences.mean():+.4f}", "-", "-"
    deviation = float(differences.std(ddof=1))
    half = float(stats.t.ppf(0.975, count - 1)) * deviation / math.sqrt(count)
    p = float(stats.ttest_1samp(differences, 0.0).pvalue)
    return str(count), f"{differences.mean():+.4f} ± {half:.4f}", f"{deviation:.4f}", f"{p:.2f}"


@contextmanager
def _one_thread(device: str) -> Iterator[None]:
    threads = torch.get_num_threads()
    if device == "cpu":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    run = parts.add_parser("run")
    texts.add_text_arguments(run)
    for name, default, what in (
        ("hidden", 64, "size of the Llama"),
        ("blocks", 2, "of the Llama"),
        ("rows", 4, "sequences of 256 tokens per step"),
        ("steps", 100, "of a fork"),
        ("held-out", 256, "sequences to evaluate on"),
    ):
        run.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default {default})")
    run.add_argument("--points", type=int, nargs="+", default=[100], help="steps at which arms part")
    run.add_argument("--seeds", type=int, default=8)
    run.add_argument("--minutes", type=float, default=1e9, help="begin no further fork after this time")
    run.add_argument("--output", type=Path, required=True)
    parts.add_parser("report").add_argument("lines", type=Path)
    options = parser.parse_args()
    if options.what == "report":
        print(report(read_lines(options.lines)))
        return
    with _one_thread(options.device):
        _run(options)


def _run(options: argparse.Namespace) -> None:
    """Adds a line per fork that the output lacks, until the time is over."""
    deadline = time.monotonic() + 60 * options.minutes
    text = texts.load_text(options.text, options.device)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    drop_unfinished_line(options.output)
    source = origin_of(options.device)
    where = {
        **{name: getattr(options, name) for name in ("hidden", "blocks", "steps", "held_out")},
        "tokens": options.rows * texts.LENGTH,
        "machine": source["machine"],
    }
    lines = [line for line in read_lines(options.output) if all(line[name] == where[name] for name in where)]
    done = {(line["seed"], line["point"]) for line in lines}
    for seed in range(options.seeds):
        left = sorted(point for point in options.points if (seed, point) not in done)
        for line in forks(options, text, seed, left):
            with options.output.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps({**line, **where, **source}) + "\n")
            print(json.dumps(line), flush=True)
            if time.monotonic() > deadline:
                print("The time is over; the same command goes on.")
                return


if __name__ == "__main__":
    main()
