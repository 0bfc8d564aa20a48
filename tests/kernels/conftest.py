"""The two ways in which tests run the kernels of rounding and sums."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import kernel_runs
import pytest
from kernel_runs import Run


@pytest.fixture(scope="session")
def interpreting() -> Iterator[ProcessPoolExecutor]:
    """One process of Triton's interpreter for the tests of several modules: it takes seconds to start."""
    pytest.importorskip("triton")
    with kernel_runs.interpreting() as pool:
        yield pool


@pytest.fixture(scope="session")
def interpreter(interpreting: ProcessPoolExecutor) -> Run:
    return kernel_runs.interpreter(interpreting)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    """Calls one of `kernel_runs.HOMES`, by kernel, on tensors of the CPU; the result comes back to the CPU."""
    return request.getfixturevalue("interpreter") if request.param == "interpreter" else kernel_runs.on_cuda
