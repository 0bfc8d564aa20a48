"""The trial that a backend's kernels must pass on a device before a run, and the cache of trials that passed.

A trial compares encoded operands with the reference's bytes, and small products with the emulated ones. It takes
seconds, so a trial that passed is not repeated with the same versions on the same kind of GPU: the folder `snip_hf` of
torch's compiler cache (TORCHINDUCTOR_CACHE_DIR) holds an empty file for each. Failures are not cached, since their
cause may disappear.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import __version__
from ..numerics.formats import NumberFormat
from ..numerics.gemms import GEMMS
from ..numerics.random_streams import stream_key
from .backend import Backend
from .emulated import EMULATED

# T, I, O: not multiples of the sizes to which products and runs of scales are padded.
_SIZE = (296, 176, 208)
# Both results are BF16 of FP32 sums of the same products. Another format is at least 3% off, a wrong scale 100%.
TOLERANCE = 0.005
_MOST_TEXT = 200


@dataclass(frozen=True)
class Operands:
    """x (T, I), weight (O, I) and grad_output (T, O) in BF16, and a layer's state, on the device of a trial."""

    x: Tensor
    weight: Tensor
    grad_output: Tensor
    state: Tensor

    @property
    def by_name(self) -> dict[str, Tensor]:
        return {"activation": self.x, "weight": self.weight, "gradient": self.grad_output}


def operands(format: NumberFormat, device: torch.device, size: tuple[int, int, int] = _SIZE) -> Operands:
    """Returns random operands over many magnitudes, and a state in which all GEMMs have the format."""
    tokens, in_features, out_features = size
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        normal, magnitude = (torch.randn(shape, generator=generator, device="cpu") for _ in range(2))
        return (normal * torch.exp(magnitude)).to(device, torch.bfloat16)

    x, weight = random(tokens, in_features), random(out_features, in_features)
    grad_output = random(tokens, out_features)
    key = stream_key(1, 2, 3, 4, 1) % 2**63
    state = torch.tensor([*[format.code] * len(GEMMS), key, 0, 1], device=device)
    return Operands(x, weight, grad_output, state)


Products = Iterable[tuple[str, Tensor, Tensor]]
"""GEMM, its result, and the expected result."""


def products_of(backend: Backend, given: Operands) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields each GEMM of a backend with the emulated result from the CPU, which needs no compiled kernel."""
    arguments = given.x, given.weight, given.grad_output, given.state
    on_cpu = [tensor.cpu() for tensor in arguments]
    for gemm in GEMMS:
        yield gemm, backend.gemm_call(gemm, *arguments)(), EMULATED.gemm_call(gemm, *on_cpu)()


def fault_of(
    trial: str,
    format: NumberFormat,
    device: torch.device,
    encode: Callable[[bool | None], Mapping[str, Sequence[Tensor]]],
    products: Callable[[], Products],
) -> str | None:
    """Returns why a format's GEMMs fail on a device, None if they pass.

    Args:
        trial: names the kernels.
        format: the format.
        device: of the trial.
        encode: returns operand -> encoded tensors, by the device's kernels (None) or by the reference (False).
        products: yields the GEMMs.

    Raises:
        RuntimeError: the trial made the device unusable, so that emulation cannot run there either.
    """
    passed = passed_file(trial, format, device) if device.type == "cuda" else None
    if passed is not None and passed.exists():
        return None
    try:
        found = _difference(encode, products)
    except Exception as error:
        if is_lost(device):
            raise RuntimeError(
                f"The trial of the format {format.name!r} on {device} ended with {type(error).__name__}: "
                f"{str(error).splitlines()[0][:_MOST_TEXT]}. Nothing runs on this GPU until the process ends. Start "
                f"again with backend={EMULATED.name!r}, or with other formats."
            ) from error
        # The run continues without these kernels and logs this reason.
        found = f"{type(error).__name__}: {error}"
    if found is None and passed is not None:
        with suppress(OSError):  # the next run repeats the trial
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()
    return found and f"the trial of {format.name!r} failed: {found.splitlines()[0][:_MOST_TEXT]}"


def _difference(
    encode: Callable[[bool | None], Mapping[str, Sequence[Tensor]]], products: Callable[[], Products]
) -> str | None:
    others = differing(encode(None), encode(False))
    if others:
        return f"the kernel and the reference round differently ({', '.join(others)})"
    for gemm, result, wanted in products():
        error = deviation(result.cpu(), wanted.cpu())
        if not error < TOLERANCE:
            return f"{gemm} is {error:.2g} off the reference, expected less than {TOLERANCE}"
    return None


def differing(actual: Mapping[str, Sequence[Tensor]], expected: Mapping[str, Sequence[Tensor]]) -> list[str]:
    """Returns the operands whose tensors differ from the expected ones."""
    return [
        operand
        for operand, tensors in actual.items()
        if not all(torch.equal(a.float(), b.float()) for a, b in zip(tensors, expected[operand], strict=True))
    ]


def deviation(got: Tensor, expected: Tensor) -> float:
    """Returns the norm of a result's deviation, relative to the norm of the expected result."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def is_lost(device: torch.device) -> bool:
    """Returns True if the device is unusable until the process ends, as after some CUDA errors."""
    try:
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False


def passed_file(trial: str, format: NumberFormat, device: torch.device) -> Path:
    """Returns the file that exists once a trial has passed with these versions on this kind of GPU."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # importing the compiler takes a second

    triton = getattr(sys.modules.get("triton"), "__version__", None)
    gpu = torch.cuda.get_device_properties(device)
    key = __version__, torch.__version__, triton, gpu.name, gpu.major, gpu.minor, trial, format
    return Path(cache_dir(), "snip_hf", hashlib.sha256(repr(key).encode()).hexdigest())
