"""`SnipCallback`, which forwards a Hugging Face `Trainer`'s events to the controller and holds no logic itself."""

from __future__ import annotations

import logging
import os
import traceback
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from accelerate.state import AcceleratorState
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from ..config import SnipConfig
from ..json_io import read_json, remove_temporaries, write_json_atomic
from ..kernels.backend import BACKENDS
from ..layers.convert import convert_model
from ..layers.run_hooks import RunMark, marks_on
from ..parallel.wrappers import unwrap
from ..policies.registry import needs_probe
from ..text import WITHOUT_PROBE, printable
from ..training.checks import check_launch
from ..training.controller import SnipController
from ..training.counted_passes import TrainingPasses
from ..training.refresh import Solving
from .hub import prepare_push, tag_model
from .trackers import Trackers

logger = logging.getLogger(__name__)

STATE_NAME = "snip_state.json"
_MARK = "snip-hf"


class SnipCallback(TrainerCallback):
    """Trains the Trainer's model under SNIP: `Trainer(..., callbacks=[SnipCallback(SnipConfig(...))])`.

    Each checkpoint gets `snip_state.json`; `trainer.train(resume_from_checkpoint=...)` continues from it, bit for bit.

    Args:
        config: what the user asks for; the defaults if None.
        resume: True looks for the state in OUTPUT/checkpoint-STEP of the step that the Trainer resumes at; a path names
            a checkpoint folder elsewhere; False starts a new plan even if there is a state.
        solving: as `SnipController` takes it.
    """

    def __init__(
        self,
        config: SnipConfig | None = None,
        resume: bool | str | os.PathLike[str] = True,
        solving: Solving | None = None,
    ) -> None:
        if not isinstance(config, SnipConfig | None):
            raise TypeError(
                f"Got a {type(config).__name__} for config; expected a SnipConfig, e.g. SnipConfig.from_dict(...)."
            )
        self.config = config or SnipConfig()
        self.controller: SnipController | None = None
        self._resume = resume
        self._solving = solving
        self._mark = RunMark()
        self._passes: TrainingPasses | None = None
        self._outer_run: SnipCallback | None = None
        """That of the run inside which this one runs on the same model."""
        self._trackers = Trackers()
        self._run = ""
        self._weights: str | None = None
        self._folder: str | None = None
        """The run's output folder, by its real path, where it is written to."""
        self._is_restored = False
        """Whether `restore_model` has ended SNIP in the run, which goes on without it."""
        self._state: TrainerState | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuses what cannot work, and swaps the linears before the Trainer wraps or compiles the model."""
        self._check_arguments(args)
        model = unwrap(kwargs["model"])
        # What trains inside another run gets the layers that it asks for when it begins.
        if not any(run._is_training() for run in _runs_on(model)):
            convert_model(model, self.config)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A callback that was added later saw no on_init_end; a run that an error ended saw no on_train_end.
        self._check_arguments(args)
        outer: nn.Module = kwargs["model"]
        model = unwrap(outer)
        self._take_from_others(model, state)
        self._state, self._is_restored = state, False
        if needs_probe(self.config) and state.max_steps < self.config.first_refresh + self.config.apply_delay:
            logger.warning(
                "snip-hf: training ends at step %d, before the first plan would be applied after step %d "
                "(first_refresh + apply_delay): everything stays in %s.",
                state.max_steps,
                self.config.first_refresh + self.config.apply_delay,
                self.config.start_format,
            )
        output_dir = args.output_dir if state.is_world_process_zero else None
        self._folder = None if output_dir is None else os.path.realpath(output_dir)
        if output_dir is not None and self._is_of_outer_run(self._folder):
            logger.warning(
                "snip-hf: %s is where the run around this one records its plans; this one records nothing there.",
                printable(output_dir, 1000),
            )
            output_dir = None
        self.controller = SnipController(
            model,
            kwargs["optimizer"],
            self.config,
            AcceleratorState(),
            output_dir,
            max_steps=state.max_steps,
            solving=self._solving,
        )
        self._mark = RunMark(self._end_restored)
        self._mark.put_on(model)
        self._passes = TrainingPasses(outer, self.controller, self._mark)
        try:
            # The first process may be the only one that sees the checkpoint.
            saved = self.controller.processes.everyone.by_first(lambda: self._read_state(args, state))
            if saved is not None:
                self._load_state(saved, state)
        except Exception:
            self._release()  # The folder too, for the run that is started next.
            raise
        if saved is None:
            self.controller.step = state.global_step
            _marks(state).pop(_MARK, None)
        # Travels in trainer_state.json: tells a checkpoint trained with SNIP, and its run, wherever it is moved.
        self._run = _marks(state).setdefault(_MARK, {"run": uuid.uuid4().hex})["run"]

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._is_restored:
            return
        self._running()
        assert self._passes is not None
        self._passes.is_open = True

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._is_restored:
            return
        controller = self._running()
        assert self._passes is not None
        self._passes.end_step()
        if controller.needs_probe and not self._passes.own_loss:
            raise ValueError(
                "The training loss does not depend on the loss that the model returns, which is the one that SNIP "
                f"probes: a custom loss is in use. Train with the model's own loss, or use {WITHOUT_PROBE}."
            )
        controller.before_optimizer_step(state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_restored:
            return
        self._running().after_step(state.global_step)
        # Callbacks may exchange weights around saving, before or after this one; the checkpoint gets those of now, or
        # those that are found when it is there.
        self._weights = self._running().weights_fingerprint() if control.should_save else None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._save_state(args, state)

    def on_push_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero:
            # A push of a checkpoint begins before on_save.
            self._save_state(args, state)
            emulated = BACKENDS[self._running().backend].is_emulation
            prepare_push(str(args.output_dir), unwrap(kwargs["model"]), emulated=emulated)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stops what still runs. The model keeps its swapped layers and the plan; `restore_model` undoes the swap."""
        controller, outer_run = self._running(), self._outer_run
        self._release()
        if not self._is_restored:
            tag_model(controller.model, controller.plan)
        if outer_run is not None:
            outer_run._go_on()

    def _check_arguments(self, args: TrainingArguments) -> None:
        if args.n_gpu > 1 and args.parallel_mode.value == "not_distributed":
            raise ValueError(
                f"The Trainer would put the model into nn.DataParallel on {args.n_gpu} GPUs, which copies the plan in "
                "every step. Start one process per GPU with `accelerate launch`, or show one GPU only "
                "(CUDA_VISIBLE_DEVICES=0)."
            )
        if needs_probe(self.config) and args.label_smoothing_factor > 0:
            raise ValueError(
                f"label_smoothing_factor={args.label_smoothing_factor} takes the labels away from the model, which "
                f"then gives no loss to probe. Set it to 0, or use {WITHOUT_PROBE}."
            )
        check_launch(self.config, AcceleratorState())

    def _take_from_others(self, model: nn.Module, state: TrainerState) -> None:
        """Releases what earlier runs left on the model, and suspends one inside which this one runs.

        Raises:
            ValueError: the run that goes on has a second SnipCallback, or its callback is this one.
        """
        if self._is_training():
            raise ValueError(
                "This SnipCallback drives a run that has not ended. Give the Trainer that runs inside it a "
                "SnipCallback of its own, or none."
            )
        self._outer_run = None
        for run in _runs_on(model):
            if run is not self and run._state is state:
                raise ValueError("The Trainer has two SnipCallbacks; expected one. Remove the other.")
            if not run._is_training():
                run._release()
            elif run._passes is not None and not run._is_suspended:
                run._passes.is_suspended = True
                self._outer_run = run
        self._release()

    @property
    def _is_suspended(self) -> bool:
        """Whether the model is left to a run inside this one."""
        return self._passes is not None and self._passes.is_suspended

    def _is_training(self) -> bool:
        """Returns True if the training loop of this callback's run is under way, further up this thread's stack.

        A run that an error ended looks the same otherwise: no event tells of it.
        """
        for frame, _ in traceback.walk_stack(None):
            trainer = frame.f_locals.get("self") if frame.f_code.co_name == "train" else None
            if isinstance(trainer, Trainer) and trainer.state is self._state:
                return True
        return False

    def _go_on(self) -> None:
        """Takes the model back. The run inside is over, at its end or by an error."""
        controller, passes = self.controller, self._passes
        assert controller is not None and passes is not None
        passes.is_suspended = False
        if self._is_restored:
            return
        for run in _runs_on(controller.model):
            if run is not self and not run._is_suspended:
                run._release()
        controller.retake()
        logger.info("snip-hf: another run on the same model has ended; this one goes on with its plan.")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Shows the FP4 share next to the loss: to later callbacks, in `state.log_history` and to the trackers."""
        logs = kwargs.get("logs")
        if logs is not None and "loss" in logs and self.controller is not None and not self._is_restored:
            figures = {"fp4_share": round(self.controller.plan.fp4_fraction, 4)}
            logs.update(figures)
            last = state.log_history[-1] if state.log_history else {}
            if "loss" in last and last.get("step") == state.global_step:
                last.update(figures)
            self._trackers.log(args, state, control, figures)

    def _save_state(self, args: TrainingArguments, state: TrainerState) -> None:
        """Writes the state into the checkpoint of this step, if there is one."""
        folder = _checkpoint(args, state)
        is_first = state.is_world_process_zero and not self._is_restored
        if is_first and self.controller is not None and folder.is_dir():
            try:
                remove_temporaries(folder, STATE_NAME)
                # Ties the state to the weights next to it.
                found = dict.fromkeys([self._weights, self.controller.weights_fingerprint()])
                own = {"run": self._run, "weights": [weights for weights in found if weights is not None]}
                write_json_atomic(folder / STATE_NAME, self.controller.state_dict() | own)
            except (OSError, ValueError) as error:  # ValueError: larger than what a resumed run would read
                logger.warning(
                    "snip-hf: could not write %s; resuming there will fail: %s",
                    printable(folder / STATE_NAME, 1000),
                    printable(error, 1000),
                )

    def _release(self) -> None:
        """Stops the controller of a run that has ended, if there is one."""
        self._trackers.close()
        if self.controller is not None:
            self._mark.remove(self.controller.model)
            self.controller.close()

    def _end_restored(self) -> None:
        """Ends SNIP in this run: `restore_model` takes its layers away."""
        self._is_restored = self._is_training()
        self._release()
        if self._is_restored:
            assert self._state is not None
            # A checkpoint from here on is one of training without SNIP.
            _marks(self._state).pop(_MARK, None)
            logger.warning("snip-hf: the model was restored in mid-run; training goes on without SNIP.")

    def _is_of_outer_run(self, folder: str | None) -> bool:
        """Returns True if one of the runs inside which this one runs writes to a folder."""
        outer = self._outer_run
        return outer is not None and (outer._folder == folder or outer._is_of_outer_run(folder))

    def _running(self) -> SnipController:
        if self.controller is None:
            raise RuntimeError(
                "SnipCallback got a training event before on_train_begin; add it before train() is called."
            )
        if self._is_suspended:  # by a run that an error ended
            self._go_on()
        return self.controller

    def _read_state(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any] | None:
        """Returns the path and the content of the file to resume from, None to start a new plan."""
        path = self._find_state(args, state)
        if path is None:
            return None
        run = self._marked_run(args, state)
        try:
            saved = read_json(path)
            if run is not None and isinstance(saved, dict) and saved.get("run", run) != run:
                raise ValueError(
                    "it belongs to another run than the weights. Name the folder of the checkpoint in "
                    "SnipCallback(resume=FOLDER), or say SnipCallback(resume=False) to start a new plan."
                )
        except ValueError as error:
            raise _cannot_resume(path, error) from error
        return {"path": str(path), "state": saved}

    def _load_state(self, saved: Mapping[str, Any], state: TrainerState) -> None:
        controller = self._running()
        try:
            controller.load_state_dict(saved["state"], state.global_step, controller.weights_fingerprint())
        except (KeyError, ValueError) as error:
            raise _cannot_resume(saved["path"], error) from error

    def _marked_run(self, args: TrainingArguments, state: TrainerState) -> str | None:
        """Returns the run that the checkpoint's trainer_state.json names, None if it names none.

        Raises:
            ValueError: the mark is damaged.
        """
        if _MARK not in _marks(state):
            return None
        mark = _marks(state)[_MARK]
        run = mark.get("run") if isinstance(mark, dict) else None
        if not isinstance(run, str):
            folder = self._folders(args, state)[0]
            raise ValueError(
                f"{folder / TRAINER_STATE_NAME}: stateful_callbacks[{_MARK!r}] is {str(mark)[:80]!r}, expected "
                "{'run': NAME}: the file is damaged. Restore it from another copy of the checkpoint, or say "
                "SnipCallback(resume=False) to start a new plan."
            )
        return run

    def _folders(self, args: TrainingArguments, state: TrainerState) -> list[Path]:
        """Returns the folders that may be the checkpoint's, in the order in which they are looked into."""
        if not isinstance(self._resume, bool):
            return [Path(self._resume)]
        folders = [_checkpoint(args, state)]
        if isinstance(args.resume_from_checkpoint, str) and os.path.isdir(args.resume_from_checkpoint):
            folders.insert(0, Path(args.resume_from_checkpoint))
        return folders

    def _find_state(self, args: TrainingArguments, state: TrainerState) -> Path | None:
        """Returns the file to resume from, None to start a new plan; says which in the log."""
        if state.global_step == 0 and not isinstance(self._resume, bool):
            raise ValueError(
                f"SnipCallback(resume={str(self._resume)!r}) names a checkpoint, but the Trainer starts at step 0. "
                "Give the same folder to trainer.train(resume_from_checkpoint=...)."
            )
        if state.global_step == 0 or self._resume is False:
            return None
        self._marked_run(args, state)
        folders = self._folders(args, state)
        found = [folder / STATE_NAME for folder in folders if (folder / STATE_NAME).is_file()]
        if found:
            logger.info("snip-hf: resuming from %s.", printable(found[0], 1000))
            return found[0]
        if self._resume is not True:
            raise ValueError(f"There is no {STATE_NAME} in {self._resume}, which SnipCallback(resume=...) names.")
        if _MARK in _marks(state):
            raise ValueError(
                f"The checkpoint of step {state.global_step} was trained with SNIP, but there is no {STATE_NAME} in "
                f"{', '.join(map(str, folders))}. Name its folder in SnipCallback(resume=FOLDER), or say "
                "SnipCallback(resume=False) to start a new plan."
            )
        logger.warning(
            "snip-hf: resuming at step %d without a SNIP state (looked for %s in %s): taken for a checkpoint trained "
            "without SNIP, the plan starts anew. If the checkpoint lies elsewhere, name its folder in "
            "SnipCallback(resume=...).",
            state.global_step,
            STATE_NAME,
            printable(", ".join(map(str, folders)), 1000),
        )
        return None


def _runs_on(model: nn.Module) -> list[SnipCallback]:
    """Returns the callbacks of the runs on a model that have not been released."""
    drivers = (mark.driver for mark in marks_on(model))
    return [driver for driver in drivers if isinstance(driver, SnipCallback)]


def _cannot_resume(path: Path | str, error: Exception) -> ValueError:
    return ValueError(f"Cannot resume from {path}: {error.args[0]}")


def _marks(state: TrainerState) -> dict[str, Any]:
    """Returns the dict that the Trainer keeps in trainer_state.json for what callbacks have to say."""
    return cast("dict[str, Any]", state.stateful_callbacks)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
