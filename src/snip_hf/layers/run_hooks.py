"""Hooks of a training run on a model's modules and parameters. Copies of the model do not belong to the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

# The attribute of a model with the marks of the runs that train it.
_RUNS = "snip_runs"


class RunHook:
    """A method as a hook that holds the method's object weakly.

    A copy of it, also a pickled one, is an `IdleHook`: copies of the model neither hold the run nor report to it.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = WeakMethod(method)

    # Never part of a compiled graph.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        return None if method is None else method(*args, **kwargs)

    def __reduce__(self) -> tuple[type[IdleHook], tuple[()]]:
        return IdleHook, ()


class IdleHook(RunHook):
    """Replaces a run's hook in copies of the model. It may be part of a graph, as `torch.export` makes it."""

    def __init__(self) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass


class RunMark:
    """Marks a model as trained by a run, and holds the run's hooks. Copies of the model are not marked.

    Args:
        end: a method that ends the run, held weakly; None without a run.
    """

    def __init__(self, end: Callable[[], None] | None = None) -> None:
        self.hooks: list[Any] = []
        """Handles of the run's hooks on modules, including wrappers of the model."""
        self._end = None if end is None else WeakMethod(end)

    @property
    def driver(self) -> Any:
        """The object that drives the run; None if it is gone."""
        return getattr(None if self._end is None else self._end(), "__self__", None)

    def put_on(self, model: nn.Module) -> None:
        vars(model).setdefault(_RUNS, []).append(self)

    def remove(self, model: nn.Module) -> None:
        """Removes the mark and the hooks."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        marks = [mark for mark in vars(model).pop(_RUNS, []) if mark is not self]
        if marks:
            vars(model)[_RUNS] = marks

    def end(self) -> None:
        """Ends the run if its driver still exists."""
        end = None if self._end is None else self._end()
        if end is not None:
            end()

    def __reduce__(self) -> tuple[type[RunMark], tuple[()]]:
        return RunMark, ()


def marks_on(model: nn.Module) -> list[RunMark]:
    """Returns the marks on a model; removes those whose driver is gone."""
    marks = [(module, mark) for module in model.modules() for mark in vars(module).get(_RUNS, [])]
    for module, mark in marks:
        if mark.driver is None:
            mark.remove(module)
    return [mark for _, mark in marks if mark.driver is not None]


def end_runs(model: nn.Module) -> None:
    """Ends the runs that train a model, and removes all their hooks from its modules and parameters."""
    for module in model.modules():
        for mark in list(vars(module).get(_RUNS, [])):
            mark.end()
            mark.remove(module)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            _remove_hooks(hooks)
    for parameter in model.parameters():
        _remove_hooks(parameter._post_accumulate_grad_hooks or {})


def _remove_hooks(hooks: dict[int, Any]) -> None:
    for key in [key for key, hook in hooks.items() if isinstance(hook, RunHook)]:
        del hooks[key]
