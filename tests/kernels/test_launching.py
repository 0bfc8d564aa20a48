"""Does a kernel that was compiled for such arguments get launched without asking Triton again?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from snip_hf.kernels import launching
from snip_hf.kernels.launching import launch


class Launches:
    """Stands for a compiled kernel: notes the grids and arguments that it is launched with."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.seen.append((grid, arguments))


class Kernel:
    """Stands for a kernel in Triton's language, or, without `compiled`, for one in the interpreter."""

    def __init__(self, compiled: Launches | None) -> None:
        self.fn, self.compiled = object(), compiled
        self.options: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> Launches | None:
            self.options.append(options)
            return self.compiled

        return run


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    kept = dict(launching._COMPILED)
    launching._COMPILED.clear()
    yield
    launching._COMPILED.clear()
    launching._COMPILED.update(kept)


X, Y = torch.zeros(64), torch.zeros(64)


def test_the_second_launch_with_such_arguments_goes_to_the_compiled_kernel() -> None:
    kernel = Kernel(Launches())
    for grid in ((3,), (5, 2)):
        launch(kernel, grid, (X, Y), (64, 1), (True,), num_warps=4)
    assert kernel.options == [{"num_warps": 4}]
    assert kernel.compiled is not None
    [(grid, arguments)] = kernel.compiled.seen
    assert grid == (5, 2, 1)
    assert arguments == (X.data_ptr(), Y.data_ptr(), 64, 1, True)


@pytest.mark.parametrize(
    ("tensors", "numbers", "constants", "options"),
    [
        ((X.double(), Y), (64,), (True,), {"num_warps": 4}),
        ((X, Y), (65,), (True,), {"num_warps": 4}),
        ((X, Y), (64,), (False,), {"num_warps": 4}),
        ((X, Y), (64,), (True,), {"num_warps": 8}),
        ((X, Y[1:]), (64,), (True,), {"num_warps": 4}),
        ((X[1:], Y), (64,), (True,), {"num_warps": 4}),
    ],
    ids=["dtype", "number", "constant", "option", "address", "first address"],
)
def test_triton_is_asked_again_where_it_may_have_to_compile(
    tensors: Any, numbers: Any, constants: Any, options: dict[str, Any]
) -> None:
    kernel = Kernel(Launches())
    for _ in range(2):
        launch(kernel, (1,), (X, Y), (64,), (True,), num_warps=4)
    launch(kernel, (1,), tensors, numbers, constants, **options)
    assert len(kernel.options) == 2


def test_kernels_in_the_interpreter_and_unaligned_tensors_are_never_kept() -> None:
    for kernel, x in ((Kernel(None), X), (Kernel(Launches()), X[1:])):
        for _ in range(3):
            launch(kernel, (1,), (x, Y), (64,), (True,))
        assert len(kernel.options) == 3


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MOST", 8)
    kernel = Kernel(Launches())
    for number in range(100):
        launch(kernel, (1,), (X, Y), (number,), (True,))
    assert len(launching._COMPILED) <= 8


def test_more_programs_than_a_gpu_takes_along_an_axis_are_refused() -> None:
    def fold_kernel() -> None: ...

    kernel = Kernel(Launches())
    kernel.fn = fold_kernel
    launch(kernel, (100_000, 65_535), (X, Y), (64,), ())
    with pytest.raises(
        ValueError,
        match=r"^Got an operand of shape \(64,\) for fold_kernel, which takes 65,536 rows of blocks; expected at most "
        r"65,535\. Use smaller micro-batches, and more of them\.$",
    ):
        launch(kernel, (1, 65_536), (X, Y), (65,), ())
