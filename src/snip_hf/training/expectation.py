"""What speed a run may expect, by what was measured of its backend, and what it lacks for that; said once."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from statistics import mode
from typing import Any

from torch import Tensor, nn

from ..estimation.batch import is_of_sequences
from ..kernels.backend import BACKENDS
from ..kernels.emulated import Emulated
from ..layers.layer import SnipLayer
from ..parallel.sharding import is_sharded

BY_REGIONS = "compiled by regions"
AS_A_WHOLE = "compiled as a whole (by regions is faster, and compiles sooner)"
# Tokens of a micro-batch times the square of the hidden size: below, launches take longer than the products that they
# spare (docs/hopper.md, "Where it begins to pay").
LEAST_WORK = 4e10


class Expectation:
    """Finds what is to be expected when the first micro-batch has run, since only then it is known what is compiled.

    What is lacking is a warning; the rest is for the message that a run begins with.

    Args:
        backend: name of the one in use.
        layers: the swapped layers.
        log: gets the warning.
        requested: `SnipConfig.backend`.
    """

    def __init__(self, backend: str, layers: Mapping[str, SnipLayer], log: logging.Logger, requested: str) -> None:
        self.is_said = False
        self.text: str | None = None
        """What was found, for the log; None: nothing was measured of the backend."""
        self._backend = BACKENDS[backend]
        self._hidden = mode(layer.in_features for layer in layers.values())
        self._is_sharded = any(is_sharded(layer.weight) for layer in layers.values())
        is_fallback = requested == "auto" and backend == Emulated.name
        self._is_fallback = is_fallback and any(layer.weight.is_cuda for layer in layers.values())
        self._log = log

    def say(self, how: str | None, tokens: int | None) -> None:
        """Finds it, unless that was done or nothing was measured of the backend; warns of emulation on a GPU.

        Args:
            how: the model is compiled; None: it is not.
            tokens: of the first micro-batch; None: not known.
        """
        if self.is_said:
            return
        self.is_said = True
        if self._is_fallback:
            self._log.warning(
                "snip-hf: rounding is emulated, slower than BF16: no kernels here run these formats in this training's "
                "precision (docs/hopper.md). `snip-hf doctor` says what runs; backend=%r asks for this.",
                self._backend.name,
            )
        measured = self._backend.measured_speeds
        if not measured:
            return
        lacking = []
        if how is None:
            lacking.append(
                "the model is not compiled, so that launches outweigh faster products: set torch_compile=True in "
                "TrainingArguments, or call layer.compile() for each decoder layer"
            )
        if self._hidden < min(measured):
            lacking.append(
                f"below a hidden size of {min(measured):,} quantization outweighs faster products, and this model has "
                f"{self._hidden:,}: BF16 is likely to be faster"
            )
        elif tokens is not None and tokens < (enough := math.ceil(LEAST_WORK / self._hidden**2)):
            lacking.append(
                f"micro-batches of {tokens:,} tokens are short at this hidden size: take longer or more sequences, "
                f"with at least {enough:,} tokens"
            )
        if lacking:
            self.text = "less than was measured (docs/hopper.md), as the warning says"
            self._log.warning(
                "snip-hf: backend %s will not reach the speed that was measured (docs/hopper.md): %s.",
                self._backend.name,
                "; ".join(lacking),
            )
            return
        self.text = (
            f"{how}, hidden size {self._hidden}: by runs on one H200 about {interpolated(measured, self._hidden):.2f} "
            "times the speed of compiled BF16 (docs/hopper.md)"
        )
        if self._is_sharded:
            self.text += "; weights are sharded, and with FSDP2 on two GPUs it was 2 to 18% less (docs/distributed.md)"


def tokens_of(batch: Mapping[str, Any]) -> int | None:
    """Returns how many tokens a batch has; None where that cannot be told."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    in_batch = not isinstance(labels, Tensor) or (is_of_sequences(labels) and isinstance(ids, Tensor))
    found = ids if in_batch else labels
    return int(found.numel()) if isinstance(found, Tensor) else None


def compiled_by(accelerator: Any) -> str | None:
    """Returns how an Accelerator, or its state, compiles the models that it prepares; None: not at all."""
    plugin = getattr(getattr(accelerator, "state", accelerator), "dynamo_plugin", None)
    if plugin is None or plugin.backend.value == "NO":
        return None
    return BY_REGIONS if plugin.use_regional_compilation else AS_A_WHOLE


def how_compiled(model: nn.Module) -> str | None:
    """Returns how torch.compile runs a model, as far as its modules tell; None: not at all."""
    if any(_is_compiled(module) for name, module in model.named_modules() if name):
        return BY_REGIONS
    return AS_A_WHOLE if _is_compiled(model) else None


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def interpolated(measured: Mapping[int, float], size: int) -> float:
    """Returns the figure for a size: between its neighbours by the logarithm, outside that of the nearest end."""
    sizes = sorted(measured)
    if size <= sizes[0] or size >= sizes[-1]:
        return measured[sizes[0] if size <= sizes[0] else sizes[-1]]
    above = next(index for index, one in enumerate(sizes) if one >= size)
    low, high = sizes[above - 1], sizes[above]
    part = math.log(size / low) / math.log(high / low)
    return measured[low] + part * (measured[high] - measured[low])
