r"""What a plan costs after many steps, and which one-step figure ranks that cost best: the measurements.

    python benchmarks/plan_damage.py --output runs/plan_damage.jsonl --step 400 --kinds reference rule program
    python benchmarks/plan_damage_report.py runs/plan_damage.jsonl

A small model is trained unquantized to a step S. From there every *arm*, an assignment of formats, trains on, in each
repeat with the same micro-batches and the same random numbers as all other arms of that repeat. After K steps each arm
gives one JSON line: its held-out loss under its own arithmetic and in high precision, and how far its weights are from
the unquantized run's. The one-step figures of state S go to a .json file beside.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from plan_damage_arms import CRITERIA, KINDS, OBJECTIVES, ONE_STEP_KINDS, Arm, Assignment, make_arms
from shared import small_models, texts
from shared.json_lines import drop_unfinished_line, read_lines
from shared.origin import origin_of

from snip_hf import SnipConfig
from snip_hf.costs.flops import linear_flops
from snip_hf.estimation.divergence import estimate_divergence
from snip_hf.estimation.ground_truth import measure_assignment
from snip_hf.layers.convert import convert_model
from snip_hf.layers.linear import SnipLinear
from snip_hf.layers.state import set_step, snip_linears
from snip_hf.numerics.gemms import GEMMS


def estimates(state: small_models.State, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the table's rows with more columns.

    loss_taylor is the loss divergence with its first-order part, snip_paper Q = dL + dW of the policy "snip-paper",
    greedy and fisher the criteria of these policies.
    """
    options: tuple[dict[str, Any], ...] = ({"loss_estimator": "token-fisher"}, {"loss_estimator": "taylor"})
    rows, with_slope, of_paper, *own = (
        estimate_divergence(
            state.model,
            batch,
            state.optimizer,
            SnipConfig(probe_tokens=None, probe_batch_tokens=None, **one),
        ).to_records()
        for one in (*options, *({"policy": policy} for policy in ("snip-paper", *CRITERIA)))
    )
    return [
        row
        | {"loss_taylor": slope["loss_divergence"], "snip_paper": q["loss_divergence"] + q["weight_divergence"]}
        | {name: one["criterion"] for name, one in zip(CRITERIA, criteria, strict=True)}
        for row, slope, q, *criteria in zip(rows, with_slope, of_paper, *own, strict=True)
    ]


# ------------------------------------------------------------------------------------------------ one worker


@dataclass(frozen=True)
class Job:
    """One arm in one repeat, until the last of its horizons."""

    arm: Arm
    repeat: int
    horizons: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """What every worker is told."""

    options: argparse.Namespace
    folder: Path
    """With the tokens, and the reference's weights as they come."""
    jobs: list[Job]
    deadline: float
    """Seconds since the epoch."""


