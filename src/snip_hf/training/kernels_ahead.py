"""The process beside training that compiles the kernels of the first probe into Triton's cache on disk (ours).

A probe launches some thirty Triton kernels that no training step does, and Triton compiles each where it is first
launched. This process compiles them while training begins, from `estimation.foreseen`. It uses no GPU, has a low
priority and a bounded life, and ends with the run. Whatever it does not foresee, or fails at, the probe compiles.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from ..config import SnipConfig
from ..estimation.batch import Batch
from ..estimation.foreseen import Foreseen, compile_kernels, layer_of
from ..estimation.objective import token_ids
from ..kernels.ahead import capability, compile_for, is_compiled
from ..layers.layer import SnipLayer
from ..planning.solver.ilp import end_with
from ..planning.solver.process import give_up, import_paths
from .captured_step import TrainingPass
from .step_probe import StepProbe

# Seconds that the process lives at most.
_LONGEST = 300
# `main` in a Python that finds what this one does, without the working directory and the script's folder.
_PROGRAM = "import json, sys; given = json.load(sys.stdin); sys.path[:] = given['paths']; " + (
    f"from {__name__} import main; main(given)"
)
_MAX_ERROR_BYTES = 4 * 2**10


class KernelsAhead:
    """Starts the process with the first micro-batch of a run, and ends it with the run.

    Args:
        probe: what the run probes.
        model: as there.
        config: as there.
        is_first_here: whether this process is the first one of its machine, which compiles for all of them.
        log: is told, for debugging, what becomes of it.
    """

    def __init__(
        self, probe: StepProbe, model: nn.Module, config: SnipConfig, is_first_here: bool, log: logging.Logger
    ) -> None:
        self._probe, self._model, self._config, self._log = probe, model, config, log
        self._device = next(model.parameters()).device
        self._may_begin = is_first_here
        self._process: AheadProcess | None = None

    def begin(self, first: TrainingPass, refreshes: bool) -> None:
        """Starts the process, unless that was done or nothing is to be compiled. Never raises.

        Args:
            first: the micro-batch.
            refreshes: whether the run will take a probe, as far as is known.
        """
        if not self._may_begin:
            return
        self._may_begin = False
        try:
            if refreshes and self._probe.processes.run is None and is_compiled(self._device):
                foreseen = self.foreseen(first)
                self._process = AheadProcess(foreseen, capability(self._device), torch.cuda.device_count())
        except Exception as error:
            self._log.debug("snip-hf: the first probe compiles its kernels itself: %s: %s", type(error).__name__, error)

    def foreseen(self, first: TrainingPass) -> Foreseen:
        """Returns the first probe as this micro-batch lets it be foreseen."""
        probe, config = self._probe, self._config
        batch = Batch.of(first.batch, first.objective, first.seen, first.advice).part(probe.batch_tokens)
        is_trained = probe.source.trains()
        layers = [_layer(layer, is_trained(layer.weight)) for layer in probe.layers.present.values()]
        return Foreseen(
            [layer for index, layer in enumerate(layers) if layer is not None and layer not in layers[:index]],
            [batch.tokens] * probe.processes.data.size,
            _attention(self._model, batch),
            list(config.quantized_formats),
            config.probes,
            config.probe_tokens,
            config.loss_estimator,
            config.guard_noise is not None,
            probe.source.response(),
        )

    def close(self) -> None:
        """Ends the process."""
        process, self._process = self._process, None
        self._may_begin = False
        if process is not None:
            self._log.debug("snip-hf: compiling kernels ahead: %s", process.close())


class AheadProcess:
    """The process; killed with all that it started when its owner is collected and when Python ends, too.

    Args:
        foreseen: the probe.
        gpu: the compute capability to compile for.
        devices: how many GPUs the machine has.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, foreseen: Foreseen, gpu: tuple[int, int], devices: int) -> None:
        given = {
            "paths": [str(Path(__file__).parents[2]), *import_paths()],
            "parent": os.getpid(),
            "gpu": gpu,
            "devices": devices,
            "foreseen": foreseen.to_dict(),
        }
        with contextlib.ExitStack() as on_failure:
            stdin, self._said = (on_failure.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            stdin.write(json.dumps(given).encode())
            stdin.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-c", _PROGRAM],
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                cwd="/",
                start_new_session=True,
            )
            on_failure.pop_all()
        stdin.close()
        files: list[IO[bytes]] = [self._said]
        self._finalizer = weakref.finalize(self, give_up, self.process, files, os.getpid())

    def close(self) -> str:
        """Ends the process; returns the last lines of what it said."""
        ended = self.process.poll()
        self._said.seek(max(self._said.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES, 0))
        said = self._said.read(_MAX_ERROR_BYTES).decode(errors="replace").strip()
        self._finalizer()
        return f"{said} (ended by the run)" if ended is None else f"{said} (exit code {ended})"


def main(given: dict[str, Any]) -> None:
    """What the process does."""
    os.nice(10)
    signal.alarm(_LONGEST)
    end_with(given["parent"])
    began = time.monotonic()
    compiled = compile_for(tuple(given["gpu"]), given["devices"])
    compile_kernels(Foreseen(**given["foreseen"]))
    print(f"{len(compiled)} kernels in {time.monotonic() - began:.1f} s", file=sys.stderr)


def _layer(layer: SnipLayer, is_trained: bool) -> dict[str, Any] | None:
    """Returns what is to be known of a layer; None of one of several matrices, whose rows a router decides."""
    matrices: tuple[Tensor, ...] = layer.matrices(layer.weight.detach())
    return layer_of(matrices[0], layer.weight.dtype, is_trained) if len(matrices) == 1 else None


def _attention(model: nn.Module, batch: Batch) -> list[int] | None:
    """Returns `Foreseen.attention` of a model of transformers."""
    config, ids = getattr(model, "config", None), token_ids(batch.kwargs)
    heads = getattr(config, "num_attention_heads", None)
    if heads is None or not ids or getattr(config, "_attn_implementation", None) != "sdpa":
        return None
    channels = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    return [*ids[0].shape, heads, getattr(config, "num_key_value_heads", None) or heads, channels]
