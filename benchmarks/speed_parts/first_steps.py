"""Part `first`: the first step and the first refresh of runs in processes of their own, with nothing compiled on disk.

So it is on a machine on which nothing was trained before. In part `trainer` a run finds what those before it compiled.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

from . import setting
from .measuring import guarded
from .setting import BF16, IN_TRAINER, TORCHAO_IN_TRAINER, Row
from .trainer_runs import logged, run

# Of `setting`, what a run reads.
_READ = ("MODELS", "VOCABULARY", "COMPILER")


def first_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    recipes = [recipe for recipe in (*IN_TRAINER, *TORCHAO_IN_TRAINER) if recipe in options.recipes]
    for name in options.models:
        rows = []
        for recipe in (BF16, *recipes):
            rows += guarded({"model": name, "recipe": recipe}, partial(_alone, name, recipe, options), options)
        yield from in_units_of_bf16(rows)


def in_units_of_bf16(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows with first step, and first step and refresh, as multiples of the first step in BF16."""
    of_bf16 = [row["first_s"] for row in rows if row["recipe"] == BF16 and "error" not in row]
    result = []
    for row in rows:
        if of_bf16 and "error" not in row:
            both = row["first_s"] + row["first_refresh_ms"] / 1e3
            row = row | {"first_ratio": row["first_s"] / of_bf16[0], "first_two_ratio": both / of_bf16[0]}
        result.append(row)
    return result


def _alone(name: str, recipe: str, options: argparse.Namespace) -> Iterator[Row]:
    """Trains once, in a new process whose caches of compiled kernels are empty."""
    values = {attribute: getattr(setting, attribute) for attribute in _READ}
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ):
        os.environ.pop("TRITON_CACHE_DIR", None)
        os.environ["TRITON_HOME"] = str(Path(folder, "triton"))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder, "inductor"))
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            yield pool.submit(_run, values, name, recipe, options).result()


def _run(values: dict[str, Any], name: str, recipe: str, options: argparse.Namespace) -> Row:
    for attribute, value in values.items():
        setattr(setting, attribute, value)
    logged()
    (row,) = run(name, recipe, options)
    kept = (
        "formats",
        "backend",
        "steps",
        "step_ms",
        "start_s",
        "first_s",
        "first_refresh_ms",
        "refresh_ms",
        "slowest_ms",
    )
    return {field: row[field] for field in kept}
