"""Are products whose weights are buffers counted by hand's figures, and masks, tables and states told from weights?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import HIDDEN, VOCABULARY, build, text
from torch import Tensor, nn

from snip_hf import SnipConfig, coverage
from snip_hf.estimation.coverage import Coverage
from snip_hf.estimation.fixed_tensors import fixed_tensors

# Of the input: (batch, positions, features).
BATCH, LENGTH, WIDTH = 2, 3, 8
TOKENS = BATCH * LENGTH
ACTIVATIONS = "products of activations with each other (attention, scans)"


def matrix(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Holder(nn.Module):
    """A tensor that is no parameter, as a buffer or a plain attribute, and what is computed with it."""

    def __init__(self, fixed: Tensor, run: Callable[[Any, Tensor], Tensor], is_buffer: bool = True) -> None:
        super().__init__()
        self.run = run
        if is_buffer:
            self.register_buffer("fixed", fixed)
        else:
            self.fixed = fixed

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Block(nn.Module):
    """A linear that plans decide on, and anything else."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.up, self.other = nn.Linear(WIDTH, WIDTH, bias=False), other

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.up(x))


class Model(nn.Module):
    """Blocks, one for each of the others."""

    def __init__(self, *others: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Block, others))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers:
            x = block(x)
        return x


def found_in(*others: nn.Module, config: SnipConfig | None = None) -> Coverage:
    return coverage(Model(*others), {"x": matrix(BATCH, LENGTH, WIDTH)}, config)


# Of a block's linear, which is trained.
LINEAR = 3 * 2.0 * TOKENS * WIDTH * WIDTH


def linear(products: float, gemms: int = 3) -> float:
    return gemms * 2.0 * products


@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize(
    ("run", "shape", "outputs"),
    [
        (lambda own, x: nn.functional.linear(x, own.fixed), (5, 8), 5),
        (lambda own, x: x @ own.fixed[:, :4], (8, 9), 4),
        (lambda own, x: (own.fixed[:5, :8] @ x.mT).mT, (7, 9), 5),
        (lambda own, x: x.to(torch.bfloat16) @ own.fixed.to(torch.bfloat16), (8, 5), 5),
        (lambda own, x: torch.einsum("btd,od->bto", x, own.fixed * 2 + 1), (5, 8), 5),
        (lambda own, x: x @ torch.cat([own.fixed, own.fixed.flip(0)]), (4, 5), 5),
        (lambda own, x: nn.functional.conv1d(x.mT, own.fixed), (5, 8, 1), 5),
    ],
)
def test_a_product_with_a_matrix_that_is_no_parameter_belongs_to_the_module_that_runs_it(
    run: Any, shape: tuple[int, ...], outputs: int, is_buffer: bool
) -> None:
    found = found_in(Holder(matrix(*shape), run, is_buffer))
    what = "buffers" if is_buffer else "tensors that are no parameters"
    assert found.covered == LINEAR and found.flops - found.covered == linear(TOKENS * WIDTH * outputs, gemms=2)
    assert [(one.name, one.kind, one.reason) for one in found.uncovered] == [
        ("layers.*.other", "Holder", f"its weights are {what}: fixed")
    ]
    assert found.aside == {"output head": 0.0, ACTIVATIONS: 0.0}


def test_a_part_as_wide_as_the_features_of_the_batch_is_a_weight() -> None:
    found = coverage(Model(Holder(matrix(8, 9), lambda own, x: x @ own.fixed[:, :8])), {"x": matrix(TOKENS, WIDTH)})
    assert found.flops - LINEAR == linear(TOKENS * 64, gemms=2)


def test_in_front_of_what_is_trained_such_a_product_runs_forward_alone() -> None:
    model = Model(Holder(matrix(8, 8), lambda own, x: x @ own.fixed), nn.Identity())
    model.layers[0].up.weight.requires_grad_(False)
    found = coverage(model, {"x": matrix(BATCH, LENGTH, WIDTH)})
    # The first linear and the buffer: forward; the second linear: forward and grad_weight.
    assert found.flops == linear(TOKENS * 64, gemms=4) and found.uncovered[0].share == 1 / 4


