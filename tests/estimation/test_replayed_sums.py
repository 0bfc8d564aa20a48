"""Sums that layers of one shape share through a capture, against the sums of each layer by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from small import tiny_llama
from torch import Tensor

from snip_hf import estimate_divergence
from snip_hf.estimation import replayed_sums
from snip_hf.estimation.extrapolation import BatchSizes
from snip_hf.estimation.layer_sums import LayerSums, read_all
from snip_hf.estimation.replayed_sums import DenseLayer, Replays, cuda_graph
from snip_hf.estimation.samples import LayerSample

TOKENS, SAMPLED, OUTPUTS, INPUTS = 600, 256, 48, 40
FORMATS = ("mxfp4", "fp8-tensor", "fp8-delayed", "fp4")
SIZES = 2, BatchSizes(*(TOKENS, TOKENS - 10) * 2)


class Recording:
    """Stands for CUDA graphs: repeats the work on the same inputs."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def layer(index: int, device: str = "cpu", outputs: int = OUTPUTS) -> DenseLayer:
    generator = torch.Generator().manual_seed(index)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    rows, columns = (SAMPLED, INPUTS), (SAMPLED, outputs)
    x, grad_output = drawn(*rows), drawn(*columns) / TOKENS
    amaxes = x.abs().amax() * 1.5, grad_output.abs().amax() * (1 + index)
    dots = [drawn(*rows)], [drawn(*columns) / TOKENS]
    sample = LayerSample(TOKENS, x, grad_output, *dots, energies=(3.0 + index, 1.0), amaxes=amaxes)
    weight, push = drawn(outputs, INPUTS), drawn(outputs, INPUTS).abs()
    return DenseLayer(weight, [push] if index % 5 else None, sample, (2**63 + index, 77 + index))


def by_itself(given: DenseLayer, form: str = "token-fisher") -> list[Any]:
    sums = LayerSums(given.sample, [given.weight], given.pushforward, *SIZES, formats=FORMATS)
    return [
        read_all([sums.weight_divergences(name, given.keys), sums.loss_divergence(name, form), sums.errors(name)])
        for name in FORMATS
    ]


def shared(replays: Replays, given: DenseLayer, form: str = "token-fisher") -> list[Any]:
    found = replayed_sums.replayed_sums(replays, given, *SIZES, formats=FORMATS, form=form)
    return [read_all(found[name]) for name in FORMATS]


@pytest.mark.parametrize("form", ["token-fisher", "saliency"])
def test_replayed_layers_have_the_sums_of_each_layer_by_itself(form: str) -> None:
    recording = Recording()
    replays = Replays(recording.capture, set())
    for index in range(1, 5):
        assert shared(replays, layer(index), form) == by_itself(layer(index), form)
    assert (recording.captures, recording.replays) == (1, 3)


def test_layers_of_several_shapes_take_turns_each_with_its_own_capture() -> None:
    recording = Recording()
    replays = Replays(recording.capture, set())
    for index in range(6):  # the first one has no pushforward, and so a shape of its own
        given = layer(index, outputs=(OUTPUTS, 32)[index % 2])
        assert shared(replays, given) == by_itself(given)
    assert (recording.captures, recording.replays) == (2, 2)


def test_without_room_for_a_capture_sums_are_launched_one_by_one() -> None:
    replays = Replays(lambda work: None, set())
    for index in range(1, 4):
        assert shared(replays, layer(index)) == by_itself(layer(index))


def test_later_estimates_capture_the_first_layer_of_a_known_shape_and_form() -> None:
    known, captures = set[Any](), []
    for form in ("token-fisher", "token-fisher", "saliency"):
        recording = Recording()
        replays = Replays(recording.capture, known)
        for index in range(1, 4):
            # The third has a shape of its own, and is never captured.
            given = layer(index, outputs=OUTPUTS if index < 3 else 32)
            assert shared(replays, given, form) == by_itself(given, form)
        captures.append((recording.captures, recording.replays))
    assert captures == [(1, 1), (1, 2), (1, 1)]


def test_a_capture_that_runs_out_of_memory_returns_none_and_frees_the_memory_of_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    homes: list[torch.device] = []

    @cache
    def home(device: torch.device) -> replayed_sums._Home:
        homes.append(device)
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
    assert len(homes) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("outputs", [(OUTPUTS,), (OUTPUTS, 32)], ids=["one shape", "two, which share memory"])
def test_sums_from_a_cuda_graph_are_those_of_single_launches(outputs: tuple[int, ...]) -> None:
    known = set[Any]()
    for _ in range(2):
        replays = Replays(cuda_graph, known)
        for index in range(1, 5):
            given = layer(index, "cuda", outputs[index % len(outputs)])
            assert shared(replays, given) == by_itself(given)
    assert len(known) == len(outputs)


def test_an_estimate_with_captures_has_the_table_of_one_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model, recording = tiny_llama(hidden=32, layers=3), Recording()
    ids = torch.randint(model.config.vocab_size, (4, 16), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    expected = estimate_divergence(model, batch)
    monkeypatch.setattr(Replays, "on_cuda", lambda weights: Replays(recording.capture, set()))
    assert estimate_divergence(model, batch) == expected
    assert recording.replays > recording.captures > 1
