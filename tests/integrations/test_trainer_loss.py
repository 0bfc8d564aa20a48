"""Is a loss that the Trainer computes itself probed as it is, and is the Trainer left as if it had not been?"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import fp4_config
from rank_processes import assert_succeeded, start_ranks
from run_own_loss import by_items
from slow_cases import slow
from small import tiny_llama
from tiny_runs import SCHEDULE, data, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, Trainer, default_data_collator

from snip_hf import SnipCallback, SnipConfig
from snip_hf.integrations.trainer_loss import find_trainer, terms_of
from snip_hf.layers.state import snip_linears
from snip_hf.training import setup

pytestmark = pytest.mark.usefixtures("one_thread_only")

CONFIG = fp4_config(**SCHEDULE)
# Until a plan is applied, nothing differs from a run without SNIP.
UNTOUCHED = fp4_config(start_format="bf16", **SCHEDULE)
SHORT: dict[str, Any] = {"max_steps": 5}


def probed(folder: Path) -> dict[str, Any]:
    """The first refresh's divergences."""
    found: dict[str, Any] = json.loads((folder / "snip" / "divergence-2.json").read_text())
    return found


def token_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction=reduction)


class Inherited(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def figures(folder: Path) -> Tensor:
    """Loss and weight divergences of the first refresh."""
    rows = probed(folder)["rows"]
    return torch.tensor([[row[3], row[4]] for row in rows], dtype=torch.float64)


def test_the_models_loss_from_a_compute_loss_of_the_users_gives_the_same_divergences_to_the_bit(tmp_path: Path) -> None:
    own = train(tmp_path / "own", CONFIG, **SHORT)
    found = train(tmp_path / "class", CONFIG, trainer_class=Inherited, **SHORT)
    assert probed(tmp_path / "class") == probed(tmp_path / "own")
    assert found.losses == own.losses
    assert "compute_loss" not in vars(found.trainer)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [None, 128])
def test_the_models_loss_from_a_function_gives_nearly_the_same_divergences(tokens: int | None, tmp_path: Path) -> None:
    """Also of a part of the micro-batch, which has the count of its own labels."""
    config, rows = fp4_config(**SCHEDULE, probe_batch_tokens=tokens), data(24, 80)
    train(tmp_path / "own", config, trainer={"train_dataset": rows}, **SHORT)
    train(tmp_path / "function", config, trainer={"train_dataset": rows, "compute_loss_func": by_items}, **SHORT)
    torch.testing.assert_close(figures(tmp_path / "function"), figures(tmp_path / "own"), rtol=1e-3, atol=0)


@pytest.mark.slow
def test_on_two_ranks_the_count_is_that_of_both_where_the_trainer_averages_over_them(tmp_path: Path) -> None:
    assert_succeeded(start_ranks("run_own_loss.py", tmp_path, folder=tmp_path))
    for together in (True, False):
        own, found = (figures(tmp_path / f"{name}-{together}") for name in ("own", "function"))
        torch.testing.assert_close(found, own, rtol=1e-2, atol=0)


@pytest.mark.parametrize("how", [{"label_smoothing_factor": 0.5}, {"trainer": {"compute_loss_func": by_items}}])
def test_losses_that_shift_the_labels_of_one_rank_are_refused_under_context_parallelism(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup, "context_mesh", lambda accelerator: SimpleNamespace())
    with pytest.raises(ValueError, match=r"shift labels after the sequences were cut, .*or use a policy that needs no"):
        train(tmp_path, CONFIG, **how, **SHORT)


def test_smoothed_labels_are_in_the_loss_that_is_probed(tmp_path: Path) -> None:
    smooth = {"label_smoothing_factor": 0.5, "learning_rate": 1e-1, "max_steps": 5}
    run = train(tmp_path / "snip", UNTOUCHED, **smooth)
    assert [line["status"] for line in run.refreshes] == ["applied"]
    assert probed(tmp_path / "snip")["loss"] == pytest.approx(run.losses[2][0], rel=0.02)
    plain = train(tmp_path / "plain", **smooth)
    assert [run.losses[step] for step in (1, 2, 3, 4)] == [plain.losses[step] for step in (1, 2, 3, 4)]


