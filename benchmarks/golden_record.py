"""Records the numbers of a fixed set of small trainings, to the bit, and compares two such records by value.

    python benchmarks/golden_record.py record before.json.gz      # on one commit
    python benchmarks/golden_record.py record after.json.gz       # on another one, on the same machine
    python benchmarks/golden_record.py compare before.json.gz after.json.gz

A change that moves code without changing numbers leaves the record equal. It holds, for each training:

- losses and, under a Trainer, gradient norms of each step;
- plans, layer -> GEMM -> format, with the step after which each was in force;
- refreshes, with their step and status;
- divergences, layer -> GEMM -> format -> loss divergence and weight divergence;
- a hash of the weights, and of each weight its norm and its sum under random signs, which tell how far apart two are.

File layouts, schema versions, times, and memory are left out, so commits with other files can be compared. Configs are
built by the constructor and name every format, so changed defaults do not change them.

`benchmarks/results/golden_record.json.gz` is the record of commit 51bff34; its header names the machine. Bits depend on
the CPU: on another model of CPU, record the old commit again. Recording takes 80 seconds on one core.

The cases cover both granularities, accumulation, clipping, SNIP and other policies, resuming in the middle of a
refresh, a model with biases, experts, LoRA, autocast to BF16, losses that TRL's trainers compute, a compiled model, two
DDP ranks, and a pipeline. A gated MLP is fused only by kernels for GPUs, so on a CPU its linears run one by one, also
compiled. `record --gpu` has cases of its own (for an H100 or H200): the formats of the preset "hopper" compiled, with
fused gated MLPs and with experts, and the paper's blocks compiled.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from golden_loops import RANKS, run_rank, with_ranks
from golden_trainings import (
    GPU,
    IN_ONE_SCALE,
    LARGE,
    PREFERENCES,
    TEXTS,
    TRAININGS,
    Size,
    llama,
    neox,
    qwen3_moe,
    with_lora,
    with_trainer,
    with_trl,
)
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
Case = Callable[[Path], dict[str, Any]]


# ------------------------------------------------------------------------------------------------------------- cases


def cpu_cases() -> Iterator[tuple[str, Case]]:
    by_gemm = {"granularity": "gemm"}
    for name, config in TRAININGS.items():
        yield name, lambda folder, config=config: with_trainer(folder, config)
    yield "biases", lambda folder: with_trainer(folder, by_gemm, neox)
    yield "experts", lambda folder: with_trainer(folder, by_gemm, qwen3_moe)
    yield "experts, one scale per tensor", lambda folder: with_trainer(folder, IN_ONE_SCALE, qwen3_moe)
    yield "autocast to BF16", lambda folder: with_trainer(folder, by_gemm, bf16=True)
    yield "LoRA", lambda folder: with_trainer(folder, by_gemm, with_lora)
    yield "TRL's SFT", lambda folder: with_trl(folder, "SFT", TEXTS)
    yield "TRL's DPO", lambda folder: with_trl(folder, "DPO", PREFERENCES)
    yield "compiled", lambda folder: with_trainer(folder, by_gemm, max_steps=8, torch_compile=True)
    yield "resumed in the middle of a refresh", lambda folder: with_trainer(folder, {}, resume_at=3)
    yield from ((name, with_ranks(name)) for name in RANKS)


def gpu_cases() -> Iterator[tuple[str, Case]]:
    def case(config: Mapping[str, Any], model: Callable[[Size], nn.Module], **changes: Any) -> Case:
        return lambda folder: with_trainer(folder, config, lambda: model(LARGE), LARGE.length, **changes)

    blocks = {"granularity": "gemm"}
    hopper = {**IN_ONE_SCALE, "ties": "auto"}
    yield "hopper, compiled, gated MLPs", case(hopper, llama, torch_compile=True)
    yield "hopper, not compiled", case(hopper, llama)
    yield "hopper, compiled, experts", case(hopper, qwen3_moe, torch_compile=True)
    yield "paper's blocks, compiled", case(blocks, llama, torch_compile=True)


# ----------------------------------------------------------------------------------------------------------- records


def header() -> dict[str, Any]:
    """Returns the commit, versions and machine, which may explain differences."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True).stdout.strip()
    info = Path("/proc/cpuinfo")
    models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return {
        "commit": commit + (" with changes in src" if changed else ""),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": models[0] if models else platform.processor(),
        "gpu": torch.cuda.get_device_name() if GPU else None,
    }


