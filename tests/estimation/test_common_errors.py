"""Do errors that tokens share count as often as they meet, and only those?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import drawn
from sums_of_layer import LayerSums, alike, whole
from sums_of_layer import across_channels as written_out
from torch import Tensor

from snip_hf.estimation import common_errors
from snip_hf.estimation.common_errors import ByChannels, ByTokens, prepared
from snip_hf.estimation.samples import LayerSample
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.rounding import round_operand

KEYS = (1, 2)


def across_channels(factors: Tensor, errors: Tensor) -> Tensor:
    return prepared(factors).across_channels(errors)


def pieces_of(factors: Tensor) -> list[slice]:
    count, length = factors.shape[:2]
    return [slice(index * length, (index + 1) * length) for index in range(count)]


def test_it_is_the_sum_over_pairs_of_tokens_and_of_channels_in_the_product_form() -> None:
    """Five tokens, three channels, every pair looked at; the same errors in all tokens, so that the form holds."""
    m, e = drawn(5, 3, seed=1) + 1, drawn(1, 3, seed=2).repeat(5, 1)
    size = m.square().sum()

    def in_form(different_channels: bool) -> float:
        found = 0.0
        for t in range(5):
            for s in range(5):
                for i in range(3):
                    for j in range(3):
                        if t != s and (i != j) == different_channels:
                            alike_tokens, alike_channels = (m[t] * m[s]).sum(), (m[:, i] * m[:, j]).sum()
                            found += float(alike_tokens * alike_channels / size * e[t, i] * e[s, j])
        return found

    known = sum(
        float(m[t, i] * e[t, i] * m[s, i] * e[s, i]) for i in range(3) for t in range(5) for s in range(5) if s != t
    )
    share = min(1.0, known / in_form(False))
    assert share > 0
    own, total = across_channels(m[None], e[None]).tolist()
    assert own == pytest.approx(total, rel=1e-5)
    assert total == pytest.approx(share * in_form(True), rel=1e-5)


@pytest.mark.parametrize("shape", [(1, 7, 3), (2, 30, 12), (8, 5, 64), (3, 1, 9), (1, 1, 4)])
def test_products_of_channels_and_products_of_tokens_give_the_same(shape: tuple[int, int, int]) -> None:
    factors, errors = drawn(*shape, seed=1) + 0.5, drawn(*shape, seed=2) + 0.5
    m, e = factors.flatten(0, 1), errors.flatten(0, 1)
    one, other = (form(factors).product_form(errors) for form in (ByChannels, ByTokens))
    size = float(m.square().sum() * e.square().sum())
    for found, wanted in zip(one, other, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6 * size)
    expected = torch.tensor(written_out(m, e, pieces_of(factors)))
    assert torch.allclose(across_channels(factors, errors), expected, rtol=1e-4, atol=1e-6 * size)


def test_short_pieces_end_in_zeros_that_add_nothing() -> None:
    m, e = drawn(11, 4, seed=1) + 0.5, drawn(11, 4, seed=2) + 0.5
    parts = (torch.nn.utils.rnn.pad_sequence(list(x.tensor_split(3)), batch_first=True) for x in (m, e))
    expected = written_out(m, e, [slice(0, 4), slice(4, 8), slice(8, 11)])
    assert across_channels(*parts).tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("n", "channels"), [(6, 20), (20, 6)])
def test_a_token_alone_a_channel_alone_and_nothing_at_all_share_nothing(n: int, channels: int) -> None:
    m, e = drawn(1, n, channels, seed=1), drawn(1, n, channels, seed=2)
    token, channel = torch.zeros_like(e), torch.zeros_like(e)
    token[:, 3], channel[:, :, 3] = e[:, 3], e[:, :, 3]
    scale = float(m.square().sum() * e.square().sum())
    for factors, errors in ((m, token), (m, channel), (m, 0 * e), (0 * m, e)):
        assert across_channels(factors, errors).abs().max() <= 1e-6 * scale
    assert across_channels(0 * m, e).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("n", "channels"), [(6, 20), (20, 6)])
def test_it_is_of_second_order_in_both_and_keeps_what_is_no_number(n: int, channels: int) -> None:
    m, e = drawn(1, n, channels, seed=1) + 0.5, drawn(1, 1, channels, seed=2).repeat(1, n, 1)
    wanted = across_channels(m, e)
    assert (wanted != 0).all()
    # Gradients of a mean over many tokens are this small.
    assert torch.allclose(across_channels(2.0**-40 * m, e / 8) * 2.0**86, wanted, rtol=1e-4)
    for factors, errors in ((m.clone(), e), (m, e.clone())):
        (factors if errors is e else errors)[0, 2, 1] = torch.nan
        assert across_channels(factors, errors).isnan().all()


def test_errors_of_independent_tokens_add_nothing_on_the_average() -> None:
    n, channels, draws = 40, 16, 400
    found, elements = [], 0.0
    for seed in range(draws):
        m, e = drawn(1, n, channels, seed=2 * seed), drawn(1, n, channels, seed=2 * seed + 1)
        found.append(float(across_channels(m, e)[1]))
        elements += float((m * e).square().sum()) / draws
    mean = sum(found) / draws
    assert abs(mean) < 0.02 * elements


# ----------------------------------------------------------------------------------- the mean square, known exactly


def mixed(tokens: Tensor, channels: Tensor, seed: int) -> Tensor:
    """Returns factors along one direction: <m_ti m_sj> = (tokens tokens^T)_ts (channels^T channels)_ij."""
    return tokens @ drawn(tokens.shape[1], channels.shape[0], seed=seed) @ channels


def test_with_repeated_rows_the_forward_s_figure_is_the_mean_square_over_directions() -> None:
    """Six kinds of rows among 256, as behind an activation function: small values that FP4 rounds to zero.

    The weight lies on the grid, so that only errors of activations are left. The mean square of the whole inner product
    is tr(<M M^T> e <N N^T> e^T), exactly. Without pairs of tokens across channels the figure is a small part of it.
    """
    n, width, height, draws = 256, 24, 20, 100
    weight = 3.0 * torch.randint(0, 3, (height, width), generator=torch.Generator().manual_seed(3))
    x = alike(n, 6, width, seed=4).abs() / 20
    x[:, 0] = 6.0
    e = round_operand(x, FORMATS["fp4"], "activation", 1).double() - x.double()
    tokens, outputs = drawn(n, 30, seed=5) + 0.3, drawn(40, height, seed=6)
    channels = outputs.double() @ weight.double()
    exact = ((tokens.double() @ tokens.double().t() @ e) * (e @ channels.t() @ channels)).sum().item()
    found, without = 0.0, 0.0
    for seed in range(draws):
        g_dot = mixed(tokens, outputs, seed=100 + seed)
        sample = LayerSample(n, x, drawn(n, height, seed=7), [torch.zeros_like(x)], [g_dot])
        step = LayerSums(sample, weight, None, 1).weight_divergences("fp4", KEYS)["forward"].step
        found += step / draws
        without += (step - written_out(g_dot @ weight, e, whole(n))[1]) / draws
    assert found == pytest.approx(exact, rel=0.15)
    assert without < 0.5 * exact


@pytest.mark.parametrize(
    ("shape", "once", "each"), [((2, 30, 12), 1, 3), ((2, 5, 12), 1, 3)], ids=["channels", "tokens"]
)
def test_factors_are_multiplied_with_themselves_once_for_all_formats(
    shape: tuple[int, int, int], once: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors, errors = drawn(*shape, seed=1) + 0.5, [drawn(*shape, seed=seed) for seed in (2, 3)]
    expected = [across_channels(factors, one) for one in errors]
    calls: list[Any] = []
    multiply = common_errors.rough_product
    monkeypatch.setattr(common_errors, "rough_product", lambda *operands: calls.append(operands) or multiply(*operands))
    met = prepared(factors)
    assert len(calls) == once
    found = [met.across_channels(one) for one in errors]
    assert len(calls) == once + each * len(errors)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
