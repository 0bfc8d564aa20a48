"""The backend "emulated", which runs anywhere: rounding in software, products in FP32, as custom operators.

Legend: T tokens, I in_features, O out_features; x (T, I), weight (O, I), grad_output (T, O). `state` is the layer's
int64 tensor of `STATE_SIZE` numbers on its device: the format codes of the three GEMMs (in the order of `gemms.GEMMS`);
the key of the random numbers that its output gradient is rounded with (`random_streams.stream_key`); the rank of this
process among those that share the batch, and how many they are (`random_streams.rank_stream`). Operators read it at run
time, so that a new plan or step is new data for the same code. A CUDA graph keeps the formats of its capture; with
`layers.state.KeysOnDevice` it draws by the keys of each replay.

Both operands are quantized along the contraction, multiplied and summed in FP32, and the result is cast to the
operands' dtype. On CUDA, BF16 calls in formats whose rounded values are BF16 numbers (`products.fits_bf16`) multiply
on BF16 tensor cores: the products are the same, the sums are FP32 too, in another order. In an unquantized format
(BF16, the compute dtype) the operators call exactly the aten functions that `nn.Linear` and its autograd call, so that
such a layer gives the same bits as an `nn.Linear`. `grouped.py` has the same operators for layers of several matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..numerics.formats import NumberFormat, format_of_code
from ..numerics.gemms import GEMMS
from .backend import Backend, GroupedLayer, Layer, register_backend
from .grouped import ThreeGroupedGemms
from .products import STATE_SIZE as STATE_SIZE
from .products import fits_bf16, is_differentiated_again, multiply
from .rounding import fake_quantize

# The operators read the state on the host, which a CUDA graph cannot: inductor leaves them out of one.
_READS_ON_THE_HOST = (torch.Tag.cudagraph_unsafe,)


@torch.library.custom_op("snip_hf::forward_gemm", mutates_args=(), tags=_READS_ON_THE_HOST)
def forward_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, key: Tensor | None = None) -> Tensor:
    """Returns x @ weight^T + bias, (..., O) for x (..., I), in x's dtype; the bias is added after the GEMM in FP32.

    Here and below, `key` is read in place of the state's, on the device.
    """
    fmt, stream = _read(state, "forward", key)
    if not fmt.is_quantized:
        # x as it came: aten adds the bias inside the GEMM or after it, depending on x's dimensions and strides.
        y = torch.nn.functional.linear(x, weight, bias)
    else:
        # (T, I) x (I, O): contracts I
        left = fake_quantize(x.reshape(-1, x.shape[-1]), fmt, "activation", 1)
        right = fake_quantize(weight, fmt, "weight", 1, *stream).t()
        y_fp32 = multiply(left, right, x.dtype, fits_bf16(fmt, "forward"))
        if bias is not None:
            y_fp32 += bias.to(torch.float32)
        y = y_fp32.to(x.dtype)
    # A view would be refused by autograd where a model adds to it in place (Falcon: `attention_output += ...`).
    result: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], weight.shape[0]])
    return result


@torch.library.custom_op("snip_hf::grad_input_gemm", mutates_args=(), tags=_READS_ON_THE_HOST)
def grad_input_gemm(grad_output: Tensor, weight: Tensor, state: Tensor, key: Tensor | None = None) -> Tensor:
    """Returns grad_output @ weight, (T, I), in grad_output's dtype."""
    fmt, stream = _read(state, "grad_input", key)
    if not fmt.is_quantized:
        return grad_output.mm(weight)
    # (T, O) x (O, I): contracts O
    left = fake_quantize(grad_output, fmt, "gradient", 1, *stream)
    right = fake_quantize(weight, fmt, "weight", 0, *stream)
    return multiply(left, right, grad_output.dtype, fits_bf16(fmt, "grad_input")).to(grad_output.dtype)


@torch.library.custom_op("snip_hf::grad_weight_gemm", mutates_args=(), tags=_READS_ON_THE_HOST)
def grad_weight_gemm(grad_output: Tensor, x: Tensor, state: Tensor, key: Tensor | None = None) -> Tensor:
    """Returns grad_output^T @ x, (O, I), in grad_output's dtype."""
    fmt, stream = _read(state, "grad_weight", key)
    if not fmt.is_quantized:
        return grad_output.t().mm(x)
    # (O, T) x (T, I): contracts T
    left = fake_quantize(grad_output, fmt, "gradient", 0, *stream).t()
    right = fake_quantize(x, fmt, "activation", 0)
    return multiply(left, right, grad_output.dtype, fits_bf16(fmt, "grad_weight")).to(grad_output.dtype)


