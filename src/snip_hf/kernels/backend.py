"""The interface of backends, which run the three GEMMs of a layer, and the choice of one for a device.

Backends are entries of the registry `BACKENDS`, the fastest first. Layers, the controller and the configuration know
none of them by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..numerics.formats import FORMATS, NumberFormat
from ..registry import Registry


class Layer(Protocol):
    """What a backend sees of a layer; `layers.layer.SnipLayer` is one."""

    weight: Any
    """The parameter as the model stores it, perhaps transposed or sharded; `matrix` is what is multiplied with."""
    bias: Any
    training: bool
    snip_state: Tensor
    snip_backend: Backend
    snip_cache: Any
    """The backend's own; None until it is put there."""

    @property
    def matrix(self) -> Tensor: ...

    @property
    def formats(self) -> dict[str, str]: ...

    def set_formats(self, formats: Mapping[str, str]) -> None: ...


class GroupedLayer(Protocol):
    """What a backend sees of a layer of several matrices, such as a projection of experts."""

    training: bool
    snip_state: Tensor
    snip_cache: Any
    num_matrices: int
    out_features: int
    in_features: int
    """Of each matrix; right also where the weight is sharded or not loaded."""
    is_transposed: bool
    """Whether the weight is stored as (E, I, O)."""

    @property
    def weight(self) -> Any:
        """The parameter as the model stores it."""

    @property
    def stacked(self) -> Tensor:
        """The matrices (E, O, I): the weight itself or a view of it."""


