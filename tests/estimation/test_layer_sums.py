"""Are the sums of one layer those of the formulas, and do they tell what comes back from what is drawn anew?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rounded import COLUMN_TILE, fake_quantize
from small import drawn
from sums_of_layer import LayerSums, across_channels
from torch import Tensor

from snip_hf.estimation import layer_sums as layer_sums_module
from snip_hf.estimation import products
from snip_hf.estimation.extrapolation import BatchSizes, Squares
from snip_hf.estimation.optimizer_step import UpdateChange
from snip_hf.estimation.samples import LayerSample
from snip_hf.estimation.table import LAYER, ROWS
from snip_hf.kernels.errors import WeightErrors, weight_errors
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import CONTRACTIONS, GEMMS, ROW_TILE, SQUARE_TILE
from snip_hf.numerics.rounding import round_operand

KEYS = (0x1234_5678_9ABC_DEF0, 0x0FED_CBA9_8765_4321)
# Square of one step, square of what comes back at every step, and the size of what they are the difference of.
Sums = tuple[float, float, float]
Push = Callable[[Tensor], Tensor]


def a_sample(n: int, tokens: int, probes: int = 1, width: int = 12, height: int = 9, mean: float = 0.3) -> LayerSample:
    """Tokens that have something in common, so that neither part of a divergence is nothing."""
    return LayerSample(
        tokens,
        drawn(n, width, seed=1, mean=mean),
        drawn(n, height, seed=2, mean=mean),
        [drawn(n, width, seed=10 + index, mean=mean) for index in range(probes)],
        [drawn(n, height, seed=20 + index, mean=mean) for index in range(probes)],
    )


def moved(sample: LayerSample, device: str) -> LayerSample:
    x, grad_output = sample.x.to(device), sample.grad_output.to(device)
    dots = ([dot.to(device) for dot in one] for one in (sample.x_dot, sample.grad_output_dot))
    return LayerSample(sample.tokens, x, grad_output, *dots)


def a_weight(height: int = 9, width: int = 12) -> Tensor:
    return drawn(height, width, seed=3)


def scaled(height: int = 9, width: int = 12) -> Push:
    """An elementwise J; every element has its own factor."""
    return torch.rand(height, width, generator=torch.Generator().manual_seed(4)).mul


def on_grid(*shape: int, seed: int = 5) -> Tensor:
    """Numbers that FP4 and FP8 both keep as they are, whatever the tile: 0, ±3 and ±6, ±6 in every row and column."""
    choice = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(seed))
    found = 3.0 * (choice - 2)
    found[:, 0] = 6.0
    found[:: shape[0] - 1] = 6.0
    found[64::64] = -6.0  # runs of 128 tokens
    return found


# ------------------------------------------------------------------------------------------------- written-out formulas


def cut(n: int) -> list[slice]:
    """One piece per run of 128 tokens, 2 to 8 of them, as even as possible, longer ones first."""
    count = max(2, min(8, n // 128))
    lengths = [n // count + (index < n % count) for index in range(count)]
    return [slice(sum(lengths[:index]), sum(lengths[: index + 1])) for index in range(count)]


def extrapolated(parts: list[Tensor], per_sample: float, micro_batches: int) -> Sums:
    """Expected |mean over k micro-batches of the sum over N pieces|^2, and |expected sum|^2.

    The k N pieces meet themselves k N times, which is E|c|^2, and others k N (k N - 1) times, which is |E c|^2: the
    mean of <c_r, c_s> over different pieces of the sample.
    """
    count, wanted = len(parts), len(parts) * per_sample
    of_own = sum((part * part).sum().item() for part in parts) / count
    pairs = [(a * b).sum().item() for i, a in enumerate(parts) for j, b in enumerate(parts) if i != j]
    of_pairs = sum(pairs) / len(pairs)
    k = micro_batches
    own_terms, cross_terms = k * wanted, k * wanted * (k * wanted - 1)
    step = (own_terms * of_own + cross_terms * of_pairs) / k**2
    return step, wanted**2 * of_pairs, wanted**2 * of_own


def of_tokens(
    products: Tensor,
    pieces: list[slice],
    per_sample: float,
    micro_batches: int,
    pairs: tuple[float, float] = (0.0, 0.0),
) -> Sums:
    """Elements that share their token or their channel, (n, channels); pairs of tokens across channels."""
    step, bias, size = extrapolated([products[piece].sum(0) for piece in pieces], per_sample, micro_batches)
    count, (own, total) = len(pieces), pairs
    wanted = count * per_sample
    of_pairs = (total - own) / (count * (count - 1))
    step += wanted * own / count / micro_batches + wanted * (wanted - 1 / micro_batches) * of_pairs
    bias += wanted**2 * of_pairs
    by_token = 0.0
    for row in products:
        by_token += (row.sum() ** 2 - (row**2).sum()).item()
    return step + per_sample / micro_batches * by_token, bias, size


def added(*sums: Sums) -> Sums:
    step, bias, size = (sum(one[part] for one in sums) for part in range(3))
    return step, bias, size


def squares_written_out(
    sample: LayerSample, w: Tensor, push: Push, fmt: str, micro_batches: int = 1, keys: tuple[int, int] = KEYS
) -> dict[str, Sums]:
    """docs/method.md, section 3, in float64."""
    is_random = FORMATS[fmt].gradient.stochastic
    x, g, weight = sample.x.double(), sample.grad_output.double(), w.double()
    row_key, column_key = keys if is_random else (None, None)

    def seen(tensor: Tensor, operand: str, contracts: int, key: int | None = None) -> Tensor:
        return round_operand(tensor, FORMATS[fmt], operand, contracts, key).double()

    # Errors of the weight in the forward GEMM and in grad_input; equal if its blocks are square.
    e_w, e_w_back = seen(w, "weight", 1) - weight, seen(w, "weight", 0) - weight
    e_x = seen(sample.x, "activation", 1) - x
    e_g = seen(sample.grad_output, "gradient", 1, row_key) - g
    g_columns = seen(sample.grad_output, "gradient", 0, column_key)
    x_columns = seen(sample.x, "activation", 0)
    pieces, per_sample, k = cut(len(x)), sample.tokens / len(x), micro_batches
    rows: dict[str, list[Sums]] = {"forward": [], "grad_input": [], LAYER: []}
    for x_dot, g_dot in zip(sample.x_dot, sample.grad_output_dot, strict=True):
        x_dot, g_dot = x_dot.double(), g_dot.double()
        forward = [torch.einsum("to,ti->oi", g_dot[piece], x[piece]) * e_w for piece in pieces]
        grad_input = [torch.einsum("to,ti->oi", g[piece], x_dot[piece]) * e_w_back for piece in pieces]
        both = [one + other for one, other in zip(forward, grad_input, strict=True)]
        meets = torch.einsum("to,oi->ti", g_dot, weight)
        on_x = of_tokens(meets * e_x, pieces, per_sample, k, across_channels(meets, e_x, pieces))
        products = torch.einsum("ti,oi->to", x_dot, weight) * e_g
        # Stochastic rounding: every element is independent, and zero on the average.
        on_g = (per_sample / k * (products**2).sum().item(), 0.0, 0.0)
        if not is_random:
            on_g = of_tokens(products, pieces, per_sample, k)
        rows["forward"].append(added(on_x, extrapolated(forward, per_sample, k)))
        rows["grad_input"].append(added(on_g, extrapolated(grad_input, per_sample, k)))
        rows[LAYER].append(added(on_x, on_g, extrapolated(both, per_sample, k)))
    found: dict[str, Sums] = {}
    for row, sums in rows.items():
        step, bias, size = (total / len(sums) for total in added(*sums))
        found[row] = step, bias, size
    errors = [
        torch.einsum("to,ti->oi", g_columns[piece], x_columns[piece]) - torch.einsum("to,ti->oi", g[piece], x[piece])
        for piece in pieces
    ]
    found["grad_weight"] = extrapolated([push(error.float()).double() for error in errors], per_sample, k)
    found[LAYER] = added(found[LAYER], found["grad_weight"])
    return found


def assert_squares(found: Squares, expected: Sums) -> None:
    """Allows for FP32 differences of large sums: up to 1.2e-5 of them, depending on the BLAS's order of addition."""
    step, bias, size = expected
    assert found.step == pytest.approx(step, rel=1e-5, abs=5e-5 * size)
    assert found.bias == pytest.approx(bias, rel=1e-5, abs=5e-5 * size)


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("mean", [0.0, 2.0])
@pytest.mark.parametrize(
    ("n", "tokens", "probes", "micro_batches"),
    [
        (50, 50, 1, 1),
        (50, 50, 3, 4),
        (300, 300, 1, 1),
        (128, 512, 1, 1),  # one run, cut in two
        (384, 3000, 2, 1),
        (384, 3000, 2, 8),
        (1203, 1203, 1, 2),  # 8 pieces of 151 and 150 tokens
    ],
)
def test_the_squares_are_the_written_out_formulas(
    n: int, tokens: int, probes: int, micro_batches: int, mean: float, fmt: str
) -> None:
    sample, weight, push = a_sample(n, tokens, probes, mean=mean), a_weight(), scaled()
    expected = squares_written_out(sample, weight, push, fmt, micro_batches)
    found = LayerSums(sample, weight, push, micro_batches).weight_divergences(fmt, KEYS)
    assert set(found) == set(expected) == set(ROWS)
    for row in ROWS:
        assert_squares(found[row], expected[row])
    assert max(step for step, _, _ in expected.values()) > 0
    if mean > 1:
        assert expected["forward"][1] > 0.2 * expected["forward"][0]


