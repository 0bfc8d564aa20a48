"""Records what a fixed set of small trainings does, to the bit, and compares two such records by value.

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
import hashlib
import json
import math
import os
import platform
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from snip_hf import PrecisionPlan, SnipCallback, SnipConfig, SnipController

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, LENGTH = 128, 48
PAD, EOS = 124, 125
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
BLOCKS, ONE_SCALE = ("fp4", "fp8"), ("mxfp4", "fp8-tensor")
# Refreshes at steps 2, 6 and 10, applied after steps 4, 8 and 12. Fields whose defaults may change are named.
COMMON: dict[str, Any] = {
    "formats": BLOCKS,
    "start_format": "fp8",
    "target_fp4_fraction": 0.75,
    "granularity": "layer",
    "policy": "snip",
    "objective": "additive",
    "loss_estimator": "saliency",
    "probes": 1,
    "probe_tokens": 1024,
    "probe_batch_tokens": 4096,
    "ties": (),
    "stages": None,
    "first_refresh": 2,
    "refresh_every": 4,
    "apply_delay": 2,
    "solver": "greedy",
    "guard": "off",
    "seed": 0,
}
IN_ONE_SCALE: dict[str, Any] = {"formats": ONE_SCALE, "start_format": "fp8-tensor", "granularity": "gemm"}
TIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
TRAININGS: dict[str, dict[str, Any]] = {
    "snip by layer": {},
    "snip by GEMM, two stages, two probes": {"granularity": "gemm", "stages": 2, "probes": 2},
    "snip by GEMM, token-fisher": {"granularity": "gemm", "loss_estimator": "token-fisher"},
    "snip by GEMM, one scale per tensor, ties": {**IN_ONE_SCALE, "ties": TIES},
    "snip by GEMM, three formats": {"granularity": "gemm", "formats": (*BLOCKS, "bf16"), "start_format": "bf16"},
    "snip by layer, paper's objective, ties": {"objective": "paper", "ties": TIES},
    "forward GEMMs, shares that change": {
        "granularity": "gemm",
        "decides": "forward",
        "target_fp4_fraction": ((1, 0.9), (6, 0.5)),
    },
    "speed-up by rates": {"granularity": "gemm", "target_fp4_fraction": None, "target_linear_speedup": 2.5}
    | {"rates": "ideal"},
    "CBC": {"solver": "cbc", "granularity": "gemm"},
    "HiGHS": {"solver": "highs", "granularity": "gemm"},
    "snip-paper": {"policy": "snip-paper", "objective": "paper"},
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
GPU = torch.cuda.is_available()


class Size(NamedTuple):
    hidden: int = 32
    inner: int = 80
    layers: int = 3
    length: int = LENGTH


SMALL = Size()
# The kernels for GPUs take multiples of 128.
LARGE = Size(256, 512, 4, 256)


# ---------------------------------------------------------------------------------------------------- models and data


def llama(size: Size = SMALL, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_sizes(size), intermediate_size=size.inner, **NO_TOKENS | options))


def qwen3_moe(size: Size = SMALL) -> Qwen3MoeForCausalLM:
    """A model with four experts per layer, of which each token takes two."""
    torch.manual_seed(0)
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": size.inner,
        "decoder_sparse_step": 1,
    }
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_sizes(size), **experts, head_dim=size.hidden // 4, mlp_only_layers=[], **NO_TOKENS)
    )


def _sizes(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        # Dropout makes the random state count. On a GPU, fused attention adds up in no fixed order.
        "attention_dropout": 0.0 if GPU else 0.1,
        "attn_implementation": "eager" if GPU else "sdpa",
    }


def neox() -> GPTNeoXForCausalLM:
    """A model with biases."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **sizes, **NO_TOKENS))


def with_lora() -> nn.Module:
    """A frozen Llama with adapters."""
    import peft

    model = llama()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, lora_dropout=0.1))


