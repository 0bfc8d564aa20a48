"""The process beside training that compiles the kernels of the first probe into Triton's cache on disk (ours).

A probe launches some thirty Triton kernels that no training step does, and its plan some more. Triton compiles each
where it is first launched. This process compiles them while training begins, from `estimation.foreseen`. It uses no
GPU, has a low priority and a bounded life, and ends with the run. Whatever it does not foresee, or fails at, is
compiled where it is launched.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..config import SnipConfig
from ..estimation.batch import Batch
from ..estimation.foreseen import Foreseen, compile_kernels, layer_of
from ..estimation.objective import token_ids
from ..kernels.ahead import capability, compile_for, is_compiled
from ..layers.layer import SnipLayer
from ..planning.solver.ilp import end_with
from ..planning.solver.process import Watch, give_up, import_paths, run_beside
from .captured_step import TrainingPass
from .step_probe import StepProbe

# Seconds that the process lives at most.
_LONGEST = 300
# `main` in a Python that finds what this one does, without the working directory and the script's folder. Imports, of
# torch above all, are part of what has a low priority and a bounded life.
_PROGRAM = f"import json, os, signal, sys; os.nice(10); signal.alarm({_LONGEST}); " + (
    f"given = json.load(sys.stdin); sys.path[:] = given['paths']; from {__name__} import main; main(given)"
)
_MAX_ERROR_BYTES = 4 * 2**10


class KernelsAhead:
    """Starts the process with the first micro-batch of a run, and ends it with the run.

    Args:
        probe: what the run probes.
        model: as there.
        config: as there.
        backend: name of the one in use.
        is_first_here: whether this process is the first one of its machine, which compiles for all of them.
        log: is told, for debugging, what becomes of it.
    """

    def __init__(
        self,
        probe: StepProbe,
        model: nn.Module,
        config: SnipConfig,
        backend: str,
        is_first_here: bool,
        log: logging.Logger,
    ) -> None:
        self._probe, self._model, self._config, self._backend, self._log = probe, model, config, backend, log
        self._device = next(model.parameters()).device
        self._may_begin = is_first_here
        self._process: subprocess.Popen[bytes] | None = None

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
                self._start(self.foreseen(first))
        except Exception as error:
            self._log.debug("snip-hf: the first probe compiles its kernels itself: %s: %s", type(error).__name__, error)

    def foreseen(self, first: TrainingPass) -> Foreseen:
        """Returns the first probe as this micro-batch lets it be foreseen."""
        probe, config = self._probe, self._config
        whole = Batch.of(first.batch, first.objective, first.seen, first.advice)
        batch = whole.part(probe.batch_tokens)
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
            self._backend,
            whole.tokens,
            probe.source.response(),
        )

    def _start(self, foreseen: Foreseen) -> None:
        given = {
            "paths": _paths(),
            "parent": os.getpid(),
            "gpu": capability(self._device),
            "devices": torch.cuda.device_count(),
            "foreseen": asdict(foreseen),
        }
        words = [sys.executable, "-I", *(["-B"] if sys.dont_write_bytecode else []), "-c", _PROGRAM]
        # Where this process is: the folders of caches may be relative.
        self._process, self._files = run_beside(words, given, folder=None)
        self._give_up = weakref.finalize(self, give_up, self._process, self._files, os.getpid())
        Watch(self._process, _LONGEST).start()

    def close(self) -> None:
        """Ends the process with all that it started. So do the end of this object and that of Python."""
        process, self._process = self._process, None
        self._may_begin = False
        if process is not None:
            code, said = process.poll(), self._files[1]
            said.seek(max(said.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES, 0))
            text = said.read(_MAX_ERROR_BYTES).decode(errors="replace").strip()
            self._give_up()
            end = "ended by the run" if code is None else f"exit code {code}"
            self._log.debug("snip-hf: compiling the first probe's kernels ahead: %s (%s)", text, end)


def main(given: dict[str, Any]) -> None:
    """What the process does."""
    end_with(given["parent"])
    began = time.monotonic()
    compiled = compile_for(tuple(given["gpu"]), given["devices"])
    compile_kernels(Foreseen(**given["foreseen"]))
    print(f"{len(compiled)} kernels in {time.monotonic() - began:.1f} s", file=sys.stderr)


def _paths() -> list[str]:
    """Returns where the process imports from: as this one, and this package even if it came from the script's folder,
    which `import_paths` leaves out."""
    paths, own = import_paths(), str(Path(__file__).resolve().parents[2])
    return paths if own in paths else [own, *paths]


def _layer(layer: SnipLayer, is_trained: bool) -> dict[str, Any] | None:
    """Returns what is to be known of a layer; None of one of several matrices, whose rows a router decides."""
    matrices: tuple[Tensor, ...] = layer.matrices(layer.weight.detach())
    return layer_of(matrices[0], layer.weight.dtype, is_trained) if len(matrices) == 1 else None


def _attention(model: nn.Module, batch: Batch) -> list[int] | None:
    """Returns `Foreseen.attention` of a model of transformers."""
    config, ids = getattr(model, "config", None), token_ids(batch.kwargs)
    heads = getattr(config, "num_attention_heads", None)
    shared_heads = getattr(config, "num_key_value_heads", None) or heads
    # Some models have a list, of a number per block.
    if not isinstance(heads, int) or not isinstance(shared_heads, int) or not ids:
        return None
    if getattr(config, "_attn_implementation", None) != "sdpa":
        return None
    channels = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    return [*ids[0].shape, heads, shared_heads, channels]
