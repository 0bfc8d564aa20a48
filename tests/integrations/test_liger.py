"""Is a loss that Liger's kernels compute probed as one that torch computes? They need a GPU."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import causal_families
import pytest
import torch
from configs import fp4_config
from small import tiny_llama
from tiny_runs import SCHEDULE, train
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

from snip_hf import SnipConfig
from snip_hf.records.load import read_divergence

pytest.importorskip("liger_kernel", reason="Liger's kernels are not installed; they need a GPU")


@pytest.fixture(autouse=True)
def kept_files() -> Iterator[None]:
    """Gives torch and transformers' files the functions and classes back that Liger exchanges for all models."""
    prefixes = "transformers.models.", "torch.nn.functional"
    files = {name: dict(vars(file)) for name, file in sys.modules.items() if name.startswith(prefixes)}
    yield
    for name, contents in files.items():
        vars(sys.modules[name]).update(contents)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_loss_by_liger_s_kernels_is_probed_as_torch_s_is(tmp_path: Path) -> None:
    tables = []
    for uses in (False, True):
        folder, config = tmp_path / str(uses), fp4_config(**SCHEDULE)
        options = {"use_cpu": False, "use_liger_kernel": uses, "max_steps": 4}
        finished = train(folder, config, model=tiny_llama(hidden=64), **options)
        assert [(line["step"], line["status"]) for line in finished.refreshes] == [(2, "applied")]
        norm = finished.model.model.norm.forward.__func__
        assert norm.__module__.startswith("liger_kernel") == uses
        tables.append(read_divergence(folder / "snip" / "divergence-2.json")[1].rows)
    for figure in ("loss_divergence", "weight_divergence"):
        pairs = [(getattr(one, figure), getattr(other, figure)) for one, other in zip(*tables, strict=True)]
        assert statistics.median(abs(one / other - 1) for one, other in pairs if other) < 0.02


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("formats", [("mxfp4", "fp8-delayed"), ("fp4", "fp8")], ids="-".join)
@pytest.mark.parametrize("compiles", [False, True])
def test_the_preset_trains_with_liger_s_kernels_as_bf16_does(
    compiles: bool, formats: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "true"
    )  # a whole model of Liger's does not compile
    torch._dynamo.reset()
    config = SnipConfig(formats=formats, **SCHEDULE)
    options = {"use_cpu": False, "use_liger_kernel": True, "bf16": True, "torch_compile": compiles, "max_steps": 6}
    options["adam_epsilon"] = 1e-3  # Adam's response to gradients near 0 would magnify roundings
    finished, plain = (
        train(tmp_path / name, chosen, model=tiny_llama(hidden=256, layers=2), **options)
        for name, chosen in (("snip", config), ("bf16", None))
    )
    assert finished.refreshes[0]["status"] == "applied"
    norms = {name: weight for name, weight in finished.model.named_parameters() if "norm" in name}
    assert norms
    for name, weight in norms.items():  # which a wrong graph overwrites
        assert (weight - plain.model.get_parameter(name)).norm() < 0.1 * weight.norm(), name
    for step, (loss, _) in plain.losses.items():
        assert finished.losses[step][0] == pytest.approx(loss, rel=0.02)


# Of those that Liger 0.8.5 patches. Its kernel also runs the experts of nine others, which snip-hf then leaves out.
FAMILIES = ("gemma2", "gemma3_text", "gpt_oss", "granite", "llama", "mistral", "olmo2", "olmo3", "phi3", "qwen2")
FAMILIES += ("qwen3", "smollm3", "gemma", "gemma4_text", "glm4", "exaone4", "hunyuan_v1_dense", "ministral", "nemotron")
FAMILIES += ("qwen3_5_text", "falcon_h1", "llama4_text")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_with_liger_s_kernels_as_without(family: str, tmp_path: Path) -> None:
    ids = causal_families.batch(rows=2, length=64)["input_ids"].tolist()
    runs = []
    for uses in (False, True):
        model = causal_families.build(family)
        finished = train(
            tmp_path / str(uses),
            SnipConfig(**SCHEDULE),
            model=model,
            trainer={"train_dataset": [{"input_ids": row, "labels": row} for row in ids] * 6},
            train_sampling_strategy="sequential",
            use_liger_kernel=uses,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),
            learning_rate=1e-3,
            # Adam's response to gradients near 0 would magnify roundings.
            adam_epsilon=1e-4,
            max_steps=6,
        )
        assert [(line["step"], line["status"]) for line in finished.refreshes] == [(2, "applied")]
        owners = {module.forward.__module__ for module in model.modules()}
        assert any(owner.startswith("liger_kernel") for owner in owners) == uses
        runs.append([loss for loss, _ in finished.losses.values()])
    assert len(runs[0]) == 6 and runs[0][-1] < 0.98 * runs[0][0]
    assert runs[1] == pytest.approx(runs[0], rel=0.005)


class Peaks(TrainerCallback):
    """Records the memory that each step needed at most, beyond what was allocated before it."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.bytes.append(torch.cuda.max_memory_allocated() - self._before)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiles", [False, True])
def test_the_logits_are_never_whole_in_training_or_a_probe(compiles: bool, tmp_path: Path) -> None:
    torch._dynamo.reset()
    vocabulary, rows, length = 65536, 16, 512
    shape = {"hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = torch.randint(vocabulary, (5 * rows, length)).tolist()
    peaks = Peaks()
    finished = train(
        tmp_path,
        SnipConfig(probe_batch_tokens=None, **SCHEDULE),
        model=LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **shape)),
        callbacks=[peaks],
        trainer={"train_dataset": [{"input_ids": row, "labels": row} for row in ids]},
        use_cpu=False,
        use_liger_kernel=True,
        bf16=True,
        torch_compile=compiles,
        optim="adamw_torch_fused",
        per_device_train_batch_size=rows,
        max_steps=5,
    )
    assert [(line["step"], line["status"]) for line in finished.refreshes] == [(2, "applied")], finished.refreshes
    logits_in_bf16 = 2 * rows * length * vocabulary
    assert max(peaks.bytes) < logits_in_bf16, [round(number / 2**20) for number in peaks.bytes]
