"""What a long run with a fault in nearly every refresh leaks, and what faults cost besides their refresh.

    python benchmarks/leaks_under_faults.py --output benchmarks/results/leaks_under_faults.jsonl
    python benchmarks/leaks_under_faults.py --processes 2 --output benchmarks/results/leaks_under_faults.jsonl

A tiny Llama is trained by a plain loop with a refresh every 20 steps, each with a fault of `injected_faults` drawn by a
seeded generator. Midway between refreshes, with nothing under way, memory, file descriptors, threads, processes and
files are counted; after a warm-up (a quarter of the run) they must be flat. Two more runs follow:

- "replayed": no refresh at all; every layer is given the formats that it had at that step of the run with faults.
- "without faults": the same schedule, of which only the refreshes that kept their plan are passed over. Up to the first
  of those it is a run that nothing was done to.

Losses, gradient norms and final weights of both must be those of the run with faults, to the bit. Steps whose gradients
are not finite are skipped, as careful loops do; the micro-batch that makes them so is in all three runs. Exit code 1 if
anything is not flat, not equal, or did not cost what `injected_faults` says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from injected_faults import ABANDONED, FAULTS, RESUMED, Place, draws
from process_resources import RESOURCES, counted, judged, own_traces, rank
from shared.origin import origin_of
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf import SnipConfig, SnipController
from snip_hf.layers.state import snip_linears

ROWS, LENGTH = 2, 64


def main() -> int:
    """Starts the processes and prints what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=1, help="ranks of DDP over gloo (default 1: no DDP)")
    parser.add_argument("--refresh-every", type=int, default=20)
    parser.add_argument("--apply-delay", type=int, default=5)
    parser.add_argument("--solver", default="greedy", help="greedy starts fastest (default)")
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, help="JSONL file; a line per process is added")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        logging.getLogger("snip_hf").setLevel(logging.ERROR)
        torch.set_num_threads(1)
        if options.device == "cuda":
            torch.cuda.set_device(rank())
        (options.worker / f"{rank()}.json").write_text(json.dumps(work(options)))
        return 0
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.processes}"]
    names = ("steps", "refresh_every", "apply_delay", "solver", "blocks", "seed", "device", "processes")
    given = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    origin = origin_of(options.device)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *(launcher if options.processes > 1 else []), __file__, *given, "--worker", folder]
        subprocess.run(command, check=True)
        rows = [json.loads(Path(folder, f"{number}.json").read_text()) for number in range(options.processes)]
    rows = [row | origin for row in rows]
    if options.output:
        with options.output.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
    print("\n".join(map(report, rows)))
    return 0 if all(row["passed"] for row in rows) else 1


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what one process found in all three runs."""
    if options.processes > 1:
        dist.init_process_group("gloo" if options.device == "cpu" else "nccl")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, own_traces(Path(folder, "tmp")) as mark:
        faulty = with_faults(options, Path(folder), mark)
        runs = {"replayed": replayed(options, faulty), "without faults": without_faults(options, Path(folder), faulty)}
    if dist.is_initialized():
        dist.destroy_process_group()
    kept = [step for step, is_applied in faulty.applied.items() if not is_applied]
    row = {
        **{name: getattr(options, name) for name in ("processes", "steps", "refresh_every", "apply_delay", "solver")},
        **{"blocks": options.blocks, "seed": options.seed, "rank": rank(), "seconds": time.perf_counter() - began},
        "refreshes": {"applied": len(faulty.applied) - len(kept), "kept": len(kept)},
        "first_kept_due": min(kept) + options.apply_delay if kept else None,
        "plans": len(faulty.plans),
        "skipped_steps": int(np.sum(~np.isfinite(faulty.norms))),
        "loss": {"first": faulty.losses[0], "last": float(np.mean(faulty.losses[-20:]))},
        "faults": fault_table(faulty),
        "resources": {name: judged(faulty.steps, values, RESOURCES[name]) for name, values in faulty.counts.items()},
        "comparisons": {name: compared(faulty, run) for name, run in runs.items()},
    }
    return row | {"passed": passed(row)}


@dataclass
class Run:
    """What a run leaves. Numbers are kept in arrays and text, which hold no Python objects that would count."""

    losses: array[float] = field(default_factory=lambda: array("d"))
    norms: array[float] = field(default_factory=lambda: array("d"))
    """Of the gradients, before clipping; those that are not finite were of no step."""
    weights: str = ""
    """Digest of all parameters at the end."""
    plans: dict[int, str] = field(default_factory=dict)
    """First step -> layer -> GEMM -> format, as JSON, for each plan that differs from the one before."""
    faults: dict[int, str] = field(default_factory=dict)
    """Step of the refresh -> name of the fault in it."""
    applied: dict[int, bool] = field(default_factory=dict)
    """Step of the refresh -> whether its plan was applied."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Step of the refresh -> why the plan was kept, as far as the history says."""
    steps: array[int] = field(default_factory=lambda: array("q"))
    """Steps after which resources were counted."""
    counts: dict[str, array[int]] = field(default_factory=dict)


