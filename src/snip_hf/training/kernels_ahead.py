"""The process beside training that compiles kernels of the first step and probe into Triton's cache on disk (ours).

A first step launches some fifteen Triton kernels outside of compiled graphs, a probe some thirty that no step does, and
its plan some more. Triton compiles each where it is first launched. This process compiles them while training begins,
from `estimation.foreseen`. It starts with the run and imports until the first micro-batch comes. It uses no GPU, has a
low priority and a bounded life, and ends with the run. Whatever it does not foresee, or fails at, is compiled where it
is launched.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from ..config import SnipConfig
from ..estimation.batch import Batch
from ..estimation.foreseen import Foreseen, layer_of
from ..estimation.objective import token_ids
from ..kernels.ahead import cache_folders, capability, is_compiled
from ..layers.gated import gate_up_down, is_gated
from ..layers.layer import SnipLayer
from ..planning.solver.process import Watch, give_up, import_paths, run_beside
from .captured_step import TrainingPass
from .compiling import LONGEST, PROGRAM
from .step_probe import StepProbe

_MAX_ERROR_BYTES = 4 * 2**10


class KernelsAhead:
    """Starts the process with a run, tells it of the first micro-batch, and ends it with the run.

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

    def prepare(self, refreshes: bool) -> None:
        """Starts the process, which waits for `begin`, if something is to be compiled. Never raises.

        Args:
            refreshes: whether the run will take a probe, as far as is known.
        """
        if self._may_begin:
            with self._tried():
                if self._is_due(refreshes):
                    self._start()

    def begin(self, first: TrainingPass, refreshes: bool) -> None:
        """Has the process compile, unless that was done or nothing is to be compiled. Never raises.

        Args:
            first: the micro-batch. One that is not counted yet may not tell enough; then it does when it is.
            refreshes: as above.
        """
        # Of a batch without labels the passes of the model show how many tokens they see.
        if not self._may_begin or not (first.counted or first.batch.get("labels") is not None):
            return
        with self._tried(is_last=first.counted):
            if not self._is_due(refreshes):
                self.close()
                return
            foreseen = self.foreseen(first)
            self._may_begin = False
            if self._process is None or self._process.poll() is not None:  # it has waited for too long
                self._drop()
                self._start()
            self._tell(asdict(foreseen))

    @contextmanager
    def _tried(self, is_last: bool = False) -> Iterator[None]:
        """Says what goes wrong; the last time there is no process then."""
        try:
            yield
        except Exception as error:
            if is_last or not self._may_begin:
                text = "snip-hf: training compiles its kernels itself: %s: %s"
                self._log.debug(text, type(error).__name__, error)
                self.close()

    def _is_due(self, refreshes: bool) -> bool:
        return refreshes and self._probe.processes.run is None and is_compiled(self._device)

    def foreseen(self, first: TrainingPass) -> Foreseen:
        """Returns the first step and probe as this micro-batch lets them be foreseen."""
        probe, config = self._probe, self._config
        whole = first.to_probe()
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
            self._backend,
            whole.tokens,
            probe.source.response(),
            _gates(self._model),
        )

    def _start(self) -> None:
        words = [sys.executable, "-I", *(["-B"] if sys.dont_write_bytecode else []), "-c", PROGRAM]
        self._scratch = tempfile.mkdtemp(prefix="snip-hf-")
        self._input, theirs = socket.socketpair()
        try:  # where this process is: the folders of caches may be relative
            self._process, self._files = run_beside(words, theirs, folder=None)
        except BaseException:
            self._input.close()
            os.rmdir(self._scratch)
            raise
        files: list[IO[bytes] | socket.socket] = [*self._files, self._input]
        self._give_up = weakref.finalize(self, _give_up, self._process, files, os.getpid(), self._scratch)
        try:
            Watch(self._process, 2 * LONGEST).start()
            folders = list(cache_folders(torch.cuda.device_count()))
            known = {"paths": _paths(), "parent": os.getpid(), "scratch": self._scratch}
            self._tell({**known, "gpu": capability(self._device), "folders": folders})
        except BaseException:
            self._drop()
            raise

    def _tell(self, given: dict[str, Any]) -> None:
        """Writes a line to the process, without waiting for it to read, and without a signal if it has ended.

        Raises:
            OSError: the process has ended, or its socket does not hold the line.
        """
        line = json.dumps(given).encode() + b"\n"
        self._input.setblocking(False)
        if self._input.send(line, getattr(socket, "MSG_NOSIGNAL", 0)) != len(line):
            raise OSError(f"A socket does not hold {len(line):,} bytes.")

    def close(self) -> None:
        """Ends the process with all that it started. So do the end of this object and that of Python."""
        self._may_begin = False
        self._drop()

    def _drop(self) -> None:
        """Ends the process, if there is one, and says what it said."""
        process, self._process = self._process, None
        if process is not None:
            code, said = process.poll(), self._files[1]
            said.seek(max(said.seek(0, os.SEEK_END) - _MAX_ERROR_BYTES, 0))
            text = said.read(_MAX_ERROR_BYTES).decode(errors="replace").strip()
            self._give_up()
            end = "ended by the run" if code is None else f"exit code {code}"
            self._log.debug("snip-hf: compiling kernels ahead: %s (%s)", text, end)


def _give_up(
    process: subprocess.Popen[bytes], files: Sequence[IO[bytes] | socket.socket], owner: int, scratch: str
) -> None:
    """As `give_up`; also removes what the process left."""
    give_up(process, files, owner)
    if os.getpid() == owner:
        shutil.rmtree(scratch, ignore_errors=True)


def _paths() -> list[str]:
    """Returns where the process imports from: as this one, and this package even if it came from the script's folder,
    which `import_paths` leaves out."""
    paths, own = import_paths(), str(Path(__file__).resolve().parents[2])
    return paths if own in paths else [own, *paths]


def _layer(layer: SnipLayer, is_trained: bool) -> dict[str, Any] | None:
    """Returns what is to be known of a layer; None of one of several matrices, whose rows a router decides."""
    matrices: tuple[Tensor, ...] = layer.matrices(layer.weight.detach())
    return layer_of(matrices[0], layer.weight.dtype, is_trained) if len(matrices) == 1 else None


def _gates(model: nn.Module) -> list[int]:
    """Returns `Foreseen.gates`."""
    gated = [gate_up_down(module)[0] for module in model.modules() if is_gated(module)]
    return list(dict.fromkeys(layer.out_features for layer in gated))


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
