"""How to run a run again, as far as its files say: its configuration as code, what the Trainer recorded, versions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..config import SnipConfig
from ..json_io import open_regular
from ..records.load import Run
from ..text import printable

# Bytes of a model card that are read, and lines of a section that are shown.
_MOST_BYTES, _MOST_LINES = 2**20, 60
# Of a value of the configuration.
_VALUE = 2000
# What the Trainer writes into a model card.
_SECTIONS = ("Training hyperparameters", "Framework versions")


def reproduction(run: Run) -> dict[str, Any]:
    """Returns the code and the texts that the page shows.

    "code" builds the run's configuration, "config" is all of it as JSON, "recorded" has titles and lines.
    """
    return {
        "code": config_code(run.config),
        "config": printable_lines(json.dumps(dict(run.config), indent=1, sort_keys=True)),
        "recorded": [*_facts(run), *_card_sections(run)],
        "seed": printable(run.config.get("seed", "not recorded")),
    }


def config_code(config: Mapping[str, Any]) -> str:
    """Returns the call of `SnipConfig` that builds a configuration: the fields that differ from their defaults.

    The granularity is always among them: what it is where it is left out depends on the policy.
    """
    defaults = SnipConfig().to_dict() | {"granularity": None}
    fields = [
        f"    {name}={value!r}," if name.isidentifier() else f"    # {printable(name)}: {value!r}"
        for name, value in config.items()
        if name not in defaults or defaults[name] != value
    ]
    inside = "\n".join(printable(field, _VALUE) for field in fields)
    call = f"SnipConfig(\n{inside}\n)" if inside else "SnipConfig()"
    return f"from snip_hf import SnipCallback, SnipConfig\n\nconfig = {call}\ncallback = SnipCallback(config)"


def printable_lines(text: str) -> str:
    return "\n".join(printable(line, _VALUE) for line in text.splitlines())


def _facts(run: Run) -> list[tuple[str, list[str]]]:
    lines = [printable(f"{name}: {value}") for name, value in run.facts.items()]
    return [("Versions and numbers of the run", lines[:_MOST_LINES])] if lines else []


def _card_sections(run: Run) -> list[tuple[str, list[str]]]:
    """Returns (title, lines) of what the Trainer wrote into the model card beside the run, if there is one."""
    try:
        with open_regular(run.folder / "README.md") as file:
            text = file.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for title in _SECTIONS:
        match = re.search(rf"^#+ {title}\s*\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
        lines = [] if match is None else [line.strip("- \r") for line in match[1].splitlines()]
        lines = [printable(line) for line in lines if line and not line.startswith("<!--")]
        if lines:
            found.append((title, lines[:_MOST_LINES]))
    return found
