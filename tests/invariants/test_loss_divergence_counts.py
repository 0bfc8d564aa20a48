"""The loss divergence counts what a loss is a mean over: labels, sequences or pairs, also of experts, parts and ranks.

The truth is taken by autograd, token by token, or measured: in a model whose tokens do not see each other, the loss of
a token answers to the errors of that token alone.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from configs import fp4_config
from rounded import fake_quantize
from slow_cases import slow
from small import adamw_after, text, tiny_llama
from thread_ranks import on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from snip_hf.config import SnipConfig
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.divergence import converted, divergences_at, estimate_divergence
from snip_hf.estimation.ground_truth import measure_divergence
from snip_hf.estimation.optimizer_step import OptimizerStep
from snip_hf.estimation.table import LAYER, DivergenceTable
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import ROW_TILE, SQUARE_TILE
from snip_hf.parallel.ranks import Processes, Ranks

CHOICES = fp4_config().formats[::-1]
HIDDEN, INNER, VOCABULARY, LENGTH = 12, 20, 17, 33
# An estimator of the loss divergence ("norm": that of the policy "snip-paper"), or the criterion of a policy.
FORMS = ("token-fisher", "saliency", "norm", "fisher")
# Those that are sums over tokens, whatever the tokens are.
SUMS = ("token-fisher", "fisher")
MASKS = (1.0, 1 / 2, 1 / 8)
Inputs = dict[str, Any]
# (Layer, format) -> figure.
Figures = dict[tuple[str, str], float]


class Block(nn.Module):
    """`up` is one linear or a list of experts; the rows of a batch are dealt out to them in turn."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.ModuleList([nn.Linear(HIDDEN, INNER) for _ in range(experts)])
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found, experts = self.norm(x), len(self.up)
        inner = torch.stack([up(found[index::experts]) for index, up in enumerate(self.up)], 1).flatten(0, 1)
        return x + self.down(torch.tanh(inner))


class Pointwise(nn.Module):
    """A causal LM without attention. Its blocks run one after the other, or (`abreast`) all on the same input.

    `calls` is how many times every block runs.
    """

    def __init__(self, blocks: int = 1, experts: int = 1, calls: int = 1, abreast: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Block(experts) for _ in range(blocks)])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.calls, self.abreast = calls, abreast

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def logits(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        runs = [block for block in self.layers for _ in range(self.calls)]
        if self.abreast:
            return self.head(sum(block(x) for block in runs))
        for block in runs:
            x = block(x)
        return self.head(x)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.logits(input_ids)[:, :-1]
        return {"loss": cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())}


def pointwise(experts: int = 1, blocks: int = 1, calls: int = 1, abreast: bool = False) -> Pointwise:
    """The same weights in all blocks and experts, whatever their number."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        one = Pointwise()
        model = Pointwise(blocks, experts, calls, abreast)
    model.embed, model.head = one.embed, one.head
    model.layers = nn.ModuleList([copy.deepcopy(one.layers[0]) for _ in range(blocks)])
    for block in model.layers:
        with torch.no_grad():
            block.up[0].weight.mul_(3)
            block.down.weight.mul_(3)
        block.up = nn.ModuleList([copy.deepcopy(block.up[0]) for _ in range(experts)])
    return model


def inputs_of(rows: int, alike: int = 1, share: float = 1.0, seed: int = 1) -> Inputs:
    """Rows, each of them `alike` times; labels at this share of their ends, as where only completions have any."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator).repeat_interleave(alike, 0)
    return {"input_ids": ids, "labels": masked(ids, share)}


def masked(labels: Tensor, share: float) -> Tensor:
    """Labels of all but the first tokens that a causal LM has a loss for, of which there are 32 a row."""
    labels = labels.clone()
    labels[:, : LENGTH - round((LENGTH - 1) * share)] = -100
    return labels


def config_of(form: str) -> SnipConfig:
    policies = {"fisher": {"policy": "fisher"}, "norm": {"policy": "snip-paper"}}
    options = policies.get(form, {"loss_estimator": form})
    return fp4_config(probe_tokens=None, probe_batch_tokens=None, **options)


