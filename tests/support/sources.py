"""The package's source files, and the names that a file uses."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import snip_hf

SOURCES = sorted(Path(snip_hf.__file__).parent.rglob("*.py"))


def names(tree: ast.AST, wanted: Callable[[str], bool]) -> list[str]:
    """The dotted names that a module uses or imports, of those that are wanted."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Name):
            found.append(node.id)
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in found if wanted(name)]
