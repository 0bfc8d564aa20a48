"""The interface of backends, which run the three GEMMs of a layer, and the choice of one for a device.

Backends are entries of the registry `BACKENDS`, the fastest first. Layers, the controller and the configuration know
none of them by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..numerics.formats import FORMATS, NumberFormat
from ..registry import Registry


class Layer(Protocol):
    """A layer as backends see it, such as `layers.layer.SnipLayer`."""

    weight: Any
    """The parameter as the model stores it, perhaps transposed or sharded; GEMMs use `matrix`."""
    bias: Any
    training: bool
    in_features: int
    """Size of each matrix; valid even if the weight is sharded or not loaded."""
    out_features: int
    num_matrices: int
    """Number of matrices, such as experts, each with tokens of its own; 0: one matrix multiplies all tokens."""
    snip_state: Tensor
    snip_backend: Backend
    snip_cache: Any
    """Belongs to the backend; None until the backend sets it."""

    @property
    def matrix(self) -> Tensor:
        """The weight (O, I), or (E, O, I) for several matrices, then in memory perhaps as (E, I, O)."""

    @property
    def formats(self) -> dict[str, str]: ...

    def set_formats(self, formats: Mapping[str, str]) -> None: ...


class Backend(ABC):
    """Runs GEMMs. One stateless object per backend: `layer.snip_cache` holds the state of a layer."""

    name: ClassVar[str]
    arithmetic: ClassVar[str] = "kernels of the user's own"
    """Describes the products in model cards."""
    is_emulation: ClassVar[bool] = False
    """True if it is slower than GEMMs in the compute dtype."""
    recompiles_for_bf16: ClassVar[bool] = False
    """True if a layer recompiles when one of its GEMMs changes between quantized and not."""
    runs_gates: ClassVar[bool] = False
    """True if it has `gated_forward`. Otherwise the layers of a gated MLP run one by one."""
    measured_speeds: ClassVar[Mapping[int, tuple[float, float]]] = {}
    """Hidden size -> lowest and highest speed of training, over hosts, relative to compiled BF16. Below the smallest
    size the backend gains nothing. Empty: not measured."""
    adapter_speeds: ClassVar[Mapping[int, tuple[float, float]]] = {}
    """The same with adapters on frozen weights."""
    sharded_speeds: ClassVar[Mapping[int, tuple[float, float]]] = {}
    """The same under FSDP2."""
    layer_speeds: ClassVar[Mapping[int, Mapping[int, float]]] = {}
    """Hidden size -> tokens -> speed of one decoder layer relative to compiled BF16, around the size where it begins to
    pay. Empty: not measured."""

    @abstractmethod
    def lacks(self, device: torch.device) -> str | None:
        """Returns why the backend cannot run on a device, None if it can."""

    @abstractmethod
    def runs(self, format: NumberFormat) -> bool:
        """Returns True if its kernels support this format."""

    def fails(self, format: NumberFormat, device: torch.device) -> str | None:
        """Returns why a format's trial on a device fails, None if it passes. Called only if `lacks` returns None."""
        return None

    def refuses(self, layer: Layer) -> str | None:
        """Returns why a layer must run emulated, None if it can run here. By default those of several matrices must."""
        return f"backend {self.name} runs no grouped products" if layer.num_matrices else None

    @abstractmethod
    def forward(self, layer: Layer, input: Tensor, x: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        """Returns x @ matrix^T + bias, (..., O), differentiable, each GEMM in its format from the layer's state.

        Args:
            layer: gives the weight as `matrix`, and the state. Cast the weight to x's dtype if autocast is on.
            input: (..., I), as the layer received it.
            x: `input` in the compute dtype.
            bias: in the compute dtype, or None; (E, O) for several matrices.
            ends: of several matrices: matrix -> end of its tokens among the rows of x, (E,), int64. Tokens are then
                sorted by matrix, x is (S, I), and rows after the last end belong to no matrix: their results and
                gradients are zero. Each matrix and its tokens are rounded as a separate layer would be, with the keys
                `random_streams.matrix_keys`. None: one matrix.
        """

    def gated_forward(self, layers: Sequence[Layer], input: Tensor) -> Tensor | None:
        """Returns down(silu(gate(input)) * up(input)), differentiable; None if the layers must run one by one.

        Called only if `runs_gates` is True, while torch.compile traces the module.

        Args:
            layers: gate, up and down.
            input: (..., I), as their module received it.
        """
        raise NotImplementedError(f"The backend {self.name!r} does not run gated MLPs as one.")

    @abstractmethod
    def gemm_call(
        self, gemm: str, x: Tensor, weight: Tensor, grad_output: Tensor, state: Tensor
    ) -> Callable[[], Tensor]:
        """Returns a function that runs one GEMM as in training, with the quantization of activations and gradients.

        Args:
            gemm: one of `gemms.GEMMS`.
            x: (T, I).
            weight: (O, I).
            grad_output: (T, O).
            state: of a layer; the format of this GEMM must not change between calls.
        """

    def attach(self, layer: Layer) -> None:
        """Prepares a layer to run on this backend."""
        layer.snip_cache = None

    def cache_of_copy(self, layer: Layer) -> Any:
        """Returns the cache for a copy of the layer, which shares nothing with this one."""
        return None

    def note_formats(self, layer: Layer, formats: Sequence[NumberFormat]) -> None:
        """Called whenever the formats of a layer's three GEMMs are set."""

    def share_inputs(self, layers: Mapping[str, Layer], groups: Sequence[Sequence[str]]) -> None:
        """Receives the groups of layers that have the same input."""

    def before_pass(self, layers: Mapping[str, Layer], everything: bool) -> None:
        """Called before each training pass, in steps of several micro-batches.

        Args:
            layers: those on this backend.
            everything: False leaves out layers whose weight has not changed since the last call as far as torch knows
                (it misses changes by fused optimizers and through `weight.data`).
        """

    def after_step(self, layers: Mapping[str, Layer]) -> None:
        """Called after each optimizer step."""

    def release(self, layers: Mapping[str, Layer]) -> None:
        """Drops everything that a run kept for these layers."""

    def state_dict(self, layers: Mapping[str, Layer]) -> dict[str, Any]:
        """Returns the state besides weights and formats that results depend on, as JSON data; {} if there is none."""
        return {}

    def load_state_dict(self, layers: Mapping[str, Layer], state: Mapping[str, Any]) -> None:
        """Restores a `state_dict`; {} starts a new run.

        Raises:
            ValueError: an entry is invalid; the message names the layer.
        """

    def counters(self, layers: Mapping[str, Layer]) -> Mapping[str, float]:
        """Returns name -> number for the history and trackers, over the passes since the last call of `findings`; {} if
        nothing is counted.

        May wait for the device. The caller calls `findings` next.
        """
        return {}

    def findings(self, layers: Mapping[str, Layer]) -> tuple[bool, str] | None:
        """Returns a message about the passes since the last call, preceded by True for a warning; None: no message.

        May wait for the device.
        """
        return None

    def notice(self, weight: Tensor, mixed_precision: str | None, asked: bool) -> tuple[bool, str]:
        """Returns the message at the start of a run, preceded by True for a warning.

        Args:
            weight: of a layer.
            mixed_precision: of the launcher, None if unknown.
            asked: True if the user named this backend.
        """
        return False, "its own kernels."

    # Copies and pickles of layers refer to the backend by name.
    def __reduce__(self) -> tuple[Callable[[str], Backend], tuple[str]]:
        return backend_named, (self.name,)


BACKENDS: Registry[Backend] = Registry("backend")


def register_backend(backend: Backend) -> Backend:
    """Registers a backend under its name for `SnipConfig.backend`, and returns it."""
    return BACKENDS.register(backend)


def backend_named(name: str) -> Backend:
    return BACKENDS[name]


def select_backend(requested: str, device: torch.device | str, formats: Sequence[str] = ()) -> Backend:
    """Returns the backend for `SnipConfig.backend` on a device; "auto" takes the first that can run.

    Args:
        requested: "auto" or the name of a backend.
        device: of the model.
        formats: names of the run's formats.

    Raises:
        ValueError: the named backend cannot run there, or does not support one of the formats.
    """
    device = torch.device(device)
    if requested == "auto":
        able = [backend for backend in BACKENDS.values() if _cannot(backend, device, formats) is None]
        # An emulation that is registered later must not displace real kernels.
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
    """Returns why a device cannot run formats on real kernels; None if it can.

    Explains the closest match: device and formats, else device, else formats.
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


def missing_for_kernels(
    device: torch.device,
    expected: str,
    is_able: Callable[[tuple[int, int]], bool],
    oldest_cuda: tuple[int, int] = (0, 0),
) -> str | None:
    """Returns why Triton kernels and FP8 products cannot run on a device, None if they can.

    Args:
        device: of the model.
        expected: the compute capabilities that can, for the message.
        is_able: returns True for such a capability.
        oldest_cuda: that torch must be built for.
    """
    expected = f"expected a CUDA device of compute capability {expected}"
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"the model is on {device.type!r}, {expected}"
    if torch.version.cuda is None:
        return "torch is not built for CUDA"
    major, minor = torch.cuda.get_device_capability(device)
    if not is_able((major, minor)):
        return f"the GPU has compute capability {major}.{minor}, {expected}"
    if tuple(int(part) for part in torch.version.cuda.split(".")[:2]) < oldest_cuda:
        return f"torch is built for CUDA {torch.version.cuda}, expected at least {'.'.join(map(str, oldest_cuda))}"
    return "the package triton is not installed" if find_spec("triton") is None else None


def not_in_bf16(cores: str, formats: str, weight: Tensor, mixed_precision: str | None) -> tuple[bool, str] | None:
    """Returns the warning of a backend that needs BF16 if the model computes in another dtype; else None."""
    if weight.dtype == torch.bfloat16 or mixed_precision in (None, "bf16"):
        return None
    return True, (
        f"the GPU has {cores} tensor cores, but the model does not compute in BF16 (mixed_precision="
        f"{mixed_precision!r}, {weight.dtype} weights): {formats} are emulated, slower than BF16. Train with bf16=True."
    )


def _cannot(backend: Backend, device: torch.device, formats: Sequence[str]) -> str | None:
    lacks = backend.lacks(device)
    if lacks is not None:
        return lacks
    quantized = [FORMATS[name] for name in formats if FORMATS[name].is_quantized]
    unknown = [format.name for format in quantized if not backend.runs(format)]
    if unknown:
        return f"its kernels do not know the format {unknown[0]!r}"
    return next((fault for format in quantized if (fault := backend.fails(format, device))), None)
