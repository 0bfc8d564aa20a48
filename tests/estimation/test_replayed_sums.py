"""Are sums that layers of one shape share a capture of those of each layer by itself?"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import get_ident
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_hf.estimation import replayed_sums
from snip_hf.estimation.criterion import LayerCriterion
from snip_hf.estimation.extrapolation import BatchSizes
from snip_hf.estimation.pending import read_all
from snip_hf.estimation.replayed_sums import Replays, cuda_graph
from snip_hf.estimation.samples import LayerSample
from snip_hf.estimation.whole_layer import Figures, Task, WholeLayer
from snip_hf.policies.kl import KL

TOKENS, SAMPLED, OUTPUTS, INPUTS = 600, 256, 48, 40
FORMATS = ("mxfp4", "fp8-tensor", "fp4")
KEYS = (2**63 + 5, 77)


class Recording:
    """Stands for a CUDA graph: does the work again, on the same inputs."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def layer(index: int, device: str = "cpu", outputs: int = OUTPUTS) -> tuple[WholeLayer, LayerSample]:
    generator = torch.Generator().manual_seed(index)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    rows, columns = (SAMPLED, INPUTS), (SAMPLED, outputs)
    x, grad_output = drawn(*rows), drawn(*columns) / TOKENS
    amaxes = x.abs().amax() * 1.5, grad_output.abs().amax() * (1 + index)
    dots = [drawn(*rows)], [drawn(*columns) / TOKENS]
    sample = LayerSample(TOKENS, x, grad_output, *dots, energies=(3.0 + index, 1.0), amaxes=amaxes)
    return WholeLayer(f"layer {index}", (drawn(outputs, INPUTS),), (drawn(outputs, INPUTS).abs(),)), sample


def task(replays: Replays | None, **changes: Any) -> Task:
    batch = BatchSizes.complete(TOKENS, TOKENS - 10)
    return Task(LayerCriterion, "token-fisher", FORMATS, 2, batch, replays=replays)._replace(**changes)


def results(found: list[Figures]) -> list[Any]:
    return [(one.layer, one.format, *(read_all([part])[0] for part in one[2:])) for one in found]


@pytest.mark.parametrize("loss_estimator", ["token-fisher", "saliency"])
def test_figures_of_replayed_layers_are_those_of_each_layer(loss_estimator: str) -> None:
    recording = Recording()
    replays = Replays(recording.capture)
    for index in range(4):
        whole, sample = layer(index)
        keys = KEYS[0] + index, KEYS[1] + index
        expected = whole.figures(sample, task(None, loss_estimator=loss_estimator), keys, None)
        assert results(whole.figures(sample, task(replays, loss_estimator=loss_estimator), keys, None)) == results(
            expected
        )
    assert (recording.captures, recording.replays) == (1, 3)


def test_layers_of_other_shapes_and_the_first_of_each_are_not_captured() -> None:
    recording = Recording()
    replays = Replays(recording.capture)
    for index, outputs in enumerate((16, 32, 48)):
        whole, sample = layer(index, outputs=outputs)
        expected = results(whole.figures(sample, task(None), KEYS, None))
        assert results(whole.figures(sample, task(replays), KEYS, None)) == expected
    assert recording.captures == 0


def test_without_room_for_a_capture_sums_are_launched_one_by_one() -> None:
    replays = Replays(lambda work: None)
    for index in range(3):
        whole, sample = layer(index)
        expected = results(whole.figures(sample, task(None), KEYS, None))
        assert results(whole.figures(sample, task(replays), KEYS, None)) == expected


def test_a_capture_that_runs_out_of_memory_is_none_and_lets_go_of_the_memory_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    homes: list[int] = []

    @cache
    def home(device: torch.device, thread: int) -> replayed_sums._Home:
        homes.append(thread)
        return replayed_sums._Home(None, None, None)  # type: ignore[arg-type]

    def fail(*given: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(replayed_sums, "_home", home)
    monkeypatch.setattr(replayed_sums, "_capture", fail)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    assert cuda_graph(lambda: None) is None
    assert cuda_graph(lambda: None) is None
    assert homes == [get_ident()] * 2
    with ThreadPoolExecutor(1) as pool:  # as a second Trainer's
        assert pool.submit(cuda_graph, lambda: None).result() is None
    assert homes[2] not in homes[:2]


def test_what_is_no_function_of_tensors_alone_is_not_captured() -> None:
    def refuse(work: Callable[[], None]) -> None:
        raise AssertionError("captured")

    replays = Replays(refuse)
    for index in range(3):
        whole, sample = layer(index)
        expected = results(whole.figures(sample, task(None, criterion=KL), KEYS, None))
        assert results(whole.figures(sample, task(replays, criterion=KL), KEYS, None)) == expected


def test_another_form_of_the_loss_is_compiled_before_it_is_captured() -> None:
    recording, known = Recording(), set[Any]()
    for form in ("token-fisher", "saliency"):
        replays = Replays(recording.capture, known)
        for index in range(2):  # the first one is the run that compiles
            whole, sample = layer(index)
            whole.figures(sample, task(replays, loss_estimator=form), KEYS, None)
            assert recording.captures == (form == "saliency") + index


def test_layers_of_two_shapes_take_turns_each_with_a_capture_of_its_own() -> None:
    recording = Recording()
    replays = Replays(recording.capture)
    for index in range(6):
        whole, sample = layer(index, outputs=(OUTPUTS, 32)[index % 2])
        expected = results(whole.figures(sample, task(None), KEYS, None))
        assert results(whole.figures(sample, task(replays), KEYS, None)) == expected
    assert (recording.captures, recording.replays) == (2, 4)


def test_what_one_estimate_captured_the_next_one_captures_for_its_first_layer() -> None:
    known, captures = set[Any](), []
    for _ in range(2):
        recording = Recording()
        replays = Replays(recording.capture, known)
        for index in range(3):
            # The third is alone in its shape, and never captured.
            whole, sample = layer(index, outputs=OUTPUTS if index < 2 else 32)
            expected = results(whole.figures(sample, task(None), KEYS, None))
            assert results(whole.figures(sample, task(replays), KEYS, None)) == expected
        captures.append((recording.captures, recording.replays))
    assert captures == [(1, 1), (1, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("outputs", [(OUTPUTS,), (OUTPUTS, 32)], ids=["one shape", "two, which share memory"])
def test_figures_from_a_cuda_graph_are_those_of_single_launches(outputs: tuple[int, ...]) -> None:
    known = set[Any]()
    for _ in range(2):
        replays = Replays(cuda_graph, known)
        for index in range(6):
            whole, sample = layer(index, "cuda", outputs[index % len(outputs)])
            expected = results(whole.figures(sample, task(None), KEYS, None))
            assert results(whole.figures(sample, task(replays), KEYS, None)) == expected
    assert len(known) == len(outputs)
