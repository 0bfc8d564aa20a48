"""Runs the Python blocks of the documentation, page by page, with the names of a reader's script."""

from __future__ import annotations

import ast
import functools
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from registries import nothing_stays_registered
from small import text, tiny_llama
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import snip_hf

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / name for name in ("README.md", "eval/README.md", "recipes/README.md")),
]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# Page -> number of a block on it, from 1 -> why it does not run here.
# Page -> number of a block that is not run here -> what it needs, and what runs it elsewhere.
NOT_RUN = {
    "docs/distributed.md": {
        1: "DDP: tests/distributed/devices.py, and on two H200s benchmarks/speed.py",
        2: "FSDP2: tests/parallel/test_sharding.py, and on two H200s benchmarks/multi_gpu_speed.py",
        3: "four processes: tests/distributed/test_distributed_config.py",
        4: "the processes of a pipeline: tests/distributed/test_pipeline.py",
        7: "processes under DDP: tests/parallel/test_gradient_compression.py",
    },
    "docs/hopper.md": dict.fromkeys((1, 2), "an H200: benchmarks/speed.py trained so"),
    "docs/kernels.md": {1: "a Blackwell GPU: not run"},
    "docs/models.md": {3: "a checkpoint of the reader's run: tests/integrations/test_experts_in_training.py"},
    "docs/optimizers.md": dict.fromkeys((1, 2), "a GPU: tests/training/test_gradients.py"),
    "docs/results.md": {1: "the repository's lines: tests/around/test_results.py"},
    "docs/sharing.md": dict.fromkeys(range(1, 5), "the Hub: tests/integrations/test_hub.py has one")
    | dict.fromkeys((5, 6), "what `snip-hf export` wrote: tests/integrations/test_export.py"),
    "docs/trl.md": dict.fromkeys((1, 2, 3), "TRL, a model from the Hub: tests/integrations/test_trl.py has another"),
}
# Their blocks take longest.
TRAINING = ("docs/accelerate.md", "docs/distributed.md", "docs/reliability.md", "docs/reports.md", "docs/trainer.md")


@contextmanager
def no_group_stays() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[tuple[int, str]]:
    """(line of the page, code) of each block."""
    source = page.read_text(encoding="utf-8")
    return [(source.count("\n", 0, match.start(1)) + 1, match[1]) for match in BLOCK.finditer(source)]


SHOWN = {name_of(page): blocks_of(page) for page in PAGES if blocks_of(page)}
RUN = [
    pytest.param(name, marks=pytest.mark.slow if name in TRAINING else ())
    for name, blocks in SHOWN.items()
    if len(blocks) > len(NOT_RUN.get(name, ()))
]


def script(folder: Path) -> dict[str, Any]:
    """The names of a reader's script: a model, its data and arguments, and what is imported."""
    model = tiny_llama(hidden=32)
    rows = [{name: row[0] for name, row in text(1, 32, index).items()} for index in range(8)]
    arguments: dict[str, Any] = {"max_steps": 3, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 2}
    names = {name: getattr(snip_hf, name) for name in snip_hf.__all__}
    training = TrainingArguments(str(folder / "run"), use_cpu=True, report_to="none", disable_tqdm=True, **arguments)
    return names | {
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "Path": Path,
        "Trainer": Trainer,
        "TrainingArguments": TrainingArguments,
        "accelerator": Accelerator(cpu=True),  # after the arguments, which begin Accelerate's state anew
        "args": training,
        "batch": text(2, 32),
        "config": snip_hf.SnipConfig(first_refresh=1, refresh_every=2, apply_delay=1),
        "data": rows,
        "itertools": itertools,
        "json": json,
        "loader": torch.utils.data.DataLoader(rows, batch_size=2),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "torch": torch,
        "x": torch.randn(4, 256, generator=torch.Generator().manual_seed(0)),
    }


