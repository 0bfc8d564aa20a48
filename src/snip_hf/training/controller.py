"""The controller of a run: decides when to probe, refresh and apply a plan. Any training loop can drive it.

One refresh at optimizer step s: `capture` keeps the step's first micro-batch; `before_optimizer_step` probes it and
starts the solver in a separate process. Training goes on. `after_step(s + apply_delay)` reads the solution and
applies it, waiting only if it is not there yet.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..config import SnipConfig, check_config
from ..estimation.batch import Compute, Objective, objective_of
from ..estimation.coverage import Coverage
from ..numerics.random_state import RandomState
from ..parallel.pipeline import Pipeline, parts_of
from ..parallel.zero3 import partitions_as_shards
from ..planning.plan import PrecisionPlan
from ..policies.registry import policy_of
from ..records.run_folder import RunRecord, Tracker
from .checkpoint import SavedState, restore, state_of, weights_fingerprint
from .checks import StepCalls, check_alike, check_equal, check_launch, check_same_batch, deciding_fields, formats_of
from .messages import SpeedForecast, compiled_by, how_compiled
from .micro_batches import PipelineChunks, StepWatch, TrainingPass, tokens_of
from .schedule import Schedule
from .setup import RunParts, find_processes, set_up

logger = logging.getLogger(__name__)
# The first rank logs on behalf of all ranks.
_replica = logging.getLogger(f"{__name__}.replica")
_replica.setLevel(logging.ERROR)


class SnipController:
    """Drives the precision of one model through one training run.

    With several processes, each has a controller, built and called at the same points; they agree on every plan. Build
    it when the model is prepared (wrapped by DDP, sharded by FSDP2).

    Args:
        model: a causal LM, converted or not, in any wrappers (DDP, DeepSpeed, compile). With `pipeline`, the parts of
            it that this process holds; their layers are named as in the whole model.
        optimizer: the optimizer that trains it, wrapped or not.
        config: the configuration of the run.
        accelerator: the Accelerate object of the loop, if there is one; its settings are checked, and a step counts as
            an optimizer step if it synchronizes gradients.
        output_dir: the first process writes the plan, the history and the divergences to `snip/` in this folder; None:
            nothing is written.
        pipeline: runs the whole model if this process holds only parts of it.
        max_steps: the last optimizer step, if it is known: refreshes whose plan would be due after it are skipped.

    Raises:
        ValueError, TypeError, NotImplementedError, KeyError: anything that cannot work, before training starts.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Any,
        config: SnipConfig,
        accelerator: Any = None,
        output_dir: str | os.PathLike[str] | None = None,
        pipeline: Pipeline | None = None,
        max_steps: int | None = None,
    ) -> None:
        check_config(config)
        self.config = config
        self.needs_probe = policy_of(config).needs_probe
        self._weighs_updates = policy_of(config).weighs_updates and config.objective != "gradients"
        self.step = 0
        """Optimizer steps done."""
        self.compiled = compiled_by(accelerator)
        """Accelerate's way of compiling the model, for the log; None: it does not compile."""
        self._mixed_precision = getattr(accelerator, "mixed_precision", None)
        check_launch(config, accelerator)
        self.processes = find_processes(model, config, pipeline, accelerator)
        """The processes of this run."""
        check_equal(deciding_fields(config), self.processes.everyone)
        is_first = self.processes.everyone.is_first
        self._log = logger if is_first else _replica
        self._record = RunRecord(output_dir, is_first, self._log)
        self._schedule = Schedule(config, max_steps, self._log)
        self._calls = StepCalls(accelerator, self.needs_probe or config.guard != "off", self._log)
        self._watch: StepWatch | None = None
        """Watch of the running step, if it refreshes."""
        self._micro_batch, self._has_labels, self._started, self._is_new = 0, False, False, True
        try:
            with self.processes.everyone.together():
                run = set_up(model, optimizer, accelerator, config, self.processes, self._schedule, self._record)
            self._begin(run, max_steps)
        except BaseException:
            self._record.release()  # a notebook keeps the error, and this object with it
            raise

    def _begin(self, run: RunParts, max_steps: int | None) -> None:
        """Adopts the parts of the run, installs the hooks and logs the start."""
        self._run = run
        self.model = run.model
        self.backend = run.backend
        """Name of the backend in use."""
        self._layers, self._source, self._guard = run.layers, run.source, run.guard
        self._forecast = SpeedForecast(run.backend, run.model, self._log, self._mixed_precision)
        check_alike(self.model, self._layers.present, self.plan, max_steps, self.processes)
        self._layers.set_step(1, 0)
        self._chunks = PipelineChunks(parts_of(self.model), self.config.seed, lambda: self.step + 1)
        if self.needs_probe:
            self._source.attach(self._before_optimizer_step)
        self._layers.share_inputs(run.in_force.setting)
        self._schedule.warn_if_too_late(self._schedule.first_refresh)
        run.refresher.warn_if_untrained()
        self._layers.claim()

    @property
    def plan(self) -> PrecisionPlan:
        """The plan in force."""
        return self._run.in_force.plan

    @property
    def coverage(self) -> Coverage | None:
        """The FLOPs that plans decide on, from the last counted micro-batch; None: unknown."""
        return self._run.coverage.latest

    def start(self) -> None:
        """Begins a new record: the plan and the first line of the history. `capture` calls it if nobody did."""
        self._started = True
        self._record.clear()
        self._run.in_force.save()
        self._record.add(self._run.in_force.start(self.step))

    def use_scaler(self, scaler: torch.amp.GradScaler) -> None:
        """Sets the GradScaler of a loop of your own (FP16).

        Accelerate's, and so the Trainer's, is found without it. Without either, the scale is estimated from gradients.
        """
        self._source.scaling.scaler = scaler

    def note_loss(self, loss: Tensor | float) -> None:
        """Gives the guard a micro-batch's share of the step's loss. Without it, the guard sees only gradients."""
        if self._guard is not None:
            self._guard.meter.note_loss(loss)

    def add_tracker(self, tracker: Tracker) -> None:
        """Calls `tracker` with each event from now on (`snip_hf.records.events`), on the first process only.

        The events are those of `history.jsonl`, in its order. An error in a tracker becomes a warning.
        """
        self._record.add_tracker(tracker)

    def capture(self, batch: Mapping[str, Any], compute_loss: Compute | None = None, terms: int | None = None) -> None:
        """Announces a training micro-batch that is about to run forward.

        Args:
            batch: keyword arguments of the model's forward, or the inputs of `compute_loss`; kept for a probe.
            compute_loss: takes the model and `batch` and returns the loss, if the model itself does not return it.
            terms: the number of independent terms that this loss is a mean over.

        Raises:
            TypeError: the batch is not a dict.
            ValueError: the policy needs a probe, and the very first batch cannot be probed, e.g. without labels.
        """
        self._calls.check_open("capture")
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"capture got a {type(batch).__name__}; expected a dict of the model's inputs, or of compute_loss's."
            )
        self.count(self.offer(batch, objective_of(compute_loss, terms)))

    def offer(self, batch: Mapping[str, Any], objective: Objective | None = None) -> TrainingPass:
        """Announces a forward pass that is about to run; `count` reports that it is backpropagated.

        A pass that is not counted does not change the random numbers of others. Several passes before one backward pass
        draw the same random numbers.
        """
        step = self.step + 1
        self._layers.set_step(step, self._micro_batch)
        self._layers.set_rank()
        self.keep_weights(everything=self._micro_batch == 0)
        if self._micro_batch == 0:
            self._source.begin_step()
        else:
            self.keep_gradients()
        is_probed = self._micro_batch == 0 and self._refreshes(step)
        if is_probed and self._watch is None:
            self._watch = self._run.refresher.watch()
        is_read = is_probed or (self.needs_probe and not self._has_labels) or not self._forecast.is_made
        return TrainingPass(batch if is_read else {}, RandomState.now() if is_probed else None, objective)

    def count(self, one: TrainingPass) -> None:
        """Reports that a pass is backpropagated, which makes it a micro-batch of the step.

        Raises:
            ValueError: as `capture`.
        """
        if one.is_counted:
            return
        one.is_counted = True
        if self.needs_probe and not self._has_labels:
            one.check(in_pipeline=self.processes.run is not None, in_parts=self.processes.context is not None)
            check_same_batch(one.batch, self.processes)
            self._has_labels = True
        if not self._started:
            self.start()
        if not self._forecast.is_made:
            how = self.compiled or how_compiled(self.model)
            self._forecast.make(how, one.seen or tokens_of(one.batch))
        if self._micro_batch == 0:
            if self._watch is not None:
                self._watch.take(one)
            self._run.coverage.take(one)
        self._micro_batch += 1

    def keep_weights(self, everything: bool = True) -> None:
        """Quantizes the weights for a training pass, if they are kept."""
        self._layers.keep_weights(everything)

    def keep_gradients(self) -> None:
        """Keeps the gradients of a step's first micro-batches from being overwritten by CUDA graphs of torch.compile.

        `capture` calls it. Call it yourself if another compiled model runs between a backward pass and `capture`.
        """
        self._source.keep(self.model.parameters())

    def before_optimizer_step(self, step: int) -> None:
        """Probes if a refresh is due. Call this once the gradients of a step are complete and clipped.

        `step` is the number of the optimizer step, from 1. With an Accelerator, calls while it accumulates gradients
        are ignored, and `step` may be the number of the micro-batch. Under DeepSpeed, whose step is over by then, a
        hook inside that step does the work instead.

        Raises:
            TypeError, ValueError: `step` is not an integer, or (without an Accelerator) not the one after `self.step`.
        """
        if not self._source.is_inside_step and self._calls.count("before_optimizer_step", step, self.step):
            self._before_optimizer_step()

    def _before_optimizer_step(self) -> None:
        step = self.step + 1
        is_read = self._run.coverage.is_due or self._refreshes(step)
        with partitions_as_shards(self.model) if is_read else nullcontext():
            self._begin_step(step)

    def _begin_step(self, step: int) -> None:
        run = self._run
        if not self._started:  # nothing was captured
            self.start()
        self._source.note_step()
        self._calls.begin(self._source.is_late)
        is_left_out = self._guard is not None and self._guard.leaves_out(step)
        run.coverage.count_first(step, is_new=self._is_new)
        run.messages.begin(self.plan, self.coverage, self._forecast.text, self._schedule.first_refresh)
        watch = self._end_watch()
        # Ask the schedule, not the captured batches: all ranks share the schedule.
        if not self._refreshes(step):
            if self._schedule.reads_findings(step):
                self._layers.log_findings()
            return
        run.refresher.note(f"at the refresh of step {step}")
        if is_left_out:  # there are no gradients to probe with
            self._schedule.postponed = step + 1
        elif self._source.scaling.skips_step(self.model.parameters(), self.processes.everyone):
            reason = "the gradients are not finite in the loss's scale, and the GradScaler skips the step"
            self._schedule.postpone(step, reason)
        elif self._weighs_updates and self._source.takes_no_step(self.processes.everyone):
            self._schedule.postpone(step, "the learning rate is 0")
        else:
            # With apply_delay = refresh_every the last plan is due after this very step, whose passes are done.
            run.refresher.apply_due(step)
            self._schedule.note_probe(step)
            self._layers.log_findings()
            run.coverage.count_again(step, watch)
            run.refresher.begin(step, watch)

    def after_step(self, step: int) -> None:
        """Applies a plan that is due. Call this after each optimizer step, with its number (from 1).

        Raises:
            TypeError, ValueError: as `before_optimizer_step`.
        """
        if not self._calls.count("after_step", step, self.step):
            return
        step = self.step + 1
        self._calls.end()
        self._layers.note_micro_batches(self._micro_batch)
        self.step, self._micro_batch = step, 0
        self._chunks.end_step()
        self._run.refresher.end_step(step)
        self._layers.set_step(step + 1, 0)
        if self._guard is not None:
            self._guard.end_step(step)
        self._layers.end_step()  # after all changes of formats, so that kernels launch by the new ones

    def close(self) -> None:
        """Ends the run: stops a running solver, ends the record, and lets the layers compute in high precision.

        The layers stay swapped: `controller.plan.apply(model)` gives them the formats of the last plan, and
        `restore_model` swaps them back.
        """
        self._calls.is_closed = True
        self._layers.release()
        self._chunks.close()
        self._source.close()
        if self._guard is not None:
            self._guard.meter.end()
        self._end_watch()
        self._run.refresher.drop(self.step, f"training ended at step {self.step}")
        self._run.messages.end(self.step, self.plan)
        self._record.release()

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON data from which `load_state_dict` continues exactly here, even in the middle of a refresh.

        Raises:
            ValueError: an optimizer step is under way.
        """
        if self._calls.is_begun:
            raise ValueError(
                f"The state was requested in the middle of optimizer step {self.step + 1}. Save before "
                "before_optimizer_step or after after_step (under a Trainer in on_step_begin, on_step_end or on_save)."
            )
        return state_of(self._run, self.step)

    def load_state_dict(self, state: Mapping[str, Any], at_step: int | None = None, weights: str | None = None) -> None:
        """Continues from a `state_dict`. Nothing is changed if it does not fit. With several ranks it is collective.

        The target may differ from the state's: estimates stay, and the next step refreshes.

        Args:
            state: the result of `state_dict`, perhaps through JSON, perhaps with an entry "weights": the
                `weights_fingerprint` of the weights that it was saved with.
            at_step: the optimizer steps that the weights have done, as the state must have. None: not checked.
            weights: the `weights_fingerprint` of the model, as the state must have. None: not checked.

        Raises:
            ValueError: another schema version, another configuration, another step, other weights, a state that is not
                complete, or different states on different ranks.
            KeyError: the plan in it is for another model.
        """
        self.processes.note("at the loading of a state (every rank loads the same one)")
        with self.processes.everyone.together():
            saved = SavedState.of(state).fitted(self.config, self.plan, at_step, weights)
        check_equal(formats_of(saved.plan), self.processes.everyone)
        self._end_watch()
        self._calls.is_begun = False
        restore(self._run, saved)
        self._is_new, self._started, self.step, self._micro_batch = False, True, saved.step, 0

    def weights_fingerprint(self) -> str | None:
        """Returns a digest of the weights for `load_state_dict`, on the first process.

        None in a pipeline, and without a probe, since the plan then does not come from the weights.
        """
        is_whole = self.needs_probe and self.processes.run is None
        return weights_fingerprint(self.model) if is_whole and self.processes.everyone.is_first else None

    def _refreshes(self, step: int) -> bool:
        return self._schedule.refreshes(step, self._run.refresher.is_planned(step))

    def _end_watch(self) -> StepWatch | None:
        """Ends the watch of a step that refreshes, and returns it."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end(self._micro_batch)
        return watch
