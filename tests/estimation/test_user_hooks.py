"""Which hooks act in the probe's passes, and which only observe?"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from small import TinyLM, tiny_lm, tokens
from torch import nn
from torch.nn.utils import prune
from transformers.integrations.neftune import neftune_post_forward_hook

from snip_hf.config import SnipConfig
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.hook_source import Finding
from snip_hf.estimation.passes import run_pass
from snip_hf.estimation.user_hooks import judge
from snip_hf.layers.convert import convert_model
from snip_hf.python_state import Kept

SEEN: list[Any] = []
COUNTS: dict[str, int] = {}
OBSERVES, ACTS = Finding(False), Finding(True)


def judged(hook: Any, model: nn.Module | None = None) -> Finding:
    model, kept = model or tiny_lm(), Kept()
    kept.keep_modules(model)
    return judge(hook, {id(module) for module in model.modules()}, kept)


# -------------------------------------------------------------------------------------------------------- that observe


def notes_a_penalty(module: nn.Module, args: Any, output: Any) -> None:
    SEEN.append(output.pow(2).mean())


def counts(module: nn.Module, args: Any) -> None:
    name = type(module).__name__
    COUNTS[name] = COUNTS.get(name, 0) + 1
    if not isinstance(module, nn.Module):
        return
    for value in args:
        print(value.shape, module.training)


def with_kwargs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    total = sum(value.float().norm().item() for value in kwargs.values())
    total += 1
    SEEN.append(total)


def keeps_gradients(module: nn.Module, args: Any, output: Any) -> None:
    output.register_hook(lambda gradient: SEEN.append(gradient))
    output.register_hook(SEEN.append)
    output.retain_grad()


def sees_gradients(module: nn.Module, into: Any, out: Any) -> None:
    SEEN.append(out[0].norm())
    return None


@torch.no_grad()
def under_a_decorator_of_torch(module: nn.Module, args: Any, output: Any) -> None:
    SEEN.append(output.abs().max())


def named(name: str, module: nn.Module, args: Any, output: Any) -> None:
    COUNTS[name] = output.numel()


class Monitor:
    def __init__(self) -> None:
        self.total, self.values = torch.zeros(()), []

    def method(self, module: nn.Module, args: Any, output: Any) -> None:
        self.total.add_(output.detach().mean())
        self.values.append(float(output.mean()))

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.total = self.total + output.detach().mean()


def default_name() -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any, name: str = "up") -> None:
        COUNTS[name] = output.numel()

    return hook


@pytest.mark.parametrize(
    "hook",
    [
        notes_a_penalty,
        counts,
        with_kwargs,
        keeps_gradients,
        sees_gradients,
        under_a_decorator_of_torch,
        partial(named, "up"),
        Monitor().method,
        Monitor(),
        default_name(),
        lambda *_: SEEN.append(1),
        lambda module, args, output: None,
        lambda module, args, output: print(output.shape),
    ],
)
def test_what_returns_nothing_and_only_reads_observes(hook: Any) -> None:
    assert judged(hook) == OBSERVES


# ------------------------------------------------------------------------------------------------------------ that act


def returns_another_output(module: nn.Module, args: Any, output: Any) -> Any:
    noise = torch.zeros_like(output).uniform_(-1, 1)
    return output + noise


def returns_by_name(module: nn.Module, args: Any, output: Any) -> Any:
    output = Monitor().method(module, args, output) or output
    return output


def sometimes(module: nn.Module, args: Any) -> Any:
    if module.training:
        return (args[0] * 2,)
    return None


def in_place(module: nn.Module, args: Any, output: Any) -> None:
    output.mul_(0.5)


def in_place_on_a_part(module: nn.Module, args: Any, output: Any) -> None:
    hidden = output[0] if isinstance(output, tuple) else output
    hidden[..., 0] = 0


def in_place_by_an_operator(module: nn.Module, args: Any, output: Any) -> None:
    output += 1


def in_place_on_all(module: nn.Module, args: Any) -> None:
    for one in args:
        one.zero_()


def in_place_by_an_argument(module: nn.Module, args: Any, output: Any) -> None:
    nn.functional.relu(output, inplace=True)


def writes_to_the_module(module: nn.Module, args: Any) -> None:
    module.scale = args[0].norm()


def sets_by_name(module: nn.Module, args: Any) -> None:
    setattr(module, "weight", module.weight_g * module.weight_v)  # noqa: B010


def fills_the_modules_list(module: nn.Module, args: Any, output: Any) -> None:
    module.losses.append(output.mean())


def asks_for_gradients(module: nn.Module, args: Any, output: Any) -> None:
    output.requires_grad_(True)


def scales_gradients(module: nn.Module, args: Any, output: Any) -> None:
    output.register_hook(lambda gradient: gradient * 2)


class OfTheModel(TinyLM):
    def hook(self, module: nn.Module, args: Any, output: Any) -> None:
        SEEN.append(self.summary(output))


OF_THE_MODEL = OfTheModel()


@pytest.mark.parametrize(
    "hook",
    [
        returns_another_output,
        returns_by_name,
        sometimes,
        in_place,
        in_place_on_a_part,
        in_place_by_an_operator,
        in_place_on_all,
        in_place_by_an_argument,
        writes_to_the_module,
        sets_by_name,
        fills_the_modules_list,
        asks_for_gradients,
        scales_gradients,
        OF_THE_MODEL.hook,
        neftune_post_forward_hook,
        nn.utils.parametrize.type_before_parametrizations,  # any function of torch's
        lambda module, args, output: output * 0,
        lambda module, args, output: output.add_(0.0),
        lambda module, args, output: torch.relu(output),
    ],
)
def test_what_returns_something_or_writes_to_its_arguments_acts(hook: Any) -> None:
    assert judged(hook, OF_THE_MODEL) == ACTS


def test_old_parametrizations_of_torch_act() -> None:
    layer = prune.identity(nn.Linear(3, 3), "weight")  # writes the weight anew in a pre-hook that returns nothing
    hook = next(iter(layer._forward_pre_hooks.values()))
    assert judged(hook) == ACTS


def test_what_fills_a_list_of_the_model_acts() -> None:
    model = tiny_lm()
    model.losses = []
    losses = model.losses
    assert judged(lambda module, args, output: losses.append(output.mean()), model) == ACTS
    assert judged(lambda module, args, output: losses.append(output.mean())) == OBSERVES


# ------------------------------------------------------------------------------------------------- that cannot be told


def decorated(function: Any) -> Any:
    @wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def hands_the_module_on(module: nn.Module, args: Any) -> None:
    Monitor().method(module, args, args[0])


def moves_the_module(module: nn.Module, args: Any) -> None:
    module.to("cpu")


def writes_to_a_copy_or_not(module: nn.Module, args: Any, output: Any) -> None:
    output.detach().mul_(2)


def registers(module: nn.Module, args: Any, output: Any) -> None:
    output.register_hook(Monitor().method)


def yields(module: nn.Module, args: Any, output: Any) -> Any:
    yield output


without_source: dict[str, Any] = {}
exec("def hook(module, args, output): pass", without_source)

UNCLEAR: dict[str, Any] = {
    "it returns what function() gives": decorated(notes_a_penalty),
    "it hands a module to Monitor().method()": hands_the_module_on,
    "it calls to() of a module": moves_the_module,
    "line {} writes in place to what may be a part of its arguments": writes_to_a_copy_or_not,
    "it registers a hook on a tensor": registers,
    "it is a generator or a coroutine": yields,
    "its source is not at hand": without_source["hook"],
    "it is not a Python function": max,
    "it returns what Monitor().method() gives": lambda *all: Monitor().method(*all),
}


@pytest.mark.parametrize(("doubt", "hook"), UNCLEAR.items())
def test_what_cannot_be_told_acts_and_says_why(doubt: str, hook: Any) -> None:
    line = hook.__code__.co_firstlineno + 1 if hasattr(hook, "__code__") else 0
    assert judged(hook) == Finding(True, doubt.format(line))


def test_what_a_list_of_unknown_kind_takes_in_is_left_out_with_a_doubt() -> None:
    assert judged(lambda m, a, output: Monitor().values.append(output)) == Finding(
        False, "it returns what Monitor().values.append() gives"
    )


def test_the_log_names_once_what_it_cannot_tell_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny_lm(), Batch.of(tokens())
    convert_model(model, SnipConfig())
    caplog.clear()
    model.layers[1].norm.register_forward_hook(notes_a_penalty)
    model.layers[1].norm.register_forward_hook(returns_another_output)
    model.layers[1].down.register_forward_pre_hook(moves_the_module)
    caplog.set_level(logging.WARNING, "snip_hf.estimation.user_hooks")
    for _ in range(2):
        run_pass(model, batch, {})
    assert caplog.messages == [
        "snip-hf: the code of hook moves_the_module of module 'layers.1.down' does not tell whether it changes what "
        "the model computes (it calls to() of a module). The probe's passes run it. To have it left out, "
        "return nothing and only read its arguments; to have it act, assign its result to a variable and return that."
    ]
    SEEN.clear()
