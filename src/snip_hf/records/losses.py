"""The losses of a run and the numbers it was run with, from the Trainer's trainer_state.json."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..json_io import MAX_JSON_BYTES
from .values import entry_of, is_step, list_of, mapping_of, short, step_of

# Checkpoints that are looked at for losses, the latest first, until one can be used.
_MOST_CHECKPOINTS = 3
# What else of a state tells how the training was run.
_FACTS = ("max_steps", "num_train_epochs", "train_batch_size")
# A step in the name of a folder.
_STEP = re.compile(r"[0-9]{1,16}")


@dataclass(frozen=True)
class TrainerLog:
    """What the Trainer recorded."""

    losses: dict[int, dict[str, float]]
    """Step -> {"loss", "eval_loss"}, either may be absent; in order of the steps."""
    facts: dict[str, str]
    """Name of a number that the training was run with -> the number."""


def read_log(folder: Path, notes: list[str]) -> TrainerLog:
    """Returns what is in the trainer_state.json that got furthest; notes what cannot be used."""
    losses: dict[int, dict[str, float]] = {}
    skipped = 0
    log, facts = _latest(folder, notes)
    for entry in log:
        step = entry.get("step") if isinstance(entry, dict) else None
        if not isinstance(step, int) or not is_step(step):
            skipped += 1
            continue
        for key in ("loss", "eval_loss"):
            value = entry.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                losses.setdefault(step, {})[key] = float(value)
    if skipped:
        notes.append(f"{skipped:,} entries of the Trainer's log are at no step and are left out.")
    if not losses:
        notes.append("There is no trainer_state.json with losses (saved with a checkpoint or by trainer.save_state()).")
    return TrainerLog(dict(sorted(losses.items())), facts)


def _latest(folder: Path, notes: list[str]) -> tuple[list[Any], dict[str, str]]:
    """Returns log and facts of the Trainer's state that got furthest: the folder's own or that of a late checkpoint."""
    checkpoints = [
        (int(number), path)
        for path in folder.glob("checkpoint-*/trainer_state.json")
        if _STEP.fullmatch(number := path.parent.name.removeprefix("checkpoint-"))
    ]
    late = [path for _, path in sorted(checkpoints, reverse=True)]
    states: list[tuple[int, list[Any], dict[str, str]]] = []
    # The second one is what `hub_strategy="checkpoint"` pushes.
    own = [folder / "trainer_state.json", folder / "last-checkpoint" / "trainer_state.json"]
    for paths in (own[:1], own[1:], late[:_MOST_CHECKPOINTS]):
        for path in paths:
            if not path.exists():
                continue
            try:
                states.append(_read_state(path))
                break
            except (OSError, ValueError) as error:
                notes.append(f"{path.relative_to(folder)} cannot be used and is left out: {error}")
    return max(states, key=lambda state: state[0])[1:] if states else ([], {})


def _read_state(path: Path) -> tuple[int, list[Any], dict[str, str]]:
    with open(path, "rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"the file is larger than {MAX_JSON_BYTES} bytes.")
    # Not parse_json: the Trainer writes a NaN loss as NaN.
    state = mapping_of(json.loads(data), "the state")
    log = list_of(entry_of(state, "log_history"), "log_history")
    facts = {name: short(state[name]) for name in _FACTS if isinstance(state.get(name), int | float)}
    return step_of(entry_of(state, "global_step"), "global_step"), log, facts