class Trainer:
    """A model with its optimizer and controller, in a plain loop."""

    def __init__(self, options: argparse.Namespace, config: SnipConfig, folder: Path | None = None) -> None:
        self.run = Run()
        self._config, self._folder = config, folder
        torch.manual_seed(options.seed)
        shape = LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=options.blocks,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            attention_dropout=0.1,  # so that losses depend on the state of torch's random generator
            use_cache=False,
        )
        self.model = LlamaForCausalLM(shape).to(options.device).train()
        self._wrapped = self.model if options.processes == 1 else DistributedDataParallel(self.model)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.controller = self._new_controller()
        self.layers = snip_linears(self.model)
        torch.manual_seed(options.seed + 1 + rank())
        self._text = torch.tensor(list(Path(argparse.__file__).read_bytes()), device=options.device)
        self._batches = options.processes

    def step(self, number: int, is_captured: bool = True) -> None:
        start = (number * self._batches + rank()) * ROWS * LENGTH % (len(self._text) - ROWS * LENGTH)
        ids = self._text[start : start + ROWS * LENGTH].view(ROWS, LENGTH)
        batch = {"input_ids": ids, "labels": ids}
        if is_captured:
            self.controller.capture(batch)
        loss: Tensor = self._wrapped(**batch).loss
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0))
        self.controller.before_optimizer_step(number)
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.controller.after_step(number)
        self.run.losses.append(float(loss.detach()))
        self.run.norms.append(norm)

    def resume(self, politely: bool) -> None:
        """Goes on with a new controller from the old one's state, as a run does that starts again here."""
        state = json.loads(json.dumps(self.controller.state_dict()))
        if politely:
            self.controller.close()
        del self.controller
        self.controller = self._new_controller()
        self.controller.load_state_dict(state, at_step=state["step"])

    def formats(self) -> str:
        return json.dumps({name: layer.formats for name, layer in self.layers.items()})

    def end(self) -> Run:
        self.controller.close()
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(parameter.detach().cpu().numpy().tobytes())
        self.run.weights = digest.hexdigest()
        return self.run

    def _new_controller(self) -> SnipController:
        return SnipController(self._wrapped, self._optimizer, self._config, output_dir=self._folder)


def snip_config(options: argparse.Namespace) -> SnipConfig:
    return SnipConfig(
        granularity="gemm",
        first_refresh=options.refresh_every,
        refresh_every=options.refresh_every,
        apply_delay=options.apply_delay,
        solver=options.solver,
        rank_timeout=60.0,
        seed=options.seed,
    )


def with_faults(options: argparse.Namespace, folder: Path, mark: str) -> Run:
    """Trains with a fault in each refresh, and counts resources midway between the refreshes."""
    trainer = Trainer(options, snip_config(options), folder / "faulty")
    run, every, delay = trainer.run, options.refresh_every, options.apply_delay
    rng = random.Random(options.seed)
    names = draws(rng)
    run.plans[1] = formats = trainer.formats()
    probed = resumed_after = 0
    with ExitStack() as lasting:
        for step in range(1, options.steps + 1):
            if step % every == 0 and step + delay <= options.steps:
                probed, resumed_after = step, step + rng.randrange(delay)
                run.faults[step] = next(names)
                lasting.enter_context(strike(run.faults[step], trainer, options, step))
            trainer.step(step)
            name = run.faults.get(probed, "none")
            if step == probed + (0 if FAULTS[name].is_of_step else delay):
                lasting.close()
            if name in (RESUMED, ABANDONED) and step == resumed_after:
                trainer.resume(politely=name == RESUMED)
            if probed and step == probed + delay:
                run.applied[probed] = trainer.controller.plan.provenance.step == probed
            if trainer.formats() != formats:
                run.plans[step + 1] = formats = trainer.formats()
            if step % every == (every + delay) // 2:
                run.steps.append(step)
                for name, count in counted(folder, mark, options.device).items():
                    run.counts.setdefault(name, array("q")).append(count)
    if rank() == 0:
        for line in map(json.loads, (folder / "faulty" / "snip" / "history.jsonl").read_text().splitlines()):
            if line["event"] == "refresh" and line["reason"]:
                run.reasons[line["step"]] = line["reason"]
    return trainer.end()


def strike(name: str, trainer: Trainer, options: argparse.Namespace, step: int) -> AbstractContextManager[Any]:
    """Returns the context of a fault, which at this step is the same in all runs."""
    rng = random.Random(f"{options.seed} {step}")
    layer, struck = rng.choice(list(trainer.layers.values())), rng.randrange(options.processes)
    return FAULTS[name].lasts(Place(layer, struck == rank(), random.Random(f"{rng.random()} {rank()}")))


