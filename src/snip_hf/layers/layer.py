"""`SnipLayer`: the interface of a swapped layer of any kind to the run, the estimate and the kernels.

Legend: T tokens, I in_features, O out_features. A swapped layer is one entry of plans and tables. It multiplies its
input with a weight matrix (O, I), and so runs three GEMMs. Its formats and the key of its random numbers live in one
small non-persistent buffer that `PrecisionPlan.apply` and the controller write.

A weight has two layouts. The parameter, its gradient, its shards and the optimizer's state keep the layout in which the
model stores them. Samples, random directions, errors and GEMMs have the layout (O, I). `matrices` and `laid_out`
convert between the two; nothing else in snip-hf knows how a kind of layer stores its weight.

A module may have several layers, and a parameter several matrices. Experts (`experts`) need both: each of their
module's parameters is one layer, with one entry of a plan and E `matrices` in the same formats. A layer's sample holds
the rows of all matrices, one after the other (`Dispatch`). The estimate adds the errors of all rows of a token before
it squares them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..kernels.backend import Backend
from ..kernels.emulated import EMULATED
from ..numerics.formats import FORMATS, UNQUANTIZED, check_format, format_of_code
from ..numerics.gemms import GEMMS
from ..parallel.tensor_parallel import change_class

STATE = "snip_state"
KEY = len(GEMMS)
# Index of the output gradient among the operands with random streams. grad_input and grad_weight round it with the same
# random numbers.
GRAD_OUTPUT = 1


class Dispatch(NamedTuple):
    """Assigns the rows of a layer's input to its matrices and to tokens."""

    ends: Tensor
    """Matrix -> index behind its last row, (E,), int64; rows are sorted by matrix. Rows behind the last end belong to
    no matrix, and their output is 0."""
    token: Tensor
    """Row -> index of its token in the module's input, (T,), int64; ascending within a matrix. A token that goes to k
    matrices has k rows."""
    tokens: int
    """Number of tokens in the module's input."""

    def matrix(self) -> Tensor:
        """Returns row -> its matrix, (T,); E for a row behind the last end, which belongs to none."""
        return torch.searchsorted(self.ends, torch.arange(len(self.token), device=self.ends.device), right=True)


ForwardRecorder = Callable[["SnipLayer", Tensor, "Dispatch | None"], Tensor]
"""(Layer, input, dispatch) -> the output, as `SnipLayer.forward`; computed in place of the backend, and recorded."""


