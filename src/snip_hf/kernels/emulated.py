"""The backend "emulated", which runs anywhere: rounding in software, products in FP32, as custom operators.

Legend: T tokens, I in_features, O out_features, E matrices; x (T, I), weight (O, I), grad_output (T, O).

`state` is the layer's int64 tensor of `STATE_SIZE` numbers on its device: the format codes of the three GEMMs (in the
order of `gemms.GEMMS`); the key of the random numbers that round its output gradient (`random_streams.stream_key`); the
rank of this process among those that share the batch, and their number (`random_streams.rank_stream`). Operators read
it at run time, so that a new plan or step is new data for the same code.

A layer of several matrices has a weight (E, O, I) and `ends` (E,): tokens are sorted by matrix, and those of matrix e
are rows ends[e - 1] to ends[e] - 1. Rows after the last end belong to no matrix and give zeros. Each matrix gives bit
for bit the result of a layer with that matrix and its tokens, and has its own key (`random_streams.matrix_keys`).
Without `ends`, there is one matrix (O, I) for all tokens.

Both operands are quantized along the contraction, multiplied and summed in FP32, and the result is cast to the
operands' dtype. On CUDA, BF16 calls in formats whose rounded values are BF16 numbers (`fits_bf16`) multiply on BF16
tensor cores: the products are the same, the sums are FP32 too, in another order. In an unquantized format (BF16, the
compute dtype) the operators call exactly the aten functions that `nn.Linear` and its autograd call, so that such a
layer gives the same bits as an `nn.Linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..numerics.formats import UNQUANTIZED, NumberFormat, format_of_code
from ..numerics.gemms import CONTRACTIONS, GEMMS, gemm_of
from ..numerics.random_streams import matrix_keys
from .backend import Backend, Layer, register_backend
from .linear import Gradients, is_transposed, linear_function
from .rounding import fake_quantize

STATE_SIZE = len(GEMMS) + 3
_BF16_SIGNIFICAND_BITS = 8
# The operators read the state on the host, which a CUDA graph cannot do: inductor leaves them out of one.
_READS_ON_THE_HOST = (torch.Tag.cudagraph_unsafe,)


class _Part(NamedTuple):
    """A matrix with its tokens."""

    matrix: int | None
    """None: the layer has one matrix, (O, I)."""
    rows: slice
    stream: tuple[int, int, int]
    """Key, rank and ranks of its random numbers."""

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the matrix's entry of the weight or the bias."""
        return tensor if self.matrix is None else tensor[self.matrix]


@torch.library.custom_op("snip_hf::forward_gemm", mutates_args=(), tags=_READS_ON_THE_HOST)
def forward_gemm(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, ends: Tensor | None = None) -> Tensor:
    """Returns x @ weight^T + bias, (..., O) for x (..., I), in x's dtype; the bias is added after the GEMM in FP32."""
    format, parts = _read(state, ends, "forward")
    products: Iterable[Tensor]
    if not format.is_quantized:
        # x is not reshaped: its dimensions and strides decide if aten adds the bias inside the GEMM or after it.
        products = (
            functional.linear(x[part.rows], part.of(weight), None if bias is None else part.of(bias)) for part in parts
        )
    else:
        # (T, I) x (I, O): contracts I
        lefts = _rounded_tokens(x.reshape(-1, x.shape[-1]), parts, format, "activation", 1)
        rights = _rounded_weights(weight, parts, format, 1)
        products = (
            _with_bias(multiply(left, right.t(), x.dtype, fits_bf16(format, "forward")), bias, part).to(x.dtype)
            for part, left, right in zip(parts, lefts, rights, strict=True)
        )
    y = _by_rows(products, parts, x, weight.shape[-2])
    # Not a view: autograd refuses to modify one in place, as Falcon does (`attention_output += ...`).
    return torch.ops.aten._unsafe_view(y, [*x.shape[:-1], weight.shape[-2]])