def for_adapters(names: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    names |= {"get_peft_model": peft.get_peft_model, "LoraConfig": peft.LoraConfig}


def run(names: dict[str, Any], folder: str, model: Any, **config: Any) -> Trainer:
    """A trained Trainer, whose best checkpoint is loaded at its end."""
    arguments = replace(
        names["args"], output_dir=folder, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True
    )
    callback = snip_hf.SnipCallback(replace(names["config"], **config))
    trainer = Trainer(
        model, arguments, train_dataset=names["data"], eval_dataset=names["data"][:2], callbacks=[callback]
    )
    trainer.train()
    return trainer


def for_pipeline(names: dict[str, Any]) -> None:
    run(names, "run", names["model"], stages=2)
    names["plan"] = snip_hf.PrecisionPlan.load("run/snip/plan.json")
    snip_hf.restore_model(names["model"])
    names["table"] = snip_hf.estimate_divergence(names["model"], names["batch"], config=names["config"])
    names["DistributedDataParallel"] = in_one_process


def in_one_process(model: torch.nn.Module) -> torch.nn.Module:
    """DDP over a process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return torch.nn.parallel.DistributedDataParallel(model)


def for_the_best_model(names: dict[str, Any]) -> None:
    names["trainer"] = run(names, "run", names["model"])


def for_reports(names: dict[str, Any]) -> None:
    pytest.importorskip("tensorboard", reason="the example logs to TensorBoard")
    for granularity in ("layer", "gemm"):
        run(names, f"runs/{granularity}", tiny_llama(hidden=32), granularity=granularity)


def for_own_loss(names: dict[str, Any]) -> None:
    names["loader"] = [{"input_ids": row, "targets": row} for row in text(2, 32)["input_ids"].split(1)]
    names["my_loss"] = lambda logits, targets: torch.nn.functional.cross_entropy(logits[0], targets[0])
    names["controller"] = snip_hf.SnipController(names["model"], names["optimizer"], names["config"])


# Page -> what its blocks take from the reader's script beside the names that all of them have.
BEFORE = {
    "docs/adapters.md": for_adapters,
    "docs/distributed.md": for_pipeline,
    "docs/reliability.md": for_the_best_model,
    "docs/reports.md": for_reports,
    "docs/trl.md": for_own_loss,
}


@pytest.mark.parametrize("page", SHOWN)
def test_every_block_is_python(page: str) -> None:
    for line, code in SHOWN[page]:
        ast.parse("\n" * (line - 1) + code, page)


@pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning")  # PEFT's use of transformers
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run_one_after_the_other(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with nothing_stays_registered(), no_group_stays():
        names = script(tmp_path)
        BEFORE.get(page, lambda names: None)(names)
        for number, (line, code) in enumerate(SHOWN[page], start=1):
            if number not in NOT_RUN.get(page, {}):
                exec(compile("\n" * (line - 1) + code, page, "exec"), names)


@pytest.mark.slow
def test_the_diff_of_the_readme_leads_to_a_script_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = {"use_cpu": True, "max_steps": 2, "report_to": "none", "save_strategy": "no"}
    # test_compile.py trains under the default one, which takes half a minute to build this model.
    given = functools.partial(TrainingArguments, **quick, torch_compile_backend="eager")
    monkeypatch.setattr("transformers.TrainingArguments", given)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [diff] = re.findall(r"^```diff\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    after = "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] != "-")
    names = script(tmp_path)
    exec(compile(after, "README.md", "exec"), names)
    assert names["args"].bf16 and names["args"].torch_compile and names["trainer"].state.global_step == 2


def test_the_blocks_that_do_not_run_are_there() -> None:
    left_out = {(page, number) for page, numbers in NOT_RUN.items() for number in numbers}
    assert left_out <= {(page, number) for page, blocks in SHOWN.items() for number in range(1, len(blocks) + 1)}
    assert all((ROOT / page).is_file() for page in (*TRAINING, *BEFORE))
    for reason in {reason for numbers in NOT_RUN.values() for reason in numbers.values()}:
        files = re.findall(r"(?:tests|benchmarks)/[\w/]+\.py", reason)
        assert files or reason.endswith(": not run"), reason
        assert all((ROOT / file).is_file() for file in files), reason