def test_a_weight_made_of_two_buffers_counts_and_so_does_the_making() -> None:
    found = found_in(Holder(matrix(8, 8), lambda own, x: x @ (own.fixed @ own.fixed[:, :5])))
    assert found.flops - LINEAR == linear(TOKENS * 40, gemms=2) + linear(8 * 40, gemms=1)


TRIANGLE = torch.tril(torch.ones(LENGTH, LENGTH))


def attend(queries: Tensor, keys: Tensor) -> Tensor:
    return (queries @ keys.mT) @ keys


def write(own: Any, x: Tensor) -> Tensor:
    y = x @ own.fixed
    own.fixed.add_(x[0].mT @ x[0])
    return y


def write_list(own: Any, x: Tensor) -> Tensor:
    y = x @ own.fixed
    torch._foreach_add_([own.fixed], [x[0].mT @ x[0]])
    return y


def replace(own: Any, x: Tensor) -> Tensor:
    y = x @ own.fixed
    own.fixed = own.fixed * 0.9 + x[0].mT @ x[0]
    return y


def fill_and_attend(own: Any, x: Tensor) -> Tensor:
    own.fixed[:, :LENGTH].copy_(x)
    return attend(x, own.fixed)


@pytest.mark.parametrize("is_buffer", [True, False])
@pytest.mark.parametrize(
    ("run", "fixed", "products"),
    [
        pytest.param(lambda own, x: own.fixed @ x, TRIANGLE, 3 * TOKENS * 8, id="mask"),
        pytest.param(lambda own, x: own.fixed @ x, TRIANGLE / 3, 3 * TOKENS * 8, id="scaled mask"),
        pytest.param(lambda own, x: x @ own.fixed, torch.eye(8)[:, :5], TOKENS * 40, id="choice"),
        pytest.param(lambda own, x: x @ own.fixed, torch.full((8, 5), 0.125), TOKENS * 40, id="mean"),
        pytest.param(lambda own, x: own.fixed.to(x.dtype) @ x, TRIANGLE > 0, 3 * TOKENS * 8, id="mask of truth values"),
        pytest.param(
            lambda own, x: attend(x, own.fixed[:LENGTH]), matrix(9, 8), 2 * 3 * TOKENS * 8, id="table of positions"
        ),
        pytest.param(
            lambda own, x: attend(x, own.fixed[torch.arange(x.shape[1])]), matrix(9, 8), 2 * 3 * TOKENS * 8, id="lookup"
        ),
        pytest.param(
            lambda own, x: attend(x, own.fixed * torch.arange(4)[:, None]), matrix(4, 8), 2 * 4 * TOKENS * 8, id="table"
        ),
        pytest.param(
            lambda own, x: attend(x, own.fixed[torch.tensor([1, 3])]), matrix(9, 8), 2 * 2 * TOKENS * 8, id="index"
        ),
        pytest.param(
            lambda own, x: x @ own.fixed.to(x.dtype), torch.arange(40).view(8, 5), TOKENS * 40, id="whole numbers"
        ),
        pytest.param(write_list, matrix(8, 8), TOKENS * 64 + LENGTH * 64, id="state that is written to in a list"),
        pytest.param(write, matrix(8, 8), TOKENS * 64 + LENGTH * 64, id="state that is written to"),
        pytest.param(replace, matrix(8, 8), TOKENS * 64 + LENGTH * 64, id="state that is replaced"),
        pytest.param(fill_and_attend, torch.zeros(2, 4, 8), 2 * 4 * TOKENS * 8, id="cache"),
        pytest.param(lambda own, x: x @ own.fixed, matrix(8), TOKENS * 8, id="vector"),
        pytest.param(lambda own, x: x[..., :1] @ own.fixed, matrix(1, 8), TOKENS * 8, id="frequencies"),
    ],
)
def test_masks_tables_states_and_vectors_are_no_weights(
    run: Any, fixed: Tensor, products: int, is_buffer: bool
) -> None:
    found = found_in(Holder(fixed.clone(), run, is_buffer))
    assert found.uncovered == [] and found.flops == LINEAR
    assert found.aside[ACTIVATIONS] == linear(products)


