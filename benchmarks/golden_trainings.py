"""Trainings of the golden record under Trainers: models, data, configurations, and their recorded output."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
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

from snip_hf import PrecisionPlan, SnipCallback, SnipConfig

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


# -------------------------------------------------------------------------------------------------- models and data


def llama(size: Size = SMALL, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**_sizes(size), intermediate_size=size.inner, **NO_TOKENS | options))


def qwen3_moe(size: Size = SMALL) -> Qwen3MoeForCausalLM:
    """Returns a model with four experts per layer, two per token."""
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
    """Returns a model with biases."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return GPTNeoXForCausalLM(GPTNeoXConfig(vocab_size=VOCABULARY, max_position_embeddings=256, **sizes, **NO_TOKENS))


def with_lora() -> nn.Module:
    """Returns a frozen Llama with adapters."""
    import peft

    model = llama()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, lora_dropout=0.1))


def data(length: int = LENGTH, rows: int = 54) -> list[dict[str, list[int]]]:
    """Returns sequences with different numbers of labels."""
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(7)).tolist()
    return [{"input_ids": row, "labels": [-100] * (index % 9) + row[index % 9 :]} for index, row in enumerate(tokens)]


# --------------------------------------------------------------------------------------------------------- Trainers


class Watch(TrainerCallback):
    """Records each plan when it is applied."""

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
    """Returns arguments of twelve steps with two accumulated micro-batches."""
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
    """Trains the trainer that `build` makes from a callback; returns the recorded output."""
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
    """Trains under a Trainer, and again from a checkpoint if `resume_at` is set."""
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
    """Returns a tokenizer with one token per ASCII character."""
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


# ----------------------------------------------------------------------------------------------- what trainings leave


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
    """Returns a hash of all tensors, and the norm and randomly signed sum of each."""
    digest, tensors = hashlib.sha256(), {}
    for name, tensor in sorted(model.state_dict().items()):
        tensor = tensor.detach().cpu().contiguous()
        digest.update(name.encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
        values = tensor.double()
        signs = torch.randint(0, 2, values.shape, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
        tensors[name] = [float(values.norm()), float((values * signs).sum())]
    return {"hash": digest.hexdigest(), "tensors": tensors}
