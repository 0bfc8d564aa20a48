"""What runs in place of `nn.Linear`: `SnipLinear`, and how it is swapped into a model and back.

Legend: T tokens, I in_features, O out_features. The swap changes a module's class in place, so that parameters, their
ties, hooks, sharding and state_dict keys stay what they were. What a layer needs to know at run time (its formats and
the key of its random numbers) lives in one small non-persistent buffer that `PrecisionPlan.apply` and the controller
write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.emulated import forward_gemm, grad_input_gemm, grad_weight_gemm
from ..numerics.formats import FORMAT_CODES, FORMAT_NAMES, check_format
from ..numerics.gemms import GEMMS
from .tensorcores import TensorCoreGemms, TiedInput, quantize_input

_LEFT_OUT = "skip_modules"
# More than this share of a model's weight matrices outside the plan is worth a warning.
_MUCH = 0.1
STATE = "snip_state"
KEY = len(GEMMS)
# Number of the output gradient among the operands that a random stream can be for. Both GEMMs that read it round it
# with the same random numbers: what one adds to the layers before, and the other to the own weight's gradient.
GRAD_OUTPUT = 1


class _ThreeGemms(torch.autograd.Function):
    """Y = X W^T + b with the format of each GEMM read from `state`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor) -> Tensor:
        # A copy: the next forward pass may write the state before this one's backward pass reads it.
        ctx.save_for_backward(x, weight, state.clone())
        y: Tensor = forward_gemm(x, weight, bias, state)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, state = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_rows = grad_output.reshape(-1, grad_output.shape[-1])
        return (
            grad_input_gemm(grad_rows, weight, state).view(x.shape) if needs_x else None,
            grad_weight_gemm(grad_rows, x.reshape(-1, x.shape[-1]), state) if needs_weight else None,
            grad_rows.sum(0) if needs_bias else None,
            None,
        )


class SnipLinear(nn.Linear):
    """An `nn.Linear` whose three GEMMs run in the formats that its `snip_state` buffer names.

    Made by `convert_model` (or torchao's `quantize_` with `SnipLinearConfig`), never directly. Takes inputs of any
    number of dimensions, also empty ones; computes in the autocast dtype where autocast is on, else in the input's.
    """

    snip_state: Tensor
    snip_original_class: type[nn.Linear]
    snip_key: int
    """The layer's part of the key of its random numbers, of its name."""
    snip_recorder: Callable[[SnipLinear, Tensor], Tensor] | None
    """Set by the probe for the time of its passes: computes the layer's output instead."""
    snip_backend: str
    """"emulated" or "hopper"; the latter's kernels compute in BF16 only, other dtypes run emulated."""
    snip_device: str
    """Type of the device that the backend was chosen for; on another one the layer runs emulated."""
    snip_high: tuple[bool, bool, bool]
    """Which GEMMs run in BF16; for the "hopper" backend, where this is part of the compiled graph."""
    snip_tied: TiedInput | None
    """Shared with the tied layers that take the same input; None: the input is quantized for this layer alone."""
    snip_weights: tuple[Tensor, ...]
    """The weight as `keep_quantized` quantized it last; empty: every pass quantizes what it needs."""
    snip_weight_version: int
    """torch's count of the weight's changes at that time."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns input @ weight^T + bias; (..., I) -> (..., O)."""
        if self.snip_recorder is not None:
            return self.snip_recorder(self, input)
        x = input
        bias: Tensor | None = self.bias
        casts = torch.is_autocast_enabled(x.device.type)
        if casts:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        if self.snip_backend == "hopper" and x.dtype == torch.bfloat16 and x.device.type == self.snip_device:
            return self._on_hopper(input, x, bias)
        y: Tensor = _ThreeGemms.apply(x, self.weight.to(x.dtype) if casts else self.weight, bias, self.snip_state)
        return y

    def _on_hopper(self, input: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the output for x, which is `input` in BF16."""
        high = self.snip_high
        if all(high):
            return nn.functional.linear(x, self.weight.to(x.dtype), bias)
        keeps_x = torch.is_grad_enabled() and self.weight.requires_grad
        row_gemm, column_gemm = -1 if high[0] else 0, 2 if keeps_x and not high[2] else -1
        if self.snip_tied is None or self.snip_tied.parted:
            quantized = quantize_input(x, self.snip_state, row_gemm, column_gemm)
        else:
            quantized = self.snip_tied.quantized(input, x, self.snip_state, row_gemm, column_gemm)
        # Evaluation, and generation in training mode, may follow a change of the weights that nobody told of; a pass
        # that is trained on does not.
        is_kept = torch.compiler.is_compiling() or self.snip_weight_version == self.weight._version
        weights = self.snip_weights if self.training and torch.is_grad_enabled() and is_kept else ()
        y: Tensor = TensorCoreGemms.apply(x, self.weight, bias, self.snip_state, high, keeps_x, *quantized, *weights)
        return y

    @property
    def formats(self) -> dict[str, str]:
        """Returns GEMM -> format name, as in force now."""
        codes = self.snip_state[: len(GEMMS)].tolist()
        return {gemm: FORMAT_NAMES[code] for gemm, code in zip(GEMMS, codes, strict=True)}

    def set_formats(self, formats: Mapping[str, str]) -> None:
        """Writes GEMM -> format name for all three GEMMs.

        Raises:
            ValueError: a GEMM is missing or not known, or a format is not known.
        """
        if set(formats) != set(GEMMS):
            raise ValueError(f"Got formats for {sorted(formats)}; expected exactly {', '.join(GEMMS)}.")
        codes = [FORMAT_CODES[check_format(formats[gemm], gemm)] for gemm in GEMMS]
        self.snip_state[: len(GEMMS)] = torch.tensor(codes)
        self._note_formats(codes)

    def _note_formats(self, codes: Sequence[int]) -> None:
        """Keeps what Python has to know of the formats."""
        forward, grad_input, grad_weight = (FORMAT_NAMES[code] == "bf16" for code in codes)
        self.snip_high = (forward, grad_input, grad_weight)
        self.snip_weight_version = -1  # what is kept of the weight is in other formats
        if self.snip_tied is not None:
            self.snip_tied.note(id(self), (codes[0], codes[2]))

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy takes over: formats and key, but nothing that it would share with this layer's run."""
        own = {"snip_recorder": None, "snip_tied": None, "snip_weights": (), "snip_weight_version": -1}
        buffers = self._buffers | {STATE: self.snip_state.clone()}
        state: dict[str, Any] = super().__getstate__() | own | {"_buffers": buffers}
        return state

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, formats={'/'.join(self.formats.values())}"