class Backend(ABC):
    """Runs GEMMs. One object per backend, without state of its own: what belongs to a layer is `layer.snip_cache`."""

    name: ClassVar[str]
    arithmetic: ClassVar[str] = "kernels of the user's own"
    """How the products are computed, for readers of a model card."""
    is_emulation: ClassVar[bool] = False
    """Whether it is slower than the compute dtype's own GEMMs."""
    recompiles_for_bf16: ClassVar[bool] = False
    """Whether torch.compile compiles a layer again when a GEMM of it changes to or from no quantization."""
    runs_groups: ClassVar[bool] = False
    """Whether it has `grouped_forward`. Where it has not, the emulated backend runs layers of several matrices."""
    runs_gates: ClassVar[bool] = False
    """Whether it has `gated_forward`. Where it has not, each layer of a gated MLP runs by itself."""
    measured_speeds: ClassVar[Mapping[int, float]] = {}
    """Hidden size -> speed of training, in that of compiled BF16, for the log. The smallest size is the least at which
    the backend pays. Empty: nothing was measured."""

    @abstractmethod
    def lacks(self, device: torch.device) -> str | None:
        """Returns what keeps the backend from running on a device, None if nothing does."""

    @abstractmethod
    def runs(self, format: NumberFormat) -> bool:
        """Returns True if its kernels know this format."""

    def fails(self, format: NumberFormat, device: torch.device) -> str | None:
        """Returns what a trial of a format on a device finds wrong, None if nothing; asked where nothing is lacking."""
        return None

    @abstractmethod
    def forward(self, layer: Layer, input: Tensor, x: Tensor, bias: Tensor | None, casts: bool) -> Tensor:
        """Returns x @ matrix^T + bias, (..., O), differentiable, each GEMM in the format that the layer's state names.

        Args:
            layer: gives the weight as a matrix (O, I), and the state.
            input: (..., I), as the layer got it.
            x: `input` in the compute dtype.
            bias: in the compute dtype, or None.
            casts: whether autocast is on, so that the weight is to be cast to the compute dtype.
        """

    def grouped_forward(self, layer: GroupedLayer, x: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        """Returns x @ matrix^T + bias of the matrix that each token belongs to, (S, O), differentiable, as `forward`.

        Called only where `runs_groups` is True.

        Args:
            layer: gives the matrices, which are to be cast to x's dtype, and the state. Each matrix is rounded with
                its tokens as a layer of its own would be, with the keys `random_streams.matrix_keys`.
            x: (S, I), in the compute dtype, sorted by matrix.
            bias: (E, O), in the compute dtype, or None.
            ends: matrix -> where its tokens end among the rows of x, (E,), int64. Rows behind the last end belong to
                none; their results and gradients are zero.
        """
        raise NotImplementedError(f"The backend {self.name!r} does not run layers of several matrices.")

    def refuses_groups(self, layer: GroupedLayer) -> str | None:
        """Returns why a layer of several matrices is to run emulated instead, None if nothing keeps it from running
        here; asked where `runs_groups` is True."""
        return None

    def gated_forward(self, layers: Sequence[Layer], input: Tensor) -> Tensor | None:
        """Returns down(silu(gate(input)) * up(input)), differentiable; None where the layers have to run one by one.

        Called only where `runs_gates` is True, and only while torch.compile traces the module.

        Args:
            layers: gate, up and down.
            input: (..., I), as their module got it.
        """
        raise NotImplementedError(f"The backend {self.name!r} does not run gated MLPs as one.")

    @abstractmethod
    def gemm_call(
        self, gemm: str, x: Tensor, weight: Tensor, grad_output: Tensor, state: Tensor
    ) -> Callable[[], Tensor]:
        """Returns a function that runs one GEMM as training does, with the quantization of activations and gradients.

        Args:
            gemm: one of `gemms.GEMMS`.
            x: (T, I).
            weight: (O, I).
            grad_output: (T, O).
            state: of a layer; its format of this GEMM must stay the same between calls.
        """

    def attach(self, layer: Layer) -> None:
        """Prepares a layer that is about to run here."""
        layer.snip_cache = None

    def cache_of_copy(self, layer: Layer) -> Any:
        """Returns what a copy of the layer takes over of its cache: nothing that it would share with the layer."""
        return None

    def note_formats(self, layer: Layer, formats: Sequence[NumberFormat]) -> None:
        """Takes notice of the formats of a layer's three GEMMs, whenever they are set."""

    def share_inputs(self, layers: Mapping[str, Layer], groups: Sequence[Sequence[str]]) -> None:
        """Is told which layers take the same input."""

    def before_pass(self, layers: Mapping[str, Layer], everything: bool) -> None:
        """Is told, in steps of several micro-batches, that a training pass is about to run.

        Args:
            layers: those that run here.
            everything: False: weights have not changed since the last call, as far as is known.
        """

    def after_step(self, layers: Mapping[str, Layer]) -> None:
        """Is told that an optimizer step is done."""

    def release(self, layers: Mapping[str, Layer]) -> None:
        """Lets go of all that a run has kept for these layers."""

    def state_dict(self, layers: Mapping[str, Layer]) -> dict[str, Any]:
        """Returns what passes depend on beside the weights and formats, as JSON data; {} if there is nothing."""
        return {}

    def load_state_dict(self, layers: Mapping[str, Layer], state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`, {} where a run begins anew.

        Raises:
            ValueError: it cannot be read; the message names the layer.
        """

    def figures(self, layers: Mapping[str, Layer]) -> Mapping[str, float]:
        """Returns what the history and trackers show of the passes since the last call of `findings`, by name; {} if
        nothing is counted.

        It may wait for the device. `findings` is called next.
        """
        return {}

    def findings(self, layers: Mapping[str, Layer]) -> tuple[bool, str] | None:
        """Returns whether to warn, and what a run should be told of the passes since the last call; None: nothing.

        It may wait for the device.
        """
        return None

    def notice(self, weight: Tensor, mixed_precision: str | None, asked: bool) -> tuple[bool, str]:
        """Returns whether to warn, and what to say at the start of a run.

        Args:
            weight: of a layer.
            mixed_precision: of the launcher, None if it is not known.
            asked: whether the user named this backend.
        """
        return False, "its own kernels."

    # Layers are copied and pickled with their model; the backend stays the one of this process.
    def __deepcopy__(self, memo: dict[int, Any]) -> Backend:
        return self

    def __reduce__(self) -> tuple[Callable[[str], Backend], tuple[str]]:
        return backend_named, (self.name,)


BACKENDS: Registry[Backend] = Registry("backend")


def register_backend(backend: Backend) -> Backend:
    """Adds a backend, which `SnipConfig.backend` may then name. Returns it."""
    return BACKENDS.register(backend)


def backend_named(name: str) -> Backend:
    return BACKENDS[name]


def select_backend(requested: str, device: torch.device | str, formats: Sequence[str] = ()) -> Backend:
    """Returns the backend that runs for `SnipConfig.backend` on a device: with "auto" the first that can.

    Args:
        requested: "auto" or the name of a backend.
        device: of the model.
        formats: names of the run's formats.

    Raises:
        ValueError: the named backend cannot run there, or does not know one of the formats.
    """
    device = torch.device(device)
    if requested == "auto":
        able = [backend for backend in BACKENDS.values() if _cannot(backend, device, formats) is None]
        # An emulation that is registered later must not take the place of real kernels.
        return min(able, key=lambda backend: backend.is_emulation)
    reason = _cannot(BACKENDS[BACKENDS.checked(requested, "backend")], device, formats)
    if reason is not None:
        others = [f"{other.name!r}" for other in BACKENDS.values() if _cannot(other, device, formats) is None]
        raise ValueError(
            f"backend={requested!r} cannot run: {reason}. Use backend='auto' or {' or '.join(others)} (same numerics, "
            "slower than BF16)."
        )
    return BACKENDS[requested]


def why_emulated(device: torch.device, formats: Sequence[str]) -> str | None:
    """Returns what keeps a device from running formats by kernels of its own; None where nothing does.

    The reason is that of the first backend whose device it is, best one with kernels for the formats; or else of the
    first that has kernels for them.
    """
    others = [backend for backend in BACKENDS.values() if not backend.is_emulation]
    quantized = [name for name in formats if FORMATS[name].is_quantized]
    able = [backend for backend in others if all(backend.runs(FORMATS[name]) for name in quantized)]
    suited = [backend for backend in others if backend.lacks(device) is None]
    if not able and not suited:
        return f"no other backend has kernels for {', '.join(quantized)} together"
    both = [backend for backend in suited if backend in able]
    reasons = [_cannot(backend, device, formats) for backend in both or suited or able]
    return None if None in reasons else reasons[0]


def _cannot(backend: Backend, device: torch.device, formats: Sequence[str]) -> str | None:
    lacks = backend.lacks(device)
    if lacks is not None:
        return lacks
    quantized = [FORMATS[name] for name in formats if FORMATS[name].is_quantized]
    unknown = [format.name for format in quantized if not backend.runs(format)]
    if unknown:
        return f"its kernels do not know the format {unknown[0]!r}"
    return next((fault for format in quantized if (fault := backend.fails(format, device))), None)