def gradients_in(model: nn.Module, inputs: Inputs) -> Inputs:
    """Gradients of the blocks' weights in high precision, as an optimizer would use them."""
    weights = {name: module.weight for name, module in model.layers.named_modules() if isinstance(module, nn.Linear)}
    loss = model(inputs["input_ids"], inputs["labels"])["loss"]
    found = torch.autograd.grad(loss, list(weights.values()))
    return {f"layers.{name}": gradient for name, gradient in zip(weights, found, strict=True)}


def table_of(model: nn.Module, inputs: Inputs, form: str, part: int | None = None) -> DivergenceTable:
    """X and G from one pass without derivatives."""
    config, batch, gradients = config_of(form), Batch.of(inputs), gradients_in(model, inputs)
    with converted(model, config):
        return divergences_at(model, batch.part(part), OptimizerStep(gradients, {}), config)


def figures_in(table: DivergenceTable, form: str) -> Figures:
    """Rises of the loss (not relative to it), or criteria."""
    found = {}
    for row in table.rows:
        if row.gemm == "forward":
            value = row.criterion if form == "fisher" else row.loss_divergence * table.loss
            assert value is not None
            found[row.layer, row.format] = value
    return found


def figures(model: nn.Module, inputs: Inputs, form: str, part: int | None = None) -> Figures:
    return figures_in(table_of(model, inputs, form, part), form)


def added(found: Mapping[tuple[str, str], float], kind: str) -> dict[str, float]:
    """Format -> sum over the layers whose names have this in them."""
    return {fmt: sum(value for (name, at), value in found.items() if kind in name and at == fmt) for fmt in CHOICES}


class Call(NamedTuple):
    """The tensors of one call of a layer in FP64, one row per token."""

    x: Tensor
    own_gradient: Tensor
    """Gradient of the token's own loss, not of a mean."""
    error: Tensor
    """Error of its output, from quantizing both operands."""


def calls_of(model: Pointwise, inputs: Inputs, name: str, fmt: str) -> tuple[list[Call], int]:
    """Returns the calls of a layer in a plain model, and the number of labels; by hooks and autograd alone."""
    layer = model.get_submodule(name)
    seen: list[tuple[Tensor, Tensor]] = []

    def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        added = torch.zeros_like(output).requires_grad_()
        seen.append((args[0].detach().flatten(0, -2), added))
        return output + added

    handle = layer.register_forward_hook(hook)
    logits = model.logits(inputs["input_ids"])[:, :-1]
    handle.remove()
    labels = inputs["labels"][:, 1:]
    total = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    gradients = torch.autograd.grad(total, [added for _, added in seen])
    weight = layer.weight.detach()
    w, w_q = weight.double(), fake_quantize(weight, FORMATS[fmt], SQUARE_TILE).double()
    calls = []
    for (x, _), gradient in zip(seen, gradients, strict=True):
        x_q = fake_quantize(x, FORMATS[fmt], ROW_TILE).double()
        calls.append(Call(x.double(), gradient.flatten(0, -2).double(), x_q @ w_q.t() - x.double() @ w.t()))
    return calls, int((labels != -100).sum())


def truth(model: Pointwise, inputs: Inputs, form: str, name: str, fmt: str) -> float:
    """docs/method.md, section 2, from the gradients of the tokens' own losses."""
    calls, labels = calls_of(model, inputs, name, fmt)
    weight = model.get_submodule(name).weight.detach()
    error_w = fake_quantize(weight, FORMATS[fmt], SQUARE_TILE).double() - weight.double()
    gradient_w = sum(call.own_gradient.t() @ call.x for call in calls) / labels
    if form == "fisher":
        return sum(float((call.own_gradient * call.error).square().sum()) for call in calls) / labels
    if form == "saliency":
        return float((gradient_w * error_w).abs().sum())
    if form == "norm":
        x, g = (torch.cat([call[part] for call in calls]) for part in (0, 1))
        error_x = fake_quantize(x.float(), FORMATS[fmt], ROW_TILE).double() - x
        mean_square = float(error_x.square().sum()) / (inputs["labels"].numel() * x.shape[1])
        square = float((g @ weight.double() / labels).square().sum()) * mean_square
        square += float(gradient_w.square().sum() * error_w.square().mean())
        return square**0.5
    return sum(float((call.own_gradient * call.error).sum(1).square().sum()) for call in calls) / (2 * labels)


