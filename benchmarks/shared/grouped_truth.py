"""The measured weight divergence of many layers, GEMMs and formats, of several micro-batches in one pass.

`snip_hf.estimation.ground_truth` runs one pass per micro-batch and reads each result at once, which takes minutes for a
few formats. Here all micro-batches go through the model together. What is quantized is quantized as if each were alone:
blocks lie within a micro-batch, and formats with a scale of the whole tensor are applied to each by itself. So the
figures are those of `ground_truth` but for the random numbers, which differ between micro-batches here.

Legend: B micro-batches, T tokens of one, I in_features, O out_features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from snip_hf.estimation.divergence import weights_of
from snip_hf.estimation.pending import LAYER
from snip_hf.kernels.emulated import forward_gemm, grad_input_gemm
from snip_hf.kernels.rounding import fake_quantize
from snip_hf.layers.layer import SnipLayer
from snip_hf.layers.state import set_step, snip_linears
from snip_hf.numerics.formats import FORMATS, UNQUANTIZED
from snip_hf.numerics.gemms import GEMMS
from snip_hf.optimizers.response import AnalyticResponse, Response, responses

# (layer, row, format)
Cell = tuple[str, str, str]
UNQUANTIZED_GEMMS = dict.fromkeys(GEMMS, UNQUANTIZED.name)


class GroupedTruth:
    """Measures cells on a converted, unquantized FP32 model without dropout, whose layers' states are on the CPU."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Mapping[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        seed: int = 0,
    ) -> None:
        self._model, self._count = model, len(batches)
        layers = snip_linears(model)
        self._inputs = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
        self._layers = {name: _Layer(layer, len(batches)) for name, layer in layers.items()}
        self._answers = responses(optimizer, weights_of(layers))
        set_step(layers, seed, 0, 0)

    def squares(self, cells: Sequence[Cell]) -> Tensor:
        """Returns the squared weight divergence of each cell and micro-batch, (cells, B), FP64 on the CPU."""
        with self._grouped():
            base = self._gradients()
            updates = {name: self._of_each(name, "update", gradient) for name, gradient in base.items()}
            weighed = {
                name: self._of_each(name, "meaningful", gradient) / self._layers[name].layer.weight.norm()
                for name, gradient in base.items()
            }
            found = []
            for layer, row, fmt in cells:
                gemms = GEMMS if row == LAYER else (row,)
                self._layers[layer].layer.set_formats({**UNQUANTIZED_GEMMS, **dict.fromkeys(gemms, fmt)})
                gradients = self._gradients()
                self._layers[layer].layer.set_formats(UNQUANTIZED_GEMMS)
                moved = [
                    (self._of_each(name, "update", gradients[name]) - updates[name]) * weighed[name] for name in updates
                ]
                found.append(torch.stack([part.square().sum((1, 2)) for part in moved]).sum(0))
            return torch.stack(found).to("cpu", torch.float64)

    @contextmanager
    def _grouped(self) -> Iterator[None]:
        """Lets the layers compute gradients per micro-batch, and no other parameter get one."""
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        embedding = self._model.get_input_embeddings()  # type: ignore[operator]
        handle = embedding.register_forward_hook(lambda module, args, output: output.detach().requires_grad_())
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            for layer in self._layers.values():
                layer.layer.forward = layer.forward  # type: ignore[method-assign]
            yield
        finally:
            handle.remove()
            for layer in self._layers.values():
                del layer.layer.forward
            for parameter in trained:
                parameter.requires_grad_(True)

    def _gradients(self) -> dict[str, Tensor]:
        """Runs one pass, and returns every weight's gradient of each micro-batch's mean loss, (B, O, I)."""
        # The mean over all tokens is the mean of the micro-batches' means, since all have as many.
        (self._model(**self._inputs).loss * self._count).backward()
        return {name: layer.taken() for name, layer in self._layers.items()}

    def _of_each(self, name: str, method: str, gradient: Tensor) -> Tensor:
        """Returns what a method of the optimizer's response gives for each micro-batch's gradient, (B, O, I)."""
        answer: Response = self._answers[name]
        call: Callable[[Tensor], Tensor] = getattr(answer, method)
        return call(gradient) if isinstance(answer, AnalyticResponse) else torch.func.vmap(call)(gradient)


class _Layer:
    """One layer: its products for all micro-batches, and its weight's gradient for each."""

    def __init__(self, layer: SnipLayer, count: int) -> None:
        self.layer, self._count = layer, count
        self._gradient: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Products.apply(x.reshape(-1, x.shape[-1]), self)
        return y.view(*x.shape[:-1], -1)

    def taken(self) -> Tensor:
        """Returns the gradient of the last pass, and forgets it."""
        gradient, self._gradient = self._gradient, None
        assert gradient is not None
        return gradient

    def product(self, x: Tensor) -> Tensor:
        """Returns x W^T + b, (B T, O)."""
        weight, bias, state = self.layer.weight, self.layer.bias, self.layer.snip_state
        return torch.cat([forward_gemm(part, weight, bias, state) for part in self._parts(x, "forward")])

    def grad_input(self, grad_output: Tensor) -> Tensor:
        """Returns G W, (B T, I)."""
        weight, state = self.layer.weight, self.layer.snip_state
        return torch.cat([grad_input_gemm(part, weight, state) for part in self._parts(grad_output, "grad_input")])

    def keep_grad_weight(self, grad_output: Tensor, x: Tensor) -> None:
        """Keeps G^T X of each micro-batch, (B, O, I)."""
        fmt = FORMATS[self.layer.formats["grad_weight"]]
        *_, key, rank, ranks = self.layer.snip_state.tolist()
        left, right = grad_output, x
        if fmt.is_quantized:
            stream = (key % 2**64, rank, ranks)
            parts = self._parts(grad_output, "grad_weight")
            left = torch.cat([fake_quantize(part, fmt, "gradient", 0, *stream) for part in parts])
            parts = self._parts(x, "grad_weight")
            right = torch.cat([fake_quantize(part, fmt, "activation", 0) for part in parts])
        left, right = (each.view(self._count, -1, each.shape[-1]) for each in (left, right))
        # (B, O, T) x (B, T, I)
        self._gradient = left.transpose(1, 2) @ right

    def _parts(self, rows: Tensor, gemm: str) -> Sequence[Tensor]:
        """Returns what is to be quantized together: one micro-batch, or all where no scale spans more than blocks."""
        return rows.chunk(self._count) if FORMATS[self.layer.formats[gemm]].has_tensor_scale else (rows,)


class _Products(torch.autograd.Function):
    """The three products of a layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _Layer) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        grad_output = grad_output.contiguous()
        ctx.layer.keep_grad_weight(grad_output, x)
        return ctx.layer.grad_input(grad_output), None