def of_data(trainer: Trainer, options: argparse.Namespace, faulty: Run, step: int) -> AbstractContextManager[Any]:
    """Returns the context of the fault of the step if it belongs to the data."""
    name = faulty.faults.get(step, "none")
    return strike(name, trainer, options, step) if FAULTS[name].is_in_data else nullcontext()


def without_faults(options: argparse.Namespace, folder: Path, faulty: Run) -> Run:
    """Trains by the same schedule, without the refreshes that came to nothing."""
    trainer = Trainer(options, snip_config(options), folder / "sound")
    for step in range(1, options.steps + 1):
        with of_data(trainer, options, faulty, step):
            trainer.step(step, is_captured=faulty.applied.get(step, True))
    return trainer.end()


def replayed(options: argparse.Namespace, faulty: Run) -> Run:
    """Trains under the plans that the run with faults had, none of them made here."""
    trainer = Trainer(options, SnipConfig(policy="uniform-fp8", seed=options.seed))
    for step in range(1, options.steps + 1):
        for name, formats in json.loads(faulty.plans.get(step, "{}")).items():
            trainer.layers[name].set_formats(formats)
        with of_data(trainer, options, faulty, step):
            trainer.step(step)
    return trainer.end()


def fault_table(run: Run) -> dict[str, dict[str, int]]:
    """Returns for each fault how often it struck, what became of the refresh, and how often that was expected."""
    table = {}
    for name, often in sorted(Counter(run.faults.values()).items()):
        reason = FAULTS[name].reason
        struck = [step for step, fault in run.faults.items() if fault == name]
        applied = sum(run.applied[step] for step in struck)
        told = [reason is None or rank() != 0 or reason in run.reasons.get(step, "") for step in struck]
        expected = sum(run.applied[step] == (reason is None) and why for step, why in zip(struck, told, strict=True))
        table[name] = {"struck": often, "applied": applied, "kept": often - applied, "as_expected": expected}
    return table


def compared(one: Run, other: Run) -> dict[str, Any]:
    """Returns in how many steps loss and norm are the same numbers (NaN is NaN), and whether all weights are."""
    pairs = zip(zip(one.losses, one.norms, strict=True), zip(other.losses, other.norms, strict=True), strict=True)
    different = [step for step, (ours, theirs) in enumerate(pairs, start=1) if str(ours) != str(theirs)]
    return {
        "equal_steps": len(one.losses) - len(different),
        "first_different": different[0] if different else None,
        "equal_weights": one.weights == other.weights,
    }


def passed(row: dict[str, Any]) -> bool:
    return (
        all(resource["flat"] is not False for resource in row["resources"].values())
        and all(fault["as_expected"] == fault["struck"] for fault in row["faults"].values())
        and all(found["equal_weights"] and not found["first_different"] for found in row["comparisons"].values())
    )


def report(row: dict[str, Any]) -> str:
    """Returns what one process found as Markdown."""
    refreshes = row["refreshes"]
    lines = [
        f"\nRank {row['rank']} of {row['processes']}, seed {row['seed']}, commit {row['commit']}, {row['machine']}: "
        f"{row['steps']} steps, {row['seconds']:.0f} s for all three runs. {refreshes['applied']} refreshes applied, "
        f"{refreshes['kept']} kept; {row['plans']} different plans one after the other; {row['skipped_steps']} steps "
        f"skipped; loss {row['loss']['first']:.3f} to {row['loss']['last']:.3f}.\n",
        "| resource | after warm-up | at the end | per 1,000 steps (95%) | allowed | flat |\n|" + "---|" * 6,
    ]
    for name, found in row["resources"].items():
        allowed = "-" if found["allowed_per_1000_steps"] is None else f"{found['allowed_per_1000_steps']:g}"
        slope, (low, high) = found["per_1000_steps"], found["between_95"]
        flat = {True: "yes", False: "NO", None: "by design"}[found["flat"]]
        ends = f"{found['after_warm_up']:,} | {found['at_end']:,}"
        lines.append(f"| {name} | {ends} | {slope:+.1f} ({low:+.1f} to {high:+.1f}) | {allowed} | {flat} |")
    lines.append("\n| fault | struck | applied | kept | as expected |\n|" + "---|" * 5)
    for name, fault in row["faults"].items():
        lines.append(f"| {name} | {' | '.join(str(count) for count in fault.values())} |")
    lines.append("\n| run | steps with equal loss and norm | first different | equal weights |\n|" + "---|" * 4)
    for name, found in row["comparisons"].items():
        equal = f"{found['equal_steps']} of {row['steps']}"
        weights = "yes" if found["equal_weights"] else "NO"
        lines.append(f"| {name} | {equal} | {found['first_different'] or '-'} | {weights} |")
    lines.append(f"\nUp to step {row['first_kept_due'] or row['steps']} nothing was kept. {PASSED[row['passed']]}")
    return "\n".join(lines)


PASSED = {True: "All flat, all equal, all as expected.", False: "NOT all flat, equal and as expected."}


if __name__ == "__main__":
    sys.exit(main())