# ---------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("share", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_under_masks_each_form_is_the_mean_over_the_labelled_tokens_of_autograd(form: str, share: float) -> None:
    model, inputs = pointwise(blocks=2), inputs_of(4, share=share)
    found = figures(model, inputs, form)
    assert len(found) == 4 * len(CHOICES)
    for (name, fmt), value in found.items():
        assert value == pytest.approx(truth(model, inputs, form, name, fmt), rel=1e-3), (name, fmt)


def of_the_model(model: Pointwise, rows: int, seed: int) -> Tensor:
    """Labels drawn from what the model predicts, of which the Fisher information is an expectation."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=generator)
    with torch.no_grad():
        drawn = torch.multinomial(model.logits(ids)[:, :-1].softmax(-1).flatten(0, 1), 1, generator=generator)
    return torch.stack([ids, torch.cat([ids[:, :1], drawn.view(rows, LENGTH - 1)], 1)])


@contextmanager
def erring(layer: nn.Module, fmt: str, sign: float) -> Iterator[None]:
    """Adds the error of quantizing both operands, times `sign`, to the layer's output."""
    weight = layer.weight.detach()
    w_q = fake_quantize(weight, FORMATS[fmt], SQUARE_TILE)

    def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        x = args[0].flatten(0, -2)
        error = fake_quantize(x, FORMATS[fmt], ROW_TILE) @ w_q.t() - x @ weight.t()
        return output + sign * error.view_as(output)

    handle = layer.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("share", [MASKS[-1]])
def test_under_masks_token_fisher_is_the_measured_second_order_rise(share: float) -> None:
    """The mean rise under the layer's errors and under their opposites, in which what is of first order cancels."""
    model = pointwise(blocks=2)
    ids, labels = of_the_model(model, 2048, seed=3)
    inputs = {"input_ids": ids, "labels": masked(labels, share)}
    found = figures(model, inputs, "token-fisher")

    @torch.no_grad()
    def loss(name: str, fmt: str, sign: float) -> float:
        with erring(model.get_submodule(name), fmt, sign):
            logits = model.logits(ids)[:, :-1].double().flatten(0, 1)
        return float(cross_entropy(logits, inputs["labels"][:, 1:].flatten()))

    without = loss(*next(iter(found)), 0.0)
    for (name, fmt), value in found.items():
        plus, minus = loss(name, fmt, 1.0), loss(name, fmt, -1.0)
        assert value == pytest.approx((plus + minus) / 2 - without, rel=0.06), (name, fmt)


@pytest.mark.slow
def test_under_masks_token_fisher_is_the_measured_rise_of_a_trained_llama() -> None:
    """Over 12 batches of text with labels drawn from the model, whose loss rises on the average by the Kullback-Leibler
    divergence from it. The tokens that the layers saw, in place of labels, would give 2 and 8 times as much."""
    model, length, generator = tiny_llama(), 96, torch.Generator().manual_seed(0)
    adamw_after(model, steps=300)
    ids = [text(8, length, 200 + index)["input_ids"] for index in range(12)]

    @torch.no_grad()
    def predictions() -> Tensor:
        return torch.stack([model(input_ids=one).logits[:, :-1].double().log_softmax(-1) for one in ids])

    before = predictions()
    drawn = torch.multinomial(before.exp().flatten(0, 2), 1, generator=generator).view(12, 8, length - 1)
    labels = [torch.cat([one[:, :1], other], 1) for one, other in zip(ids, drawn, strict=True)]

    def rise(name: str) -> Tensor:
        """Figures of every token, (12, 8, 95)."""
        rises = []
        for sign in (1.0, -1.0):
            with erring(model.get_submodule(name), "fp4", sign):
                rises.append((before.exp() * (before - predictions())).sum(-1))
        return (rises[0] + rises[1]) / 2

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "layers" in name]
    measured = {name: rise(name) for name in names}
    for share in MASKS:
        start = length - round((length - 1) * share)
        sums = dict.fromkeys(names, 0.0)
        for one, other in zip(ids, labels, strict=True):
            masked = other.index_fill(1, torch.arange(start), -100)
            config = config_of("token-fisher")
            with converted(model, config):
                batch = Batch.of({"input_ids": one, "labels": masked})
                table = divergences_at(model, batch, OptimizerStep({}, {}), config)
            for (name, fmt), value in figures_in(table, "token-fisher").items():
                if fmt == "fp4":
                    sums[name] += value / len(ids)
        ratios = [sums[name] / float(measured[name][:, :, start - 1 :].mean()) for name in names]
        assert len(ratios) == 14
        assert statistics.median(ratios) == pytest.approx(1.0, abs=0.25), share