@torch.library.custom_op("snip_hf::grad_input_gemm", mutates_args=(), tags=_READS_ON_THE_HOST)
def grad_input_gemm(grad_output: Tensor, weight: Tensor, state: Tensor, ends: Tensor | None = None) -> Tensor:
    """Returns grad_output @ weight, (T, I), in grad_output's dtype."""
    format, parts = _read(state, ends, "grad_input")
    products: Iterable[Tensor]
    if not format.is_quantized:
        products = (grad_output[part.rows].mm(part.of(weight)) for part in parts)
    else:
        # (T, O) x (O, I): contracts O
        lefts = _rounded_tokens(grad_output, parts, format, "gradient", 1)
        rights = _rounded_weights(weight, parts, format, 0)
        fits = fits_bf16(format, "grad_input")
        pairs = zip(lefts, rights, strict=True)
        products = (multiply(left, right, grad_output.dtype, fits).to(grad_output.dtype) for left, right in pairs)
    return _by_rows(products, parts, grad_output, weight.shape[-1])


@torch.library.custom_op("snip_hf::grad_weight_gemm", mutates_args=(), tags=_READS_ON_THE_HOST)
def grad_weight_gemm(
    grad_output: Tensor, x: Tensor, state: Tensor, ends: Tensor | None = None, transposed: bool = False
) -> Tensor:
    """Returns grad_output^T @ x, (O, I) or (E, O, I), in grad_output's dtype; zeros for a matrix without tokens.

    `transposed`: in memory as (E, I, O).
    """
    format, parts = _read(state, ends, "grad_weight")
    products: Iterable[Tensor]
    if not format.is_quantized:
        products = (grad_output[part.rows].t().mm(x[part.rows]) for part in parts)
    else:
        # (O, T) x (T, I): contracts T
        lefts = _rounded_tokens(grad_output, parts, format, "gradient", 0)
        rights = _rounded_tokens(x, parts, format, "activation", 0)
        fits = fits_bf16(format, "grad_weight")
        pairs = zip(lefts, rights, strict=True)
        products = (multiply(left.t(), right, grad_output.dtype, fits).to(grad_output.dtype) for left, right in pairs)
    if ends is None:
        (grad_weight,) = products
        return grad_weight
    grad_weight = _empty_grad_weight(grad_output, x, ends, transposed).zero_()
    for part, product in zip(parts, products, strict=True):
        grad_weight[part.matrix] = product
    return grad_weight


@torch.library.custom_op("snip_hf::bias_gradient", mutates_args=(), tags=_READS_ON_THE_HOST)
def bias_gradient(grad_output: Tensor, ends: Tensor) -> Tensor:
    """Returns the sum of grad_output over the tokens of each matrix, (E, O)."""
    sums = grad_output.new_zeros(ends.shape[0], grad_output.shape[1])
    for matrix, rows in _rows(ends.tolist()):
        sums[matrix] = grad_output[rows].sum(0)
    return sums


@forward_gemm.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[-2])