def data(length: int = LENGTH, rows: int = 54) -> list[dict[str, list[int]]]:
    """Sequences with unequal numbers of labels."""
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7)).tolist()
    return [{"input_ids": row, "labels": [-100] * (index % 9) + row[index % 9 :]} for index, row in enumerate(tokens)]


# ------------------------------------------------------------------------------------------------------ Trainers


class Watch(TrainerCallback):
    """Notes each plan when it comes into force."""

    def __init__(self, snip: SnipCallback) -> None:
        self.snip = snip
        self.plans: list[dict[str, Any]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.snip.controller is not None:
            note_plan(self.plans, state.global_step, self.snip.controller.plan)


def note_plan(plans: list[dict[str, Any]], step: int, plan: PrecisionPlan) -> None:
    """Appends a plan unless it is the last one."""
    formats = {layer: dict(row) for layer, row in plan.assignment.items()}
    if not plans or plans[-1]["formats"] != formats:
        plans.append({"step": step, "formats": formats})


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Twelve steps of two accumulated micro-batches."""
    values: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": not GPU,
        "bf16": GPU,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return values | changes


def trained(
    folder: Path, config: Mapping[str, Any], build: Callable[..., Trainer], checkpoint: str | None = None
) -> Any:
    """Trains what `build` makes of a callback; returns what the training did."""
    snip = SnipCallback(SnipConfig(**{**COMMON, **config}))
    watch = Watch(snip)
    trainer = build(callbacks=[snip, watch])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    logs = [line for line in trainer.state.log_history if "loss" in line]
    losses = [[line["step"], line["loss"], line["grad_norm"]] for line in logs]
    return {"losses": losses, "plans": watch.plans, "weights": weights_of(trainer.model), **files_of(folder)}


def with_trainer(
    folder: Path,
    config: Mapping[str, Any],
    model: Callable[[], nn.Module] = llama,
    length: int = LENGTH,
    resume_at: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Trains under a Trainer; once more from a checkpoint if `resume_at` is set."""
    if resume_at is not None:
        changes |= {"save_strategy": "steps", "save_steps": 1}

    def build(**callbacks: Any) -> Trainer:
        args = TrainingArguments(**arguments(folder, **changes))
        return Trainer(model=model(), args=args, train_dataset=data(length), **callbacks)

    found: dict[str, Any] = trained(folder, config, build)
    if resume_at is not None:
        found = trained(folder, config, build, str(folder / f"checkpoint-{resume_at}"))
    return found


def with_trl(folder: Path, kind: str, rows: list[dict[str, str]]) -> dict[str, Any]:
    """Trains under a trainer of TRL's: "SFT" or "DPO"."""
    import trl
    from datasets import Dataset

    def build(**callbacks: Any) -> Trainer:
        args = getattr(trl, f"{kind}Config")(
            **arguments(folder, max_steps=6, bf16=False, gradient_checkpointing=False, max_length=LENGTH)
        )
        reference = {"ref_model": llama()} if kind == "DPO" else {}
        trainer: Trainer = getattr(trl, f"{kind}Trainer")(
            model=llama(pad_token_id=PAD, eos_token_id=EOS),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            **reference | callbacks,
        )
        return trainer

    return trained(folder, {"granularity": "gemm"}, build)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per ASCII character."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {chr(code): code for code in range(1, PAD)} | {"<unk>": 0, "<pad>": PAD, "<eos>": EOS}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


TEXTS = [{"text": f"this is row {index} of the text " * (1 + index % 3)} for index in range(24)]
PREFERENCES = [
    {"prompt": f"what is {index}? ", "chosen": f"it is {index * index}", "rejected": f"no idea {index}"}
    for index in range(24)
]


# ------------------------------------------------------------------------------------------------------ own loops


def with_ranks(case: str) -> Callable[[Path], dict[str, Any]]:
    """Returns a function that runs a case of `RANKS` on two processes."""

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
    config = SnipConfig(**{**COMMON, "granularity": "gemm", "probe_tokens": None})
    controller = SnipController(model, optimizer, config, output_dir=folder)
    torch.manual_seed(7 + rank)
    losses: list[float] = []
    plans: list[dict[str, Any]] = []
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
        note_plan(plans, step, controller.plan)
    controller.close()
    return {"losses": losses, "plans": plans, "weights": weights_of(model.module)}


def pipeline(folder: Path) -> dict[str, Any]:
    """Four stages on two processes, by the recipe."""
    sys.path.insert(0, str(ROOT / "recipes"))
    import pipeline as recipe

    training = recipe.Training(4, 4, torch.device("cpu"))
    optimizer = torch.optim.SGD([weight for part in training.parts for weight in part.parameters()], lr=0.1)
    changes = {"stages": 4, "target_fp4_fraction": 0.5, "probe_tokens": None, "probe_batch_tokens": None}
    controller = SnipController(
        training.parts,
        optimizer,
        SnipConfig(**{**COMMON, **changes}),
        output_dir=folder,
        pipeline=recipe.Pipeline(training.run),
    )
    losses: list[float | None] = []
    plans: list[dict[str, Any]] = []
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
        note_plan(plans, step, controller.plan)
    controller.close()
    return {"losses": losses, "plans": plans, "weights": weights_of(nn.ModuleList(training.parts))}


RANKS = {"two DDP ranks": two_ddp_ranks, "pipeline": pipeline}
Case = Callable[[Path], dict[str, Any]]


# ------------------------------------------------------------------------------------------------------ cases


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


# ------------------------------------------------------------------------------------------------------ records


def files_of(folder: Path) -> dict[str, Any]:
    """Returns the refreshes and divergences that a run wrote, without the layout of its files."""
    found: dict[str, Any] = {"refreshes": [], "divergences": {}}
    history = folder / "snip" / "history.jsonl"
    for line in map(json.loads, history.read_text().splitlines() if history.exists() else ()):
        if line["event"] == "refresh":
            found["refreshes"].append([line["step"], line["status"]])
    for path in sorted((folder / "snip").glob("divergence-*.json")):
        document = json.loads(path.read_text())
        table: dict[str, Any] = {}
        for row in rows_of(document):
            values = [row["loss_divergence"], row["weight_divergence"]]
            table.setdefault(row["layer"], {}).setdefault(row["gemm"], {})[row["format"]] = values
        found["divergences"][path.stem.rpartition("-")[2]] = {"loss": document["loss"], "layers": table}
    return found


def rows_of(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a divergence file, which holds them as objects or as columns and arrays."""
    if "rows" not in document:
        return list(document["records"])
    return [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]


def weights_of(model: nn.Module) -> dict[str, Any]:
    """Returns a hash of all tensors, and of each its norm and its sum under random signs."""
    digest, tensors = hashlib.sha256(), {}
    for name, tensor in sorted(model.state_dict().items()):
        tensor = tensor.detach().cpu().contiguous()
        digest.update(name.encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
        values = tensor.double()
        signs = torch.randint(0, 2, values.shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
        tensors[name] = [float(values.norm()), float((values * signs).sum())]
    return {"hash": digest.hexdigest(), "tensors": tensors}


def header() -> dict[str, Any]:
    """Returns what may explain a difference: the commit, versions, and the machine."""
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
                except Exception:  # The other cases are worth having.
                    traceback.print_exc()
                    failed.append(name)
            print(f"{name}: {'failed' if name in failed else 'recorded'}", flush=True)
    write(path, {"header": header(), "cases": found})
    if failed:
        sys.exit(f"Failed, and not in {path}: {', '.join(failed)}.")


def write(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=1, sort_keys=True) + "\n"
    # Without the time in it, equal records are equal files.
    path.write_bytes(gzip.compress(text.encode(), 9, mtime=0) if path.suffix == ".gz" else text.encode())


def read(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    return found


def run_rank(case: str, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = RANKS[case](folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------ comparison


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
    """Prints what differs, case by case, and returns the exit code: 0 if nothing does."""
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
