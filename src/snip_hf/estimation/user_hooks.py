"""The user's hooks in the probe's passes: those that only observe are left out, those that change the model act.

A hook's code says which it is. One that returns nothing and writes to nothing that it is given observes. One that
returns something, or writes in place to its module, inputs or outputs, acts. Hooks of the libraries that models are
built with act, and so do methods of the model's own modules. Where the code does not decide, the log names the hook.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..python_state import Kept, is_empty, is_library, referred

logger = logging.getLogger(__name__)

_OWN = "snip_hf"
# Their hooks are part of what a model computes.
_OF_LIBRARIES = frozenset(
    {"torch", "torchao", "transformers", "transformers_modules", "accelerate", "peft", "deepspeed"}
)
_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Methods of lists, dicts and sets that return None.
_MUTATORS = frozenset({"append", "add", "extend", "insert", "update", "clear", "remove", "discard", "appendleft"})
_LOOKUPS = frozenset({"get", "pop", "setdefault", "index", "count"})
_HARMLESS = frozenset({"id", "type", "isinstance", "len", "str", "repr", "print", "getattr", "hasattr", "hash", "vars"})
_READING = ("parameters", "buffers", "modules", "children", "state_dict", "get_submodule", "get_parameter")
_PASSING_ON = frozenset({"enumerate", "zip", "iter", "reversed", "list", "tuple", "getattr", "vars", "next"})
_OF_TENSORS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# Model -> hooks that the log named.
_named: WeakKeyDictionary[nn.Module, set[tuple[str, str]]] = WeakKeyDictionary()


class Finding(NamedTuple):
    """What a hook's code says of it."""

    acts: bool
    doubt: str | None = None
    """Why the code does not decide; None: it does."""


class _Facts(NamedTuple):
    """Names in a hook's code, and what they stand for."""

    handed: frozenset[str]
    """Arguments: the module, inputs, outputs, gradients."""
    own: frozenset[str]
    """Modules of the model, and what its attributes hold."""
    values: Callable[[str], Any]


class _Hook(NamedTuple):
    module: str
    hooks: dict[int, Any]
    key: int

    @property
    def hook(self) -> Any:
        return self.hooks[self.key]


def leave_out_observers(model: nn.Module, kept: Kept) -> None:
    """Takes out of the model's modules the hooks that the probe's passes must not run; keeps the state of the others.

    Args:
        model: whose hooks they are.
        kept: has the model's state, and puts the hooks back.
    """
    found: list[_Hook] = []
    for name, module in model.named_modules():
        for kind in _OF_MODULES:
            hooks = getattr(module, kind)
            if hooks and module is model and kind == "_forward_pre_hooks":
                _leave_out_seen(hooks)
            found += [_Hook(name, hooks, key) for key in hooks]
        if "forward" in vars(module):
            kept.keep(vars(module)["forward"])
    _leave_out(model, found, kept)


def leave_out_global_observers(model: nn.Module, kept: Kept) -> None:
    """Does the same with the hooks of all modules there are (`register_module_forward_hook` and the like)."""
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
            "The probe's passes %s it. A hook that returns nothing and only reads its arguments is left out; one that "
            "returns its result by name acts.",
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
    found = {_read(node, _facts(function, bound, modules, kept)) for node in _sources(function.__code__)}
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


def _facts(function: FunctionType, bound: list[Any], modules: set[int], kept: Kept) -> _Facts:
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
    return _Facts(frozenset({*given, *own}), frozenset({*first, *own}), known.get)


@lru_cache(maxsize=64)
def _functions(filename: str) -> dict[int, list[_Function]]:
    """Returns line -> functions that begin there."""
    found: dict[int, list[_Function]] = {}
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            decorators = getattr(node, "decorator_list", [])
            found.setdefault(min(part.lineno for part in (node, *decorators)), []).append(node)
    return found


