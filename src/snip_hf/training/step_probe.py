"""The probe of an optimizer step that is about to be taken: what has to hold for it, and the divergences it finds."""

from __future__ import annotations

import math
from dataclasses import replace

from torch import nn

from ..config import SnipConfig
from ..costs.flops import Work
from ..estimation.divergence import divergences_at
from ..estimation.memory import adds_noise, kept_tokens, probe_memory
from ..estimation.table import DivergenceTable
from ..parallel.ranks import Attempt, Processes
from ..python_state import collecting_no_garbage
from .gradients import GradientSource
from .micro_batches import NOT_CAPTURED, StepWatch
from .swapped_layers import SwappedLayers

# Why ranks may wait for each other in training.
_RUNS_OUT = "a rank that runs out of batches, as under DDP's Join, never comes to it"


class StepProbe:
    """Probes steps of one run. With several processes, all of them do so together.

    Args:
        model: the model, or the parts of it that this process holds.
        config: the configuration of the run.
        flops: of all layers, in the order that tables have.
        layers: the swapped ones.
        source: of the gradients.
        processes: those of the run.
    """

    def __init__(
        self,
        model: nn.Module,
        config: SnipConfig,
        flops: Work,
        layers: SwappedLayers,
        source: GradientSource,
        processes: Processes,
    ) -> None:
        self.layers = layers
        self.source = source
        self.processes = processes
        self._model = model
        self._config = config
        self._flops = flops

    @property
    def batch_tokens(self) -> int | None:
        """Tokens that this rank's part of the probe may run on; a pipeline takes whole batches only."""
        tokens = self._config.probe_batch_tokens
        return None if tokens is None or self.processes.run else max(1, tokens // self.processes.data.size)

    def why_untrained(self) -> str | None:
        """Returns why no parameter of the model is ever updated; None if some are."""
        return self.source.why_untrained(self._model)

    def watch(self) -> StepWatch:
        """Returns what the step that begins is noted in."""
        layers, parameters = self.layers.present, self.source.unclipped(self._model)
        return StepWatch(self.batch_tokens, layers, parameters, self.source.beside(self._model, layers))

    def memory(self, watch: StepWatch) -> float:
        """Returns the MiB that the probe of a step is expected to take beyond the model."""
        tokens = kept_tokens(self._config, watch.batch.tokens, self.processes.data.size)
        return probe_memory(self._model, self._config.probes, tokens, adds_noise(self._config))

    def note(self, place: str) -> None:
        """Says where in training the ranks meet next."""
        self.processes.note(f"{place} ({_RUNS_OUT})")

    def ready(self, watch: StepWatch | None) -> StepWatch:
        """Returns what the step's micro-batch was noted in; raises, on all ranks, if one of them cannot probe its."""
        attempt = Attempt()
        with attempt:
            if watch is None:
                raise ValueError(NOT_CAPTURED)
            _ = watch.batch
            self.layers.check(self._flops)
            self.source.check_unchanged()
        self.processes.everyone.agree(attempt.error)
        assert watch is not None
        return watch

    def check_applied(self) -> None:
        """Raises ValueError, on all ranks, if the plan of the last probe is for what is no longer trained."""
        attempt = Attempt()
        with attempt:
            self.layers.check(self._flops)
            self.source.check_gradients_used()
        self.processes.everyone.agree(attempt.error)

    def divergences(self, step: int, watch: StepWatch, probes: int | None = None) -> DivergenceTable:
        """Returns the divergences of the step that is running.

        Args:
            step: its number, from 1.
            watch: what was noted of it.
            probes: in place of the configured number; 0 is one cheap pass.

        Raises:
            ValueError: anything is not finite, or everything is 0.
        """
        layers = self.layers.present
        with collecting_no_garbage():
            table = divergences_at(
                self._model,
                batch=watch.batch,
                optimizer_step=self.source.read(self._model, layers, watch, self.processes.everyone),
                config=self._config,
                step=step,
                probes=probes,
                processes=self.processes,
            )
        _check_finite(table)
        _check_some(table)
        # Stages that one process of a pipeline holds need not be neighbours.
        order = {layer: index for index, layer in enumerate(self._flops)}
        return replace(table, rows=tuple(sorted(table.rows, key=lambda row: order[row.layer])))


def _check_finite(table: DivergenceTable) -> None:
    for row in table.rows:
        if not all(map(math.isfinite, (row.loss_divergence, row.weight_divergence, row.criterion or 0.0))):
            raise ValueError(
                f"The divergences of layer {row.layer!r} are not finite; expected finite activations and gradients."
            )


def _check_some(table: DivergenceTable) -> None:
    if table.rows and not any(row.loss_divergence or row.weight_divergence for row in table.rows):
        raise ValueError(
            "The loss of the probed micro-batch has no gradient, so all divergences are 0: nothing tells the layers "
            "apart. In reinforcement learning, all advantages of the micro-batch are then 0, as where all completions "
            "of a prompt have the same reward."
        )