@pytest.mark.parametrize("share", MASKS)
def test_under_masks_norm_is_the_root_mean_square_of_what_errors_of_that_size_do_to_the_loss(share: float) -> None:
    """Measured over random errors of both operands; to first order, by the difference of both signs."""
    model, inputs, name, draws = pointwise(), inputs_of(4, share=share), "layers.0.down", 600
    layer, generator = model.get_submodule(name), torch.Generator().manual_seed(0)
    (call,), _ = calls_of(model, inputs, name, "fp8")
    x, weight = call.x.float(), layer.weight.detach().clone()
    errors = (fake_quantize(one, FORMATS["fp8"], tile) - one for one, tile in ((x, ROW_TILE), (weight, SQUARE_TILE)))
    size_x, size_w = (float(error.square().mean().sqrt()) for error in errors)
    moves = []
    for _ in range(draws):
        error_x = size_x * torch.randn(x.shape, generator=generator)
        error_w = size_w * torch.randn(weight.shape, generator=generator)
        losses = []
        for sign in (1, -1):
            moved = (x + sign * error_x) @ (weight + sign * error_w).t()
            handle = layer.register_forward_hook(lambda module, args, output, y=moved: y.view_as(output))
            with torch.no_grad():
                logits = model.logits(inputs["input_ids"])[:, :-1].double().flatten(0, 1)
                losses.append(float(cross_entropy(logits, inputs["labels"][:, 1:].flatten())))
            handle.remove()
        moves.append((losses[0] - losses[1]) / 2)
    measured = float(torch.tensor(moves).square().mean().sqrt())
    # A root mean square of that many draws is right to 1 / sqrt(2 draws).
    assert figures(model, inputs, "norm")[name, "fp8"] == pytest.approx(measured, rel=3 / (2 * draws) ** 0.5)


# ----------------------------------------------------------------------------------------------- experts, shared layers


@pytest.mark.parametrize("share", [1.0, 1 / 8])
@pytest.mark.parametrize("experts", [2, 4, 8])
@pytest.mark.parametrize("form", FORMS)
def test_identical_experts_of_the_same_tokens_add_up_to_the_dense_layer(form: str, experts: int, share: float) -> None:
    """Rows come eight times each, so that every expert sees the same."""
    inputs = inputs_of(3, alike=8, share=share)
    dense = added(figures(pointwise(), inputs, form), ".up.")
    found = figures(pointwise(experts), inputs, form)
    assert len(found) == (experts + 1) * len(CHOICES)
    assert added(found, ".up.") == pytest.approx(dense, rel=1e-5)


@pytest.mark.parametrize("form", SUMS)
def test_experts_that_see_different_tokens_add_up_too(form: str) -> None:
    inputs = inputs_of(8)
    inputs["labels"][1] = inputs["labels"][6, :20] = -100
    dense = added(figures(pointwise(), inputs, form), ".up.")
    assert added(figures(pointwise(4), inputs, form), ".up.") == pytest.approx(dense, rel=1e-5)


@pytest.mark.parametrize("share", [1.0, 1 / 2])
@pytest.mark.parametrize("form", SUMS)
def test_a_layer_that_is_called_twice_has_the_sum_over_its_calls(form: str, share: float) -> None:
    """The figure of two layers with the same weights, called one after the other, and that of autograd."""
    inputs, shared = inputs_of(4, share=share), pointwise(calls=2)
    found, apart = figures(shared, inputs, form), figures(pointwise(blocks=2), inputs, form)
    for kind in (".up.", ".down"):
        assert added(found, kind) == pytest.approx(added(apart, kind), rel=1e-5)
    for (name, fmt), value in found.items():
        assert value == pytest.approx(truth(shared, inputs, form, name, fmt), rel=1e-3)


