"""Does a rank that never comes back from the middle of a refresh hold up the others for no longer than the bound?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_processes import start_ranks

BOUND = 6.0  # seconds, as `run_into_sleep` configures it


@pytest.mark.parametrize(("where", "sleeper"), [("probe", 1)])
@pytest.mark.slow
def test_the_other_rank_raises_within_the_bound_and_names_it(tmp_path: Path, where: str, sleeper: int) -> None:
    awaited = 1 - sleeper
    ended = start_ranks("run_into_sleep.py", tmp_path, sleeper, where, folder=tmp_path, timeout=90, until=awaited)
    assert ended.codes[awaited] == 0, ended.logs[awaited][-4000:]
    assert ended.codes[sleeper] is None  # it would have slept on
    found = json.loads((tmp_path / f"rank{awaited}.json").read_text())
    assert BOUND - 1 < found["seconds"] < BOUND + 10
    assert found["error"].startswith(f"Rank {awaited} of 2 waited for the others, for at most 6 s, ")