class Collecting(Trainer):
    """Twice the model's loss; keeps and logs figures, counts, draws random numbers, and takes its inputs apart."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.metrics: dict[str, list[float]] = defaultdict(list)
        self.calls = 0
        self.generator = torch.Generator().manual_seed(0)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        loss = 2 * token_loss(model(**inputs).logits, labels) + 0 * torch.rand((), generator=self.generator)
        self.calls += 1
        self.metrics[f"loss {len(labels)}"].append(float(loss.detach()))
        self.metrics["drawn"].append(float(torch.rand((), generator=self.generator)))
        self.log({"calls": float(self.calls)})
        return loss


def collected(folder: Path, config: SnipConfig | None) -> tuple[Any, ...]:
    """Up to the fourth step, before a plan is applied."""
    model = tiny_llama(hidden=32, attention_dropout=0.1)
    run = train(folder, config, model=model, trainer_class=Collecting, max_steps=5)
    trainer = run.trainer
    logged = [line["calls"] for line in trainer.state.log_history if "calls" in line]
    metrics = {name: values[:4] for name, values in trainer.metrics.items()}
    return trainer.calls, metrics, logged, [run.losses[step] for step in (1, 2, 3, 4)]


def test_the_probe_leaves_no_trace_in_the_trainer(tmp_path: Path) -> None:
    assert collected(tmp_path / "snip", UNTOUCHED) == collected(tmp_path / "plain", None)
    assert probed(tmp_path / "snip")["loss"] == pytest.approx(2 * 4.87, rel=0.02)


class OfSequences(Trainer):
    """A loss without labels, around 0: the mean over sequences of what their last token's logits add up to."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return model(input_ids=inputs["input_ids"]).logits[:, -1].sum(-1).tanh().mean()


