"""Runs by name: a folder here, or a repository of the Hub, of which the record of the run is downloaded."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import OfflineModeIsEnabled

from ..records.run_folder import FOLDER
from ..text import printable

# A repository, and perhaps a revision of it.
_REPOSITORY = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
# What of a repository tells of its run: not the weights.
_RECORD = (
    f"{FOLDER}/history.jsonl",
    f"{FOLDER}/plan.json",
    "trainer_state.json",
    "last-checkpoint/trainer_state.json",
    "checkpoint-*/trainer_state.json",
    "README.md",
)
_TABLES = f"{FOLDER}/divergence-*.json"
# Tables of divergences that are downloaded: so many, evenly spaced, since a report shows no more, and the last ones.
_MOST_TABLES, _LAST_TABLES = 128, 8


@dataclass(frozen=True)
class RunSource:
    """Where a run's files are."""

    name: str
    """As the user gave it."""
    folder: Path
    is_local: bool


def run_source(name: str, snapshot: Callable[[str, str | None], Path] | None = None) -> RunSource:
    """Finds a run by what a user calls it: a folder, or `USER/REPOSITORY` or `USER/REPOSITORY@REVISION` on the Hub.

    Args:
        name: a folder that exists goes before a repository.
        snapshot: downloads a repository's record. None: `download_record`.

    Raises:
        OSError: neither is there, or the Hub cannot be reached; names both.
    """
    match = _REPOSITORY.fullmatch(name)
    if os.path.lexists(name) or match is None:
        return RunSource(name, Path(name), is_local=True)
    try:
        folder = (snapshot or download_record)(match[1], match[2])
    except Exception as error:  # whatever the client of the Hub raises
        raise FileNotFoundError(
            f"There is no folder {printable(name)} here, and no run can be read from a Hub repository of this name: "
            f"{printable(error, 600)}"
        ) from error
    return RunSource(name, folder, is_local=False)


def download_record(repository: str, revision: str | None) -> Path:
    """Downloads what tells of the run into the cache of the Hub, and returns the folder of the snapshot.

    In offline mode it is the snapshot that the cache has.

    Raises:
        FileNotFoundError: the repository has no history of a run.
        Exception: whatever the client of the Hub raises where it cannot be downloaded.
    """
    try:
        files = HfApi().list_repo_files(repository, revision=revision)
    except OfflineModeIsEnabled:
        return Path(snapshot_download(repository, revision=revision, local_files_only=True))
    wanted = record_files(files)
    if _RECORD[0] not in wanted:
        raise FileNotFoundError(f"it has no {_RECORD[0]}; expected a model that was pushed with SnipCallback.")
    return Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))


def record_files(files: Sequence[str]) -> list[str]:
    """Returns those of a repository's files that tell of its run."""
    tables = sorted((file for file in files if fnmatch.fnmatchcase(file, _TABLES)), key=lambda file: (len(file), file))
    step = max(1, -(-len(tables) // _MOST_TABLES))
    # The last ones always: the plan in force was decided by one of them.
    shown = dict.fromkeys([*tables[: -_LAST_TABLES - 1 : -1], *tables[::-1][::step]])
    rest = [file for file in files if any(fnmatch.fnmatchcase(file, pattern) for pattern in _RECORD)]
    return [*rest, *shown]
