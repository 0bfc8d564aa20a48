"""The page of one run or several: one HTML file with its style, its script and its data, which loads nothing else."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from rich.table import Table
from rich.text import Text

from ..json_io import write_atomic
from ..records.load import Run
from ..text import printable
from .comparison import comparison
from .page_data import Losses, page_data
from .reproduction import reproduction
from .run_report import Content, run_contents

# Characters of a cell and of a sentence.
_CELL, _SENTENCE = 200, 2000


def write_page(
    path: str | os.PathLike[str],
    runs: Mapping[str, Run],
    bf16: tuple[str, Losses] | None = None,
    contents: Mapping[str, Sequence[Content]] | None = None,
) -> Path:
    """Writes the page.

    Args:
        path: the file, which is replaced.
        runs: name -> run.
        bf16: name and losses of a run in BF16 to compare with; None: there is none.
        contents: name -> what `run_contents` gave for a run. None: it is asked for all runs.

    Returns: the file.

    Raises:
        OSError: it cannot be written, or is a link.
        ValueError: as `page`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page(runs, bf16, contents).encode())
    return path


def page(
    runs: Mapping[str, Run],
    bf16: tuple[str, Losses] | None = None,
    contents: Mapping[str, Sequence[Content]] | None = None,
) -> str:
    """Returns the page as HTML; the arguments are those of `write_page`.

    Raises:
        ValueError: there is no run.
    """
    if not runs:
        raise ValueError("There is no run to report on; expected at least one.")
    environment = Environment(
        loader=FunctionLoader(_template),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # JSON.parse knows no NaN; `tojson` escapes what would end the element.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    style, script = _template("report.css"), _template("curves.js") + _template("layers.js")
    data = page_data(runs, bf16)
    shown = [run_contents(run) if contents is None else contents[name] for name, run in runs.items()]
    return environment.get_template("report.html").render(
        title=", ".join(run["name"] for run in data["runs"]),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=data,
        version=_version(),
        comparison=comparison(runs, bf16),
        runs=[
            {"name": own["name"], "data": own, "blocks": blocks(content), "again": reproduction(run)}
            for own, run, content in zip(data["runs"], runs.values(), shown, strict=True)
        ],
    )


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
        # "\\[" is rich's way to write a bracket that begins no markup.
        "headings": [_text(str(column.header).replace("\\[", "[").replace("\n", " ")) for column in table.columns],
        "left": [column.justify == "left" for column in table.columns],
        "rows": list(zip(*columns, strict=True)),
    }


def _text(cell: object, limit: int = _CELL) -> str:
    return printable(cell.plain if isinstance(cell, Text) else cell, limit)


def _template(name: str) -> str:
    return resources.files(__package__).joinpath("template").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Returns what a Content-Security-Policy allows an inline style or script by."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _version() -> str:
    try:
        return metadata.version("snip-hf")
    except metadata.PackageNotFoundError:
        return "(not installed)"