def test_a_loss_without_labels_is_a_mean_over_sequences_and_its_rise_is_not_relative(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"]} for row in data()]
    run = train(
        tmp_path, CONFIG, trainer_class=OfSequences, trainer={"train_dataset": rows}, max_steps=5, save_strategy="no"
    )
    assert [line["status"] for line in run.refreshes] == ["applied"]
    assert abs(probed(tmp_path)["loss"]) < 1


class WithOutputs(Inherited):
    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss: Tensor = self.compute_loss(model, self._prepare_inputs(inputs), return_outputs=True)[0]
        loss.backward()
        return loss.detach()


def test_a_training_step_may_ask_compute_loss_for_the_outputs_too(tmp_path: Path) -> None:
    assert [line["status"] for line in train(tmp_path, CONFIG, trainer_class=WithOutputs, **SHORT).refreshes] == [
        "applied"
    ]


class Compared(Trainer):
    """With a reference model, as TRL's trainers have it."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            reference = self.ref_model(input_ids=inputs["input_ids"]).logits
        return (model(input_ids=inputs["input_ids"]).logits - reference + 1).square().mean()


def test_a_reference_follows_the_plan_of_a_model_with_frozen_layers(tmp_path: Path) -> None:
    model = tiny_llama(hidden=32)
    model.model.layers[0].requires_grad_(False)
    reference = tiny_llama(hidden=32)

    class WithReference(Compared):
        ref_model = reference

    run = train(tmp_path, CONFIG, trainer_class=WithReference, model=model, **SHORT)
    assert [line["status"] for line in run.refreshes] == ["applied"]
    own, others = snip_linears(model), snip_linears(reference)
    assert {name: layer.formats for name, layer in own.items()} == {
        name: layer.formats for name, layer in others.items()
    }
    assert "fp4" in {layer.formats["forward"] for layer in others.values()}


class Nothing(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 0 * super().compute_loss(*args, **kwargs)


class Pair(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss if self.state.global_step != 1 or torch.is_autocast_enabled("cpu") else torch.stack([loss, loss])

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch).mean()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        slow(Nothing, "Every gradient of the step is 0. The loss has no gradient at this step"),
        (Pair, "compute_loss returned a tensor of shape (2,); expected the micro-batch's loss"),
    ],
)
def test_a_loss_that_cannot_be_probed_costs_the_refresh(kind: type[Trainer], reason: str, tmp_path: Path) -> None:
    run = train(tmp_path, CONFIG, trainer_class=kind, **SHORT)
    (line,) = run.refreshes
    assert line["status"] == "kept" and reason in line["reason"]


class Popped(Trainer):
    """Removes the labels from the inputs before the model sees them."""

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> Tensor:
        model.train()
        return self.backward(model, self._prepare_inputs(inputs))

    def backward(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        labels = inputs.pop("labels")
        loss = token_loss(model(**inputs).logits, labels)
        self.accelerator.backward(loss)
        return loss.detach()


class PoppedLater(Popped):
    """From the second step on."""

    def backward(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if self.state.global_step:
            return super().backward(model, inputs)
        loss: Tensor = model(**inputs).loss
        self.accelerator.backward(loss)
        return loss.detach()


class InComputeLoss(Popped):
    """Follows the advice of the error message."""

    def backward(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        labels = inputs.pop("labels")
        return token_loss(model(**inputs).logits, labels)


NO_LABELS = (
    "The batch has no labels (its keys are input_ids), so the model gives no loss to probe. Expected a causal LM "
    "batch with `labels`. If the model does not return the loss, say how it is computed: by compute_loss=... in your "
    "own loop; in a Trainer by compute_loss_func or an override of compute_loss, which training_step must call (if it "
    "does, name the input with the labels: TrainingArguments(label_names=[NAME])). Or use a policy that needs no "
    "probe, such as policy='layer-position'."
)


def test_a_trainer_that_takes_the_labels_out_is_told_what_a_trainer_can_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        train(tmp_path, CONFIG, trainer_class=Popped, **SHORT)
    assert str(caught.value) == NO_LABELS


@pytest.mark.slow
def test_its_advice_helps_and_comes_at_a_later_step_too(tmp_path: Path) -> None:
    advised = train(tmp_path / "advised", CONFIG, trainer_class=InComputeLoss, **SHORT)
    later = train(tmp_path / "later", CONFIG, trainer_class=PoppedLater, **SHORT)
    assert [line["status"] for line in (*advised.refreshes, *later.refreshes)] == ["applied", "kept"]
    assert later.refreshes[0]["reason"] == f"ValueError: {NO_LABELS}"


class Labelled(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(input_ids, labels=labels)


class Targeted(LlamaForCausalLM):
    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Any:
        return super().forward(input_ids, labels=targets)


def of_class(kind: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    model = tiny_llama(hidden=32)
    model.__class__ = kind
    return model


def test_labels_of_another_name_are_probed_and_counted_as_labels_are(tmp_path: Path) -> None:
    """Also in a part of the micro-batch."""
    config, rows = fp4_config(**SCHEDULE, probe_batch_tokens=128), data(24, 80)
    options: dict[str, Any] = {**SHORT}
    named = train(tmp_path / "labels", config, model=of_class(Labelled), trainer={"train_dataset": rows}, **options)
    renamed = [{"input_ids": row["input_ids"], "targets": row["labels"]} for row in rows]
    of_data = {"train_dataset": renamed, "data_collator": default_data_collator}
    options |= {"label_names": ["targets"]}
    found = train(tmp_path / "targets", config, model=of_class(Targeted), trainer=of_data, **options)
    assert probed(tmp_path / "targets") == probed(tmp_path / "labels")
    assert found.losses == named.losses
    assert found.callback.controller.plan.tokens == named.callback.controller.plan.tokens


def test_labels_of_a_name_that_nobody_tells_are_refused_with_what_to_say(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"], "targets": row["labels"]} for row in data(4)]
    with pytest.raises(ValueError, match=r"its keys are input_ids, targets.*TrainingArguments\(label_names=\[NAME\]\)"):
        train(tmp_path, CONFIG, model=of_class(Targeted), trainer={"train_dataset": rows}, **SHORT)


def test_the_trainer_is_found_by_its_state_from_within_its_training_loop(tmp_path: Path) -> None:
    found: list[Any] = []

    class Asking(SnipCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            super().on_step_begin(args, state, control, **kwargs)
            found.append(find_trainer(state))

    run = train(tmp_path, callback=Asking(fp4_config(policy="uniform-fp8")), max_steps=1)
    assert found == [run.trainer]
    assert find_trainer(run.trainer.state) is None


def of_trl(name: str, **attributes: Any) -> Any:
    """A trainer of a class derived from TRL's of this name."""
    base = type(name, (), {"__module__": f"trl.trainer.{name}"})
    return type("Own", (base,), attributes)()


PREFERENCES = {"input_ids": torch.zeros(6, 4, dtype=torch.long)}
COMPLETIONS = {
    "prompt_ids": torch.zeros(3, 2, dtype=torch.long),
    "completion_ids": torch.zeros(3, 4, dtype=torch.long),
    "completion_mask": torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1]]),
}


@pytest.mark.parametrize(
    ("trainer", "inputs", "expected"),
    [
        (of_trl("DPOTrainer"), PREFERENCES, 3),
        (of_trl("RewardTrainer"), PREFERENCES, 3),
        (of_trl("KTOTrainer"), PREFERENCES, 6),
        (of_trl("RLOOTrainer"), COMPLETIONS, 3),
        (of_trl("GRPOTrainer"), COMPLETIONS, 8),
        (of_trl("GRPOTrainer"), COMPLETIONS | {"tool_mask": torch.tensor([[1, 0, 1, 1]] * 3)}, 6),
        (of_trl("GRPOTrainer", importance_sampling_level="sequence"), COMPLETIONS, 3),
    ],
)
def test_losses_of_trl_are_means_over_their_own_terms(trainer: Any, inputs: dict[str, Tensor], expected: int) -> None:
    terms = terms_of(trainer)
    assert terms is not None and terms(inputs) == expected


def test_other_losses_are_means_over_tokens_with_a_label() -> None:
    assert terms_of(of_trl("SFTTrainer")) is None
    assert terms_of(type("DPOTrainer", (), {})()) is None
