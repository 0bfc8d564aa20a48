"""`SnipLayer`, what a swapped layer of any kind offers to the run, the estimate and the kernels.

Legend: T tokens, I in_features, O out_features. A swapped layer is one entry of plans and tables. It multiplies its
input with a weight as a matrix (O, I), and so runs three GEMMs. What it needs to know at run time (its formats and the
key of its random numbers) lives in one small non-persistent buffer that `PrecisionPlan.apply` and the controller write.

Two layouts of a weight meet here. The model's parameter, its gradient, its shards and the optimizer's state all have
the layout in which the model stores them, and stay in it. Samples, random directions, errors and GEMMs have the layout
(O, I). `matrices` and `laid_out` lead from one to the other, and nothing else in snip-hf knows how a kind of layer
stores its weight.

A module may have several layers, and a parameter several matrices. Experts need both: their module holds parameters
(E, O, I) or (E, I, O) and no modules of their own. Each such parameter is one layer, and so one entry of a plan.
`LayerKind.swap` makes it a child of the module, in a container that `state.plain_name` leaves out of names. Plans then
call it by the parameter's name, which `weight_name` returns as it is. (A child of the parameter's own name would be
thrown out by whoever assigns the parameter, as `load_state_dict(assign=True)` does.) Its `matrices` are E, in the same
formats. Its sample holds the rows of all of them, one matrix's after the other's (`Dispatch`). The estimate adds the
errors of all rows of a token, in whichever matrices they are, before it takes squares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..kernels.backend import Backend
from ..kernels.emulated import EMULATED
from ..numerics.formats import FORMATS, UNQUANTIZED, check_format, format_of_code
from ..numerics.gemms import GEMMS

STATE = "snip_state"
KEY = len(GEMMS)
# Number of the output gradient among the operands that a random stream can be for. Both GEMMs that read it round it
# with the same random numbers: what one adds to the layers before, and the other to the own weight's gradient.
GRAD_OUTPUT = 1


class Dispatch(NamedTuple):
    """Which matrix of a layer each row of its input meets, and which token it is."""

    ends: Tensor
    """Matrix -> where its rows end, (E,), int64: first come the rows of the first matrix, then those of the second.
    Rows behind the last end belong to none; what the layer makes of them is 0."""
    token: Tensor
    """Row -> its token among those that the layer's module was given, (T,), int64; ascending within a matrix. A token
    that goes to k matrices has k rows."""
    tokens: int
    """How many tokens the module was given."""

    def matrix(self) -> Tensor:
        """Returns row -> its matrix, (T,); E for a row behind the last end, which belongs to none."""
        return torch.searchsorted(self.ends, torch.arange(len(self.token), device=self.ends.device), right=True)


class ForwardRecorder(Protocol):
    """Computes a layer's output in the place of its backend, and notes what it likes."""

    def __call__(self, layer: SnipLayer, input: Tensor, dispatch: Dispatch | None) -> Tensor:
        """Returns input @ weight^T + bias; (..., I) -> (..., O).

        Args:
            layer: the layer.
            input: what it multiplies; of a layer of several matrices (T, I).
            dispatch: what goes to which matrix; None: the layer has one.
        """


