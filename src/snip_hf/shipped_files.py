"""Lists the files that a built package ships besides its code, and makes links absolute in its long description.

setup.py runs this file, so it only imports the standard library.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

REPOSITORY = "https://github.com/snip-hf/snip-hf"
FOLDER = "shipped"
"""The folder of the built package that holds the files, at their paths in the repository."""

_PATTERNS = (
    "recipes/*.py",
    "recipes/*.yaml",
    "recipes/README.md",
    "recipes/accelerate/*.yaml",
    "recipes/parts/*.py",
    "recipes/slurm/*.sbatch",
    # Recipes score their models with these.
    "eval/__init__.py",
    "eval/run.py",
    "eval/scoring/*.py",
)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|!\[[^\]]*\]\([^)\s]*\))*)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)


def shipped_files(root: Path) -> list[str]:
    """Returns the paths of the shipped files, relative to the root of the repository or the built package's folder."""
    return sorted({path.relative_to(root).as_posix() for pattern in _PATTERNS for path in root.glob(pattern)})


def absolute_links(text: str, folder: str = "") -> str:
    """Returns a page with relative links turned into links to the repository.

    Args:
        text: Markdown; code blocks do not change.
        folder: the page's folder, relative to the repository's root.
    """
    parts = _FENCE.split(text)
    # Splitting at a pattern with one group alternates text and code blocks.
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
