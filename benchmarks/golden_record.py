"""Records what a fixed set of small trainings does, to the bit, and compares two such records.

    python benchmarks/golden_record.py record before.json      # on one commit
    python benchmarks/golden_record.py record after.json       # on another one, on the same machine
    python benchmarks/golden_record.py compare before.json after.json

A record holds the losses, plans, divergence tables, history and a hash of the weights of each training. A change that
moves code without changing numbers leaves it equal. The trainings cover both granularities, accumulation, clipping,
SNIP and other policies, drift checks, resuming in the middle of a refresh, a model with biases, two DDP ranks, and a
pipeline. Times and memory are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from snip_hf import SnipCallback, SnipConfig, SnipController

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
VOCABULARY, LENGTH = 128, 48
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Refreshes at steps 2, 6 and 10, applied after steps 4, 8 and 12. By layer, as the first version did by default.
SCHEDULE: dict[str, Any] = {"first_refresh": 2, "refresh_every": 4, "apply_delay": 2, "solver": "greedy"} | {
    "granularity": "layer"
}
# What differs from one run to the next on the same commit.
MEASURED = ("seconds", "memory_mib", "solver_version")
# Parts of a configuration that a later version may add or rename; what they decide shows in the numbers.
ASIDE = ("config", "schema_version", "versions")
# Events that a later version adds to the history; what follows from them shows in the others.
ASIDE_EVENTS = ("coverage",)

# Fields have the names of the first version, which `from_dict` takes in every later one.
TRAININGS: dict[str, dict[str, Any]] = {
    "snip by layer": {},
    "snip by GEMM, two stages, taylor, horizon": {
        "granularity": "gemm",
        "stages": 2,
        "loss_form": "taylor",
        "objective": "horizon",
        "probes": 2,
    },
    "snip by layer, paper's objective, norm, ties, switching cost": {
        "objective": "paper",
        "loss_form": "norm",
        "ties": (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
        "switching_cost": 0.1,
    },
    "drift checks": {"refresh_on_drift": 0.999, "drift_every": 3, "refresh_every": 8},
    "CBC or HiGHS": {"solver": "auto", "granularity": "gemm"},
    "fisher by GEMM": {"policy": "fisher", "granularity": "gemm"},
    "hessian-trace": {"policy": "hessian-trace", "probes": 4},
    "min-rel-err": {"policy": "min-rel-err"},
    "kl": {"policy": "kl"},
    "greedy": {"policy": "greedy"},
    "random": {"policy": "random"},
    "backward-first": {"policy": "backward-first", "granularity": "gemm"},
    "first2-last8": {"policy": "first2-last8", "granularity": "gemm"},
    "uniform-fp4": {"policy": "uniform-fp4"},
    "bf16": {"policy": "bf16"},
}


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            attention_dropout=0.1,
            **NO_TOKENS,
            **options,
        )
    )


def neox() -> GPTNeoXForCausalLM:
    """A model with biases."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **sizes, **NO_TOKENS))


def data(rows: int = 54) -> list[dict[str, list[int]]]:
    """Sequences with unequal numbers of labels."""
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(7)).tolist()
    return [{"input_ids": row, "labels": [-100] * (index % 9) + row[index % 9 :]} for index, row in enumerate(tokens)]


