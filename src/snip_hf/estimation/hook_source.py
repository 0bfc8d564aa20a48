"""What the source of a hook says of it: whether it acts on what it is given, and why that may not be certain.

A hook acts if it returns something, or writes in place to its arguments, to a part of them, or to what the model holds.
"""

from __future__ import annotations

import ast
import linecache
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from types import CodeType, ModuleType
from typing import Any, NamedTuple

# Methods of lists, dicts and sets that return None.
_MUTATORS = frozenset({"append", "add", "extend", "insert", "update", "clear", "remove", "discard", "appendleft"})
_LOOKUPS = frozenset({"get", "pop", "setdefault", "index", "count"})
_HARMLESS = frozenset({"id", "type", "isinstance", "len", "str", "repr", "print", "getattr", "hasattr", "hash", "vars"})
_READING = ("parameters", "buffers", "modules", "children", "state_dict", "get_submodule", "get_parameter")
_PASSING_ON = frozenset({"enumerate", "zip", "iter", "reversed", "list", "tuple", "getattr", "vars", "next"})
_OF_TENSORS = frozenset({"register_hook", "register_post_accumulate_grad_hook"})
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Finding(NamedTuple):
    """What a hook's code says of it."""

    acts: bool
    doubt: str | None = None
    """Why the code does not decide; None: it does."""


class Facts(NamedTuple):
    """Names in a hook's code, and what they stand for."""

    handed: frozenset[str]
    """Arguments: the module, inputs, outputs, gradients."""
    own: frozenset[str]
    """Modules of the model, and what its attributes hold."""
    values: Callable[[str], Any]


def findings_in(code: CodeType, facts: Facts) -> set[Finding]:
    """Returns what the functions in the source say whose code this may be; nothing if there is no source."""
    return {_Reader(facts).read(node) for node in _sources(code)}


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


class _Reader:
    """Reads the source of one hook."""

    def __init__(self, facts: Facts) -> None:
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
        """Notes what a hook says that it registers on a tensor that it is given."""
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
