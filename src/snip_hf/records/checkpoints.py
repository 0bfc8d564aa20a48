"""The part of a checkpoint's snip_state.json that tells of the run: its step, its plan, what the plan covers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from ..json_io import read_json
from ..planning.plan import PrecisionPlan
from ..registry import UnknownName
from .coverage import Counted, read_coverage
from .values import entry_of, mapping_of, step_of

# In the folder of a checkpoint.
STATE_NAME = "snip_state.json"


@dataclass(frozen=True)
class Checkpoint:
    """What the state of a checkpoint says of its run."""

    folder: Path
    step: int
    """Optimizer steps that were done."""
    plan: PrecisionPlan
    """The plan in force, with the configuration of the run."""
    counted: list[Counted]
    """Of the first micro-batch, with the tokens of the plan; empty if there was none, or it could not be counted."""


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads the state in a checkpoint's folder.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none; names the file, the field and what is wrong.
    """
    path = folder / STATE_NAME
    try:
        state = mapping_of(read_json(path), "the state")
        step = step_of(entry_of(state, "step"), "step")
        plan = PrecisionPlan.from_dict(mapping_of(entry_of(state, "plan"), "plan"))
        config = mapping_of(entry_of(state, "config"), "config")
        found = state.get("coverage")
        counted = [] if found is None else [Counted(step=step, coverage=read_coverage(found), tokens=plan.tokens)]
    except UnknownName as error:
        raise UnknownName(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a usable state of a checkpoint: {error}") from error
    provenance = dataclasses.replace(plan.provenance, config=config)
    return Checkpoint(folder, step, dataclasses.replace(plan, provenance=provenance), counted)