@grad_input_gemm.register_fake
def _(grad_output: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return grad_output.new_empty(grad_output.shape[0], weight.shape[-1])


@grad_weight_gemm.register_fake
def _(grad_output: Tensor, x: Tensor, state: Tensor, ends: Tensor | None = None, transposed: bool = False) -> Tensor:
    return _empty_grad_weight(grad_output, x, ends, transposed)


@bias_gradient.register_fake
def _(grad_output: Tensor, ends: Tensor) -> Tensor:
    return grad_output.new_empty(ends.shape[0], grad_output.shape[1])


def multiply(left_fp32: Tensor, right_fp32: Tensor, dtype: torch.dtype, fits_bf16: bool) -> Tensor:
    """Returns left @ right, FP32, also under autocast, which would cast both to BF16.

    Args:
        left_fp32, right_fp32: the rounded operands.
        dtype: of the call.
        fits_bf16: True if the operands' values are BF16 numbers.
    """
    with torch.autocast(left_fp32.device.type, enabled=False):
        if not (fits_bf16 and dtype == torch.bfloat16 and left_fp32.is_cuda):
            return left_fp32 @ right_fp32
        # With an FP32 result partial sums are FP32 too, regardless of
        # the setting `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`.
        left, right = left_fp32.to(torch.bfloat16), right_fp32.to(torch.bfloat16)
        return torch.mm(left, right, out_dtype=torch.float32)


def fits_bf16(format: NumberFormat, gemm: str) -> bool:
    """Returns True if both rounded operands of a GEMM are BF16 numbers: at most 8 bits, times a power of two.

    Values below 2**-126 are the exception: BF16 has fewer bits there, so they are rounded once more.
    """
    if format.scale != "e8m0" or gemm in format.rotated:
        return False
    rules = [format.operand(operand) for operand, _ in CONTRACTIONS[gemm]]
    grids = [rule.grid or format.grid for rule in rules if rule.quantized and not rule.noise]
    most = _BF16_SIGNIFICAND_BITS
    return len(grids) == len(rules) and all(grid is not None and grid.mantissa_bits < most for grid in grids)


def _read(state: Tensor, ends: Tensor | None, gemm: str) -> tuple[NumberFormat, list[_Part]]:
    """Returns the format of `gemm`, and the matrices that have tokens; reads both tensors in one go."""
    numbers = (state if ends is None else torch.cat([state, ends])).tolist()
    *codes, key, rank, ranks = numbers[:STATE_SIZE]
    format = format_of_code(codes[GEMMS.index(gemm)])
    if ends is None:
        return format, [_Part(None, slice(None), (key % 2**64, rank, ranks))]
    keys = matrix_keys(key % 2**64, len(ends))
    return format, [_Part(e, rows, (keys[e], rank, ranks)) for e, rows in _rows(numbers[STATE_SIZE:])]


def _rows(ends: Sequence[int]) -> list[tuple[int, slice]]:
    """Returns (matrix, its rows) for every matrix that has tokens."""
    starts = [0, *ends[:-1]]
    return [(e, slice(start, end)) for e, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]


def _by_rows(products: Iterable[Tensor], parts: Sequence[_Part], x: Tensor, columns: int) -> Tensor:
    """Returns the products of all matrices at their tokens' rows, zeros elsewhere."""
    if len(parts) == 1 and parts[0].matrix is None:
        (y,) = products
        return y
    y = x.new_zeros(x.shape[0], columns)
    for part, product in zip(parts, products, strict=True):
        y[part.rows] = product
    return y


def _with_bias(y_fp32: Tensor, bias: Tensor | None, part: _Part) -> Tensor:
    return y_fp32 if bias is None else y_fp32.add_(part.of(bias).to(torch.float32))


def _rounded_tokens(
    x: Tensor, parts: Sequence[_Part], format: NumberFormat, operand: str, contracts: int
) -> Sequence[Tensor]:
    """Returns each matrix's tokens, rows of x (T, C), rounded, FP32."""
    if len(parts) > 1 and _can_round_together(format, operand, contracts, 1):
        rounded = fake_quantize(x, format, operand, contracts)
        return [rounded[part.rows] for part in parts]
    return [fake_quantize(x[part.rows], format, operand, contracts, *part.stream) for part in parts]


def _rounded_weights(weight: Tensor, parts: Sequence[_Part], format: NumberFormat, contracts: int) -> Sequence[Tensor]:
    """Returns the matrices (O, I) that have tokens, rounded, FP32."""
    if weight.dim() == 3 and parts and _can_round_together(format, "weight", contracts, weight.shape[1]):
        needed = weight if len(parts) == len(weight) else weight[[part.matrix for part in parts]]
        rounded = fake_quantize(needed.reshape(-1, weight.shape[2]), format, "weight", contracts)
        return rounded.view(needed.shape).unbind()
    return [fake_quantize(part.of(weight), format, "weight", contracts, *part.stream) for part in parts]


def _can_round_together(format: NumberFormat, operand: str, contracts: int, rows: int) -> bool:
    """Returns True if one call can round a stack of tensors, each with a multiple of `rows`: no block spans two."""
    rule = format.operand(operand)
    if rule.block is None or format.tensor_scale is not None or rule.stochastic or rule.noise:
        return False
    height, _ = rule.tile(contracts)
    is_rotated = contracts == 0 and gemm_of(operand, contracts) in format.rotated
    return rows % height == 0 and not (is_rotated and rows % format.rotation)


def _empty_grad_weight(grad_output: Tensor, x: Tensor, ends: Tensor | None, transposed: bool) -> Tensor:
    out_features, in_features = grad_output.shape[1], x.shape[1]
    if ends is None:
        return grad_output.new_empty(out_features, in_features)
    if transposed:
        return grad_output.new_empty(ends.shape[0], in_features, out_features).transpose(1, 2)
    return grad_output.new_empty(ends.shape[0], out_features, in_features)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, options: None, tensors: Sequence[Any]
) -> tuple[Tensor, Sequence[Tensor | None]]:
    state, ends = (*tensors, None)[:2]  # torch.compile drops a last argument that is None
    if torch.compiler.is_compiling():
        kept, kept_ends = state.clone(), ends
    else:
        # Copies, since the next forward pass may write the state before this one's backward pass reads it. On the host,
        # where the operators read them: one wait for the device instead of one per GEMM.
        state, ends = kept, kept_ends = _on_host(state, ends)
    return forward_gemm(x, weight, bias, state, ends), (x, kept, kept_ends)