@forward_gemm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, key: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@grad_input_gemm.register_fake
def _(grad_output: Tensor, weight: Tensor, state: Tensor, key: Tensor | None = None) -> Tensor:
    return grad_output.new_empty(grad_output.shape[0], weight.shape[1])


@grad_weight_gemm.register_fake
def _(grad_output: Tensor, x: Tensor, state: Tensor, key: Tensor | None = None) -> Tensor:
    return grad_output.new_empty(grad_output.shape[1], x.shape[1])


def _read(state: Tensor, gemm: str, on_device: Tensor | None) -> tuple[NumberFormat, tuple[int | Tensor, int, int]]:
    """Returns the format of `gemm`, and key, rank and ranks for what it draws: rounding of G, noise on the weight."""
    *codes, key, rank, ranks = state.tolist()
    return format_of_code(codes[GEMMS.index(gemm)]), (key % 2**64 if on_device is None else on_device, rank, ranks)


class _ThreeGemms(torch.autograd.Function):
    """Y = X W^T + b with the format of each GEMM read from `state`, and the key from `key`, if it is there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, key: Tensor | None) -> Tensor:
        # A copy, since the next forward pass may write the state before this one's backward pass reads it. Outside a
        # graph it is on the host, where the operators read it: so they wait for the device once and not once per GEMM.
        is_traced = torch.compiler.is_compiling()
        kept = state.clone() if is_traced else state.to("cpu", copy=True)
        state = state if is_traced else kept
        ctx.save_for_backward(x, weight, kept, key)
        y: Tensor = forward_gemm(x, weight, bias, state, key)
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, state, key = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_rows, rows = grad_output.reshape(-1, grad_output.shape[-1]), x.reshape(-1, x.shape[-1])
        if is_differentiated_again():  # in high precision: rounding has no derivative
            grad_x, grad_weight = grad_rows @ weight, grad_rows.t() @ rows
        else:
            grad_x = grad_input_gemm(grad_rows, weight, state, key) if needs_x else None
            grad_weight = grad_weight_gemm(grad_rows, rows, state, key) if needs_weight else None
        return (
            grad_x.view(x.shape) if needs_x else None,
            grad_weight if needs_weight else None,
            grad_rows.sum(0) if needs_bias else None,
            None,
            None,
        )


class KeyOnDevice(NamedTuple):
    """What `layers.state.KeysOnDevice` puts in a layer's cache."""

    key: Tensor
    """(1,), int64, on the weight's device: read in place of the state's."""


class Emulated(Backend):
    """Rounding in software, products in FP32, on any device that torch runs on."""

    name = "emulated"
    is_emulation = True
    runs_groups = True
    arithmetic = "emulated: values were rounded in software, products were computed in higher precision (no speed-up)"

    def lacks(self, device: torch.device) -> str | None:
        return None

    def runs(self, format: NumberFormat) -> bool:
        return True

    def forward(self, layer: Layer, input: Tensor, x: Tensor, bias: Tensor | None, casts: bool) -> Tensor:
        weight, cache = layer.matrix, layer.snip_cache
        key = cache.key if type(cache) is KeyOnDevice else None  # another backend's cache says nothing here
        y: Tensor = _ThreeGemms.apply(x, weight.to(x.dtype) if casts else weight, bias, layer.snip_state, key)
        return y

    def grouped_forward(self, layer: GroupedLayer, x: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
        weight = layer.stacked.to(x.dtype)
        y: Tensor = ThreeGroupedGemms.apply(x, weight, bias, ends, layer.snip_state, layer.is_transposed)
        return y

    def gemm_call(
        self, gemm: str, x: Tensor, weight: Tensor, grad_output: Tensor, state: Tensor
    ) -> Callable[[], Tensor]:
        return {
            "forward": lambda: forward_gemm(x, weight, None, state),
            "grad_input": lambda: grad_input_gemm(grad_output, weight, state),
            "grad_weight": lambda: grad_weight_gemm(grad_output, x, state),
        }[gemm]

    def notice(self, weight: Tensor, mixed_precision: str | None, asked: bool) -> tuple[bool, str]:
        return False, "the numerics of the formats, slower than BF16"


EMULATED = register_backend(Emulated())
