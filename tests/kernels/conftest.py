"""The two ways in which tests run the kernels of rounding and sums, and the end of a Trainer's `full_determinism`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import kernel_runs
import pytest
import torch
from kernel_runs import Run


@pytest.fixture(scope="session")
def interpreting() -> Iterator[ProcessPoolExecutor]:
    """One process of Triton's interpreter for the tests of several modules: it takes seconds to start."""
    pytest.importorskip("triton")
    with kernel_runs.interpreting() as pool:
        yield pool


@pytest.fixture(scope="session")
def interpreter(interpreting: ProcessPoolExecutor) -> Run:
    return kernel_runs.interpreter(interpreting, kernel_runs.by_kernel)


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def run(request: pytest.FixtureRequest) -> Run:
    """Calls one of `kernel_runs.HOMES`, by kernel, on tensors of the CPU; the result comes back to the CPU."""
    return request.getfixturevalue("interpreter") if request.param == "interpreter" else kernel_runs.on_cuda


@pytest.fixture
def full_determinism_ends_here() -> Iterator[None]:
    """Restores what a Trainer's `full_determinism` sets for the whole process.

    With its variables the next test that adds a bias in cuBLASLt would get, as an error, the warning on its workspace
    that tests with this fixture ignore.
    """
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    with mock.patch.dict(os.environ):
        yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn
    # torch would take a workspace that it allocated under the smaller size for one of the larger.
    torch._C._cuda_clearCublasWorkspaces()
