"""Which side, and which stage of it, gives NaN for a single token in bf16/mxfp4/ufp4 (`test_tensor_scaled_layers`)?

    python benchmarks/one_token.py

Runs the failing case and its neighbours on the backends "tensor-scaled" and "emulated", uncompiled and compiled, with
the allocator's memory as it is and filled with NaN before: a read of what nobody wrote shows then. Each stage of the
weight's gradient is looked at alone: the operands of both sides, against the reference on the CPU, and the products.
Prints a line per case and per stage that is wrong.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from snip_hf import SnipLinear, convert_model
from snip_hf.config import SnipConfig
from snip_hf.kernels.backend import BACKENDS
from snip_hf.kernels.products import multiply as emulated_product
from snip_hf.kernels.rounding import fake_quantize
from snip_hf.kernels.tensor_scaled import operators
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.kernels.tensor_scaled.records import Records, follow
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS

IN, OUT = 200, 136
BF16 = torch.bfloat16
FORMATS_OF_LAYERS = [("bf16", "mxfp4", "ufp4"), ("mxfp4", "mxfp4", "ufp4"), ("bf16", "mxfp4", "mxfp4"), ("mxfp4",) * 3]
KEY = 1234567891234


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--times", type=int, default=5, help="of each case")
    options = parser.parse_args()
    device = torch.device(options.device)
    wrong = 0
    for formats, tokens in itertools.product(FORMATS_OF_LAYERS, (1, 2, 5)):
        wrong += stages(formats[2], tokens, device)
        compiled = (False, True) if formats == FORMATS_OF_LAYERS[0] else (False,)
        for name, poisons, compiles in itertools.product((TENSOR_SCALED.name, "emulated"), (False, True), compiled):
            times = 1 if compiles else options.times
            bad = [layer(name, formats, tokens, device, poisons, compiles) for _ in range(times)]
            wrong += sum(map(bool, bad))
            case = f"{'/'.join(formats)} tokens={tokens} {name} poisoned={poisons} compiled={compiles}"
            print(f"{case}: {'; '.join(sorted(set(filter(None, bad)))) or 'finite'}", flush=True)
    print(f"{wrong} wrong")


def random(*shape: int, seed: int, device: torch.device) -> Tensor:
    """As the test's numbers: of two magnitudes, in turn."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return (x * torch.tensor([1.0, 8.0]).repeat(-(-shape[-1] // 2))[: shape[-1]]).to(device, BF16)


def poison(device: torch.device) -> None:
    """Fills the allocator's free memory, small blocks and large ones, with NaN."""
    sizes = [2**power for power in range(3, 22)] * 8
    held = [torch.full((size,), float("nan"), device=device) for size in sizes]
    del held


def layer(name: str, formats: tuple[str, ...], tokens: int, device: torch.device, poisons: bool, compiles: bool) -> str:
    """Returns what of a layer's results is not finite."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = nn.ModuleDict({"one": nn.Linear(IN, OUT, bias=False, dtype=BF16, device=device)})
    convert_model(nn.ModuleDict({"layers": nn.ModuleList([block])}), SnipConfig())
    one = block["one"]
    assert isinstance(one, SnipLinear)
    one.use_backend(BACKENDS[name])
    one.set_formats(dict(zip(GEMMS, formats, strict=True)))
    call: Callable[[Tensor], Tensor] = torch.compile(one) if compiles else one
    x = random(tokens, IN, seed=1, device=device).requires_grad_()
    if poisons:
        poison(device)
    y = call(x)
    if poisons:
        poison(device)
    y.backward(random(tokens, OUT, seed=9, device=device))
    assert x.grad is not None and one.weight.grad is not None
    results = {"y": y, "x's gradient": x.grad, "weight's gradient": one.weight.grad}
    return ", ".join(f"{what} {count(value)}" for what, value in results.items() if count(value))


def count(value: Tensor) -> str:
    """Returns how many numbers are not finite and where the first ones are, or nothing."""
    bad = ~value.detach().float().isfinite()
    places = bad.nonzero()[:3].tolist()
    return f"{int(bad.sum())} of {bad.numel()} at {places}" if bad.any() else ""


def stages(fmt: str, tokens: int, device: torch.device) -> int:
    """Looks at both sides' operands of grad_weight and their products; returns how many stages are wrong."""
    state = torch.tensor([FORMATS["bf16"].code, FORMATS["mxfp4"].code, FORMATS[fmt].code, KEY, 0, 1])
    x, g = random(tokens, IN, seed=1, device=device), random(tokens, OUT, seed=9, device=device)
    found: dict[str, str] = {}
    for known in (False, True):
        records = {at: Records.new(at) for at in {device, torch.device("cpu")}}
        for number, operand, gemms in ((0, x, (-1, 2)), (1, g, (1, 2)), (1, g, (-1, 2))):
            folded = {}
            for at, own in records.items():
                if known:
                    operators.folded(operand.to(at), state.to(at), own, number, gemms)
                    follow([own])
                poison(at)
                folded[at] = operators.folded(operand.to(at), state.to(at), own, number, gemms)
            parts = ("rows", "their scale", "columns", "theirs")
            for part, made, wanted in zip(parts, folded[device], folded[torch.device("cpu")], strict=True):
                if not torch.equal(made.float().cpu(), wanted.float()):
                    found[f"{'XG'[number]} {gemms} known={known} {part}"] = count(made) or "other bytes"
    of_g, of_x = fake_quantize(g, FORMATS[fmt], "gradient", 0, KEY), fake_quantize(x, FORMATS[fmt], "activation", 0)
    found |= {"emulated G": count(of_g), "emulated X": count(of_x)}
    exact = of_g.double().t() @ of_x.double()
    products: dict[str, Callable[[], Tensor]] = {
        "mm to FP32": lambda: emulated_product(of_g.t(), of_x, BF16, True),
        "mm in FP32": lambda: of_g.t() @ of_x,
        "mm in BF16": lambda: of_g.to(BF16).t() @ of_x.to(BF16),
    }
    own = Records.new(device)
    left = operators.folded(g, state.to(device), own, 1, (1, 2))[2:]
    right = operators.folded(x, state.to(device), own, 0, (-1, 2))[2:]
    for dtype in (BF16, torch.float32):
        products[f"scaled to {dtype}"] = partial(operators.multiply, "grad_weight", left, right, (OUT, IN), dtype)
    for name, product in products.items():
        poison(device)
        got = product()
        error = float((got.double() - exact).norm() / exact.norm())
        found[name] = count(got) or (f"{error:.2g} off" if not error < 5e-3 else "")
    wrong = {stage: text for stage, text in found.items() if text}
    for stage, text in wrong.items():
        print(f"  stage, {fmt} tokens={tokens}: {stage}: {text}", flush=True)
    return len(wrong)


if __name__ == "__main__":
    main()
