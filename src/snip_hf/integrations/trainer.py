"""How a Hugging Face `Trainer` drives the controller: `SnipCallback` forwards events and holds no logic of its own."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..config import SnipConfig
from ..json_io import read_json, remove_temporaries, write_json_atomic
from ..kernels.backend import BACKENDS
from ..layers.convert import convert_model
from ..parallel.wrappers import unwrap
from ..policies.registry import needs_probe
from ..training.checks import check_launch
from ..training.controller import SnipController
from .hub import prepare_push, tag_model

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
    """

    def __init__(self, config: SnipConfig | None = None, resume: bool | str | os.PathLike[str] = True) -> None:
        if not isinstance(config, SnipConfig | None):
            raise TypeError(
                f"Got a {type(config).__name__} for config; expected a SnipConfig, e.g. SnipConfig.from_dict(...)."
            )
        self.config = config or SnipConfig()
        self.controller: SnipController | None = None
        self._resume = resume
        self._hooks: list[Any] = []
        self._run = ""
        self._own_loss_used = False
        self._state: TrainerState | None = None

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Refuses what cannot work, and swaps the linears before the Trainer wraps or compiles the model."""
        self._check_arguments(args)
        convert_model(unwrap(kwargs["model"]), self.config)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A callback that was added later saw no on_init_end; a run that an error ended saw no on_train_end.
        self._check_arguments(args)
        self._release()
        outer: nn.Module = kwargs["model"]
        model = unwrap(outer)
        self._check_others((outer, model), state)
        self._state = state
        if needs_probe(self.config) and state.max_steps < self.config.first_refresh + self.config.apply_delay:
            logger.warning(
                "snip-hf: training ends at step %d, before the first plan would be applied after step %d "
                "(first_refresh + apply_delay): everything stays in %s.",
                state.max_steps,
                self.config.first_refresh + self.config.apply_delay,
                self.config.start_format,
            )
        output_dir = args.output_dir if state.is_world_process_zero else None
        self.controller = SnipController(model, kwargs["optimizer"], self.config, AcceleratorState(), output_dir)
        # Never part of a compiled graph: torch.compile runs the hooks of the module that it is given, and those of the
        # wrapper that it returns, before and after the graph. Hooks further inside would break it in two.
        self._hooks = [
            outer.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            outer.register_forward_hook(self._after_forward),
        ]
        self._own_loss_used = False
        # The first process may be the only one that sees the checkpoint.
        saved = self.controller.processes.everyone.by_first(lambda: self._read_state(args, state))
        if saved is None:
            self.controller.step = state.global_step
            _marks(state).pop(_MARK, None)
        else:
            self._load_state(saved, state)
        # Travels in trainer_state.json: tells a checkpoint trained with SNIP, and its run, wherever it is moved.
        self._run = _marks(state).setdefault(_MARK, {"run": uuid.uuid4().hex})["run"]

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        controller = self._running()
        if controller.needs_probe and not self._own_loss_used:
            raise ValueError(
                "The training loss does not depend on the loss that the model returns, which is the one that SNIP "
                "probes: a custom loss is in use. Train with the model's own loss, or use a policy that needs no "
                "probe, such as policy='layer-position'."
            )
        controller.before_optimizer_step(state.global_step + 1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._running().after_step(state.global_step)

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
        controller = self._running()
        self._release()
        tag_model(controller.model, controller.plan)

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
                "then gives no loss to probe. Set it to 0, or use a policy that needs no probe, such as "
                "policy='layer-position'."
            )
        check_launch(self.config, AcceleratorState())

    def _check_others(self, modules: Iterable[nn.Module], state: TrainerState) -> None:
        """Refuses a second SnipCallback of the same run, and releases what an earlier run left on the modules."""
        hooks = [hook for module in modules for hook in module._forward_pre_hooks.values()]
        for other in [getattr(hook, "__self__", None) for hook in hooks]:
            if isinstance(other, SnipCallback) and other is not self:
                if other._state is state:
                    raise ValueError("The Trainer has two SnipCallbacks; expected one. Remove the other.")
                other._release()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Shows the FP4 share next to the loss."""
        logs = kwargs.get("logs")
        if logs is not None and "loss" in logs and self.controller is not None:
            logs["fp4_share"] = round(self.controller.plan.fp4_fraction, 4)

    def _save_state(self, args: TrainingArguments, state: TrainerState) -> None:
        """Writes the state into the checkpoint of this step, if there is one."""
        folder = _checkpoint(args, state)
        if state.is_world_process_zero and self.controller is not None and folder.is_dir():
            try:
                remove_temporaries(folder, STATE_NAME)
                write_json_atomic(folder / STATE_NAME, self.controller.state_dict() | {"run": self._run})
            except OSError as error:
                logger.warning("snip-hf: could not write %s; resuming there will fail: %s", folder / STATE_NAME, error)

    def _release(self) -> None:
        """Stops the controller of a run that has ended, if there is one."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.controller is not None:
            self.controller.close()

    @torch.compiler.disable
    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model.training:
            self._running().capture(kwargs)

    @torch.compiler.disable
    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Finds out whether the model's own loss takes part in the backward pass, once per run."""
        if model.training and not self._own_loss_used:
            loss = output.get("loss") if isinstance(output, dict) else output[0]
            if isinstance(loss, torch.Tensor) and loss.requires_grad:
                loss.register_hook(self._note_own_loss)

    def _note_own_loss(self, gradient: torch.Tensor | None) -> None:
        # A compiled model's outputs have one backward pass: without a gradient, the loss only came out with the others.
        if gradient is not None:
            self._own_loss_used = True

    def _running(self) -> SnipController:
        if self.controller is None:
            raise RuntimeError(
                "SnipCallback got a training event before on_train_begin; add it before train() is called."
            )
        return self.controller

    def _read_state(self, args: TrainingArguments, state: TrainerState) -> dict[str, Any] | None:
        """Returns the path and the content of the file to resume from, None to start a new plan."""
        path = self._find_state(args, state)
        if path is None:
            return None
        mark = _marks(state).get(_MARK)
        try:
            saved = read_json(path)
            if mark is not None and isinstance(saved, dict) and saved.get("run", mark["run"]) != mark["run"]:
                raise ValueError(
                    "it belongs to another run than the weights. Name the folder of the checkpoint in "
                    "SnipCallback(resume=FOLDER), or say SnipCallback(resume=False) to start a new plan."
                )
        except ValueError as error:
            raise _cannot_resume(path, error) from error
        return {"path": str(path), "state": saved}

    def _load_state(self, saved: Mapping[str, Any], state: TrainerState) -> None:
        try:
            self._running().load_state_dict(saved["state"], state.global_step)
        except (KeyError, ValueError) as error:
            raise _cannot_resume(saved["path"], error) from error

    def _find_state(self, args: TrainingArguments, state: TrainerState) -> Path | None:
        """Returns the file to resume from, None to start a new plan; says which in the log."""
        if state.global_step == 0 and not isinstance(self._resume, bool):
            raise ValueError(
                f"SnipCallback(resume={str(self._resume)!r}) names a checkpoint, but the Trainer starts at step 0. "
                "Give the same folder to trainer.train(resume_from_checkpoint=...)."
            )
        if state.global_step == 0 or self._resume is False:
            return None
        folders = [_checkpoint(args, state)]
        if isinstance(args.resume_from_checkpoint, str) and os.path.isdir(args.resume_from_checkpoint):
            folders.insert(0, Path(args.resume_from_checkpoint))
        if self._resume is not True:
            folders = [Path(self._resume)]
        found = [folder / STATE_NAME for folder in folders if (folder / STATE_NAME).is_file()]
        if found:
            logger.info("snip-hf: resuming from %s.", found[0])
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
            ", ".join(map(str, folders)),
        )
        return None


def _cannot_resume(path: Path | str, error: Exception) -> ValueError:
    return ValueError(f"Cannot resume from {path}: {error.args[0]}")


def _marks(state: TrainerState) -> dict[str, Any]:
    """Returns the dict that the Trainer keeps in trainer_state.json for what callbacks have to say."""
    return cast("dict[str, Any]", state.stateful_callbacks)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