class SnipLayer(nn.Module):
    """A module whose three GEMMs run in the formats that its `snip_state` buffer names.

    Made by `convert_model` (or torchao's `quantize_` with `SnipLinearConfig`), never directly. Runs the forward of its
    original class until it gets formats. Accepts inputs of any number of dimensions, also empty ones. Computes in the
    autocast dtype under autocast, else in the input's dtype. A kind of layer derives its class from this one and from
    the class that it swaps.
    """

    in_features: int
    """I of each matrix. An attribute or a property; correct also if the weight is sharded or not loaded."""
    out_features: int
    """O of each matrix."""
    num_matrices: int = 0
    """Number of matrices, each with rows of its own (`Dispatch`); 0: one matrix multiplies all rows."""
    weight: Any
    """The parameter as the model stores it and the optimizer trains it. Frozen, it has no gradient."""
    bias: Any
    """(O,) or None; (E, O) for several matrices."""
    snip_state: Tensor
    snip_original_class: type[nn.Module]
    snip_key: int
    """The layer's part of the key of its random numbers: a hash of its name."""
    snip_is_plain: bool
    """True if the layer computes exactly as before the swap: no run owns it, and no formats were requested."""
    snip_recorder: ForwardRecorder | None
    """Set by the probe during its passes; computes the layer's output instead of the backend."""
    snip_backend: Backend
    """Runs the three GEMMs."""
    snip_cache: Any
    """The backend's own data on the layer."""

    def matrices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Returns the matrices (O, I) of a tensor in the weight's layout: the weight itself, or a gradient."""
        return (tensor,)

    def laid_out(self, matrices: Sequence[Tensor]) -> Tensor:
        """The inverse of `matrices`: returns one tensor in the weight's layout."""
        (matrix,) = matrices
        return matrix

    @property
    def matrix(self) -> Tensor:
        """The weight (O, I) that kernels multiply with, if it holds one matrix."""
        (matrix,) = self.matrices(self.weight)
        return matrix

    @property
    def rows_per_token(self) -> float:
        """Rows of the layer's input per token of the batch, over all matrices."""
        return 1.0

    @property
    def holder(self) -> tuple[nn.Module, str]:
        """The module that holds the parameter, and the parameter's name there."""
        return self, "weight"

    def weight_name(self, name: str) -> str:
        """Returns the full name of the parameter; plans call the layer `name`."""
        return f"{name}.weight"

    def forward(self, input: Tensor, dispatch: Dispatch | None = None) -> Tensor:
        """Returns input @ weight^T + bias; (..., I) -> (..., O).

        Args:
            input: (..., I); (T, I), sorted by matrix, for a layer of several matrices.
            dispatch: assigns rows to matrices; None: the layer has one matrix.
        """
        if self.snip_recorder is not None:
            return self.snip_recorder(self, input, dispatch)
        if self.snip_is_plain and dispatch is None:
            return self.snip_original_class.forward(self, input)
        x = input
        bias: Tensor | None = self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
        return self.snip_backend.forward(self, input, x, bias, None if dispatch is None else dispatch.ends)

    @property
    def formats(self) -> dict[str, str]:
        """GEMM -> name of the format in force."""
        codes = self.snip_state[: len(GEMMS)].tolist()
        return {gemm: format_of_code(code).name for gemm, code in zip(GEMMS, codes, strict=True)}

    def set_formats(self, formats: Mapping[str, str]) -> None:
        """Sets GEMM -> format name for all three GEMMs.

        Raises:
            ValueError: a GEMM is missing or unknown, or a format is unknown, here or to the layer's backend.
        """
        if set(formats) != set(GEMMS):
            raise ValueError(f"Got formats for {sorted(formats)}; expected exactly {', '.join(GEMMS)}.")
        chosen = [FORMATS[check_format(formats[gemm], gemm)] for gemm in GEMMS]
        for format in chosen:
            if format.is_quantized and not self.snip_backend.runs(format):
                raise ValueError(
                    f"The backend {self.snip_backend.name!r} has no kernels for the format {format.name!r}. Name the "
                    "format in SnipConfig.formats, so that a backend with kernels for it is chosen."
                )
        self.snip_state[: len(GEMMS)] = torch.tensor([format.code for format in chosen])
        self.snip_backend.note_formats(self, chosen)
        self.snip_is_plain = False

    def compute_plainly(self) -> None:
        """Makes the layer compute exactly as before the swap, until `set_formats`."""
        self.snip_state[: len(GEMMS)] = UNQUANTIZED.code
        self.snip_is_plain = True

    def use_backend(self, backend: Backend) -> None:
        """Runs the layer on a backend from now on, in its present formats; on the emulated one if it refuses."""
        self.snip_backend = backend if backend.refuses(self) is None else EMULATED
        self.snip_backend.attach(self)

    def restore(self) -> None:
        """Undoes `LayerKind.swap`: the module gets its original class back."""
        del self._buffers[STATE]
        self._non_persistent_buffers_set.discard(STATE)
        original_class = self.snip_original_class
        del self.snip_original_class, self.snip_key, self.snip_recorder, self.snip_backend, self.snip_cache
        del self.snip_is_plain
        change_class(self, original_class, takes_parts=False)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state of a copy: formats and key, but nothing that belongs to this layer's run."""
        own = {"snip_recorder": None, "snip_cache": self.snip_backend.cache_of_copy(self)}
        own_state = {STATE: self.snip_state.clone()} if STATE in self._buffers else {}
        buffers = {**self._buffers, **own_state}
        return super().__getstate__() | own | {"_buffers": buffers}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, formats={'/'.join(self.formats.values())}"