@pytest.mark.parametrize("calls", [2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_calls_that_are_alike_count_as_often_as_there_are_calls(form: str, calls: int) -> None:
    inputs = inputs_of(4)
    found = figures(pointwise(calls=calls, abreast=True), inputs, form)
    apart = figures(pointwise(blocks=calls, abreast=True), inputs, form)
    for kind in (".up.", ".down"):
        for fmt, value in added(found, kind).items():
            one = next(figure for (name, at), figure in apart.items() if kind in name and at == fmt)
            assert value == pytest.approx(calls * one, rel=1e-5)


@pytest.mark.parametrize("options", [{"experts": 4}, slow({"calls": 2})])
def test_weight_divergences_of_experts_and_of_shared_layers_are_the_measured_ones(options: dict[str, int]) -> None:
    """Their sums hold products of X and G alone, and no number of tokens. Calls and experts see whole tiles of 128."""
    model, inputs, seeds = pointwise(**options), inputs_of(512, share=1 / 8), 6
    measured = measure_divergence(model, inputs, config=fp4_config(), draws=1, gemms=("grad_weight", LAYER))
    squares: dict[tuple[str, str], float] = {}
    for seed in range(seeds):
        config = fp4_config(probe_tokens=None, probe_batch_tokens=None, seed=seed)
        for row in estimate_divergence(model, inputs, config=config).rows:
            if row.format == "fp8":
                key = row.layer, row.gemm
                squares[key] = squares.get(key, 0.0) + row.weight_divergence**2 / seeds
    for row in measured.rows:
        if row.format == "fp8":  # FP4 rounds at random
            exactly = row.gemm == "grad_weight"
            found = squares[row.layer, row.gemm] ** 0.5
            assert found == pytest.approx(row.weight_divergence, rel=5e-3 if exactly else 0.35), (row.layer, row.gemm)


# --------------------------------------------------------------------------------------------------- parts, ranks, pass


@pytest.mark.parametrize("form", FORMS)
def test_a_part_of_a_micro_batch_stands_for_all_of_it_under_masks(form: str) -> None:
    """Rows come twice each; every other one is run."""
    inputs = inputs_of(4, alike=2)
    inputs["labels"][:2, :20] = inputs["labels"][6:, :30] = -100
    whole, part = figures(pointwise(2), inputs, form), figures(pointwise(), inputs, form, part=4 * LENGTH)
    for kind in (".up.", ".down"):
        assert added(part, kind) == pytest.approx(added(whole, kind), rel=1e-5)


def test_errors_of_a_part_grow_by_its_tokens_in_x_and_shrink_by_its_labels_in_g() -> None:
    """Rows come twice each, of which the first has all labels and the second half of them."""
    inputs = inputs_of(4, alike=2)
    inputs["labels"][1::2] = masked(inputs["input_ids"][1::2], 1 / 2)
    whole, part = (table_of(pointwise(), inputs, "token-fisher", count) for count in (None, 4 * LENGTH))
    errors = [{(row.layer, row.gemm, row.format): row.absolute_error for row in table.rows} for table in (whole, part)]
    for (layer, gemm, fmt), value in errors[0].items():
        if gemm == "forward":
            assert errors[1][layer, gemm, fmt] == pytest.approx(value, rel=1e-5)
        elif gemm == "grad_input":  # the rows without half of their labels are not those that were run
            assert errors[1][layer, gemm, fmt] == pytest.approx(value, rel=0.05)


@pytest.mark.parametrize("form", FORMS)
def test_ranks_with_different_numbers_of_labels_have_together_the_figures_of_one_process(form: str) -> None:
    inputs, config = inputs_of(6, seed=5), config_of(form)
    inputs["labels"][:3] = masked(inputs["labels"][:3], 1 / 8)
    wanted, gradients = figures(pointwise(2), inputs, form), gradients_in(pointwise(2), inputs)

    def work(ranks: Ranks) -> DivergenceTable:
        mine = Batch.of({name: value[2 * ranks.rank : 2 * ranks.rank + 2] for name, value in inputs.items()})
        model, processes = pointwise(2), Processes(data=ranks, everyone=ranks)
        with converted(model, config):
            return divergences_at(model, mine, OptimizerStep(gradients, {}), config, processes=processes)

    for table in on_ranks(3, work):
        assert figures_in(table, form) == pytest.approx(wanted, rel=1e-5)


# ------------------------------------------------------------ losses that are means over tokens, sequences or pairs

# The policy takes gradients that are 0, as where preferences of either kind balance.
BY_GRADIENTS = fp4_config(
    policy="fisher", loss_estimator="token-fisher", probe_tokens=None, probe_batch_tokens=None, probes=1
)
ROWS, BETA = 64, 0.1
Terms = Callable[[nn.Module, Inputs], Tensor]


def log_probs(model: Any, inputs: Inputs) -> Tensor:
    """Figures of all tokens but the first ones, (sequences, tokens)."""
    ids = inputs["input_ids"]
    return torch.log_softmax(model.logits(ids)[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]


def by_tokens(model: nn.Module, inputs: Inputs) -> Tensor:
    """A policy's tokens, as in GRPO: minus the advantage times the ratio of probabilities, now and then."""
    return -inputs["advantages"][:, None] * (log_probs(model, inputs) - inputs["before"]).exp()


def by_sequences(model: nn.Module, inputs: Inputs) -> Tensor:
    """A policy's completions, as in RLOO."""
    return -inputs["advantages"] * (log_probs(model, inputs) - inputs["before"]).sum(-1).exp()


def by_pairs(model: nn.Module, inputs: Inputs) -> Tensor:
    """Preferences, as in DPO: the first half of the sequences was chosen. The reference is the model itself."""
    chosen, rejected = (log_probs(model, inputs) - inputs["before"]).sum(-1).chunk(2)
    return -logsigmoid(BETA * (chosen - rejected))


def mean_of(terms: Terms) -> Terms:
    return lambda model, inputs: terms(model, inputs).mean()


def half_square_of(terms: Terms) -> Terms:
    """Half the mean square by which the terms differ from those that the inputs have."""
    return lambda model, inputs: (terms(model, inputs) - inputs["terms"]).square().mean() / 2


def a_case(terms: Terms) -> tuple[nn.Module, Inputs]:
    generator = torch.Generator().manual_seed(3)
    model = pointwise(blocks=2)
    ids = torch.randint(0, 17, (ROWS, LENGTH), generator=generator)
    inputs = {"input_ids": ids, "advantages": torch.randint(0, 2, (ROWS,), generator=generator) * 2.0 - 1}
    with torch.no_grad():
        inputs["before"] = log_probs(model, inputs)
        inputs["terms"] = terms(model, inputs)
    return model, inputs


def ratios(model: nn.Module, inputs: Inputs, loss: Terms, truth: Terms, terms: int) -> list[float]:
    """Estimate over truth, of the forward GEMMs in FP8: FP4 moves sums over tokens beyond first order."""
    found = estimate_divergence(model, inputs, None, BY_GRADIENTS, loss, terms)
    true = measure_divergence(model, inputs, None, BY_GRADIENTS, 1, ("forward",), compute_loss=truth)
    expected = {(row.layer, row.format): row.loss_divergence for row in true.rows}
    forward = [row for row in found.rows if row.gemm == "forward" and row.format == "fp8"]
    return [row.loss_divergence / expected[row.layer, row.format] for row in forward]


@pytest.mark.parametrize(
    ("terms", "count", "tolerance"),
    [(by_tokens, ROWS * (LENGTH - 1), 0.1), (by_sequences, ROWS, 0.25), (by_pairs, ROWS // 2, 0.6)],
)
def test_it_is_half_the_mean_square_by_which_the_terms_move(terms: Terms, count: int, tolerance: float) -> None:
    """Errors of tokens are taken as independent: in terms of several tokens, products of theirs average to nothing."""
    model, inputs = a_case(terms)
    found = ratios(model, inputs, mean_of(terms), half_square_of(terms), count)
    assert statistics.median(found) == pytest.approx(1, rel=tolerance)
    assert all(1 / 3 < ratio < 3 for ratio in found)


def test_it_is_the_rise_of_a_loss_of_preferences_that_are_drawn_from_the_model() -> None:
    """Both orders of a pair are as likely if the model prefers neither: here each pair is in the batch in both."""
    model, inputs = a_case(by_pairs)
    first, second = inputs["input_ids"].chunk(2)
    inputs["input_ids"] = torch.cat([first, second, second, first])
    with torch.no_grad():
        inputs["before"] = log_probs(model, inputs)
    found = ratios(model, inputs, mean_of(by_pairs), mean_of(by_pairs), ROWS)
    assert statistics.median(found) == pytest.approx(1, rel=0.6)
    assert all(1 / 3 < ratio < 3 for ratio in found)
