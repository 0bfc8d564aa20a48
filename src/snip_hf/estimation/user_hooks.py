"""The user's hooks in the probe's passes: those that only observe are left out, those that change the model act.

A hook's code says which it is. One that returns nothing and writes to nothing that it is given observes. One that
returns something, or writes in place to its module, inputs or outputs, acts. Hooks of the libraries that models are
built with act, and so do methods of the model's own modules. Where the code does not decide, the log names the hook.
"""

from __future__ import annotations

import inspect
import logging
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..python_state import Kept, is_empty, is_library, referred
from .hook_source import Facts, Finding, findings_in

logger = logging.getLogger(__name__)

_OWN = "snip_hf"
# Their hooks are part of what a model computes.
_OF_LIBRARIES = frozenset(
    {"torch", "torchao", "transformers", "transformers_modules", "accelerate", "peft", "deepspeed", "trl"}
)
_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Model -> hooks that the log named.
_named: WeakKeyDictionary[nn.Module, set[tuple[str, str]]] = WeakKeyDictionary()


class _Hook(NamedTuple):
    module: str
    hooks: dict[int, Any]
    key: int

    @property
    def hook(self) -> Any:
        return self.hooks[self.key]


def leave_out_observers(model: nn.Module, kept: Kept, has_been_through_hooks: bool = True) -> None:
    """Takes out of the model's modules the hooks that the probe's passes must not run; keeps the state of the others.

    Args:
        model: whose hooks they are.
        kept: has the model's state, and puts the hooks back.
        has_been_through_hooks: as in `passes.traceless`.
    """
    found: list[_Hook] = []
    for name, module in model.named_modules():
        for kind in _OF_MODULES:
            hooks = getattr(module, kind)
            if hooks and module is model and kind == "_forward_pre_hooks" and has_been_through_hooks:
                _leave_out_seen(hooks)
            found += [_Hook(name, hooks, key) for key in hooks]
        if "forward" in vars(module):
            kept.keep(vars(module)["forward"])
    _leave_out(model, found, kept)


def leave_out_global_observers(model: nn.Module, kept: Kept) -> None:
    """Does the same with torch's global hooks, which all modules have (`register_module_forward_hook` and the like)."""
    every = [getattr(torch.nn.modules.module, f"_global{kind}") for kind in _OF_MODULES]
    for hooks in every:
        kept.keep_entries(hooks)
    _leave_out(model, [_Hook("all", hooks, key) for hooks in every for key in hooks], kept)


def _leave_out_seen(hooks: dict[int, Any]) -> None:
    """Leaves out the model's pre-hooks up to SNIP's own: the inputs that SNIP noted there have been through them."""
    own = [index for index, hook in enumerate(hooks.values()) if _package(hook) == _OWN]
    for key in list(hooks)[: own[-1] + 1 if own else 0]:
        del hooks[key]


def _leave_out(model: nn.Module, found: list[_Hook], kept: Kept) -> None:
    for one in [one for one in found if _package(one.hook) == _OWN]:
        found.remove(one)
        del one.hooks[one.key]
    modules = {id(module) for module in model.modules()}
    acting = found
    while acting:  # what fills a list from which a hook that acts takes something acts too
        findings = [judge(one.hook, modules, kept) for one in found]
        acting = [one for one, finding in zip(found, findings, strict=True) if finding.acts]
        for one, finding in zip(found, findings, strict=True):
            if finding.doubt is not None and (finding.acts or not acting):
                _log(model, one.module, one.hook, finding)
        for one in acting:
            found.remove(one)
            kept.keep(one.hook)
            kept.keep(_unbound(one.hook)[0])
    for one in found:
        del one.hooks[one.key]


def _log(model: nn.Module, name: str, hook: Any, finding: Finding) -> None:
    what = getattr(hook, "__qualname__", type(hook).__qualname__)
    named = _named.setdefault(model, set())
    if (name, what) not in named:
        named.add((name, what))
        logger.warning(
            "snip-hf: the code of hook %s of module %r does not tell whether it changes what the model computes (%s). "
            "The probe's passes %s it. To have it left out, return nothing and only read its arguments; to have it "
            "act, assign its result to a variable and return that.",
            what,
            name,
            finding.doubt,
            "run" if finding.acts else "leave out",
        )


def judge(hook: Any, modules: set[int], kept: Kept) -> Finding:
    """Returns whether a hook acts in the probe's passes.

    Args:
        hook: of any kind that torch calls with a module, inputs, outputs or gradients.
        modules: ids of the model's modules.
        kept: what the model's attributes hold is in it.
    """
    function, bound = _unbound(hook)
    if _is_wrapper(function):
        return judge(partial(function.__wrapped__, *bound), modules, kept)
    if _package(hook) in _OF_LIBRARIES or any(id(value) in modules for value in bound[:1]):
        return Finding(True)
    if not isinstance(function, FunctionType):
        return Finding(True, "it is not a Python function")
    found = findings_in(function.__code__, _facts(function, bound, modules, kept))
    if len(found) != 1:
        return Finding(True, "its source is not at hand" if not found else "its line has several functions")
    return found.pop()


def _unbound(hook: Any) -> tuple[Any, list[Any]]:
    """Returns the function that runs, and the arguments that it gets before torch's."""
    bound: list[Any] = []
    while True:
        if isinstance(hook, partial):
            bound, hook = [*hook.args, *bound], hook.func
        elif isinstance(hook, MethodType):
            bound, hook = [hook.__self__, *bound], hook.__func__
        elif isinstance(called := inspect.getattr_static(type(hook), "__call__", None), FunctionType):
            bound, hook = [hook, *bound], called
        else:
            return hook, bound


def _is_wrapper(function: Any) -> bool:
    """Returns True for what `torch.no_grad()` and the like make of a function of the user's."""
    is_function = isinstance(function, FunctionType) and hasattr(function, "__wrapped__")
    return is_function and is_library(function.__globals__.get("__name__"))


def _package(hook: Any) -> str:
    function = _unbound(hook)[0]
    while _is_wrapper(function):
        function = _unbound(function.__wrapped__)[0]
    if isinstance(function, FunctionType):  # its `__module__` may be that of what it wraps
        return str(function.__globals__.get("__name__")).partition(".")[0]
    return str(getattr(function, "__module__", "")).partition(".")[0]


def _facts(function: FunctionType, bound: list[Any], modules: set[int], kept: Kept) -> Facts:
    code = function.__code__
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    known = referred(function) | {name: cell.cell_contents for name, cell in cells if not is_empty(cell)}
    positional = code.co_varnames[: code.co_argcount]
    known |= dict(zip(positional, bound, strict=False))
    given = list(positional[len(bound) : len(positional) - len(function.__defaults__ or ())])
    if code.co_flags & 0x04:  # *args
        given.append(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
    own = {name for name, value in known.items() if id(value) in modules or kept.holds(value)}
    first = given[:1] if given and given[0] in positional else []
    return Facts(frozenset({*given, *own}), frozenset({*first, *own}), known.get)