def _sources(code: CodeType) -> list[_Function]:
    """Returns the functions in the source whose code this may be."""

    def names(node: _Function) -> tuple[str, ...]:
        of = node.args
        stars = [star.arg for star in (of.vararg, of.kwarg) if star is not None]
        return (*(arg.arg for arg in (*of.posonlyargs, *of.args, *of.kwonlyargs)), *stars)

    candidates = _functions(code.co_filename).get(code.co_firstlineno, [])
    named = [node for node in candidates if getattr(node, "name", "<lambda>") == code.co_name]
    return [node for node in named if names(node) == code.co_varnames[: len(names(node))]]


def _read(node: _Function, facts: _Facts) -> Finding:
    return _Reader(facts).read(node)


class _Reader:
    """Reads the source of one hook."""

    def __init__(self, facts: _Facts) -> None:
        # Name -> 2: an argument, a part or another name of it; 1: what one of its methods returned.
        self._levels = dict.fromkeys(facts.handed, 2)
        self._own, self._value = set(facts.own), facts.values
        self._acts = False
        self._doubts: list[str] = []

    def read(self, node: _Function) -> Finding:
        nodes = list(ast.walk(node))
        while any(self._follow(one) for one in nodes):
            pass
        for one in nodes:
            self._see(one, nodes)
        unsure = None
        for value in _returned(node):
            unsure = self._see_returned(value) or unsure
        if self._acts:
            return Finding(True)
        if self._doubts:
            return Finding(True, self._doubts[0])
        return Finding(False, unsure)

    def _level(self, expression: ast.expr | None) -> int:
        if isinstance(expression, ast.Name):
            return self._levels.get(expression.id, 0)
        if isinstance(expression, ast.Attribute | ast.Subscript | ast.Starred):
            return self._level(expression.value)
        if isinstance(expression, ast.IfExp):
            return max(self._level(expression.body), self._level(expression.orelse))
        if isinstance(expression, ast.Tuple | ast.List):
            return max(map(self._level, expression.elts), default=0)
        if isinstance(expression, ast.Call):
            if isinstance(expression.func, ast.Attribute):
                return min(1, self._level(expression.func.value))
            if isinstance(expression.func, ast.Name) and expression.func.id in _PASSING_ON:
                return max(map(self._level, expression.args), default=0)
        return 0

    def _is_own(self, expression: ast.expr) -> bool:
        while isinstance(expression, ast.Attribute | ast.Subscript):
            expression = expression.value
        return isinstance(expression, ast.Name) and expression.id in self._own

    def _follow(self, node: ast.AST) -> bool:
        """Gives other names the meaning of what is assigned to them; returns True if that is news."""
        pairs: list[tuple[ast.expr | None, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.For | ast.comprehension):
            pairs = [(node.target, node.iter)]
        elif isinstance(node, ast.withitem):
            pairs = [(node.optional_vars, node.context_expr)]
        news = False
        for target, value in pairs:
            names = [one.id for one in ast.walk(target) if isinstance(one, ast.Name)] if target is not None else []
            if not isinstance(target, ast.Name | ast.Tuple | ast.List) or value is None:
                continue
            for name in names:
                if self._level(value) > self._levels.get(name, 0):
                    self._levels[name], news = self._level(value), True
                if self._is_own(value) and name not in self._own:
                    self._own.add(name)
                    news = True
        return news

    def _writes(self, to: ast.expr) -> None:
        level = self._level(to)
        self._acts |= level == 2
        if level == 1:
            self._doubts.append(f"line {to.lineno} writes in place to what may be a part of its arguments")

    def _see(self, node: ast.AST, nodes: Iterable[ast.AST]) -> None:
        if isinstance(node, ast.Yield | ast.YieldFrom | ast.Await):
            self._doubts.append("it is a generator or a coroutine")
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            self._writes(node.value)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            self._writes(node.target)
        elif isinstance(node, ast.Call):
            self._see_call(node, nodes)

    def _see_call(self, call: ast.Call, nodes: Iterable[ast.AST]) -> None:
        function = call.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        given = [argument.value if isinstance(argument, ast.Starred) else argument for argument in call.args]
        given += [keyword.value for keyword in call.keywords]
        if isinstance(function, ast.Attribute):
            receiver = function.value
            if name.endswith("_") and not name.endswith("__"):
                self._writes(receiver)
            elif name in _OF_TENSORS and self._level(receiver):
                self._see_tensor_hook(call, nodes)
            elif name in _MUTATORS and self._is_own(receiver) and not isinstance(receiver, ast.Name):
                self._acts = True
            elif isinstance(receiver, ast.Name) and receiver.id in self._own:
                if name in _MUTATORS and isinstance(self._value(receiver.id), list | dict | set | deque):
                    self._acts = True
                elif not name.removeprefix("named_").startswith(_READING):
                    self._doubts.append(f"it calls {name}() of a module")
        if name in ("setattr", "delattr", "__setattr__", "__setitem__") and given:
            self._writes(given[0])
        if any(keyword.arg in ("out", "inplace") for keyword in call.keywords):
            for argument in given:
                self._writes(argument)
        hands_on = any(isinstance(argument, ast.Name) and argument.id in self._own for argument in given)
        if hands_on and name not in _HARMLESS | _MUTATORS | _LOOKUPS | {"setattr", "delattr"}:
            self._doubts.append(f"it hands a module to {ast.unparse(function)}()")

    def _see_tensor_hook(self, call: ast.Call, nodes: Iterable[ast.AST]) -> None:
        """A hook for gradients that it registers on what it is given."""
        hook = call.args[0] if call.args else None
        inner = [one for one in nodes if isinstance(hook, ast.Name) and getattr(one, "name", None) == hook.id]
        if isinstance(hook, ast.Attribute) and hook.attr in _MUTATORS:
            return
        if isinstance(hook, ast.Lambda):
            inner = [hook]
        if len(inner) != 1 or not isinstance(inner[0], _Function):
            self._doubts.append("it registers a hook on a tensor")
            return
        for value in _returned(inner[0]):
            if self._see_returned(value) is not None:
                self._doubts.append("it registers a hook on a tensor")

    def _see_returned(self, value: ast.expr | None) -> str | None:
        """Notes what a returned expression says; returns why it leaves a doubt although it may well be None."""
        if value is None or (isinstance(value, ast.Constant) and value.value is None):
            return None
        if isinstance(value, ast.IfExp):
            first, second = self._see_returned(value.body), self._see_returned(value.orelse)
            return first or second
        if not isinstance(value, ast.Call):
            self._acts = True
            return None
        function = value.func
        if isinstance(function, ast.Name) and function.id == "print":
            return None
        if isinstance(function, ast.Attribute):
            if function.attr in _MUTATORS and not self._level(function.value):
                certain = isinstance(self._resolved(function.value), list | dict | set | deque)
                return None if certain else f"it returns what {ast.unparse(function)}() gives"
            of_torch = getattr(self._resolved(_root(function)), "__name__", "").partition(".")[0] == "torch"
            if self._level(function.value) or of_torch:
                self._acts = True
                return None
        self._doubts.append(f"it returns what {ast.unparse(function)}() gives")
        return None

    def _resolved(self, expression: ast.expr) -> Any:
        """Returns what an expression stands for when the hook is read, None if that is not known."""
        if isinstance(expression, ast.Name):
            return self._value(expression.id)
        if isinstance(expression, ast.Attribute):
            holder = self._resolved(expression.value)
            return None if isinstance(holder, ModuleType) else getattr(holder, "__dict__", {}).get(expression.attr)
        return None


def _root(expression: ast.expr) -> ast.expr:
    while isinstance(expression, ast.Attribute):
        expression = expression.value
    return expression


def _returned(node: _Function) -> Iterator[ast.expr | None]:
    """Gives what a function may return, without the functions inside it."""
    if isinstance(node, ast.Lambda):
        yield node.body
        return
    pending: list[ast.AST] = list(node.body)
    while pending:
        one = pending.pop()
        if isinstance(one, ast.Return):
            yield one.value
        elif not isinstance(one, _Function | ast.ClassDef):
            pending.extend(ast.iter_child_nodes(one))
