"""Coverage of a run: counts the FLOPs of a real micro-batch that plans decide on, and the tokens of each layer.

The first micro-batch of a run is counted at its optimizer step, in one extra forward pass. If layers see different
numbers of tokens, as experts do, the micro-batch of each refresh is counted too. From then on the program, rules and
FP4 shares use these counts.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import SnipConfig
from ..costs.flops import Tokens, relative_tokens
from ..estimation.coverage import LITTLE, NO_CALL, Coverage, PassCounts, count_pass, training_autocast
from ..estimation.passes import forward_inputs
from ..layers.labels import without_numbers
from ..layers.selection import matches
from ..parallel.ranks import Processes, RankError, describe, failing_together
from ..parallel.zero3 import are_on_disk
from ..policies.registry import policy_of
from ..records.events import Counted
from ..records.run_folder import RunRecord
from .checks import expert_gathered_apart
from .micro_batches import StepWatch, TrainingPass, tokens_of
from .plan_in_force import PlanInForce


class CoverageCounter:
    """Counts micro-batches of one run. Collective.

    Args:
        model: the model, or the parts of it that this process holds.
        in_force: the plan; it uses the counted tokens from then on.
        processes: those of the run.
        record: gets each new count.
        accelerator: of the loop; the passes run under its autocast. None: the loop has none.
    """

    def __init__(
        self, model: nn.Module, in_force: PlanInForce, processes: Processes, record: RunRecord, accelerator: Any = None
    ) -> None:
        self.latest: Coverage | None = None
        """The last coverage; None: none yet, or counting failed."""
        self.is_due = True
        """True until the first micro-batch was counted."""
        self._model = model
        self._in_force = in_force
        self._processes = processes
        self._record = record
        self._autocast = _autocast_of(accelerator)
        self._first: TrainingPass | None = None
        self._last_step = 0

    def take(self, first: TrainingPass) -> None:
        """Keeps the first micro-batch of a step until it is counted, if it is to be."""
        self._autocast = first.autocast or self._autocast
        if not self.is_due:
            return
        self._first = first
        if self._processes.context is not None:  # inputs become whole again when torch's context ends
            batch = {key: value.clone() if isinstance(value, Tensor) else value for key, value in first.batch.items()}
            self._first = replace(first, batch=batch)

    def restore(self, coverage: Coverage | None) -> None:
        """Continues from a checkpoint of a run that has counted."""
        self.latest, self.is_due, self._first = coverage, False, None

    def count_first(self, step: int, is_new: bool) -> None:
        """Counts the first micro-batch of a run, once.

        Args:
            step: the optimizer step that is about to be taken.
            is_new: whether the run is not resumed, so that a rule decides again, by the tokens.
        """
        if not self.is_due:
            return
        first, self._first, self.is_due = self._first, None, False
        if obstacle := self._obstacle():
            text = "snip-hf: the FLOPs of a micro-batch are not counted %s, so coverage is not known."
            self._record.log.info(text, obstacle)
            return
        self._count(step, first, is_new)

    def count_again(self, step: int, watch: StepWatch | None) -> None:
        """Counts the micro-batch of a refresh, if layers see different numbers of tokens."""
        if self.latest is None or self._in_force.setting.tokens is None or step == self._last_step:
            return
        try:
            probed = None if watch is None else TrainingPass(watch.batch.kwargs, None, watch.batch.objective)
        except Exception:  # the refresh reports why it cannot be probed
            probed = None
        self._count(step, probed, is_new=False)

    def _obstacle(self) -> str | None:
        """Returns the setting in which no extra pass can run; None if it can."""
        if self._processes.run is not None or self._processes.pipeline.size > 1:
            return "in a pipeline"
        if (getattr(self._model, "tp_size", None) or 1) > self._processes.tensor.size:
            return "under tensor parallelism"
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in self._model.modules()):
            return "under FSDP version 1"
        if are_on_disk(self._model):
            return "under DeepSpeed's ZeRO-3 with weights on disk"
        if expert_gathered_apart(self._model) is not None:
            return "under FSDP2 or ZeRO-3 with experts that are layers of their own"
        return None

    def _count(self, step: int, one: TrainingPass | None, is_new: bool) -> None:
        everyone = self._processes.everyone
        self._last_step = step
        self._processes.note(f"at the counting of the FLOPs of step {step}")
        # A loop that captures nothing has nothing to count.
        if not all(everyone.gather(one is not None, "a micro-batch")):
            return
        assert one is not None
        try:
            counts, tokens = self._count_all(one)
            self._use(step, counts, relative_tokens(counts.tokens, counts.returned, tokens), is_new)
        except RankError:
            raise
        except Exception as error:  # the planner may fail; training may not
            self._record.log.warning(
                "snip-hf: the FLOPs of the micro-batch of step %d could not be counted. Earlier counts stay in force; "
                "without them, coverage is not known, every layer counts as if it saw all tokens, and the FP4 share "
                "of a model with experts is not known: %s",
                step,
                describe(error),
            )

    def _count_all(self, one: TrainingPass) -> tuple[PassCounts, int | None]:
        """Returns the counts of all ranks' micro-batches together, and their number of tokens."""
        with self._processes.everyone.together():
            with failing_together(self._processes.everyone), training_autocast(self._model, self._autocast):
                batch = forward_inputs(self._model, one.batch, one.objective)
            local = count_pass(self._model, batch, self._in_force.setting.config, self._autocast)
        # Only the first of the ranks with the same data counts.
        own = [local.entries(), tokens_of(batch)] if self._processes.tensor.is_first else [[], 0]
        every = self._processes.everyone.gather(own, "FLOPs")
        entries, tokens = zip(*every, strict=True)
        counts = PassCounts(itertools.chain(*entries))
        if not counts.coverage.flops:
            raise RuntimeError("the forward pass showed no matrix product with a weight; expected those of the layers.")
        return counts, None if None in tokens else sum(tokens)

    def _use(self, step: int, counts: PassCounts, tokens: Tokens | None, is_new: bool) -> None:
        before, found, setting = self.latest, counts.coverage, self._in_force.setting
        old_tokens = setting.tokens
        changes = self._in_force.count_by(tokens, decides=is_new and not policy_of(setting.config).needs_probe)
        self.latest = found
        if before is not None and before == found and old_tokens == self._in_force.setting.tokens:
            return
        self._record.add(Counted(step=step, coverage=found, tokens=tokens, changes=changes))
        if tokens != old_tokens or changes:
            self._in_force.save()
        if before is None and (idle := _included_in_vain(counts, setting.config)):
            self._record.log.warning(
                "snip-hf: include_modules names %s, but training multiplies with its weight without a call of the "
                "layer, as fused losses do. It stays in high precision, and the format that plans name for it has no "
                "effect. Leave the name out, or use a loss that calls the layer (docs/models.md).",
                ", ".join(map(repr, idle)),
            )
        if before is None and found.share < LITTLE:
            self._record.log.warning(
                "snip-hf: the plan decides on only %s. FP4 shares are of that part, and the rest stays in high "
                "precision.",
                found.describe(),
            )


def _included_in_vain(counts: PassCounts, config: SnipConfig) -> list[str]:
    """Returns the layers that `include_modules` names and whose products all run without a call of the layer."""
    uncalled = {one.name for one in counts.coverage.uncovered if one.reason == NO_CALL}
    unseen = (name for name, tokens in counts.tokens.items() if not tokens and without_numbers(name) in uncalled)
    return [name for name in unseen if matches(name, config.include_modules)]


def _autocast_of(accelerator: Any) -> torch.dtype | None:
    """Returns the dtype of the autocast that Accelerate puts around a model's forward; None: none."""
    if not getattr(accelerator, "native_amp", False):
        return None
    return torch.float16 if accelerator.mixed_precision == "fp16" else torch.bfloat16
