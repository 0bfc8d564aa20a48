"""Are sums that layers of one shape share a capture of those of each layer by itself?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_hf.estimation.criterion import LayerCriterion
from snip_hf.estimation.extrapolation import BatchSizes
from snip_hf.estimation.layer_sums import read_all
from snip_hf.estimation.replayed_sums import Replays, cuda_graph
from snip_hf.estimation.samples import LayerSample
from snip_hf.estimation.whole_layer import Figures, Task, WholeLayer

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
    return WholeLayer(f"layer {index}", (drawn(outputs, INPUTS),), None, (drawn(outputs, INPUTS).abs(),)), sample


def task(replays: Replays | None, **changes: Any) -> Task:
    batch = BatchSizes.complete(TOKENS, TOKENS - 10)
    return Task(LayerCriterion, "token-fisher", FORMATS, 2, batch, replays=replays)._replace(**changes)


def results(found: list[Figures]) -> list[Any]:
    return [(one.layer, one.format, *(read_all([part])[0] for part in one[2:])) for one in found]


def test_figures_of_replayed_layers_are_those_of_each_layer() -> None:
    recording = Recording()
    replays = Replays(recording.capture)
    for index in range(4):
        whole, sample = layer(index)
        keys = KEYS[0] + index, KEYS[1] + index
        expected = whole.figures(sample, task(None), keys, None)
        assert results(whole.figures(sample, task(replays), keys, None)) == results(expected)
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


@pytest.mark.parametrize(
    "changes", [{"measures_noise": True}, {"loss_estimator": "norm"}], ids=["noise", "another form of the loss"]
)
def test_what_is_no_function_of_tensors_alone_is_not_captured(changes: dict[str, Any]) -> None:
    def refuse(work: Callable[[], None]) -> None:
        raise AssertionError("captured")

    replays = Replays(refuse)
    for index in range(3):
        whole, sample = layer(index)
        expected = results(whole.figures(sample, task(None, **changes), KEYS, None))
        assert results(whole.figures(sample, task(replays, **changes), KEYS, None)) == expected


@pytest.mark.gpu
def test_figures_from_a_cuda_graph_are_those_of_single_launches() -> None:
    replays = Replays(cuda_graph)
    for index in range(4):
        whole, sample = layer(index, "cuda")
        expected = results(whole.figures(sample, task(None), KEYS, None))
        assert results(whole.figures(sample, task(replays), KEYS, None)) == expected