def _on_host(state: Tensor, ends: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if ends is None:
        return state.to("cpu", copy=True), None
    own_state, own_ends = torch.cat([state, ends]).to("cpu", copy=True).split([len(state), len(ends)])
    return own_state, own_ends


def _backward(
    grad_output: Tensor, weight: Tensor, options: None, saved: Sequence[Any], needs: tuple[bool, bool, bool]
) -> Gradients:
    x, state, ends = saved
    needs_x, needs_weight, needs_bias = needs
    rows, grad_bias = x.reshape(-1, x.shape[-1]), None
    if needs_bias:
        grad_bias = grad_output.sum(0) if ends is None else bias_gradient(grad_output, ends)
    return (
        grad_input_gemm(grad_output, weight, state, ends) if needs_x else None,
        grad_weight_gemm(grad_output, rows, state, ends, is_transposed(weight)) if needs_weight else None,
        grad_bias,
    )


def _differentiable_backward(
    grad_output: Tensor, weight: Tensor, options: None, saved: Sequence[Any], needs: tuple[bool, bool, bool]
) -> Gradients:
    """Computes the gradients in high precision by functions that torch differentiates: rounding has no derivative."""
    x, _, ends = saved
    x = x.reshape(-1, x.shape[-1])
    needs_x, needs_weight, needs_bias = needs
    if ends is None:
        grad_x, grad_weight, grad_bias = grad_output @ weight, grad_output.t() @ x, grad_output.sum(0)
    else:
        lengths = ends.diff(prepend=ends.new_zeros(1)).tolist()
        *grads, behind = grad_output.split([*lengths, len(x) - sum(lengths)])
        *parts, _ = x.split([*lengths, len(behind)])
        products = [grad @ matrix for grad, matrix in zip(grads, weight, strict=True)]
        grad_x = torch.cat([*products, behind.new_zeros(len(behind), x.shape[1])])
        grad_weight = torch.stack([grad.t() @ part for grad, part in zip(grads, parts, strict=True)])
        grad_bias = torch.stack([grad.sum(0) for grad in grads])
    return grad_x if needs_x else None, grad_weight if needs_weight else None, grad_bias if needs_bias else None


_emulated_linear = linear_function(_forward, _backward, _differentiable_backward)


def unquantized(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Returns x @ weight[e]^T + bias[e] for the tokens of each matrix e, (T, O), differentiable, in high precision.

    Args:
        x: (T, I), any dtype.
        weight: (E, O, I), in memory perhaps as (E, I, O). Gives the dtype of the products, or autocast does.
        bias: (E, O) or None.
        ends: (E,), int64.
    """
    is_cast = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if is_cast else weight.dtype
    state = ends.new_full((STATE_SIZE,), UNQUANTIZED.code)
    bias = None if bias is None else bias.to(dtype)
    return _emulated_linear(x.to(dtype), weight.to(dtype), bias, None, state, ends)


class Emulated(Backend):
    """Rounding in software, products in FP32, on any device that torch runs on."""

    name = "emulated"
    is_emulation = True
    arithmetic = "emulated: values were rounded in software, products were computed in higher precision (no speed-up)"

    def lacks(self, device: torch.device) -> str | None:
        return None

    def runs(self, format: NumberFormat) -> bool:
        return True

    def refuses(self, layer: Layer) -> str | None:
        return None

    def forward(self, layer: Layer, input: Tensor, x: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        weight = layer.matrix.to(x.dtype) if torch.is_autocast_enabled(x.device.type) else layer.matrix
        return _emulated_linear(x, weight, bias, None, layer.snip_state, ends)

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
