"""Triton's keys of compiled kernels, made the same in every process (ours).

A key names the constants of what a kernel calls. Up to version 3.7 Triton takes note of them only where a callee's own
key is known already, so that a key depends on which kernels the process has looked at before. A kernel that another
process compiled is then not found.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any


def settle_key(kernel: Any) -> None:
    """Has Triton compute the keys of all that a kernel calls before the kernel's own; an interpreted one has none.

    Args:
        kernel: a function with `triton.jit`.
    """
    if getattr(kernel, "hash", "") is not None:
        return
    for called in _called_by(kernel):
        settle_key(called)
    _ = kernel.cache_key


def _called_by(kernel: Any) -> Iterator[Any]:
    """Gives the functions with `triton.jit` that a kernel names, as `name` or as `module.name`."""
    names = kernel.fn.__globals__
    for node in ast.walk(kernel.parse()):
        found = None
        if isinstance(node, ast.Name):
            found = names.get(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found = getattr(names.get(node.value.id), node.attr, None)
        # Asked of its class, since to ask the function computes its key.
        if found is not kernel and hasattr(type(found), "cache_key"):
            yield found
