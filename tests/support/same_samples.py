"""Comparison of the samples of two probes, to the bit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from snip_hf.estimation.samples import LayerSample


def tensors_of(sample: LayerSample) -> list[Tensor]:
    return [sample.x, sample.grad_output, *sample.x_dot, *sample.grad_output_dot]


def assert_same_samples(found: Mapping[str, LayerSample], expected: Mapping[str, LayerSample]) -> None:
    assert list(found) == list(expected)
    for name, sample in found.items():
        assert sample.tokens == expected[name].tokens
        for one, other in zip(tensors_of(sample), tensors_of(expected[name]), strict=True):
            assert torch.equal(one, other), name
