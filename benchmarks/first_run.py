"""Checks and times the kernels for Blackwell on this machine, and prints one block to paste into an issue.

    python benchmarks/first_run.py
    python benchmarks/first_run.py --formats nvfp4 mxfp8 --quick
    python benchmarks/first_run.py --device cpu

The Blackwell backend was written without a Blackwell GPU. If you have one, please run this script and paste the block
that it prints at the end into an issue. It needs a GPU of compute capability 10.x or 12.x, torch for CUDA 12.8 or
newer, and Triton; it takes a few minutes and about 20 GiB of GPU memory (--quick: 4 GiB). Its parts:

checks    per format: the kernel's bytes against the reference's, and the three GEMMs against the emulated backend
products  the three GEMMs without quantization, against BF16
kernels   quantization of an operand, against the time to copy its bytes
steps     whole training steps of a small model, compiled, against BF16 and torchao

A failure becomes a line with its error, and the rest continues. After some CUDA errors the GPU is unusable until the
process ends; the block then says so and lists the skipped parts. Exit codes: 0 if all checks pass; 1 if one fails or
the machine lacks something, which is then named. With --device cpu the script checks itself: products multiply the
values that the packed bytes encode, and nothing is timed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from shared.lines import origin_of
from torch import Tensor, nn

from snip_hf import SnipConfig, convert_model
from snip_hf.kernels.blackwell import operators, packing
from snip_hf.kernels.blackwell.backend import BLACKWELL, encoded
from snip_hf.kernels.blackwell.quantization import quantize
from snip_hf.kernels.trials import TOLERANCE, deviation, differing, is_lost, operands, products_of
from snip_hf.layers.state import set_step, snip_linears
from snip_hf.numerics.formats import FORMATS, UNQUANTIZED
from snip_hf.numerics.gemms import CONTRACTIONS, GEMMS

_WARM_UP, _TIMED = 4, 10
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
    """The GPU is unusable until the process ends. Its text is the line of the last failure."""


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
    """Prints the lines of a part one by one and adds them to the block."""
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
    """Returns the missing requirement of a device; None if there is none, as on a CPU."""
    return None if device.type == "cpu" else BLACKWELL.lacks(device)


def described(options: argparse.Namespace) -> list[str]:
    """Returns lines with the machine and the versions."""
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
    """Returns a function that times a call on a GPU, with an empty cache."""
    from triton.testing import do_bench

    def clock(call: Callable[[], Any]) -> float:
        with torch.cuda.device(device):
            return float(do_bench(call, warmup=10, rep=60, return_mode="median"))

    return clock


def line_of(label: str, measure: Callable[[], str], device: torch.device) -> str:
    """Returns a line with the measurement or its error.

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
    """Yields the product of each GEMM, on operands that are already quantized."""
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
    """Yields the time to quantize an operand, relative to the time to copy its bytes."""
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


# ------------------------------------------------------------------------------------------------ a training step


class Block(nn.Module):
    """A Llama's MLP with its norm."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        z: Tensor = x + self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))
        return z


class Stack(nn.Module):
    def __init__(self, blocks: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden, intermediate) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def in_format(name: str, model: nn.Module) -> None:
    """Lets all linears of the blocks compute in a format."""
    if name == UNQUANTIZED.name:
        return
    convert_model(model, SnipConfig(backend="emulated"))
    layers = snip_linears(model)
    set_step(layers, 0, 0, 0)
    for layer in layers.values():
        layer.set_formats(dict.fromkeys(GEMMS, name))
        if layer.weight.is_cuda:
            layer.use_backend(BLACKWELL)


def _tensorwise(model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name("tensorwise"))


def _nvfp4(model: nn.Module) -> None:
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig
    from torchao.quantization import quantize_

    quantize_(model, NVFP4TrainingConfig(), filter_fn=lambda module, name: isinstance(module, nn.Linear))


RECIPES: dict[str, Callable[[nn.Module], None]] = {"torchao tensorwise": _tensorwise, "torchao nvfp4": _nvfp4}


def milliseconds_per_step(name: str, device: torch.device, quick: bool) -> tuple[float, float]:
    """Returns the median milliseconds of a step, and the loss after the last one.

    Args:
        name: a format, or one of torchao's `RECIPES`.
        device: a GPU; on a CPU a step of a tiny model gives its loss, and the time is 0.
        quick: use a smaller model.
    """
    is_cuda = device.type == "cuda"
    blocks, hidden, intermediate, tokens = (2, 64, 96, 40) if not is_cuda else (4, 4096, 14336, 16384)
    if is_cuda and quick:
        blocks, hidden, intermediate, tokens = 4, 2048, 5632, 8192
    torch.manual_seed(0)
    with torch.device(device):
        model = Stack(blocks, hidden, intermediate)
        x, target = torch.randn(2, 1, tokens, hidden)
    RECIPES.get(name, partial(in_format, name) if name in FORMATS else _unknown)(model)
    if is_cuda:
        torch.compiler.reset()
        for layer in model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=is_cuda)
    marks, loss = [], torch.zeros(())
    for _ in range(_WARM_UP + _TIMED if is_cuda else 2):
        if is_cuda:
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = float(loss.detach())  # waits for the GPU
    times = [first.elapsed_time(last) for first, last in zip(marks[_WARM_UP:-1], marks[_WARM_UP + 1 :], strict=True)]
    del model, optimizer, x, target, loss
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
    return statistics.median(times) if times else 0.0, found


def _unknown(model: nn.Module) -> None:
    raise ValueError("expected the name of a format or of a recipe")


if __name__ == "__main__":
    sys.exit(main())
