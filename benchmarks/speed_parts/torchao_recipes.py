"""torchao's FP8 trainings, which swap the same linears as snip-hf."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

BLOCKWISE = "torchao blockwise"


def in_block(module: nn.Module, name: str) -> bool:
    """The linears that snip-hf swaps: those in numbered blocks."""
    return isinstance(module, nn.Linear) and any(part.isdigit() for part in name.split("."))


def float8(recipe: str, model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=in_block, config=Float8LinearConfig.from_recipe_name(recipe))


def blockwise(model: nn.Module) -> None:
    from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinear, Float8BlockwiseLinearConfig
    from torchao.quantization import quantize_

    class UnderAutocast(Float8BlockwiseLinear):
        """As torchao's, which does not heed autocast: it would quantize, and keep, activations in FP32."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(torch.bfloat16))

    quantize_(model, Float8BlockwiseLinearConfig(), filter_fn=in_block)
    for module in model.modules():
        if type(module) is Float8BlockwiseLinear:
            module.__class__ = UnderAutocast


TORCHAO: dict[str, Callable[[nn.Module], None]] = {
    BLOCKWISE: blockwise,
    "torchao tensorwise": partial(float8, "tensorwise"),
    "torchao rowwise": partial(float8, "rowwise"),
}
