"""The list of mutants keeps up with the source; `python tests/mutants.py` tries them."""

from __future__ import annotations

import re

import pytest
from mutants import MUTANTS, ROOT, Mutant, places


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_changes_one_place_and_names_tests_that_exist(mutant: Mutant) -> None:
    found = places(mutant)
    assert len(found) == 1, (
        f"The text of the mutant {mutant.name!r} occurs {len(found)} times in src; adapt its entry in tests/mutants.py."
    )
    assert mutant.replacement != mutant.text
    named = [part.split("::") for part in mutant.tests.split() if part.startswith("tests/")]
    assert named
    for file, *names in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        assert all(re.search(rf"^ *(class|def) {name}\b", source, re.MULTILINE) for name in names), mutant.tests


def test_their_names_differ() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
