"""Which subclasses of nn.Linear can be registered, and what becomes of their modules?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from configs import fp4_config
from torch import Tensor, nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

from snip_hf import SnipLinear, convert_model, register_linear_class, restore_model
from snip_hf.layers.linear import LINEAR_CLASSES, SnipConv1D
from snip_hf.layers.selection import skip_reasons


@pytest.fixture(autouse=True)
def nothing_stays_registered() -> Iterator[None]:
    with LINEAR_CLASSES.restored():
        yield


class Same(nn.Linear):
    """The same product in other words."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        y = torch.einsum("...i,oi->...o", input, self.weight)
        return y if self.bias is None else y + self.bias


class Child(Same):
    """Registered by nobody."""


def block(**modules: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict(modules)])})


def test_modules_of_a_registered_class_run_as_linears_until_they_are_restored() -> None:
    model = block(own=Same(8), child=Child(8))
    assert skip_reasons(model, fp4_config()) == {"layers.0.own": "class Same", "layers.0.child": "class Child"}
    random = torch.get_rng_state()
    assert register_linear_class(Same) is Same
    assert torch.equal(torch.get_rng_state(), random)
    assert skip_reasons(model, fp4_config()) == {"layers.0.own": None, "layers.0.child": "class Child"}
    assert convert_model(model, fp4_config()) == ["layers.0.own"]
    assert type(model["layers"][0]["own"]) is SnipLinear
    restore_model(model)
    assert type(model["layers"][0]["own"]) is Same


def test_falcon_s_is_registered_by_its_name_so_that_remote_code_s_is_too() -> None:
    remote = type("FalconLinear", (nn.Linear,), {})
    assert skip_reasons(block(a=FalconLinear(8, 8), b=remote(8, 8)), fp4_config()) == {
        "layers.0.a": None,
        "layers.0.b": None,
    }
    assert list(LINEAR_CLASSES) == ["FalconLinear"]


def test_two_classes_of_one_name_are_two_entries_and_the_same_class_twice_is_one() -> None:
    others = [type("Same", (nn.Linear,), {"__module__": module}) for module in ("one", "two")]
    for cls in (*others, *others, Same):
        register_linear_class(cls)
    assert list(LINEAR_CLASSES) == ["FalconLinear", "one.Same", "two.Same", f"{__name__}.Same"]
    with pytest.raises(ValueError, match=r"There is a class of linear layers named 'one\.Same' already"):
        register_linear_class(type("Same", (nn.Linear,), {"__module__": "one"}))


@pytest.mark.parametrize("other", [nn.Linear, SnipLinear, SnipConv1D, nn.LayerNorm, nn.Linear(2, 2), "Same", None])
def test_what_is_no_subclass_of_linear_is_refused(other: Any) -> None:
    with pytest.raises(TypeError) as error:
        register_linear_class(other)
    assert str(error.value) == (
        f"Got {other!r}; expected a subclass of nn.Linear. Modules of other classes need a layer kind "
        "(docs/extending.md)."
    )


def subclass(**methods: Any) -> type[nn.Linear]:
    return type("Odd", (nn.Linear,), methods)


def router_in_fp32(self: nn.Linear, input: Tensor) -> Tensor:
    return nn.functional.linear(input.float(), self.weight.float())


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (subclass(forward=lambda self, x: nn.Linear.forward(self, x).softmax(-1)), "multiplies in another way"),
        (subclass(forward=lambda self, x: nn.functional.linear(x, self.weight)), "multiplies in another way"),
        (
            subclass(forward=router_in_fp32),
            r"gives \(2, 3, 5\) in float32 for \(2, 3, 8\) in bfloat16, expected \(2, 3, 5\) in bfloat16",
        ),
        (
            subclass(forward=lambda self, x: nn.Linear.forward(self, x).flatten(0, 1)),
            r"gives \(6, 5\) in bfloat16 for .*, expected \(2, 3, 5\) in bfloat16",
        ),
        (subclass(forward=lambda self, x: (nn.Linear.forward(self, x), None)), "gives a tuple for"),
        (
            subclass(forward=lambda self, x: self.scale * nn.Linear.forward(self, x)),
            r"does not run with a weight and a bias alone \(AttributeError: 'Odd' object has no attribute 'scale'\)",
        ),
        (subclass(state_dict=lambda self, *args, **kwargs: {}), "has a state_dict of its own"),
        (subclass(_load_from_state_dict=lambda self, *args: None), "has a _load_from_state_dict of its own"),
        (PhimoeTopKRouter, "does not run with a weight and a bias alone"),
    ],
)
def test_a_class_that_is_not_the_same_product_is_refused_with_what_differs(cls: type[nn.Linear], reason: str) -> None:
    message = f"{cls.__name__} cannot be swapped as an nn.Linear: it {reason}.*Write a layer kind for it"
    with pytest.raises(ValueError, match=message):
        register_linear_class(cls)
    assert list(LINEAR_CLASSES) == ["FalconLinear"]
