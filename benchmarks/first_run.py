"""Do the kernels for Blackwell work on this machine, and how fast are they? Prints one block for a report.

    python benchmarks/first_run.py
    python benchmarks/first_run.py --formats nvfp4 mxfp8 --quick
    python benchmarks/first_run.py --device cpu

snip-hf's backend for Blackwell was written without one. Whoever has one starts this script, and pastes the block that
it prints last into an issue. It needs a GPU of compute capability 10.x or 12.x, torch for CUDA 12.8 or newer, and
Triton; it takes a few minutes, and about 20 GiB of the GPU's memory (--quick: 4 GiB). In parts:

checks    per format: the kernel's bytes against the reference's, and the three GEMMs against the emulated backend
products  the three GEMMs without quantization, against BF16's
kernels   quantization of an operand, against the time that its bytes take at the copy rate
steps     whole training steps of a small model, compiled, against BF16 and torchao

What fails is a line with its error, and the rest goes on. After some CUDA errors nothing runs until the process ends:
then the block says so, and what was left to do. Exit codes: 0 if all checks pass; 1 if one does not, or if
the machine lacks something, which is then named. On a CPU the products multiply what the packed bytes stand for, and
nothing is timed: that checks the script.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from first_run_step import RECIPES, milliseconds_per_step
from shared.lines import origin_of
from torch import Tensor

from snip_hf.kernels.blackwell import operators, packing
from snip_hf.kernels.blackwell.backend import BLACKWELL, encoded
from snip_hf.kernels.blackwell.quantization import quantize
from snip_hf.kernels.trials import TOLERANCE, deviation, differing, is_lost, operands, products_of
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import CONTRACTIONS, GEMMS

# O x I of linears: the two of an 8B model's MLP, and a square one.
LINEARS = [(14336, 4096), (4096, 14336), (4096, 4096)]
Clock = Callable[[Callable[[], Any]], float]
"""Call -> milliseconds."""
Part = Callable[[argparse.Namespace, torch.device], Iterator[str]]
LOST = (
    "THE GPU IS LOST: after the last error above nothing runs on it until the process ends, so the rest was not run. "
    "Start again without the format that failed (--formats)."
)


class GpuIsLost(Exception):
    """Nothing runs on the GPU until the process ends. Has the line of what failed last."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the block; returns the exit code."""
    options = parse(arguments)
    device = torch.device(options.device)
    missing = missing_of(device)
    if missing:
        print(f"This script cannot run here: {missing}. It needs a Blackwell GPU, torch for CUDA 12.8+ and Triton.")
        print("With --device cpu it checks itself: the same bytes, products on the CPU, no times.")
        return 1
    about, lines, passed = described(options), [], False
    try:
        passed = checks(options.formats, device, lines)
        for part in (products, kernels, steps) if device.type == "cuda" else ():
            lines.append("")
            run_part(part, options, device, lines)
    except GpuIsLost as error:
        lines += [str(error), "", LOST]
        passed = False
    print("\n".join(["", "```", *about, "", *lines, "```"]))
    return 0 if passed else 1


def run_part(part: Part, options: argparse.Namespace, device: torch.device, lines: list[str]) -> None:
    """Prints the lines of a part as they come, and adds them to the block."""
    try:
        for line in part(options, device):
            print(line, flush=True)
            lines.append(line)
    except GpuIsLost:
        raise
    except Exception as error:
        ended = f"{part.__name__} ended: {told(error)}"
        if is_lost(device):
            raise GpuIsLost(ended) from error
        lines.append(ended)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [name for name, format in FORMATS.items() if packing.kind_of(format)]
    parser.add_argument("--formats", nargs="+", choices=known, default=known, metavar="FORMAT", help=", ".join(known))
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--tokens", type=int, help="of products and kernels (default 16384; quick 4096)")
    parser.add_argument("--quick", action="store_true", help="one linear, a smaller model")
    options = parser.parse_args(arguments)
    options.tokens = options.tokens or (4096 if options.quick else 16384)
    options.linears = LINEARS[2:] if options.quick else LINEARS
    return options


def missing_of(device: torch.device) -> str | None:
    """Returns what a device lacks; a CPU, asked for, lacks nothing."""
    return None if device.type == "cpu" else BLACKWELL.lacks(device)


