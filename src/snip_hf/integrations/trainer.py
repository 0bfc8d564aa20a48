"""`SnipCallback`, which forwards the events of a Hugging Face `Trainer` to the controller."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..config import SnipConfig, check_config
from ..layers.convert import keep_states_apart, restore_model
from ..layers.run_hooks import RunMark, marks_on
from ..layers.state import snip_linears
from ..parallel.sharding import gather_ahead, unwrap
from ..python_state import Wrapped
from ..records.run_folder import Tracker
from ..text import WITHOUT_PROBE
from ..training.checks import check_launch, check_trainer
from ..training.controller import SnipController
from ..training.micro_batches import TrainingPasses
from .compilation import compile_by_regions
from .hub import complete_card, tag_model
from .messages import follow_transformers
from .reference_model import AS_POLICY, ReferenceModel, check_reference, find_reference
from .state_files import StateFiles, load_state, output_folder
from .trackers import Trackers
from .trainer_loss import LossSeam, computes_loss, find_trainer

logger = logging.getLogger(__name__)


class SnipCallback(TrainerCallback):
    """Trains the model of a Trainer with SNIP: `Trainer(..., callbacks=[SnipCallback(SnipConfig(...))])`.

    Each checkpoint gets a `snip_state.json`, from which `trainer.train(resume_from_checkpoint=...)` continues bit for
    bit.

    Args:
        config: the config. None: the defaults.
        resume: whether to continue from the state in the Trainer's checkpoint; False starts a new plan.
        trackers: functions that get each event of the run (`SnipController.add_tracker`).
        reference: arithmetic of the reference model (`trainer.ref_model` of TRL's trainers): "policy" uses the formats
            of the trained model, so that both agree until their weights differ; "high" uses high precision.
        keep_formats: whether the model keeps the plan's formats after training. False restores the plain model, like
            `restore_model`.
    """

    def __init__(
        self,
        config: SnipConfig | None = None,
        resume: bool = True,
        trackers: Iterable[Tracker] = (),
        reference: str = AS_POLICY,
        keep_formats: bool = False,
    ) -> None:
        self.config = SnipConfig() if config is None else config
        check_config(self.config)
        if not isinstance(resume, bool):
            raise TypeError(
                f"resume={str(resume)!r} is not supported; give the checkpoint's folder to "
                "trainer.train(resume_from_checkpoint=...). resume=False starts a new plan."
            )
        self.controller: SnipController | None = None
        check_reference(reference)
        self._reference_option = reference
        self._reference: ReferenceModel | None = None
        self._keeps_formats = keep_formats
        self._files = StateFiles(resume, type(self).__name__)
        self._trackers = list(trackers)
        self._mark = RunMark()
        self._passes: TrainingPasses | None = None
        self._seam: LossSeam | None = None
        self._losses: Wrapped | None = None
        self._logs = Trackers()
        self._is_restored = False
        """True if `restore_model` ended SNIP during the run."""
        self._state: TrainerState | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Checks the settings. The model stays plain until training begins."""
        check_trainer(args)
        follow_transformers(args)
        check_launch(self.config, AcceleratorState())
        compile_by_regions(self.config, args, AcceleratorState())

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        # A callback that was added later got no on_init_end.
        check_trainer(args)
        follow_transformers(args)
        model = unwrap(kwargs["model"])
        was_plain = not snip_linears(model)
        self._release_ended_runs(model, state)
        try:
            self._begin(state, kwargs["model"], kwargs["optimizer"])
        except BaseException:
            self._release()  # including the folder, for the next run
            if was_plain:
                restore_model(model)
            raise

    def _begin(self, state: TrainerState, outer: nn.Module, optimizer: Any) -> None:
        """Starts the controller of a run, from a checkpoint if there is one."""
        model, trainer = unwrap(outer), find_trainer(state)
        if trainer is None:
            raise ValueError("SnipCallback works within Trainer.train(); a loop of your own needs a SnipController.")
        self._state, self._is_restored, self._logs = state, False, Trackers()
        output_dir = output_folder(state) if state.is_world_process_zero else None
        self.controller = SnipController(
            model, optimizer, self.config, AcceleratorState(), output_dir, max_steps=state.max_steps
        )
        keep_states_apart([trainer.model_wrapped])  # DDP wraps the model before its layers are swapped
        for tracker in (*self._trackers, self._logs.note):
            self.controller.add_tracker(tracker)
        self._mark = RunMark(self._end_restored)
        self._mark.put_on(model)
        self._passes = TrainingPasses(outer, self.controller, self._mark, trainer.label_names)
        if gathering := gather_ahead(model):
            logger.info("snip-hf: FSDP2 gathers the weights of %d blocks while the one before each runs.", gathering)
        self._connect(trainer)
        self._logs.open(trainer, self.controller)
        # The checkpoint may only exist on the first process.
        saved = self.controller.processes.everyone.by_first(lambda: self._files.read(state))
        if saved is None:
            self.controller.step = state.global_step
        else:
            load_state(self.controller, saved, state)
        if self._reference is not None:
            self._reference.follow()

    def _connect(self, trainer: Trainer) -> None:
        """Connects the Trainer's loss, its checkpoints and its reference model."""
        assert self.controller is not None and self._passes is not None
        self._reference = find_reference(trainer, self._reference_option, self.config, self.controller)
        if self.config.guard != "off":
            self._losses = Wrapped(trainer, "training_step", self._note_loss)
        # Also keeps this callback alive if it is removed from the Trainer.
        self._files.follow(trainer, self.controller, functools.partial(SnipCallback.on_step_end, self))
        if self.controller.needs_probe and computes_loss(trainer):
            own = trainer.label_smoother, trainer.compute_loss_func
            if self.controller.processes.context is not None and own != (None, None):
                raise ValueError(
                    "Under context parallelism, label_smoothing_factor and compute_loss_func shift labels after the "
                    "sequences were cut, so that labels at the cuts are lost or belong to other tokens. Leave them "
                    f"out, or use {WITHOUT_PROBE}."
                )
            self._seam = LossSeam(trainer, self._passes, self._reference)

    def _note_loss(self, training_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gives the guard the raw loss of a micro-batch: the log only has averages, without non-finite values."""
        loss = training_step(*args, **kwargs)
        self._running().note_loss(loss)
        return loss

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._is_restored:
            return
        self._logs.begin(self._running())
        assert self._passes is not None
        self._passes.is_open = True

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Before the loss of the next micro-batch, which may first run other compiled models (TRL).
        self._running().keep_gradients()

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._is_restored:
            return
        controller = self._running()
        assert self._passes is not None
        self._passes.is_open = False
        if controller.needs_probe and not self._passes.known_loss:
            raise ValueError(
                "The training loss depends neither on the loss that the model returns nor on the loss that the "
                "Trainer's compute_loss returns, so SNIP cannot probe it. Compute the loss in an override of "
                f"compute_loss, by compute_loss_func, or in the model, or use {WITHOUT_PROBE}."
            )
        controller.before_optimizer_step(state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Saving a checkpoint for another callback may already have ended the step.
        if self._is_restored or self._running().step == state.global_step:
            return
        self._running().after_step(state.global_step)
        if self._reference is not None:
            self._reference.follow()
        self._logs.flush(args, state, control)

    def on_push_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            controller = self._running()
            tag_model(controller.model, controller.plan)
            complete_card(Path(str(args.output_dir)), controller)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the run after `load_best_model_at_end` has loaded the best checkpoint."""
        controller = self._running()
        self._end()
        self._logs.flush(args, state, control)
        if not self._is_restored:
            tag_model(controller.model, controller.plan)

    def _end(self) -> None:
        """Ends a run, even after an error (`_ends_runs`), and restores the plain model unless `keep_formats` is set."""
        controller, reference = self._running(), self._reference
        # Not by the plan: layers may have been replaced or unfrozen during the run.
        kept = snip_linears(controller.model).values() if self._keeps_formats else ()
        in_force = {layer: layer.formats for layer in kept}
        self._files.keep_last()
        self._stop()
        if self._keeps_formats:
            for layer, formats in in_force.items():
                layer.set_formats(formats)
        elif not self._is_restored:
            restore_model(controller.model)
            if reference is not None:
                reference.restore()
            if controller.processes.everyone.is_first:
                logger.info(
                    "snip-hf: training has ended and the model is plain again: evaluation and generation run in its "
                    "own precision from here on. SnipCallback(keep_formats=True) keeps the formats of the plan."
                )

    def _release_ended_runs(self, model: nn.Module, state: TrainerState) -> None:
        """Releases earlier runs of this callback and on this model.

        Raises:
            ValueError: one of them has not ended, or the Trainer has two SnipCallbacks.
        """
        if self._is_training():
            raise ValueError(
                "This SnipCallback drives a run that has not ended. Give each Trainer its own SnipCallback."
            )
        for run in _runs_on(model):
            if run is not self and run._state is state:
                raise ValueError("The Trainer has two SnipCallbacks; expected one. Remove the other.")
            if run._is_training():
                raise ValueError(
                    "Another Trainer with a SnipCallback trains this model. Give a Trainer that runs inside it no "
                    "SnipCallback."
                )
            run._release()
        self._release()

    def _is_training(self) -> bool:
        """Returns True if the training loop of this run is on the stack of this thread.

        Events are not enough: `auto_find_batch_size` restarts the loop after an error, and `train` may be overridden.
        """
        return self._state is not None and find_trainer(self._state) is not None

    def _release(self) -> None:
        """Releases the controller and the Trainer of a run that has ended."""
        self._stop()
        self._files.close()

    def _stop(self) -> None:
        """Stops the controller; later checkpoints still get its last state."""
        self._logs.close()
        for seam in (self._seam, self._losses):
            if seam is not None:
                seam.remove()
        self._seam = self._reference = self._losses = None
        if self.controller is not None:
            self._mark.remove(self.controller.model)
            self.controller.close()

    def _end_restored(self) -> None:
        """Ends SNIP in this run, because `restore_model` is removing its layers."""
        self._is_restored = self._is_training()
        self._release()
        if self._is_restored:
            assert self._state is not None
            self._files.unmark(self._state)
            logger.warning("snip-hf: the model was restored during the run; training continues without SNIP.")

    def _running(self) -> SnipController:
        if self.controller is None:
            raise RuntimeError(
                "SnipCallback got a training event before on_train_begin; add it before train() is called."
            )
        return self.controller


def _runs_on(model: nn.Module) -> list[SnipCallback]:
    """Returns the callbacks whose runs on a model have not been released."""
    drivers = (mark.driver for mark in marks_on(model))
    return [driver for driver in drivers if isinstance(driver, SnipCallback)]


def _ends_runs(train: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Trainer.train` so that SNIP's run ends with it, even after an error or Ctrl-C."""

    @functools.wraps(train)
    def train_and_end(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        try:
            return train(self, *args, **kwargs)
        finally:
            for run in [] if self.model is None else _runs_on(unwrap(self.model)):
                if run._state is self.state:
                    run._end()

    return train_and_end


# The Trainer has no event for errors.
Trainer.train = _ends_runs(Trainer.train)  # type: ignore[method-assign]
