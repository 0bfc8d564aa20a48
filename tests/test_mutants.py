"""The list of mutants keeps up with the source; `python tests/mutants.py` tries them."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, ROOT, Mutant, places


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_changes_one_place_and_names_tests_that_exist(mutant: Mutant) -> None:
    found = places(mutant)
    assert len(found) == 1, (
        f"The text of the mutant {mutant.name!r} occurs {len(found)} times in src; adapt its entry in tests/mutants.py."
    )
    assert mutant.replacement != mutant.text
    files = [part.partition("::")[0] for part in mutant.tests.split() if part.startswith("tests/")]
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_their_names_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