def record(path: Path, only: str | None, gpu: bool) -> None:
    if gpu != GPU:
        raise SystemExit("--gpu needs a CUDA device." if gpu else "Hide the GPU (CUDA_VISIBLE_DEVICES=) or add --gpu.")
    transformers.logging.disable_progress_bar()
    os.environ["TQDM_DISABLE"] = "1"
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    failed = []
    for name, run in gpu_cases() if gpu else cpu_cases():
        if only is None or only in name:
            # Compiled code of an earlier case may guard on its sizes.
            torch.compiler.reset()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found[name] = run(Path(folder))
                except Exception:  # The other cases still count.
                    traceback.print_exc()
                    failed.append(name)
            print(f"{name}: {'failed' if name in failed else 'recorded'}", flush=True)
    write(path, {"header": header(), "cases": found})
    if failed:
        sys.exit(f"Failed, and not in {path}: {', '.join(failed)}.")


def write(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    # Without a timestamp, equal records are equal files.
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0) if path.suffix == ".gz" else text.encode())


def read(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return found


# -------------------------------------------------------------------------------------------------------- comparison


class Difference(NamedTuple):
    where: str
    text: str
    size: float
    """Relative to the larger of two numbers; infinite for other values."""


def differences(one: Any, other: Any, where: str = "") -> Iterator[Difference]:
    """Yields the places at which two JSON documents differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if key in one and key in other:
                yield from differences(one[key], other[key], f"{where}/{key}")
            else:
                yield Difference(f"{where}/{key}", f"only in the {'first' if key in one else 'second'}", math.inf)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{where}/{index}")
    elif one != other and not (one != one and other != other):
        numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
        size = abs(one - other) / max(abs(one), abs(other)) if numbers else math.inf
        yield Difference(where, f"{str(one)[:60]} against {str(other)[:60]}", size)


def weight_distance(one: Any, other: Any) -> float:
    """Estimates how far apart two models' weights are, relative to their norm.

    The difference of two sums under the same random signs has the squared distance as its mean square.
    """
    one, other = one["tensors"], other["tensors"]
    square = sum((one[name][1] - other[name][1]) ** 2 for name in one.keys() & other.keys())
    return math.sqrt(square / (sum(norm**2 for norm, _ in one.values()) or 1.0))


def compare(one: Path, other: Path, shown: int) -> int:
    """Prints the differences case by case; returns 0 if there are none, else 1."""
    first, second = read(one), read(other)
    for key in first["header"]:
        print(f"{key}: {first['header'][key]} | {second['header'].get(key)}")
    total = 0
    for name in sorted({*first["cases"], *second["cases"]}):
        left, right = first["cases"].get(name), second["cases"].get(name)
        if left is None or right is None:
            print(f"{name}: only in the {'second' if left is None else 'first'} record")
            total += 1
        else:
            total += compare_case(name, left, right, shown)
    print(f"{total} differences." if total else "The records are equal.")
    return int(total > 0)


def compare_case(name: str, left: Any, right: Any, shown: int) -> int:
    """Prints the differences of a case, part by part; returns their number."""
    if "ranks" in left and "ranks" in right:
        pairs = zip(left["ranks"], right["ranks"], strict=True)
        total = sum(compare_case(f"{name}, rank {rank}", *pair, shown) for rank, pair in enumerate(pairs))
        left, right = ({key: value for key, value in case.items() if key != "ranks"} for case in (left, right))
        return total + compare_case(name, left, right, shown)
    total = 0
    for part in sorted({*left, *right}):
        found = list(differences(left.get(part), right.get(part)))
        total += len(found)
        if not found:
            continue
        sizes = [difference.size for difference in found if difference.size < math.inf]
        most = f", by {max(sizes):.1e} of their size at most" if sizes else ""
        distance = f", about {weight_distance(left[part], right[part]):.1e} of their norm" if part == "weights" else ""
        print(f"{name}, {part}: {len(found)} values differ{most}{distance}")
        for difference in found[:shown]:
            print(f"    {difference.where}: {difference.text}")
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("path", type=Path, help="file to write, .json or .json.gz")
    recording.add_argument("--only", help="record the trainings whose names contain this")
    recording.add_argument("--gpu", action="store_true", help="record the cases for a GPU")
    comparing = commands.add_parser("compare")
    comparing.add_argument("one", type=Path)
    comparing.add_argument("other", type=Path)
    comparing.add_argument("--shown", type=int, default=3, help="differences to print of each part of a case")
    rank = commands.add_parser("rank", help="one process of a training on two; used by record")
    rank.add_argument("case", choices=list(RANKS))
    rank.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        record(options.path, options.only, options.gpu)
    elif options.command == "rank":
        run_rank(options.case, options.folder)
    else:
        sys.exit(compare(options.one, options.other, options.shown))


if __name__ == "__main__":
    main()
