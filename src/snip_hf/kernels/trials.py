"""What trials of backends share: operands, tolerance, messages, and a cache of the trials that passed.

A trial takes seconds, so one that passed is not repeated with the same versions on the same kind of GPU. Torch's
compiler cache (TORCHINDUCTOR_CACHE_DIR) holds an empty file for each; delete its folder `snip_hf` to repeat them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .. import __version__
from ..numerics.formats import NumberFormat
from ..numerics.gemms import GEMMS
from ..numerics.random_streams import stream_key
from .emulated import EMULATED

# T, I, O: ragged in what products and runs of scales are multiples of.
_SIZE = (296, 176, 208)
# Both results are BF16 of FP32 sums of the same products. The next format's are 3% off, a wrong scale's 100%.
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


def deviation(got: Tensor, expected: Tensor) -> float:
    """Returns the norm of a result's deviation, relative to that of what is expected."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def is_lost(device: torch.device) -> bool:
    """Returns True if nothing can run on a device until the process ends, as is so after some CUDA errors."""
    try:
        torch.zeros(1, device=device).item()
    except torch.OutOfMemoryError:
        return False
    except RuntimeError:
        return True
    return False


def passed_file(trial: str, format: NumberFormat, device: torch.device) -> Path:
    """Returns the file that exists once a trial has passed with these versions on this kind of GPU."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # Importing the compiler takes a second.

    triton = getattr(sys.modules.get("triton"), "__version__", None)
    gpu = torch.cuda.get_device_properties(device)
    key = __version__, torch.__version__, triton, gpu.name, gpu.major, gpu.minor, trial, format
    return Path(cache_dir(), "snip_hf", hashlib.sha256(repr(key).encode()).hexdigest())


def fault_of(
    trial: str,
    format: NumberFormat,
    device: torch.device,
    other_bytes: Callable[[], list[str]],
    errors: Callable[[], Iterable[tuple[str, float]]],
) -> str | None:
    """Returns what is wrong with a format's GEMMs, None if nothing is.

    Failures are not cached: what caused one may be gone the next time.

    Args:
        trial: name of the trial's module.
        format: the format.
        device: of the trial.
        other_bytes: returns the operands that the device's kernel quantizes to other bytes than the reference.
        errors: yields each GEMM with its deviation.

    Raises:
        RuntimeError: the trial has left the device unusable, so that emulation would not run there either.
    """
    passed = passed_file(trial, format, device) if device.type == "cuda" else None
    if passed is not None and passed.exists():
        return None
    try:
        others = other_bytes()
        found = f"the kernel rounds otherwise than the reference ({', '.join(others)})" if others else None
        for gemm, error in () if others else errors():
            if not error < TOLERANCE:
                found = f"{gemm} is {error:.2g} off the reference, expected less than {TOLERANCE}"
                break
    except Exception as error:
        if is_lost(device):
            raise RuntimeError(
                f"The trial of the format {format.name!r} on {device} ended with {type(error).__name__}: "
                f"{str(error).splitlines()[0][:_MOST_TEXT]}. Nothing runs on this GPU until the process ends. Start "
                f"again with backend={EMULATED.name!r}, or with other formats."
            ) from error
        # A run goes on without these kernels; whatever keeps them from running is said.
        found = f"{type(error).__name__}: {error}"
    if found is None and passed is not None:
        with suppress(OSError):  # The next run repeats the trial.
            passed.parent.mkdir(parents=True, exist_ok=True)
            passed.touch()
    return found and f"the trial of {format.name!r} failed: {found.splitlines()[0][:_MOST_TEXT]}"