class SnipLayer(nn.Module):
    """A module whose three GEMMs run in the formats that its `snip_state` buffer names.

    Made by `convert_model` (or torchao's `quantize_` with `SnipLinearConfig`), never directly. Runs the forward of the
    class that it was until it gets formats. Takes inputs of any number of dimensions, also empty ones; computes in the
    autocast dtype where autocast is on, else in the input's. A kind of layer derives its class from this one and from
    the class that it swaps.
    """

    in_features: int
    """I of each matrix. An attribute or a property, right also where the weight is sharded or not loaded."""
    out_features: int
    """O of each matrix."""
    weight: Any
    """The parameter as the model stores it and the optimizer trains it. Frozen, it has no gradient."""
    bias: Any
    """(O,) or None."""
    snip_state: Tensor
    snip_original_class: type[nn.Module]
    snip_key: int
    """The layer's part of the key of its random numbers, of its name."""
    snip_is_plain: bool
    """Whether the layer computes exactly as before the swap: no run owns it, and nobody has asked for formats."""
    snip_recorder: ForwardRecorder | None
    """Set by the probe for the time of its passes: computes the layer's output instead."""
    snip_backend: Backend
    """Runs the three GEMMs."""
    snip_cache: Any
    """What the backend keeps of the layer."""

    def matrices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Returns the matrices (O, I) of a tensor that is laid out as the weight: the weight itself, or a gradient."""
        return (tensor,)

    def laid_out(self, matrices: Sequence[Tensor]) -> Tensor:
        """Returns the tensor whose `matrices` these are, laid out as the weight."""
        (matrix,) = matrices
        return matrix

    @property
    def matrix(self) -> Tensor:
        """Returns the weight (O, I) that kernels multiply with.

        Raises:
            ValueError: the weight holds several matrices.
        """
        matrices = self.matrices(self.weight)
        if len(matrices) != 1:
            raise ValueError(
                f"{type(self).__name__} has a weight of {len(matrices)} matrices; expected one. A class whose weight "
                "holds several must run them in a forward of its own."
            )
        return matrices[0]

    @property
    def rows_per_token(self) -> float:
        """How many rows of the layer's input a token of the batch has, in all its matrices together."""
        return 1.0

    @property
    def holder(self) -> tuple[nn.Module, str]:
        """The module that holds the weight, and the weight's name there."""
        return self, "weight"

    def weight_name(self, name: str) -> str:
        """Returns the name of the parameter of the layer that plans call `name`."""
        return f"{name}.weight"

    def forward(self, input: Tensor) -> Tensor:
        """Returns input @ weight^T + bias; (..., I) -> (..., O)."""
        if self.snip_recorder is not None:
            return self.snip_recorder(self, input, None)
        if self.snip_is_plain:
            y: Tensor = self.snip_original_class.forward(self, input)
            return y
        x = input
        bias: Tensor | None = self.bias
        casts = torch.is_autocast_enabled(x.device.type)
        if casts:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        return self.snip_backend.forward(self, input, x, bias, casts)

    @property
    def formats(self) -> dict[str, str]:
        """Returns GEMM -> format name, as in force now."""
        codes = self.snip_state[: len(GEMMS)].tolist()
        return {gemm: format_of_code(code).name for gemm, code in zip(GEMMS, codes, strict=True)}

    def set_formats(self, formats: Mapping[str, str]) -> None:
        """Writes GEMM -> format name for all three GEMMs, which run in these formats from now on.

        Raises:
            ValueError: a GEMM is missing or not known, or a format is not known, here or by the layer's backend.
        """
        if set(formats) != set(GEMMS):
            raise ValueError(f"Got formats for {sorted(formats)}; expected exactly {', '.join(GEMMS)}.")
        chosen = [FORMATS[check_format(formats[gemm], gemm)] for gemm in GEMMS]
        for format in chosen:
            if format.is_quantized and not self.snip_backend.runs(format):
                raise ValueError(
                    f"The backend {self.snip_backend.name!r} has no kernels for the format {format.name!r}. Name the "
                    "format in SnipConfig.formats, so that a backend is chosen that has."
                )
        self.snip_state[: len(GEMMS)] = torch.tensor([format.code for format in chosen])
        self.snip_backend.note_formats(self, chosen)
        self.snip_is_plain = False

    def compute_plainly(self) -> None:
        """Lets the layer compute exactly as before the swap, until it gets formats (`set_formats`)."""
        self.snip_state[: len(GEMMS)] = UNQUANTIZED.code
        self.snip_is_plain = True

    def refused_by(self, backend: Backend) -> str | None:
        """Returns why the emulated backend runs the layer in the place of another one, None if that one runs it."""
        return None

    def use_backend(self, backend: Backend) -> None:
        """Lets these kernels run the layer from now on, with what formats it has, or the emulated ones where
        `refused_by` says why not."""
        self.snip_backend = backend if self.refused_by(backend) is None else EMULATED
        self.snip_backend.attach(self)

    def restore(self) -> None:
        """Undoes `LayerKind.swap`: the module is again of the class that it was."""
        del self._buffers[STATE]
        self._non_persistent_buffers_set.discard(STATE)
        original_class = self.snip_original_class
        del self.snip_original_class, self.snip_key, self.snip_recorder, self.snip_backend, self.snip_cache
        del self.snip_is_plain
        self.__class__ = original_class  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy takes over: formats and key, but nothing that it would share with this layer's run."""
        own = {"snip_recorder": None, "snip_cache": self.snip_backend.cache_of_copy(self)}
        own_state = {STATE: self.snip_state.clone()} if STATE in self._buffers else {}
        buffers = {**self._buffers, **own_state}
        state: dict[str, Any] = super().__getstate__() | own | {"_buffers": buffers}
        return state

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, formats={'/'.join(self.formats.values())}"