def layer_sums_of_formats(sample: LayerSample, weight: Tensor, push: Push | None, names: list[str]) -> Any:
    return LayerSums(sample, weight, push, 1 if push is None else 2, formats=names)


OTHERS = ["mxfp8", "mxfp4", "mxfp4-32x32", "nvfp4", "nvfp4-1x16", "nvfp4-rht", "fp8-tensor", "fp8-delayed"]
OTHERS += ["ufp4-rht", "fp4-pqt"]


@pytest.mark.parametrize("fmt", OTHERS)
def test_they_are_for_weights_that_each_gemm_quantizes_for_itself(fmt: str) -> None:
    sample, weight, push = a_sample(300, 300, 2, width=70, height=50), a_weight(50, 70), scaled(50, 70)
    expected = squares_written_out(sample, weight, push, fmt, 2)
    names = ["fp8", fmt, "mxfp6", "fp4"]  # a format's place among others
    found = layer_sums_of_formats(sample, weight, push, names).weight_divergences(fmt, KEYS)
    for row in ROWS:
        assert_squares(found[row], expected[row])


@pytest.mark.parametrize("fmt", OTHERS)
def test_errors_are_those_of_each_gemm_s_own_weight(fmt: str) -> None:
    sample, weight = a_sample(300, 300, 1, width=70, height=50), a_weight(50, 70)

    def change(tensor: Tensor, operand: str, contracts: int) -> float:
        return float((round_operand(tensor, FORMATS[fmt], operand, contracts) - tensor).double().norm())

    found = layer_sums_of_formats(sample, weight, None, ["fp8", fmt]).errors(fmt)
    for gemm, operands in CONTRACTIONS.items():
        tensors = {"activation": sample.x, "gradient": sample.grad_output, "weight": weight}
        expected = sum(change(tensors[operand], operand, contracts) for operand, contracts in operands)
        assert found[gemm][0] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8-tensor", "fp8-delayed"])
