"""Does a kernel that was compiled for such arguments get launched without asking Triton again?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_hf.kernels import launching
from snip_hf.kernels.launching import launch, on_device, relaunch
from snip_hf.kernels.tensor_scaled import gated, operators
from snip_hf.kernels.tensor_scaled.exponents import Records
from snip_hf.kernels.tensor_scaled.gated import Operand, launch_backward, launch_forward
from snip_hf.kernels.tensor_scaled.operators import empty_layouts


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
    for _ in range(2):
        launch(kernel, (5, 2), (X, Y), (64, 1), (True,), (0.5,), num_warps=4)
    assert kernel.options == [{"num_warps": 4}]
    assert kernel.compiled is not None
    [(grid, arguments)] = kernel.compiled.seen
    assert grid == (5, 2, 1)
    assert arguments == (X.data_ptr(), Y.data_ptr(), 0.5, 64, 1, True)


def test_a_key_stands_for_the_arguments_but_for_tensors_and_free_numbers() -> None:
    kernel, other = Kernel(Launches()), torch.zeros(64)
    assert not relaunch("key", (X, Y), (0.5,))
    launch(kernel, (5,), (X, Y), (64,), (True,), (0.5,), "key", num_warps=4)
    assert relaunch("key", (other, Y), (0.25,))
    assert not relaunch("another", (X, Y), (0.5,))
    assert not relaunch("key", (X[1:], Y), (0.5,))  # Triton compiled for addresses that are multiples of 16
    assert kernel.compiled is not None
    assert kernel.compiled.seen == [((5, 1, 1), (other.data_ptr(), Y.data_ptr(), 0.25, 64, True))]


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


def test_tensors_on_another_gpu_are_launched_there(monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[bool] = []

    @contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        there.append(True)
        yield
        there.clear()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(launching, "_is_elsewhere", lambda x: not there)
    kernel = Kernel(Launches())
    for _ in range(2):
        assert not relaunch("key", (X, Y))
        launch(kernel, (5,), (X, Y), (64,), (True,), key="key", num_warps=4)
        assert not there
    assert kernel.options == [{"num_warps": 4}]
    assert kernel.compiled is not None
    assert kernel.compiled.seen == [((5, 1, 1), (X.data_ptr(), Y.data_ptr(), 64, True))]


def test_kernels_in_the_interpreter_and_unaligned_tensors_are_never_kept() -> None:
    for kernel, x in ((Kernel(None), X), (Kernel(Launches()), X[1:])):
        for _ in range(3):
            launch(kernel, (1,), (x, Y), (64,), (True,))
        assert len(kernel.options) == 3


def test_the_number_of_kept_tensors_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_MOST", 8)
    kernel = Kernel(Launches())
    for number in range(100):
        launch(kernel, (1,), (X, Y), (number,), (True,))
    assert len(launching._COMPILED) <= 8


def test_more_programs_than_a_gpu_takes_along_an_axis_are_refused() -> None:
    def encode_kernel() -> None: ...

    kernel = Kernel(Launches())
    kernel.fn = encode_kernel
    launch(kernel, (100_000, 65_535), (X, Y), (64,), ())
    with pytest.raises(
        ValueError,
        match=r"^Got an operand of shape \(64,\) for encode_kernel, which takes 65,536 rows of blocks; expected at "
        r"most 65,535\. Use smaller micro-batches, and more of them\.$",
    ):
        launch(kernel, (1, 65_536), (X, Y), (65,), ())


def encoding_launches() -> Iterator[Callable[[], Any]]:
    """Launches of the kernels that encode, which differ in one thing each."""
    state, own = torch.zeros(6, dtype=torch.int64), Records.new(torch.device("cpu"))

    def encode(
        shape: tuple[int, int] = (128, 192),
        dtype: torch.dtype = torch.bfloat16,
        is_part: bool = False,
        operand: int = 0,
        gemms: tuple[int, int] = (0, 2),
        counts: bool = True,
        needs: bool = False,
        in_blocks: bool = True,
    ) -> Callable[[], Any]:
        x = torch.zeros(shape[0], shape[1] + 64 * is_part, dtype=dtype)[:, : shape[1]]
        layer, outputs = (state, own.record[operand], own.table), empty_layouts(x, *gemms)
        return lambda: operators.launch_encode(x, layer, operand, gemms, counts, needs, in_blocks, outputs)

    def gate(
        shape: tuple[int, int] = (128, 192), counts: bool = True, has_rows: bool | None = None
    ) -> Callable[[], Any]:
        x = torch.zeros(*shape, dtype=torch.bfloat16)
        gemms = 0 if has_rows is None or has_rows else -1, 2
        one = [
            Operand((state, own.record, own.table), operand, gemms, counts, empty_layouts(x, *gemms))
            for operand in (1, 1, 0)
        ]
        if has_rows is None:
            return lambda: launch_forward(x, x, one[2])
        return lambda: launch_backward((x, x, x), one, has_rows, counts)

    yield from (encode(), encode((128, 256)), encode((192, 192)), encode((100, 192)), encode(dtype=torch.float32))
    yield from (encode(is_part=True), encode(operand=1), encode(operand=2), encode(gemms=(0, -1)), encode(gemms=(1, 2)))
    yield from (encode(gemms=(-1, 2)), encode(counts=False), encode(needs=True), encode(in_blocks=False))
    yield from (gate(), gate((128, 256)), gate((100, 192)), gate(counts=False))
    for has_rows in (True, False):
        yield from (gate(has_rows=has_rows), gate((64, 192), has_rows=has_rows), gate(counts=False, has_rows=has_rows))


def test_the_keys_of_encodes_tell_apart_all_launches_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    class Compiling(Kernel):
        """Records the requested compilations and launches."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def run(*arguments: Any, **options: Any) -> Launches:
                rest = [argument for argument in arguments if not isinstance(argument, Tensor)]
                launches = Launches()
                compiled.append((self, grid, rest, options, launches))
                return launches

            return run

    for module, name in (
        (operators, "encode_kernel"),
        (gated, "encode_gated_kernel"),
        (gated, "encode_gated_gradients_kernel"),
    ):
        monkeypatch.setattr(module, name, Compiling(None))
    calls = list(encoding_launches())
    for call in calls:
        call()
    assert len(compiled) == len(calls)
    for call in calls:
        call()
    assert len(compiled) == len(calls)
    for _, grid, rest, _, launches in compiled:
        [(seen_grid, seen)] = launches.seen
        assert seen_grid == (*grid, 1, 1)[:3]
        assert list(seen[len(seen) - len(rest) :]) == rest


# ------------------------------------------------------------------------------------- copies

CUDA = torch.device("cuda")


def test_on_the_host_nothing_is_copied() -> None:
    numbers = torch.arange(4)
    assert on_device(numbers, torch.device("cpu")) is numbers


@pytest.mark.gpu
def test_later_writes_on_the_host_do_not_reach_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    pin = torch.Tensor.pin_memory
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.numel()) or pin(self))
    numbers = torch.arange(64).view(32, 2)
    torch.cuda._sleep(2 * 10**8)  # about a tenth of a second, in which nothing is copied
    column, whole = on_device(numbers[:, 1], CUDA), on_device(numbers, CUDA)
    is_ahead = not torch.cuda.current_stream().query()
    numbers.zero_()
    assert is_ahead and pinned == [32, 64]
    assert column.is_contiguous() and column.tolist() == list(range(1, 64, 2))
    assert whole.flatten().tolist() == list(range(64))
