"""Do packed sequences train and get probed, under attention in half precision and in parts that end where they do?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import half_attention
import pytest
from configs import fp4_config
from small import text, tiny_llama
from tiny_runs import SCHEDULE, one_thread, refreshes
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from snip_hf import SnipCallback
from snip_hf.estimation.batch import Batch

pytest.importorskip("trl")
from trl_runs import TRLRun, model_for, run

CONFIG = fp4_config(start_format="bf16", probe_batch_tokens=128, **SCHEDULE)
LENGTHS = (29, 90, 44, 70)


@pytest.fixture(autouse=True)
def half() -> Iterator[str]:
    with half_attention.registered() as name:
        yield name


def rows() -> list[dict[str, Any]]:
    ids = text(16, max(LENGTHS))["input_ids"].tolist()
    return [
        {"input_ids": row[: LENGTHS[index % 4]], "labels": row[: LENGTHS[index % 4]]} for index, row in enumerate(ids)
    ]


@pytest.mark.parametrize("says", [{}, {"return_flash_attn_kwargs": True, "return_position_ids": False}])
def test_flattened_batches_are_probed_in_parts_and_resumed_to_the_bit(
    says: dict[str, bool], half: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[int] = []
    part = Batch.part

    def noted(self: Batch, tokens: int | None) -> Batch:
        found = part(self, tokens)
        probed.append(found.tokens)
        return found

    monkeypatch.setattr(Batch, "part", noted)

    def trainer(folder: Path) -> Trainer:
        model = tiny_llama(hidden=32)
        model.set_attn_implementation(half)
        args = TrainingArguments(
            str(folder), max_steps=8, per_device_train_batch_size=4, bf16=True, use_cpu=True, report_to=[],
            save_strategy="steps", save_steps=5, logging_steps=1, learning_rate=1e-2, disable_tqdm=True,
            train_sampling_strategy="sequential", remove_unused_columns=False,
        )  # fmt: skip
        collator = DataCollatorWithFlattening(**says)
        return Trainer(model, args, collator, rows(), callbacks=[SnipCallback(CONFIG)])

    with one_thread():
        whole = trainer(tmp_path / "whole")
        whole.train()
        resumed = trainer(tmp_path / "whole")
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    found = [(line["step"], line["status"]) for line in refreshes(tmp_path / "whole")]
    assert found[:2] == [(2, "applied"), (6, "applied")]
    losses, again = ([line["loss"] for line in one.state.log_history if "loss" in line] for one in (whole, resumed))
    assert again == losses
    # The first and third of each four sequences.
    assert probed[:2] == [sum(LENGTHS[::2])] * 2
    (controller,) = (one.controller for one in whole.callback_handler.callbacks if isinstance(one, SnipCallback))
    assert controller is not None and controller.coverage is not None and controller.coverage.share == 1
    # Three GEMMs for every token of a pack, each of which multiplies and adds.
    weights = sum(weight.numel() for name, weight in whole.model.named_parameters() if "_proj" in name)
    assert controller.coverage.flops == 3 * 2 * weights * sum(LENGTHS)


MODES: dict[str, dict[str, Any]] = {
    "packing": {"packing": True},
    "wrapped": {"packing": True, "packing_strategy": "wrapped"},
    "padding-free": {"padding_free": True, "max_length": None},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
def test_supervised_fine_tuning_on_packs_is_probed_under_attention_in_half_precision(
    mode: str, half: str, tmp_path: Path
) -> None:
    model = model_for("SFT")
    model.set_attn_implementation(half)
    found: TRLRun = run(tmp_path, "SFT", CONFIG, model=model, bf16=True, **MODES[mode])
    assert [(line["step"], line["status"]) for line in found.refreshes] == [(2, "applied")]
    assert found.probed_loss == pytest.approx(found.logged[1]["loss"], rel=0.1)
