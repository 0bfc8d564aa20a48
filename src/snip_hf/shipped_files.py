"""What a built package has beside the code: the recipes, and a long description whose links lead to the repository.

The build reads this file by itself (setup.py), so it imports the standard library alone.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

REPOSITORY = "https://github.com/snip-hf/snip-hf"
FOLDER = "shipped"
"""Folder of the built package that holds the files, at the paths that they have in the repository."""

_PATTERNS = (
    "recipes/*.py",
    "recipes/*.yaml",
    "recipes/README.md",
    "recipes/accelerate/*.yaml",
    "recipes/parts/*.py",
    "recipes/slurm/*.sbatch",
    # Recipes score their models with it.
    "eval/__init__.py",
    "eval/run.py",
    "eval/scoring/*.py",
)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)\s]*\))*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def shipped_files(root: Path) -> list[str]:
    """Returns the files below a repository's root, or the built package's folder, that are shipped, by their paths."""
    return sorted({path.relative_to(root).as_posix() for pattern in _PATTERNS for path in root.glob(pattern)})


def absolute_links(text: str, folder: str = "") -> str:
    """Returns a page of the repository with links that work anywhere: relative ones lead into the repository.

    Args:
        text: Markdown. Blocks of code stay as they are.
        folder: where the page is, from the repository's root.
    """
    parts = _FENCE.split(text)
    # A pattern with one group gives text and fences in turn.
    parts[::2] = [_LINK.sub(lambda link: _absolute(link, folder), part) for part in parts[::2]]
    return "".join(parts)


def _absolute(link: re.Match[str], folder: str) -> str:
    image, label, target = link.groups()
    label = absolute_links(label, folder) if "](" in label else label
    if not (target.startswith("#") or re.match(r"[a-z]+:", target)):
        path, mark, heading = target.partition("#")
        where = posixpath.normpath(posixpath.join(folder, path))
        target = f"{REPOSITORY}/{'raw' if image else 'blob'}/main/{where}{mark}{heading}"
    return f"{image}[{label}]({target})"