def with_trainer(
    folder: Path, config: Mapping[str, Any], model: nn.Module | None = None, resume_at: int | None = None
) -> dict[str, Any]:
    """Trains twelve steps of two accumulated micro-batches under a Trainer; from a checkpoint if `resume_at` is set."""

    def run(checkpoint: str | None) -> Trainer:
        arguments = TrainingArguments(
            str(folder),
            max_steps=12,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="cosine",
            warmup_steps=2,
            max_grad_norm=0.5,
            logging_steps=1,
            save_strategy="no" if resume_at is None else "steps",
            save_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model=llama() if model is None else model,
            args=arguments,
            train_dataset=data(),
            callbacks=[SnipCallback(SnipConfig.from_dict({**SCHEDULE, **config}))],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    trainer = run(None)
    if resume_at is not None:
        trainer = run(str(folder / f"checkpoint-{resume_at}"))
    logs = [line for line in trainer.state.log_history if "loss" in line]
    losses = [[line["step"], line["loss"], line["grad_norm"]] for line in logs]
    return {"losses": losses, "weights": weights_hash(trainer.model), **files_of(folder)}


def files_of(folder: Path) -> dict[str, Any]:
    """Returns what a run wrote into its folder `snip`, without what was measured."""
    found: dict[str, Any] = {}
    snip = folder / "snip"
    if (snip / "plan.json").exists():
        found["plan"] = without(json.loads((snip / "plan.json").read_text()))
    if (snip / "history.jsonl").exists():
        lines = map(json.loads, (snip / "history.jsonl").read_text().splitlines())
        found["history"] = [without(line) for line in lines if line["event"] not in ASIDE_EVENTS]
    for path in sorted(snip.glob("divergence-*.json")):
        document = json.loads(path.read_text())
        found[path.stem] = {"loss": document["loss"], "records": records_of(document)}
    return found


def records_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a divergence file, ordered; files hold them as objects or as columns and arrays."""
    rows = document.get("records")
    if rows is None:
        rows = [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]
    return sorted(rows, key=lambda row: (row["layer"], row["gemm"], row["format"]))


def without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without(item) for key, item in value.items() if key not in (*MEASURED, *ASIDE)}
    return [without(item) for item in value] if isinstance(value, list) else value


def weights_hash(model: nn.Module) -> str:
    return hash_of(model.state_dict())


def hash_of(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def with_ranks(case: str) -> Callable[[Path], dict[str, Any]]:
    """Returns what runs a case of `RANKS` on two processes and returns what the first of them found."""

    def run(folder: Path) -> dict[str, Any]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
        command = [sys.executable, __file__, "rank", case, str(folder)]
        running = [
            subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]
        codes = [process.wait(timeout=600) for process in running]
        if any(codes):
            raise RuntimeError(f"The ranks of {case!r} ended with exit codes {codes}; their errors are above.")
        ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
        return {"ranks": ranks, **files_of(folder)}

    return run


def two_ddp_ranks(folder: Path) -> dict[str, Any]:
    """A loop without a Trainer, with accumulation and clipping."""
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = SnipConfig.from_dict({**SCHEDULE, "granularity": "gemm", "probe_tokens": None})
    controller = SnipController(model, optimizer, config, output_dir=folder)
    torch.manual_seed(7 + rank)
    losses = []
    for step in range(1, 13):
        for part in range(2):
            tokens = torch.randint(0, VOCABULARY, (2, 128), generator=torch.Generator().manual_seed(100 * step + part))
            batch = {"input_ids": tokens[rank : rank + 1], "labels": tokens[rank : rank + 1]}
            controller.capture(batch)
            loss = model(**batch).loss
            (loss / 2).backward()
            losses.append(float(loss.detach()))
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
    controller.close()
    return {"losses": losses, "weights": weights_hash(model.module)}


def pipeline(folder: Path) -> dict[str, Any]:
    """Four stages on two processes, by the recipe."""
    sys.path.insert(0, str(RECIPES))
    import pipeline as recipe

    training = recipe.Training(4, 4, torch.device("cpu"))
    optimizer = torch.optim.SGD([weight for part in training.parts for weight in part.parameters()], lr=0.1)
    values = {**SCHEDULE, "stages": 4, "target_fp4_fraction": 0.5, "probe_tokens": None, "probe_batch_tokens": None}
    controller = SnipController(
        training.parts,
        optimizer,
        SnipConfig.from_dict(values),
        output_dir=folder,
        pipeline=recipe.Pipeline(training.run),
    )
    losses = []
    for step in range(1, 9):
        tokens = torch.randint(64, (4, 128), generator=torch.Generator().manual_seed(step)).cumsum(1) % 251
        batch = {"input_ids": tokens, "labels": tokens}
        controller.capture(batch)
        loss = training.run(batch)
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
        losses.append(None if loss is None else float(loss))
    controller.close()
    parts = enumerate(training.parts)
    states = {f"{index} {name}": x for index, part in parts for name, x in part.state_dict().items()}
    return {"losses": losses, "weights": hash_of(states)}


RANKS = {"two DDP ranks": two_ddp_ranks, "pipeline": pipeline}


def cases() -> Iterator[tuple[str, Callable[[Path], dict[str, Any]]]]:
    for name, config in TRAININGS.items():
        yield name, lambda folder, config=config: with_trainer(folder, config)
    yield "biases, by GEMM", lambda folder: with_trainer(folder, {"granularity": "gemm"}, neox())
    yield "resumed in the middle of a refresh", lambda folder: with_trainer(folder, {}, resume_at=3)
    yield from ((name, with_ranks(name)) for name in RANKS)


def record(path: Path, only: str | None) -> None:
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    found = {}
    for name, run in cases():
        if only is None or only in name:
            with tempfile.TemporaryDirectory() as folder:
                found[name] = run(Path(folder))
            print(f"{name}: {len(json.dumps(found[name]))} bytes", flush=True)
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def run_rank(case: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = RANKS[case](folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yields the places at which two JSON documents differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if key in one and key in other:
                yield from differences(one[key], other[key], f"{where}/{key}")
            else:
                yield f"{where}/{key}: only in the {'first' if key in one else 'second'} record"
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{where}/{index}")
    elif one != other:
        yield f"{where}: {str(one)[:80]} against {str(other)[:80]}"


def compare(one: Path, other: Path) -> int:
    """Prints the first differences and returns the exit code: 0 if there are none."""
    found = list(differences(json.loads(one.read_text()), json.loads(other.read_text())))
    print("\n".join(found[:40]) or "The records are equal.")
    if found:
        print(f"{len(found)} differences.")
    return int(bool(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("path", type=Path)
    recording.add_argument("--only", help="record the trainings whose names contain this")
    comparing = commands.add_parser("compare")
    comparing.add_argument("one", type=Path)
    comparing.add_argument("other", type=Path)
    rank = commands.add_parser("rank", help="one process of a training on two; used by record")
    rank.add_argument("case", choices=list(RANKS))
    rank.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "record":
        record(options.path, options.only)
    elif options.command == "rank":
        run_rank(options.case, options.folder)
    else:
        sys.exit(compare(options.one, options.other))


if __name__ == "__main__":
    main()
