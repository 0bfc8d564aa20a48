"""The two ways in which tests run the kernels of rounding and sums."""

from __future__ import annotations

from collections.abc import Iterator

import kernel_runs
import pytest
from kernel_runs import Run


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Run]:
    pytest.importorskip("triton")
    with kernel_runs.interpreter() as run:
        yield run


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    """Calls one of `kernel_runs.HOMES`, by kernel, on tensors of the CPU; the result comes back to the CPU."""
    return request.getfixturevalue("interpreter") if request.param == "interpreter" else kernel_runs.on_cuda