def work(index: int, run: Run, taken: Any, steps_done: Any, lock: Any) -> None:
    """Does the jobs that no other worker took; one that fails is reported and left."""
    settle(run.options.device)
    count = torch.cuda.device_count() if run.options.device == "cuda" else 0
    device = f"cuda:{index % count}" if count else run.options.device
    if count:
        torch.cuda.set_device(device)
    worker = Worker(run, device, lock)
    pace = 0.0
    while time.time() < run.deadline:
        with taken.get_lock():
            position, taken.value = taken.value, taken.value + 1
        if position >= len(run.jobs):
            return
        job = run.jobs[position]
        steps = max(job.horizons, default=0)
        started = time.time()
        if started + steps * pace > run.deadline:
            continue
        try:
            worker.do(job)
        except Exception:
            print(f"{job.arm.name}, repeat {job.repeat}: failed\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            continue
        if steps >= 10:
            pace = (time.time() - started) / steps
        with steps_done.get_lock():
            steps_done.value += steps


class Worker:
    """A process with the state of step S on its device."""

    def __init__(self, run: Run, device: str, lock: Any) -> None:
        self.options, self.folder, self.device, self.lock = run.options, run.folder, device, lock
        self.state = load_state(self.options, device)
        self.text = texts.load_text(run.folder / "tokens.npy", device)

    def do(self, job: Job) -> None:
        """Trains one arm and writes a line at K = 0 (with the one-step figures, in repeat 0) and at each horizon."""
        started = time.time()
        one_step = self.one_step(job.arm) if job.repeat == 0 and job.arm.name != "bf16" else {}
        # Loaded anew: torchao's 8-bit states cannot be copied.
        state = load_state(self.options, self.device)
        convert_model(state.model, SnipConfig(start_format="bf16"))
        layers = snip_linears(state.model)
        for layer in layers.values():
            # Read by the GEMMs on the host: from the device it would stop the stream at every GEMM.
            layer.snip_state = layer.snip_state.cpu()
        self.write(job, 0, started, **self.losses(state, layers, job.arm), **one_step)
        first = self.state.step + job.repeat * max(self.options.horizons)
        state.step = first
        apply(layers, job.arm.assignment)
        for horizon in job.horizons:
            while state.step < first + horizon:
                set_step(layers, job.repeat, state.step, 0)
                state.train(self.text, 1)
            distance = self.distance(job, horizon, layers)
            self.write(job, horizon, started, **self.losses(state, layers, job.arm), distance=distance)

    def one_step(self, arm: Arm) -> dict[str, float]:
        """Returns the measured divergences of the whole assignment, on the micro-batch of the estimates."""
        batch = self.text.batch(self.state.step, self.state.rows)
        config = SnipConfig(probe_tokens=None, probe_batch_tokens=None)
        # Only FP4 rounds stochastically.
        draws = self.options.draws if any("fp4" in formats.values() for formats in arm.assignment.values()) else 1
        state = self.state
        [(loss, weight)] = measure_assignment(state.model, batch, state.optimizer, [arm.assignment], config, draws)
        return {"one_step_loss": float(loss), "one_step_weight": float(weight)}

    def losses(self, state: small_models.State, layers: Mapping[str, SnipLinear], arm: Arm) -> dict[str, float]:
        """Returns the held-out loss in high precision and under the arm's formats, which are then in force."""
        high = {layer: dict.fromkeys(GEMMS, "bf16") for layer in layers}
        result = {}
        for name, assignment in (("loss_high", high), ("loss_plan", arm.assignment)):
            apply(layers, assignment)
            result[name] = float(small_models.held_out_loss(state.model, self.text, self.options.held_out).mean())
        return result

    def distance(self, job: Job, horizon: int, layers: Mapping[str, SnipLinear]) -> float | None:
        """Returns sqrt(sum over layers of |W - W_ref|^2 / |W_ref|^2); the reference arm leaves its weights here."""
        path = self.folder / f"reference-{job.repeat}-{horizon}.pt"
        if job.arm.name == "bf16":
            torch.save({name: layer.weight.detach() for name, layer in layers.items()}, path.with_suffix(".part"))
            os.replace(path.with_suffix(".part"), path)
            return 0.0
        patience = time.time() + 60
        while not path.exists():
            if time.time() > patience:
                return None
            time.sleep(0.2)
        reference = torch.load(path, map_location=self.device, weights_only=True)
        parts = [
            (layer.weight.detach() - reference[name]).square().sum() / reference[name].square().sum()
            for name, layer in layers.items()
        ]
        return float(torch.stack(parts).sum().sqrt())

    def write(self, job: Job, horizon: int, started: float, **values: float | None) -> None:
        line = {
            "arm": job.arm.name,
            "kind": job.arm.kind,
            "repeat": job.repeat,
            "k": horizon,
            **values,
            "seconds": round(time.time() - started, 2),
        }
        with self.lock, self.options.output.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def apply(layers: Mapping[str, SnipLinear], assignment: Assignment) -> None:
    """Puts the formats of all layers in force."""
    for name, layer in layers.items():
        layer.set_formats(assignment[name])


def settle(device: str) -> None:
    """One thread, and on CUDA only kernels that give the same bits again: a resumed run goes on from the same state."""
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cuda.enable_flash_sdp(False)
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)