def described(options: argparse.Namespace) -> list[str]:
    """Returns the lines on machine and versions."""
    source = origin_of(options.device)
    packages = {}
    for name in ("triton", "torchao", "snip-hf", "mslk", "fbgemm-gpu-genai"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "-"
    lines = [f"snip-hf first_run, commit {source['commit']}", f"{source['machine']}, torch {source['torch']}"]
    if torch.device(options.device).type == "cuda":
        major, minor = torch.cuda.get_device_capability(options.device)
        memory = torch.cuda.get_device_properties(options.device).total_memory / 2**30
        lines.append(f"compute capability {major}.{minor}, {memory:.0f} GiB, CUDA {torch.version.cuda}")
    return [*lines, ", ".join(f"{name} {found}" for name, found in packages.items()), source["command"]]


def checks(formats: Sequence[str], device: torch.device, lines: list[str]) -> bool:
    """Adds a line per format, and returns whether all are right."""
    lines.append(f"checks ({', '.join(GEMMS)}: distance from the emulated GEMM, at most {TOLERANCE})")
    passed = True
    for name in formats:
        try:
            format = FORMATS[name]
            others = differing(encoded(format, device), encoded(format, device, by_kernel=False))
            products = products_of(BLACKWELL, operands(format, device))
            found = {gemm: deviation(got.cpu(), expected) for gemm, got, expected in products}
            is_right = not others and all(error < TOLERANCE for error in found.values())
            bytes_are = f"differ: {', '.join(others)}" if others else "equal"
            text = f"bytes {bytes_are}; " + ", ".join(f"{error:.1e}" for error in found.values())
        except Exception as error:
            is_right, text = False, told(error)
            if is_lost(device):
                raise GpuIsLost(f"{name:14} WRONG  {text}") from error
        passed &= is_right
        lines.append(f"{name:14} {'ok' if is_right else 'WRONG'}  {text}")
    return passed


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def clock_of(device: torch.device) -> Clock:
    """Returns what times a call on a GPU, its cache emptied before each."""
    from triton.testing import do_bench

    def clock(call: Callable[[], Any]) -> float:
        with torch.cuda.device(device):
            return float(do_bench(call, warmup=10, rep=60, return_mode="median"))

    return clock


def line_of(label: str, measure: Callable[[], str], device: torch.device) -> str:
    """Returns a line with what was measured, or with the error.

    Raises:
        GpuIsLost: after this error nothing else can be measured.
    """
    try:
        return f"{label} {measure()}"
    except Exception as error:
        line = f"{label} {told(error)}"
        if is_lost(device):
            raise GpuIsLost(line) from error
        return line


def products(options: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Yields TFLOP/s of the three GEMMs."""
    clock = clock_of(device)
    yield f"products, TFLOP/s of {', '.join(GEMMS)}; {options.tokens} tokens"
    for out_features, in_features in options.linears:
        size = (options.tokens, in_features, out_features)
        flops = 2 * size[0] * size[1] * size[2]
        for name in ["bf16", *options.formats]:

            def measure(name: str = name, size: tuple[int, int, int] = size, flops: int = flops) -> str:
                rates = [flops / clock(call) / 1e9 for call in gemm_calls(name, size, device)]
                return " / ".join(f"{rate:.0f}" for rate in rates)

            yield line_of(f"{out_features:5} x {in_features:5} {name:14}", measure, device)


def gemm_calls(name: str, size: tuple[int, int, int], device: torch.device) -> Iterator[Callable[[], Tensor]]:
    """Yields the product of each GEMM, of operands that are quantized already."""
    format = FORMATS[name]
    given = operands(format, device, size)
    tensors = {"activation": given.x, "weight": given.weight, "gradient": given.grad_output}
    for (left, left_contracts), (right, right_contracts) in CONTRACTIONS.values():
        if not format.is_quantized:
            a = tensors[left] if left_contracts == 1 else tensors[left].t()
            b = tensors[right] if right_contracts == 0 else tensors[right].t()
            yield lambda a=a, b=b: a @ b  # type: ignore[misc]
            continue
        packed = [
            quantize(tensors[operand], format, operand, contracts, given.state)
            for operand, contracts in ((left, left_contracts), (right, right_contracts))
        ]
        yield lambda packed=packed: operators.multiply(*packed, torch.bfloat16)  # type: ignore[misc]


def kernels(options: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Yields how many times as long as its bytes an operand takes."""
    clock, channels = clock_of(device), 4096
    x = torch.randn(options.tokens, channels, device=device, dtype=torch.bfloat16)
    copy = torch.empty_like(x)
    rate = 2 * x.numel() * x.element_size() / clock(lambda: copy.copy_(x))  # bytes per millisecond
    amax = clock(lambda: torch.aminmax(x))
    yield (
        f"kernels, {options.tokens} x {channels}, with the tensor's amax ({amax:.3f} ms); in brackets over the time of "
        f"the bytes at {rate / 1e9:.2f} TB/s"
    )
    for name in options.formats:
        format = FORMATS[name]
        state = operands(format, device, (16, 16, 16)).state
        for operand in ("activation", "gradient", "weight"):

            def measure(format: Any = format, operand: str = operand, state: Tensor = state) -> str:
                found = []
                for contracts in (1, 0):
                    packed = quantize(x, format, operand, contracts, state)
                    taken = clock(lambda contracts=contracts: quantize(x, format, operand, contracts, state))
                    bound = (x.numel() * x.element_size() + packed.buffer.numel()) / rate
                    found.append(f"{taken:.3f} ms ({taken / bound:.1f})")
                return "rows {}, columns {}".format(*found)

            yield line_of(f"{name:14} {operand:10}", measure, device)


def steps(options: argparse.Namespace, device: torch.device) -> Iterator[str]:
    """Yields milliseconds per training step."""
    yield "steps, ms: AdamW, BF16 autocast over FP32 masters, blocks compiled; the loss after the last step"
    base = 0.0
    for name in ["bf16", *options.formats, *RECIPES]:

        def measure(name: str = name) -> str:
            nonlocal base
            taken, loss = milliseconds_per_step(name, device, options.quick)
            if name == "bf16":
                base = taken
            speed = f"{base / taken:.3f} times BF16's speed" if base else "BF16 failed, so no ratio"
            return f"{taken:.1f} ({speed}), loss {loss:.4f}"

        yield line_of(f"{name:20}", measure, device)


if __name__ == "__main__":
    sys.exit(main())
