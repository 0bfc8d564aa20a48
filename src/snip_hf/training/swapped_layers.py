"""The swapped layers of a run, the backend that runs them and the keys of their random numbers."""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from torch import nn

from ..config import SnipConfig
from ..kernels.backend import Backend, why_emulated
from ..layers.convert import convert_model
from ..layers.gated import put_gates, remove_gates
from ..layers.layer import SnipLayer
from ..layers.run_hooks import RunMark, marks_on
from ..layers.selection import skip_reasons
from ..layers.state import PackedStates, plain_name, snip_linears
from ..parallel.pipeline import parts_of
from ..parallel.ranks import Processes, Ranks
from ..parallel.sharding import compute_device
from ..parallel.zero3 import has_partitions
from ..policies.setting import Setting, siblings
from .plan_in_force import formats_in_use


class SwappedLayers:
    """The layers that a run decides on, swapped when this is built.

    Args:
        model: the model, or the parts of it that this process holds.
        config: which layers, and the seed of their random numbers.
        processes: those of the run.
        kernels: the backend in use.
        mixed_precision: of the loop, for the log; None: unknown.
        log: gets which kernels run.

    Raises:
        ValueError: another run drives them.
    """

    def __init__(
        self,
        model: nn.Module,
        config: SnipConfig,
        processes: Processes,
        kernels: Backend,
        mixed_precision: str | None,
        log: logging.Logger,
    ) -> None:
        self._model = model
        self._config = config
        self._processes = processes
        self._kernels, self._log = kernels, log
        self._keeps_weights, self._is_released = False, False
        self.counters: dict[str, float] = {}
        """Counters of the kernels at the last `log_findings`."""
        self._mark = RunMark(self.release)
        if self._are_driven():
            gc.collect()  # an abandoned run may hold itself in a cycle
        if self._are_driven():
            raise ValueError(
                "Another SnipController drives this model, expected one at a time: call its close(), or "
                "restore_model(model) if it is out of reach."
            )
        swap(model, config, processes.pipeline)
        self.all = snip_linears(model)
        """Name -> layer."""
        use_backend(self.present, kernels, mixed_precision, config, log)
        self._states = self._packed_states()

    def _are_driven(self) -> bool:
        return any(isinstance(mark.driver, SwappedLayers) for mark in marks_on(self._model))

    def claim(self) -> None:
        """Refuses the layers to other runs until `release`, or until this run is garbage."""
        self._mark.put_on(self._marked)

    @property
    def _marked(self) -> nn.Module:
        """The module with the run's mark: the model, or the first part that this process holds."""
        return (parts_of(self._model) or [self._model])[0]

    @property
    def present(self) -> dict[str, SnipLayer]:
        """Name -> layer, without those that `restore_model` restored in mid-run."""
        return {name: layer for name, layer in self.all.items() if isinstance(layer, SnipLayer)}

    @property
    def _run_by_kernels(self) -> dict[str, SnipLayer]:
        """Name -> layer, without those that the backend leaves to the emulated one."""
        return {name: layer for name, layer in self.present.items() if layer.snip_backend is self._kernels}

    def check(self) -> None:
        """Raises ValueError if the model has lost layers that were swapped when the run began."""
        present = snip_linears(self._model)
        gone = [name for name, layer in self.all.items() if present.get(name) is not layer]
        if gone:
            modules = {plain_name(name): module for name, module in self._model.named_modules()}
            now = type(modules[gone[0]]).__name__ if gone[0] in modules else "nothing"
            raise ValueError(
                f"{len(gone)} of the {len(self.all)} swapped layers were replaced or wrapped since training began, "
                f"e.g. {gone[0]!r} (now {now}). No plan can be made for the model as it is, and the FP4 share still "
                "counts them. Change a model before training begins."
            )

    def set_step(self, step: int, micro_batch: int) -> None:
        """Keys the layers' random numbers for a micro-batch of an optimizer step."""
        if not self._states.are_in_place:  # e.g. the model was moved
            self._states = self._packed_states()
        self._states.set_step(self._config.seed, step, micro_batch)

    def _packed_states(self) -> PackedStates:
        states, data = PackedStates(self.present), self._processes.data
        states.set_rank(data.rank, data.size)
        return states

    def set_rank(self) -> None:
        """Gives the layers their rank again: DDP that was built before the swap broadcasts the first rank's."""
        data = self._processes.data
        if data.size > 1:
            self._states.set_rank(data.rank, data.size)

    def share_inputs(self, setting: Setting) -> None:
        """Lets the kernels quantize a shared input once, and fuse gated MLPs; logs which."""
        layers = self._run_by_kernels
        self._kernels.share_inputs(layers, [group for group in siblings(setting) if group[0] in layers])
        put_gates(self._model, self._log)

    def keep_weights(self, everything: bool) -> None:
        """Quantizes the weights for a training pass, if they are kept."""
        if self._keeps_weights:
            self._kernels.before_pass(self._run_by_kernels, everything)

    def note_micro_batches(self, count: int) -> None:
        """Keeps quantized weights from the first step on that has several micro-batches.

        They are then worth their memory. A single micro-batch quantizes each layout once anyway. ZeRO-3 gathers
        weights only for the passes of their modules, which quantize them themselves.
        """
        self._keeps_weights = self._keeps_weights or (count > 1 and not has_partitions(self._model))

    def end_step(self) -> None:
        """Discards quantized weights. Called after each optimizer step."""
        self._kernels.after_step(self._run_by_kernels)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the state of the kernels as JSON data, by the backend's name; {} if they have none."""
        state = self._kernels.state_dict(self._run_by_kernels)
        return {self._kernels.name: state} if state else {}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Continues from a `state_dict`; the state of another backend is ignored."""
        self._kernels.load_state_dict(self._run_by_kernels, state.get(self._kernels.name, {}))

    def log_findings(self) -> None:
        """Logs the findings of the kernels since the last call, and keeps their counters."""
        self.counters = dict(self._kernels.counters(self._run_by_kernels))
        found = self._kernels.findings(self._run_by_kernels)
        if found is not None:
            warns, text = found
            self._log.log(
                logging.WARNING if warns else logging.INFO, "snip-hf: backend %s: %s", self._kernels.name, text
            )

    def release(self) -> None:
        """Gives the layers up: they compute plainly, and the kernels keep nothing of them."""
        if self._is_released:  # the user may have set formats since
            return
        self._is_released = True
        try:
            self.log_findings()
        finally:  # reading from the device may fail
            self._mark.remove(self._marked)
            self._kernels.release(self._run_by_kernels)
            remove_gates(self._model)
            for layer in self.present.values():
                layer.compute_plainly()


def swap(model: nn.Module, config: SnipConfig, pipeline: Ranks) -> None:
    """Swaps the layers of the model, or of the parts of it that this rank of a pipeline holds.

    Raises:
        ValueError: as `convert_model`; a pattern in `skip_modules` or `include_modules` has to match on some rank.
    """
    names = skip_reasons(model, config)
    given = config.skip_modules, config.include_modules
    here = {pattern: any(fnmatchcase(name, pattern) for name in names) for pattern in chain(*given)}
    everywhere = pipeline.gather(here)
    # A pattern may match only on another rank.
    matching = {pattern for pattern in here if here[pattern] or not any(found[pattern] for found in everywhere)}
    skipped, included = (tuple(one for one in patterns if one in matching) for patterns in given)
    convert_model(model, replace(config, skip_modules=skipped, include_modules=included))


def use_backend(
    layers: Mapping[str, SnipLayer],
    backend: Backend,
    mixed_precision: str | None,
    config: SnipConfig,
    log: logging.Logger,
) -> None:
    """Gives the layers their backend, and logs which kernels run."""
    weight = next(iter(layers.values())).weight
    for layer in layers.values():
        layer.snip_backend.release({"": layer})  # kernels of an earlier run that was not closed
        layer.use_backend(backend)
    refused: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if (reason := backend.refuses(layer)) is not None:
            refused.setdefault(reason, []).append(name)
    asked = config.backend != "auto"
    warns, text = backend.notice(weight, mixed_precision, asked)
    if warns:
        log.warning("snip-hf: %s", text)
    elif backend.is_emulation:
        device = compute_device(weight)
        reason = f"asked for by backend={backend.name!r}" if asked else why_emulated(device, formats_in_use(config))
        level = logging.INFO if asked or device.type == "cpu" else logging.WARNING
        log.log(level, "snip-hf: backend %s: %s (%s).", backend.name, text, reason)
    else:
        log.info("snip-hf: backend %s: %s", backend.name, text)
    for reason, names in refused.items():
        log.warning(
            "snip-hf: %s: %d layers, such as %s, are emulated, slower than BF16. Name them in skip_modules to keep "
            "them in high precision.",
            reason,
            len(names),
            names[0],
        )