def new_state(options: argparse.Namespace, device: str) -> small_models.State:
    """Returns the case's untrained state."""
    shape = (options.rows, options.seed, options.hidden, options.blocks)
    return small_models.new_state(options.family, options.optimizer, device, *shape)


def save_state(options: argparse.Namespace, state: small_models.State) -> None:
    """Writes the state file: of the optimizers what `state_dict` gives, since torchao's cannot be pickled."""
    optimizers = [optimizer.state_dict() for optimizer in state.optimizers]
    saved = {"model": state.model.state_dict(), "optimizers": optimizers, "step": state.step}
    torch.save(saved, options.state_file)


def load_state(options: argparse.Namespace, device: str) -> small_models.State:
    """Returns the state that was saved, with what was on a GPU on `device` (Adam's step counts stay on the host)."""
    saved = torch.load(options.state_file, map_location={"cuda:0": device}, weights_only=True)
    state = new_state(options, device)
    state.model.load_state_dict(saved["model"])
    for optimizer, values in zip(state.optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    state.step = saved["step"]
    return state


# ------------------------------------------------------------------------------------------------ the whole


def arguments() -> argparse.Namespace:
    """Returns the command line's options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts.add_text_arguments(parser)
    parser.add_argument("--output", type=Path, required=True, help="JSONL file; lines are added")
    parser.add_argument("--family", choices=small_models.FAMILIES, default="llama")
    parser.add_argument("--optimizer", choices=small_models.OPTIMIZERS, default="adamw")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--rows", type=int, default=8, help="sequences per micro-batch (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights")
    parser.add_argument("--step", type=int, default=300, help="S: unquantized steps before (default 300)")
    parser.add_argument("--horizons", type=int, nargs="+", default=[1, 10, 100, 1000], metavar="K")
    parser.add_argument(
        "--max-k", nargs="*", default=[], metavar="KIND=K", help="a kind's last horizon, e.g. layer=100"
    )
    parser.add_argument("--repeats", type=int, default=2, help="runs of every arm, each on its own data (default 2)")
    parser.add_argument("--plans", type=int, default=40, help="random plans of each kind (default 40)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument(
        "--objectives",
        nargs="*",
        choices=OBJECTIVES,
        default=["additive", "paper", "loss", "taylor", "weight", "loss+bias", "loss+horizon-100"],
        metavar="OBJECTIVE",
        help="of the integer program's plans; those whose columns are missing are left out",
    )
    parser.add_argument("--held-out", type=int, default=16, help="batches of 16 sequences of the held-out loss")
    parser.add_argument("--draws", type=int, default=4, help="stochastic-rounding draws of the one-step truth")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after these, no arm is begun")
    parser.add_argument("--resume", action="store_true", help="keep the output's lines and skip what is complete")
    options = parser.parse_args()
    options.horizons = sorted(set(options.horizons))
    options.max_k = {kind: int(k) for kind, _, k in (item.partition("=") for item in options.max_k)}
    if unknown := set(options.max_k) - set(KINDS):
        parser.error(f"--max-k: unknown kind {unknown.pop()!r}; expected one of {', '.join(KINDS)}")
    options.state_file = options.output.with_suffix(".state.pt")
    if options.output.exists() and not options.resume:
        parser.error(f"{options.output} exists; continue it with --resume or name another file")
    return options


def prepare(options: argparse.Namespace, folder: Path) -> list[Arm]:
    """Trains to step S (or takes the state beside the output), estimates, and writes the .json file.

    Returns: the arms.
    """
    settle(options.device)
    np.save(folder / "tokens.npy", texts.token_ids(options.text))
    text = texts.load_text(folder / "tokens.npy", options.device)
    needed = (options.step + options.repeats * max(options.horizons)) * options.rows
    if needed > len(text.train):
        print(f"the text has {len(text.train)} sequences for training, {needed} are needed: some come again")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if not (options.resume and options.state_file.exists()):
        state = new_state(options, options.device)
        state.train(text, options.step)
        save_state(options, state)
    state = load_state(options, options.device)
    figures = options.output.with_suffix(".json")
    before: dict[str, Any] = {"arms": []}
    if options.resume and figures.exists():
        before = json.loads(figures.read_text(encoding="utf-8"))
        for name in ("family", "optimizer", "hidden", "blocks", "rows", "seed", "step", "horizons"):
            if before["options"][name] != getattr(options, name):
                sys.exit(
                    f"--resume: {options.output} has {name} {before['options'][name]}, got {getattr(options, name)}"
                )
        rows = before["table"]
    else:
        rows = estimates(state, text.batch(state.step, state.rows))
    convert_model(state.model, SnipConfig())
    flops = linear_flops(state.model)
    arms = make_arms(flops, rows, options)
    names = {arm.name for arm in arms}
    # JSON has no infinity, which is "no limit" here.
    plain = {name: value for name, value in vars(options).items() if isinstance(value, int | float | str | list)}
    document = {
        "options": {name: value for name, value in plain.items() if value != math.inf},
        "origin": origin_of(options.device),
        "table": rows,
        "arms": [*map(vars, arms), *(arm for arm in before["arms"] if arm["name"] not in names)],
    }
    figures.write_text(json.dumps(document) + "\n", encoding="utf-8")
    drop_unfinished_line(options.output)
    return arms


def make_jobs(arms: Sequence[Arm], options: argparse.Namespace) -> list[Job]:
    """Returns the jobs in the order in which they are done, without those whose lines are all there."""
    done = {(line["arm"], line["repeat"], line["k"]) for line in read_lines(options.output)}
    jobs = []
    for arm, repeat in itertools.product((arm for arm in arms if arm.same_as is None), range(options.repeats)):
        one_step = arm.kind in ONE_STEP_KINDS
        limit = 0 if one_step else options.max_k.get(arm.kind, max(options.horizons))
        job = Job(arm, repeat, tuple(k for k in options.horizons if k <= limit))
        complete = all((arm.name, repeat, k) in done for k in (0, *job.horizons)) or (one_step and repeat > 0)
        # The unquantized run always: its weights are what distances are measured from.
        if arm.name == "bf16" or not complete:
            jobs.append(job)
    # All repeats of the unquantized run first, then each repeat of the plans, then the single arms.
    return sorted(
        jobs,
        key=lambda job: (
            job.arm.name != "bf16",
            job.arm.kind in ("gemm-kind", "layer", "gemm"),
            job.arm.kind in ("layer", "gemm"),
            job.repeat,
            KINDS.index(job.arm.kind),
        ),
    )


def main() -> None:
    options = arguments()
    # cuBLAS gives the same bits again only with a workspace of its own.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.time()
    with tempfile.TemporaryDirectory() as name:
        arms = prepare(options, Path(name))
        jobs = make_jobs(arms, options)
        print(f"{time.time() - started:.0f} s until {len(arms)} arms were ready; {len(jobs)} jobs", flush=True)
        run = Run(options, Path(name), jobs, started + 60 * options.minutes)
        context = mp.get_context("spawn")
        taken, steps_done, lock = context.Value("q", 0), context.Value("q", 0), context.Lock()
        begun = time.time()
        workers = [
            context.Process(target=work, args=(index, run, taken, steps_done, lock)) for index in range(options.workers)
        ]
        for worker in workers:
            worker.start()
        while any(worker.is_alive() for worker in workers):
            for worker in workers:
                worker.join(30 / len(workers))
            print(progress(jobs, taken.value, steps_done.value, begun), flush=True)


def progress(jobs: Sequence[Job], taken: int, steps: int, begun: float) -> str:
    """Returns one line: how far the workers are, and how fast."""
    seconds = time.time() - begun
    total = sum(max(job.horizons, default=0) for job in jobs)
    return (
        f"{seconds:.0f} s: {min(taken, len(jobs))} of {len(jobs)} jobs begun, {steps} of {total} steps done, "
        f"{steps / seconds:.1f} steps/s"
    )


if __name__ == "__main__":
    main()