def test_a_part_of_the_tokens_is_rounded_with_the_scale_of_all(fmt: str) -> None:
    whole, weight = a_sample(384, 384, 1), a_weight()
    whole.x[300, 2], whole.grad_output[301, 3] = 50.0, 70.0
    part = replace(
        whole,
        tokens=384,
        x=whole.x[:256],
        grad_output=whole.grad_output[:256],
        x_dot=[whole.x_dot[0][:256]],
        grad_output_dot=[whole.grad_output_dot[0][:256]],
        amaxes=(torch.tensor(50.0), torch.tensor(70.0)),
    )
    of_part = layer_sums_of_formats(part, weight, None, [fmt])
    of_whole = layer_sums_of_formats(whole, weight, None, [fmt])
    for operand in ("x", "g"):
        for contracts in (0, 1):
            found, expected = (one.rounded(operand, fmt, contracts) for one in (of_part, of_whole))
            assert torch.equal(found, expected[:256])
    unknown = layer_sums_of_formats(replace(part, amaxes=None), weight, None, [fmt])
    assert not torch.equal(unknown.rounded("x", fmt, 1), of_part.rounded("x", fmt, 1))
    # The recorded passes give the mean of two; if all tokens are there, their own values count.
    complete = layer_sums_of_formats(replace(whole, amaxes=(torch.tensor(60.0),) * 2), weight, None, [fmt])
    assert torch.equal(complete.rounded("x", fmt, 1), of_whole.rounded("x", fmt, 1))


