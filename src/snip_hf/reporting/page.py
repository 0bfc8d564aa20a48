"""Writes a page on one or more runs: one HTML file with its style and figures, without scripts or external files."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..config import changed_fields
from ..json_io import write_atomic
from ..policies.target import describe_target
from ..records.load import Run
from ..text import printable
from .figures import Losses, figures_of, loss_figure, png
from .run_report import Content, policy_text, run_contents
from .tables import number

# Maximum lengths of a cell, a sentence and a config value.
_CELL, _SENTENCE, _VALUE = 200, 2000, 2000
_NOTHING = "-"


def write_page(path: str | os.PathLike[str], runs: Mapping[str, Run], bf16: tuple[str, Losses] | None = None) -> Path:
    """Writes the page.

    Args:
        path: the file, which is replaced if it exists.
        runs: name -> run.
        bf16: name and losses of a BF16 run to compare with.

    Returns: the file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page(runs, bf16).encode())
    return path


def page(runs: Mapping[str, Run], bf16: tuple[str, Losses] | None = None) -> str:
    """Returns the page as HTML; the arguments are those of `write_page`."""
    files = PackageLoader(__package__, "template")
    environment = Environment(
        loader=files, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    losses: dict[str, Losses] = {name: run.losses for name, run in runs.items()} | dict([bf16] if bf16 else [])
    names = {name: printable(name, _CELL) for name in losses}
    style, *_ = files.get_source(environment, "report.css")
    return environment.get_template("report.html").render(
        title=", ".join(names[name] for name in runs),
        style=style,
        style_hash=f"sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}",
        version=__version__,
        headings=list(names.values()),
        rows=comparison(runs, losses, None if bf16 is None else bf16[0]),
        # Several runs share one figure of losses.
        losses=_image(png(loss_figure(losses))) if len(losses) > 1 and any(losses.values()) else None,
        runs=[_shown(names[name], run, len(losses) == 1) for name, run in runs.items()],
    )


def _shown(name: str, run: Run, with_losses: bool) -> dict[str, Any]:
    images = {file: _image(data) for file, data in figures_of(run).items() if with_losses or file != "losses.png"}
    config = json.dumps(dict(run.config), indent=1, sort_keys=True)
    return {
        "name": name,
        "images": images,
        "blocks": blocks(run_contents(run)),
        "seed": printable(run.config.get("seed", "not recorded")),
        "code": config_code(run.config),
        "config": "\n".join(printable(line, _VALUE) for line in config.splitlines()),
        "facts": [printable(f"{fact}: {value}") for fact, value in run.facts.items()],
    }


def _image(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def blocks(contents: Sequence[Content]) -> list[dict[str, Any]]:
    """Returns sentences and tables as plain data."""
    return [_table(one) if isinstance(one, Table) else {"text": printable(one, _SENTENCE)} for one in contents]


def _table(table: Table) -> dict[str, Any]:
    columns = [[_text(cell) for cell in column.cells] for column in table.columns]
    title, _, legend = _text(table.title, _SENTENCE).partition(" (")
    return {
        "title": title,
        "legend": legend.removesuffix(")"),
        "caption": _text(table.caption or "", _SENTENCE),
        "headings": [_text(str(column.header).replace("\n", " ")) for column in table.columns],
        "left": [column.justify == "left" for column in table.columns],
        "rows": list(zip(*columns, strict=True)),
    }


def _text(cell: object, limit: int = _CELL) -> str:
    return printable(cell.plain if isinstance(cell, Text) else cell, limit)


def config_code(config: Mapping[str, Any]) -> str:
    """Returns the `SnipConfig` call that builds a config, with the fields that differ from their defaults.

    It always includes the granularity, whose default depends on the policy.
    """
    changed = changed_fields(config)
    fields = [f"    {name}={value!r}," for name, value in config.items() if name in changed or name == "granularity"]
    inside = "\n".join(printable(field, _VALUE) for field in fields)
    call = f"SnipConfig(\n{inside}\n)" if inside else "SnipConfig()"
    return f"from snip_hf import SnipCallback, SnipConfig\n\nconfig = {call}\ncallback = SnipCallback(config)"


def comparison(runs: Mapping[str, Run], losses: Mapping[str, Losses], bf16: str | None) -> list[tuple[str, list[str]]]:
    """Returns the rows of a table of runs side by side; last losses are compared with BF16, or with the first run.

    Args:
        runs: name -> run.
        losses: name -> losses, including those of the BF16 run.
        bf16: name of the BF16 run.
    """
    rows = [(label, [text(run) for run in runs.values()]) for label, text in _ROWS]
    rows = [(label, cells) for label, cells in rows if any(cell != _NOTHING for cell in cells)]
    if bf16 is not None:
        rows = [(label, [*cells, _NOTHING]) for label, cells in rows]
    for key, label in (("loss", "Training loss"), ("eval_loss", "Validation loss")):
        if any(key in row for one in losses.values() for row in one.values()):
            rows.append((f"{label}, last", [_last(one, key) for one in losses.values()]))
    if len(losses) > 1:
        against = next(iter(losses)) if bf16 is None else bf16
        rows.append((f"Loss against {against}", [_against(one, losses[against]) for one in losses.values()]))
    return [(printable(label, _CELL), [printable(cell, _CELL) for cell in cells]) for label, cells in rows]


def _last(losses: Losses, key: str) -> str:
    steps = [step for step, row in losses.items() if key in row]
    return f"{losses[steps[-1]][key]:.4g} (step {steps[-1]:,})" if steps else _NOTHING


def _against(losses: Losses, other: Losses) -> str:
    """Describes the difference at the last common step, in validation loss if both have it, else in training loss."""
    if losses is other:
        return _NOTHING
    for key, label in (("eval_loss", "validation"), ("loss", "training")):
        common = [step for step in losses if key in losses[step] and key in other.get(step, {})]
        if common:
            mine, theirs = losses[common[-1]][key], other[common[-1]][key]
            relative = f", {(mine - theirs) / theirs:+.2%}" if theirs and math.isfinite(theirs) else ""
            return f"{mine - theirs:+.4g}{relative} ({label}, step {common[-1]:,})"
    return "no step in common"


def _coverage(run: Run) -> str:
    if not run.counted:
        return _NOTHING
    share = run.counted[-1].coverage.share
    return f"{share:.1%} of the model's matmul FLOPs, {share * run.plans[-1][1].fp4_fraction:.1%} of all in FP4"


def _speed(run: Run) -> str:
    plan = run.plans[-1][1]
    speedup = plan.linear_speedup()
    return _NOTHING if speedup is None else f"{speedup:.3f} times BF16's ({plan.speed_source})"


def _plans(run: Run) -> str:
    applied = sum(refresh.applied_step is not None for refresh in run.refreshes)
    return f"{applied:,} new, {len(run.refreshes) - applied:,} kept" if run.refreshes else _NOTHING


def _seconds(run: Run) -> str:
    def total(part: str) -> float:
        return math.fsum(refresh.seconds.get(part) or 0.0 for refresh in run.refreshes)

    parts = [f"{part} {total(part):,.1f}" for part in ("probe", "solver", "waited")]
    return ", ".join(parts) if any(refresh.seconds for refresh in run.refreshes) else _NOTHING


def _solvers(run: Run) -> str:
    names = (f"{one.solver} {one.solver_version or ''}".strip() for one in run.refreshes if one.solver is not None)
    return ", ".join(dict.fromkeys(names)) or _NOTHING


_ROWS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("Model", lambda run: run.plans[-1][1].provenance.model_name or _NOTHING),
    ("Decided by", lambda run: policy_text(run.config)),
    ("Target", lambda run: describe_target(run.last_config) or _NOTHING),
    ("FP4 share at the end", lambda run: run.plans[-1][1].describe()),
    ("FP4 share, mean over the steps", lambda run: number(run.mean_fp4_fraction, ".4f")),
    ("Coverage", _coverage),
    ("Speed of the linears", _speed),
    ("Last step", lambda run: f"{run.last_step:,}"),
    ("Plans", _plans),
    ("Seconds in all", _seconds),
    ("Solver", _solvers),
)
