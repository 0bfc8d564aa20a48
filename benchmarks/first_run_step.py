"""The training step that `first_run.py` times: a stack of MLP blocks in one format."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from snip_hf import SnipConfig, convert_model
from snip_hf.kernels.blackwell.backend import BLACKWELL
from snip_hf.layers.state import set_step, snip_linears
from snip_hf.numerics.formats import FORMATS, UNQUANTIZED
from snip_hf.numerics.gemms import GEMMS

_WARM_UP, _TIMED = 4, 10


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
    """Puts all linears of the blocks into a format."""
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
    """Returns the median time of a step, and the loss after the last one.

    Args:
        name: of a format, or of one of torchao's `RECIPES`.
        device: a GPU; on a CPU, a step of a tiny model is run for its loss, and the time is 0.
        quick: a smaller model.
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
