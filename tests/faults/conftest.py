"""Which runs do the tests of faults compare with?"""

from __future__ import annotations

import pytest
from fault_runs import CONFIG, SAVING, SHORT, WITHOUT_FIRST, forget_children
from tiny_runs import Run, train


@pytest.fixture(autouse=True)
def no_children_of_other_tests() -> None:
    forget_children()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Refreshes at steps 2 and 6, applied after 4 and 8, and a checkpoint after each of its 8 steps."""
    run = train(tmp_path_factory.mktemp("undisturbed"), CONFIG, **SHORT, **SAVING)
    assert [(line["step"], line["applied_step"]) for line in run.refreshes] == [(2, 4), (6, 8)]
    return run


@pytest.fixture(scope="session")
def without_first(tmp_path_factory: pytest.TempPathFactory, undisturbed: Run) -> Run:
    """The same run, if the refresh of step 2 had never been."""
    run = train(tmp_path_factory.mktemp("without_first"), WITHOUT_FIRST, **SHORT)
    assert [(line["step"], line["applied_step"]) for line in run.refreshes] == [(6, 8)]
    # The plan of step 2 is in force after step 4, so that the losses tell the two runs apart.
    assert run.losses[4] == undisturbed.losses[4]
    assert run.losses[5] != undisturbed.losses[5]
    return run