def test_a_buffer_that_the_module_moves_or_casts_is_a_weight_still() -> None:
    def cast(own: Any, x: Tensor) -> Tensor:
        own.fixed = own.fixed.to(torch.float64)
        return (x.double() @ own.fixed).float()

    assert found_in(Holder(matrix(8, 5), cast)).share == pytest.approx(3 * 64 / (3 * 64 + 2 * 40))


def test_a_shared_buffer_has_its_shortest_name_and_each_user_its_own_part() -> None:
    model = Model(*(Holder(matrix(8, 9), lambda own, x: x @ own.fixed[:, :8]) for _ in range(2)))
    model.register_buffer("projection", model.layers[0].other.fixed)
    model.layers[1].other.fixed = model.projection
    (found,) = coverage(model, {"x": matrix(BATCH, LENGTH, WIDTH)}).uncovered
    assert found == ("layers.*.other", "Holder", 2 / 5, "its weights are buffers: projection")
    assert list(fixed_tensors(model)) == ["projection"]


def test_a_layer_and_what_an_adapter_puts_around_it_keep_their_buffers_apart() -> None:
    around = Holder(matrix(8, 8), lambda own, x: own.base_layer(x))
    around.base_layer = Holder(matrix(8, 9), lambda own, x: x)
    assert list(fixed_tensors(around)) == ["fixed", "base_layer.fixed"]


def test_many_names_are_counted() -> None:
    def run(own: Any, x: Tensor) -> Tensor:
        for buffer in own.buffers():
            x = x @ buffer
        return x

    holder = Holder(matrix(8, 8), run)
    for name in "abcde":
        holder.register_buffer(name, matrix(8, 8))
    (found,) = found_in(holder).uncovered
    assert found.reason == "its weights are buffers: a, b, c, d, and 2 more"


def with_buffer(layer: nn.Linear) -> nn.Linear:
    """The layer with its weight as a buffer."""
    weight = layer.weight.detach()
    del layer.weight
    layer.register_buffer("weight", weight)
    return layer


def test_a_layer_whose_weight_is_a_buffer_is_covered_unless_it_is_left_out() -> None:
    expected = LINEAR + linear(TOKENS * 64, gemms=2)
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    found = found_in(with_buffer(layer))
    assert (found.flops, found.covered) == (expected, expected)
    found = found_in(layer, config=SnipConfig(skip_modules=("*.other",)))
    assert (found.flops, found.covered) == (expected, LINEAR)
    assert [(one.name, one.kind, one.reason) for one in found.uncovered] == [
        ("layers.*.other", "Linear", "its weights are buffers: weight")
    ]


def test_a_model_without_memory_has_the_coverage_of_one_with_memory() -> None:
    other = Holder(matrix(WIDTH, WIDTH), lambda self, x: x @ self.fixed)
    model = Model(other)
    expected = coverage(model, {"x": matrix(BATCH, LENGTH, WIDTH)})
    found = coverage(model.to("meta"), {"x": torch.empty(BATCH, LENGTH, WIDTH, device="meta")})
    assert found == expected and 0 < found.share < 1


def test_a_head_whose_weight_is_a_buffer_is_aside() -> None:
    model = build("llama")
    expected = coverage(model, text())
    with_buffer(model.lm_head)
    found = coverage(model, text())
    tokens = text()["input_ids"].numel()
    assert found.flops == expected.flops
    assert found.aside["output head"] == linear(tokens * HIDDEN * VOCABULARY, gemms=2)