@pytest.mark.parametrize("shape", [(130, 260), (257, 40)])
def test_they_are_for_a_layer_of_several_tiles_too(shape: tuple[int, int]) -> None:
    height, width = shape
    sample, weight = a_sample(200, 400, width=width, height=height), a_weight(height, width)
    push = scaled(height, width)
    expected = squares_written_out(sample, weight, push, "fp4", 2)
    found = LayerSums(sample, weight, push, 2).weight_divergences("fp4", KEYS)
    for row in ROWS:
        assert expected[row][0] > 0
        assert_squares(found[row], expected[row])


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_on_a_gpu_they_are_those_of_its_kernels(fmt: str) -> None:
    """The tolerances are those of split products."""
    sample, weight = a_sample(1203, 2406, 2, 260, 130), a_weight(130, 260)
    factors = torch.rand(130, 260, generator=torch.Generator().manual_seed(4))
    expected = squares_written_out(sample, weight, factors.mul, fmt, 2)
    rise = LayerSums(sample, weight, factors, 2).loss_divergence(fmt, "saliency")
    for push in (factors.cuda(), factors.cuda().mul):
        sums = LayerSums(moved(sample, "cuda"), weight.cuda(), push, 2)
        found = sums.weight_divergences(fmt, KEYS)
        assert sums.loss_divergence(fmt, "saliency") == pytest.approx(rise, rel=1e-3)
        for row in ROWS:
            step, bias, size = expected[row]
            assert found[row].step == pytest.approx(step, rel=1e-3, abs=1e-4 * size)
            assert found[row].bias == pytest.approx(bias, rel=1e-3, abs=1e-4 * size)


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
def test_products_of_bf16_parts_change_them_by_less_than_a_part_in_1000(
    fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, products of which only squares are summed are one BF16 product."""
    sample, weight = a_sample(1203, 2406, 2, 260, 130), a_weight(130, 260)
    factors = torch.rand(130, 260, generator=torch.Generator().manual_seed(4))
    exact = LayerSums(sample, weight, factors, 2)
    expected, forms = exact.weight_divergences(fmt, KEYS), ("token-fisher", "saliency")
    rises = {form: exact.loss_divergence(fmt, form) for form in forms}
    for module in (products, layer_sums_module):
        monkeypatch.setattr(module, "is_split", lambda left, right: True)

    def with_narrow_errors(weight: Tensor, rounded: Sequence[Tensor], out: Tensor) -> WeightErrors:
        return weight_errors(weight, rounded, out)._replace(first=(rounded[0] - weight).bfloat16())

    monkeypatch.setattr(layer_sums_module, "weight_errors", with_narrow_errors)
    for push in (factors, factors.mul):
        sums = LayerSums(sample, weight, push, 2)
        found = sums.weight_divergences(fmt, KEYS)
        for form, rise in rises.items():
            assert sums.loss_divergence(fmt, form) != rise
            assert sums.loss_divergence(fmt, form) == pytest.approx(rise, rel=1e-3)
        for row in ROWS:
            step = expected[row].step
            assert found[row].step != step and found[row].step == pytest.approx(step, rel=1e-3)
            assert found[row].bias == pytest.approx(expected[row].bias, rel=1e-3, abs=1e-3 * step)


@pytest.mark.parametrize(
    ("pieces", "inputs", "outputs"), [(8, 14336, 1152), (8, 5632, 2944), (8, 4096, 4096), (8, 2**18, 64), (8, 2**28, 1)]
)
def test_products_are_held_of_whole_runs_of_128_outputs(pieces: int, inputs: int, outputs: int) -> None:
    assert layer_sums_module.outputs_at_once(pieces, inputs) == outputs


def test_bfloat16_weights_and_their_errors_are_taken_in_fp32() -> None:
    sample, push, weight = a_sample(60, 60), scaled(), a_weight().bfloat16()
    narrow, wide = (LayerSums(sample, w, push, 1).weight_divergences("fp8", KEYS) for w in (weight, weight.float()))
    assert narrow == wide


# ------------------------------------------------------------------------------------- all tokens: squares of the whole


def test_with_all_tokens_the_weight_s_error_meets_the_square_of_the_sum() -> None:
    """With operands that a format keeps, only the weight's error is left, and no piece shows."""
    n, weight = 300, a_weight()
    x, g = on_grid(n, 12), on_grid(n, 9, seed=6)
    x_dot, g_dot = drawn(n, 12, seed=7, mean=0.2), drawn(n, 9, seed=8, mean=0.2)
    found = LayerSums(LayerSample(n, x, g, [x_dot], [g_dot]), weight, None, 1).weight_divergences("fp8", KEYS)
    e_w = fake_quantize(weight, FORMATS["fp8"], SQUARE_TILE).double() - weight.double()
    forward = torch.einsum("to,ti->oi", g_dot.double(), x.double()) * e_w
    grad_input = torch.einsum("to,ti->oi", g.double(), x_dot.double()) * e_w
    for row, met in (("forward", forward), ("grad_input", grad_input), (LAYER, forward + grad_input)):
        assert found[row].step == pytest.approx((met**2).sum().item(), rel=1e-5)


def test_with_all_tokens_grad_weight_is_the_square_of_the_whole_change_of_the_update() -> None:
    sample, push = a_sample(300, 300), scaled()
    g, x = sample.grad_output, sample.x
    for fmt, key in (("fp8", None), ("fp4", KEYS[1])):
        rounded_g = fake_quantize(g, FORMATS[fmt], COLUMN_TILE, key).double()
        rounded_x = fake_quantize(x, FORMATS[fmt], COLUMN_TILE).double()
        change = push((rounded_g.t() @ rounded_x - g.double().t() @ x.double()).float())
        found = LayerSums(sample, a_weight(), push, 1).weight_divergences(fmt, KEYS)["grad_weight"]
        assert found.step == pytest.approx(change.double().square().sum().item(), rel=1e-4)


def test_grad_weight_goes_through_a_derivative_that_is_not_elementwise() -> None:
    """Any linear map of the change: here one that mixes rows and columns."""
    sample = a_sample(300, 600)
    left, right = drawn(9, 9, seed=30), drawn(12, 12, seed=31)

    def push(change: Tensor) -> Tensor:
        return left @ change @ right

    for micro_batches in (1, 3):
        expected = squares_written_out(sample, a_weight(), push, "fp8", micro_batches)["grad_weight"]
        found = LayerSums(sample, a_weight(), push, micro_batches).weight_divergences("fp8", KEYS)["grad_weight"]
        assert expected[0] > 0
        assert_squares(found, expected)


def bending(bound: float) -> UpdateChange:
    """h(g) = left tanh(g / bound) right at g = 0: it saturates if changes are of the size of the bound."""
    left, right = drawn(9, 9, seed=30), drawn(12, 12, seed=31)
    return UpdateChange(
        lambda change: left @ (change / bound) @ right, lambda change: left @ (change / bound).tanh() @ right
    )


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize(
    ("n", "tokens", "micro_batches"), [(300, 300, 1), (300, 300, 4), (300, 1200, 1), (300, 600, 2)]
)
def test_an_update_that_bends_takes_an_error_of_a_whole_step_s_size_in_full(
    n: int, tokens: int, micro_batches: int, fmt: str
) -> None:
    sample = a_sample(n, tokens)
    key = KEYS[1] if fmt == "fp4" else None
    rounded_g = fake_quantize(sample.grad_output, FORMATS[fmt], COLUMN_TILE, key).double()
    rounded_x = fake_quantize(sample.x, FORMATS[fmt], COLUMN_TILE).double()
    error = (rounded_g.t() @ rounded_x - sample.grad_output.double().t() @ sample.x.double()).float()

    def of(push: Push) -> Squares:
        return LayerSums(sample, a_weight(), push, micro_batches).weight_divergences(fmt, KEYS)["grad_weight"]

    error *= (of(torch.clone).step / error.square().sum()).sqrt()
    bend = bending(float(error.square().mean().sqrt()))
    ratio = float(bend.in_full(error).square().sum() / bend(error).square().sum())
    assert 0.1 < ratio < 0.9
    linear, found = of(bend.first_order), of(bend)
    assert found.step == pytest.approx(ratio * linear.step, rel=1e-4)
    # The bias, which repeats at every step, changes by the same ratio.
    assert found.bias == pytest.approx(ratio * linear.bias, rel=1e-4)


def test_with_all_tokens_an_update_that_bends_is_right_however_far() -> None:
    sample, bend = a_sample(300, 300), bending(1.0)
    rounded_g = fake_quantize(sample.grad_output, FORMATS["fp4"], COLUMN_TILE, KEYS[1]).double()
    rounded_x = fake_quantize(sample.x, FORMATS["fp4"], COLUMN_TILE).double()
    error = (rounded_g.t() @ rounded_x - sample.grad_output.double().t() @ sample.x.double()).float()
    found = LayerSums(sample, a_weight(), bend, 1).weight_divergences("fp4", KEYS)["grad_weight"]
    assert found.step == pytest.approx(bend.in_full(error).square().sum().item(), rel=1e-4)
    assert found.step < 0.2 * bend(error).square().sum().item()


@pytest.mark.parametrize("n", [0, 300])
def test_no_error_bends_no_update(n: int) -> None:
    sample = LayerSample(n, on_grid(300, 12)[:n], on_grid(300, 9)[:n])
    for fmt in ("fp8", "fp4"):
        found = LayerSums(sample, a_weight(), bending(1.0), 1).weight_divergences(fmt, KEYS)
        assert found["grad_weight"] == Squares(0.0, 0.0)


@pytest.mark.parametrize("row", ["forward", "grad_input"])
def test_with_all_tokens_activation_errors_count_in_pairs_that_share_a_token_or_a_channel(row: str) -> None:
    """Every pair of elements is looked at; only FP8, where both operands are rounded to nearest."""
    n, weight = 14, on_grid(9, 12)
    x, g = drawn(n, 12, seed=1, mean=0.5), drawn(n, 9, seed=2, mean=0.5)
    x_dot, g_dot = drawn(n, 12, seed=7, mean=0.2), drawn(n, 9, seed=8, mean=0.2)
    assert torch.equal(fake_quantize(weight, FORMATS["fp8"], SQUARE_TILE), weight)
    found = LayerSums(LayerSample(n, x, g, [x_dot], [g_dot]), weight, None, 1).weight_divergences("fp8", KEYS)[row]
    if row == "forward":
        met, rounded = g_dot.double() @ weight.double(), x
    else:
        met, rounded = x_dot.double() @ weight.double().t(), g
    errors = fake_quantize(rounded, FORMATS["fp8"], ROW_TILE).double() - rounded.double()
    products = met * errors
    elements = [(t, c, products[t, c].item()) for t in range(n) for c in range(products.shape[1])]
    expected = sum(p * q for t, c, p in elements for s, d, q in elements if t == s or c == d)
    if row == "forward":  # gradients of different tokens have nothing in common
        expected += across_channels(met, errors, [slice(0, n)])[1]
    assert found.step == pytest.approx(expected, rel=1e-4)


# ------------------------------------------------------------------------------------------ bias and what is drawn anew


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(("n", "tokens"), [(512, 512), (512, 2048), (256, 2048)])
def test_step_and_bias_are_right_on_the_average_for_known_means_and_variances(
    n: int, tokens: int, micro_batches: int
) -> None:
    """Pieces c ~ N(mu, I) of 40 numbers; a step adds T / n times as many and takes the mean over micro-batches."""
    layer_sums = LayerSums(a_sample(n, tokens), a_weight(), None, micro_batches)
    count, numbers, draws = n // 128, 40, 8000
    mean = torch.linspace(0.6, 1.8, numbers, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    parts = mean + torch.randn(draws, count, numbers, generator=generator, dtype=torch.float64)
    own, total = parts.square().sum((1, 2)), parts.sum(1).square().sum(1)
    found = [layer_sums.sizes.of_pieces(*sums) for sums in zip(own.tolist(), total.tolist(), strict=True)]
    wanted = tokens // 128
    bias = wanted**2 * mean.square().sum().item()
    step = bias + wanted * numbers / micro_batches
    for values, expected in (([s.step for s in found], step), ([s.bias for s in found], bias)):
        values = torch.tensor(values, dtype=torch.float64)
        assert values.min() > 0
        assert abs(values.mean().item() - expected) < 4 * values.std().item() / draws**0.5
        # Sharp enough to tell one expectation from the other where they differ.
        assert 4 * values.std().item() / draws**0.5 < max(step - bias, 0.02 * bias)


def test_one_sample_estimates_the_average_effect_of_whole_steps_of_several_micro_batches() -> None:
    """grad_weight in FP8, tokens with something in common: 3 micro-batches of 1,024, of one of which 512 are sampled.

    Something in common, since a sum that is noise around 0 is cut off at 0, which moves its mean.
    """
    draws, tokens, micro_batches, fmt = 200, 1024, 3, FORMATS["fp8"]
    generator = torch.Generator().manual_seed(0)
    common_x, common_g = (2 * torch.randn(1, size, generator=generator) for size in (24, 20))
    changes, found = [], []
    for _ in range(draws):
        change = torch.zeros(20, 24, dtype=torch.float64)
        for index in range(micro_batches):
            x = common_x + torch.randn(tokens, 24, generator=generator)
            g = common_g + torch.randn(tokens, 20, generator=generator)
            exact = g.double().t() @ x.double()
            rounded = fake_quantize(g, fmt, COLUMN_TILE).double().t() @ fake_quantize(x, fmt, COLUMN_TILE).double()
            change += (rounded - exact) / micro_batches
            if index == 0:
                sample = LayerSample(tokens, x[:512], g[:512])
                layer_sums = LayerSums(sample, torch.ones(20, 24), torch.clone, micro_batches)
                found.append(layer_sums.weight_divergences("fp8", KEYS)["grad_weight"])
        changes.append(change)
    every = torch.stack(changes)
    truths = every.square().sum((1, 2))
    step, bias = Squares.mean(found).step, Squares.mean(found).bias
    estimates = torch.tensor([one.step for one in found], dtype=torch.float64)
    error = ((truths.var() + estimates.var()).item() / draws) ** 0.5
    assert abs(step - truths.mean().item()) < 3 * error < 0.25 * step
    # The mean over all draws carries 1 / draws of what is drawn anew.
    of_mean = every.mean(0).square().sum().item() - every.var(0).sum().item() / draws
    assert abs(bias - of_mean) < 3 * error
    # Sharp enough to tell them apart.
    assert 0.5 * step < of_mean < step - 3 * error


def alike(n: int, width: int, seed: int) -> Tensor:
    """Rows that are all the same, but for the first of every 128, which sets the scale of a tile along the tokens."""
    found = drawn(1, width, seed=seed).repeat(n, 1)
    found[::128] *= 1.3
    return found


@pytest.mark.parametrize("sampled", [256, 512])
def test_an_error_that_is_the_same_for_every_token_is_all_bias(sampled: int) -> None:
    """Every run of 128 tokens does the same: 1,024 tokens make 8 times its error, and 64 times its square."""
    x, g, x_dot, g_dot = (alike(sampled, size, seed) for size, seed in ((12, 1), (9, 2), (12, 7), (9, 8)))
    weight, push = a_weight(), scaled()
    layer_sums = LayerSums(LayerSample(1024, x, g, [x_dot], [g_dot]), weight, push, 1)
    of_run = LayerSums(LayerSample(128, x[:128], g[:128], [x_dot[:128]], [g_dot[:128]]), weight, push, 1)
    run = of_run.weight_divergences("fp8", KEYS)
    for row, square in layer_sums.weight_divergences("fp8", KEYS).items():
        assert square.bias > 0
        # The rest is what the channels of one token have in common, which is drawn anew with the token.
        assert 0.8 < square.step / square.bias < 1.2
        if row == "grad_weight":
            assert square.step == pytest.approx(square.bias, rel=1e-4)
            assert square.bias == pytest.approx(64 * run[row].step, rel=1e-4)


def test_stochastic_rounding_of_gradients_has_no_bias_in_grad_input() -> None:
    """It has none even if all tokens are equal; nearest rounding then has one."""
    n, weight = 256, on_grid(9, 12)
    g = drawn(1, 9, seed=2).expand(n, 9).contiguous()
    x_dot = drawn(1, 12, seed=7).expand(n, 12).contiguous()
    sample = LayerSample(n, drawn(n, 12, seed=1), g, [x_dot], [drawn(n, 9, seed=8)])
    layer_sums = LayerSums(sample, weight, None, 1)
    stochastic, nearest = (layer_sums.weight_divergences(fmt, KEYS)["grad_input"] for fmt in ("fp4", "fp8"))
    assert stochastic.step > 0 == stochastic.bias
    assert nearest.bias > 0.9 * nearest.step > 0


def test_stochastic_rounding_of_gradients_has_next_to_no_bias_in_grad_weight() -> None:
    """X lies on the grid, so that only G's rounding is left; what is found is noise around 0."""
    n, draws = 1024, 40
    layer_sums = LayerSums(LayerSample(n, on_grid(n, 12), alike(n, 9, 2)), torch.ones(9, 12), torch.clone, 1)
    found = [layer_sums.weight_divergences("fp4", (0, key))["grad_weight"] for key in range(1, draws + 1)]
    assert Squares.mean(found).step > 0
    assert abs(Squares.mean(found).bias) < 0.2 * Squares.mean(found).step
    assert min(one.bias for one in found) < 0
    # Rounded to nearest, the same gradients have one.
    nearest = layer_sums.weight_divergences("fp8", KEYS)["grad_weight"]
    assert nearest.bias > 0.9 * nearest.step > 0


def test_the_square_of_randomly_rounded_gradients_is_its_mean_over_roundings() -> None:
    """The whole inner product <eG, Xdot W^T>, squared, over 400 roundings of G."""
    n, weight, draws = 60, on_grid(9, 12), 400
    g, x_dot = drawn(n, 9, seed=2), drawn(n, 12, seed=7)
    sample = LayerSample(n, drawn(n, 12, seed=1), g, [x_dot], [drawn(n, 9, seed=8)])
    layer_sums = LayerSums(sample, weight, None, 1)
    met = x_dot.double() @ weight.double().t()
    squares, found = [], []
    for key in range(1, draws + 1):
        error = fake_quantize(g, FORMATS["fp4"], ROW_TILE, key).double() - g.double()
        squares.append((met * error).sum().item() ** 2)
        found.append(layer_sums.weight_divergences("fp4", (key, 0))["grad_input"].step)
    # A chi-square of one degree of freedom has the standard deviation sqrt(2) times its mean.
    wanted, tolerance = sum(squares) / draws, 4 * math.sqrt(2 / draws)
    assert sum(found) / draws == pytest.approx(wanted, rel=tolerance)


def test_micro_batches_average_what_is_drawn_anew_and_leave_the_bias() -> None:
    """Nearly the same tokens, so that there is a bias in every sum and nothing is cut off at 0."""
    x, g, x_dot, g_dot = (
        alike(384, size, seed) + drawn(384, size, seed=seed + 100) / 10
        for size, seed in ((12, 1), (9, 2), (12, 7), (9, 8))
    )
    sample, weight, push = LayerSample(3000, x, g, [x_dot], [g_dot]), a_weight(), scaled()
    one, four, many = (LayerSums(sample, weight, push, k).weight_divergences("fp8", KEYS) for k in (1, 4, 10**9))
    for row in ROWS:
        assert one[row].bias == four[row].bias == many[row].bias > 0
        assert many[row].step == pytest.approx(many[row].bias, rel=1e-5)
        anew = one[row].step - one[row].bias
        assert anew > 1e-5 * one[row].bias
        assert four[row].step - four[row].bias == pytest.approx(anew / 4, rel=1e-3)


def test_a_part_of_a_micro_batch_is_to_a_step_what_one_of_more_micro_batches_is() -> None:
    sample, weight, push = a_sample(384, 3000, 2), a_weight(), scaled()
    for fmt in ("fp8", "fp4"):
        part = LayerSums(sample, weight, push, 2, BatchSizes(3000, 3000, 9000, 12000))  # by the labels
        other = LayerSums(sample, weight, push, 8)
        assert part.weight_divergences(fmt, KEYS) == other.weight_divergences(fmt, KEYS)
        assert part.loss_divergence(fmt, "token-fisher") == other.loss_divergence(fmt, "token-fisher")


def test_a_part_of_a_micro_batch_of_equal_parts_gives_the_loss_and_the_errors_of_the_whole() -> None:
    """Four times the same tokens; the loss of the whole is a mean over four times as many, its G a fourth."""
    part, weight = a_sample(256, 256), a_weight()
    whole = LayerSample(1024, part.x.repeat(4, 1), part.grad_output.repeat(4, 1) / 4)
    one = LayerSums(part, weight, None, 1, BatchSizes(256, 256, 1024, 1024))
    other = LayerSums(whole, weight, None, 1)
    for fmt in ("fp8", "fp4"):
        for form in ("token-fisher", "saliency"):
            assert one.loss_divergence(fmt, form) == pytest.approx(other.loss_divergence(fmt, form), rel=1e-4)
        wanted = other.errors(fmt)
        for row, pair in one.errors(fmt).items():
            assert pair == pytest.approx(wanted[row], rel=1e-5)


def test_a_factor_of_every_element_is_the_function_that_multiplies_by_it() -> None:
    sample, weight = a_sample(300, 600, 1), a_weight()
    factors = torch.rand(9, 12, generator=torch.Generator().manual_seed(4))
    one, other = (LayerSums(sample, weight, push, 2) for push in (factors, factors.mul))
    for fmt in ("fp8", "fp4"):
        assert one.weight_divergences(fmt, KEYS) == other.weight_divergences(fmt, KEYS)


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_pieces_give_the_same_sums_whether_they_are_held_at_once_or_not(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, weight, push = a_sample(1203, 1203, 1), a_weight(), scaled()
    wanted = squares_written_out(sample, weight, push, "fp4")
    monkeypatch.setattr(layer_sums_module, "AT_ONCE", at_once * weight.numel())
    found = LayerSums(sample, weight, push, 1).weight_divergences("fp4", KEYS)
    for row in ROWS:
        assert_squares(found[row], wanted[row])


# ------------------------------------------------------------------------------------------------------ what is missing


def test_a_layer_that_is_not_trained_has_no_grad_weight() -> None:
    sample, weight = a_sample(60, 60), a_weight()
    with_it, without = (LayerSums(sample, weight, push, 1).weight_divergences("fp8", KEYS) for push in (scaled(), None))
    assert without["grad_weight"] == Squares(0.0, 0.0)
    assert without["forward"] == with_it["forward"]
    assert with_it[LAYER].step - without[LAYER].step == pytest.approx(with_it["grad_weight"].step, rel=1e-5)


def test_without_derivatives_only_grad_weight_is_left() -> None:
    sample, push = a_sample(60, 60, probes=0), scaled()
    found = LayerSums(sample, a_weight(), push, 1).weight_divergences("fp8", KEYS)
    assert found["forward"] == found["grad_input"] == Squares(0.0, 0.0)
    assert found[LAYER] == found["grad_weight"]
    assert found["grad_weight"].step > 0


def test_one_token_tells_nothing_of_a_bias() -> None:
    sample, weight, push = a_sample(1, 1), a_weight(), scaled()
    for fmt in ("fp8", "fp4"):
        for square in LayerSums(sample, weight, push, 1).weight_divergences(fmt, KEYS).values():
            assert square.step > 0 == square.bias


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layer_that_saw_no_token_does_no_damage(device: str) -> None:
    layer_sums = LayerSums(moved(a_sample(0, 0), device), a_weight().to(device), torch.ones(9, 12, device=device), 1)
    for fmt in ("fp8", "fp4"):
        assert layer_sums.weight_divergences(fmt, KEYS) == dict.fromkeys(ROWS, Squares(0.0, 0.0))
        assert layer_sums.loss_divergence(fmt, "token-fisher") == 0


# ------------------------------------------------------------------------------------------------------ loss and errors


SAMPLES: list[dict[str, Any]] = [{"n": 300, "tokens": 300}, {"n": 128, "tokens": 300}]


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("options", SAMPLES)
def test_token_fisher_is_the_written_out_formula(options: dict[str, int], fmt: str) -> None:
    """With the labels of the batch, whatever number of tokens the layer saw."""
    sample, w = a_sample(**options), a_weight()
    q_x = fake_quantize(sample.x, FORMATS[fmt], ROW_TILE).double()
    q_w = fake_quantize(w, FORMATS[fmt], SQUARE_TILE).double()
    total = 0.0
    for t in range(len(q_x)):
        e = q_w @ q_x[t] - w.double() @ sample.x[t].double()
        total += (sample.grad_output[t].double() @ e).item() ** 2
    expected = 300 / len(q_x) * total / 2
    assert LayerSums(sample, w, None, 1).loss_divergence(fmt, "token-fisher") == pytest.approx(300 * expected, rel=1e-3)
    layer_sums = LayerSums(sample, w, None, 1, BatchSizes(500, 70, 1000, 280))
    assert layer_sums.loss_divergence(fmt, "token-fisher") == pytest.approx(70 * expected, rel=1e-3)


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("options", SAMPLES)
def test_the_saliency_is_the_written_out_formula_whatever_the_batch(options: dict[str, int], fmt: str) -> None:
    sample, w = a_sample(**options), a_weight()
    dw = 300 / len(sample.x) * (sample.grad_output.double().t() @ sample.x.double())
    expected = float((dw * (fake_quantize(w, FORMATS[fmt], SQUARE_TILE).double() - w.double())).abs().sum())
    for batch in (None, BatchSizes(500, 70, 1000, 280)):
        assert LayerSums(sample, w, None, 1, batch).loss_divergence(fmt, "saliency") == pytest.approx(
            expected, rel=1e-4
        )


@pytest.mark.parametrize("fmt", ["fp8", "fp4"])
@pytest.mark.parametrize("options", SAMPLES)
def test_errors_are_the_norms_of_what_rounding_changes(options: dict[str, int], fmt: str) -> None:
    sample, weight = a_sample(**options), a_weight()

    def change(tensor: Tensor, tile: tuple[int, int]) -> tuple[float, float]:
        error = (fake_quantize(tensor, FORMATS[fmt], tile).double() - tensor.double()).norm().item()
        of_all = 1.0 if tensor is weight else math.sqrt(300 / len(sample.x))
        return of_all * error, error / tensor.double().norm().item()

    w = change(weight, SQUARE_TILE)
    pairs = {
        "forward": (change(sample.x, ROW_TILE), w),
        "grad_input": (change(sample.grad_output, ROW_TILE), w),
        "grad_weight": (change(sample.grad_output, COLUMN_TILE), change(sample.x, COLUMN_TILE)),
    }
    found = LayerSums(sample, weight, None, 1).errors(fmt)
    for kind in range(2):
        expected = {gemm: left[kind] + right[kind] for gemm, (left, right) in pairs.items()}
        for gemm in GEMMS:
            assert found[gemm][kind] == pytest.approx(expected[gemm], rel=1e-4)


def test_squares_stand_for_all_tokens_by_their_energy_and_errors_by_their_number() -> None:
    weight, push = a_weight(), scaled()
    plain = a_sample(256, 1024, 1)
    by_energy = replace(plain, energies=(30.0, 3.0))  # 10 instead of 4
    one, other = (LayerSums(sample, weight, push, 1) for sample in (plain, by_energy))
    assert other.loss_divergence("fp4", "token-fisher") == pytest.approx(
        10 / 4 * one.loss_divergence("fp4", "token-fisher")
    )
    assert other.weight_divergences("fp4", KEYS)["forward"].step > one.weight_divergences("fp4", KEYS)["forward"].step
    assert other.errors("fp4") == one.errors("fp4")
    assert other.loss_divergence("fp4", "saliency") == one.loss_divergence("fp4", "saliency")
