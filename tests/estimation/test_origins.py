"""Do products belong to the parameters that their weights are composed of, and to none where there are activations?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from snip_hf import coverage
from snip_hf.estimation.coverage import Coverage

BATCH, LENGTH, WIDTH, RANK = 2, 3, 8, 2
TOKENS = BATCH * LENGTH
ACTIVATIONS = "products of activations with each other (attention, scans)"
# Of the block's linear.
LINEAR = 3 * 2.0 * TOKENS * WIDTH * WIDTH


def gemms(products: float, count: int = 3) -> float:
    return count * 2.0 * products


class Holder(nn.Module):
    """Parameters, and what is computed with them."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parameters: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.randn(*shape)))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Model(nn.Module):
    """A linear that plans decide on, and anything else."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH, bias=False), "other": other})])

    def forward(self, x: Tensor) -> Tensor:
        block = self.layers[0]
        return block["other"](block["up"](x))


def found_in(other: nn.Module) -> Coverage:
    return coverage(Model(other), {"x": torch.randn(BATCH, LENGTH, WIDTH)})


def flops_by_name(found: Coverage) -> dict[str, float]:
    return {one.name.removeprefix("layers.*.other."): one.share * found.flops for one in found.uncovered}


FACTORS: dict[str, tuple[int, ...]] = {"a": (WIDTH, RANK), "b": (RANK, WIDTH)}


def test_a_weight_that_is_a_product_of_parameters_belongs_to_them_by_their_sizes() -> None:
    found = found_in(Holder(lambda own, x: x @ (own.a @ own.b), a=(8, 2), b=(2, 24)))
    made, used = gemms(8 * 2 * 24), gemms(TOKENS * 8 * 24)
    # Of two weights the second one has their product.
    assert flops_by_name(found) == pytest.approx({"a": used / 4, "b": used * 3 / 4 + made})
    assert found.aside == {"output head": 0.0, ACTIVATIONS: 0.0}


@pytest.mark.parametrize(
    "compose",
    [
        lambda own: (own.a @ own.b) * (own.c @ own.d),  # LoHa
        lambda own: torch.kron(own.e, own.c[:2] @ own.d[:, :2]),  # LoKr
        lambda own: own.a @ own.b @ own.c @ own.d,
        lambda own: torch.linalg.solve(torch.eye(8) - own.w, torch.eye(8) + own.w) @ own.w,  # a rotation
        lambda own: own.scale[:, None] * (own.a @ own.b),
        lambda own: torch.eye(8) @ own.w @ own.w,
        lambda own: nn.functional.conv1d(own.w[None], own.w[..., None])[0],
    ],
)
def test_a_composed_weight_is_no_activation(compose: Callable[[Any], Tensor]) -> None:
    parameters = {"a": (8, 2), "b": (2, 8), "c": (8, 2), "d": (2, 8), "e": (4, 4), "w": (8, 8), "scale": (8,)}
    found = found_in(Holder(lambda own, x: x @ compose(own), **parameters))
    assert found.aside == {"output head": 0.0, ACTIVATIONS: 0.0}
    assert found.flops >= LINEAR + gemms(TOKENS * 64) - 3 * len(parameters)


@pytest.mark.parametrize(
    "compose",
    [
        lambda own: own.w + own.a @ own.b,
        lambda own: torch.addmm(own.w, own.a, own.b),
        lambda own: own.w * (own.a @ own.b),
    ],
)
def test_what_an_adapter_adds_to_a_weight_leaves_it_that_weight(compose: Callable[[Any], Tensor]) -> None:
    found = found_in(Holder(lambda own, x: x @ compose(own), w=(WIDTH, WIDTH), **FACTORS))
    assert flops_by_name(found) == {"w": pytest.approx(gemms(TOKENS * 64)), "b": pytest.approx(gemms(8 * 2 * 8))}


def test_a_frozen_weight_to_which_something_trained_is_added_has_the_gradient_of_the_sum() -> None:
    holder = Holder(lambda own, x: x @ (own.w + own.a @ own.b), w=(WIDTH, WIDTH), **FACTORS)
    holder.w.requires_grad_(False)
    assert flops_by_name(found_in(holder))["w"] == pytest.approx(gemms(TOKENS * 64))
    holder.a.requires_grad_(False)
    holder.b.requires_grad_(False)
    found = flops_by_name(found_in(holder))
    # Forward and grad_input; what is made of frozen parameters has no gradients.
    assert found == {"w": pytest.approx(gemms(TOKENS * 64, 2)), "b": pytest.approx(gemms(8 * 2 * 8, 1))}


class Queries(Holder):
    """Learned queries, which a linear or a product with another module's weight makes activations of."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(run, queries=(4, WIDTH))
        self.to_keys, self.inner = nn.Linear(WIDTH, WIDTH, bias=False), Holder(lambda own, x: x @ own.w, w=(8, 8))


@pytest.mark.parametrize(
    "make",
    [
        lambda own: own.to_keys(own.queries),
        lambda own: own.to_keys(torch.zeros(4, 8)),
        lambda own: own.inner(own.queries),
        lambda own: (torch.arange(4.0)[:, None] + torch.zeros(8)) @ own.queries[:1].mT @ own.queries[:1],
    ],
)
def test_what_layers_make_of_learned_queries_and_positions_are_activations(make: Callable[[Any], Tensor]) -> None:
    found = found_in(Queries(lambda own, x: x @ make(own).mT))
    assert found.aside[ACTIVATIONS] == gemms(TOKENS * WIDTH * 4)


def test_rows_that_the_batch_looks_up_in_embeddings_are_activations_and_no_part_of_the_head() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.table = nn.ModuleList([nn.Linear(8, 8, bias=False)]), nn.Embedding(5, 8)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.table(ids)
            return self.layers[0](x @ x.mT @ x)

    found = coverage(Language(), {"ids": torch.zeros(BATCH, LENGTH, dtype=torch.int64)})
    assert found.flops == LINEAR
    assert found.aside == {"output head": 0.0, ACTIVATIONS: gemms(2 * TOKENS * LENGTH * 8)}
