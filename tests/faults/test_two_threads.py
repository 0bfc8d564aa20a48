"""Two runs in two threads of one process: is torch itself again afterwards?"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from small import tiny_lm, tokens
from tiny_runs import SCHEDULE, one_thread, prepare
from torch import Tensor, nn
from torch._dynamo import eval_frame

from snip_hf import SnipConfig, is_probing
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.divergence import estimate_divergence
from snip_hf.estimation.passes import run_pass
from snip_hf.layers.convert import convert_model

PATIENCE = 20.0


def of_torch() -> list[Any]:
    return [
        eval_frame._stance,
        nn.functional.scaled_dot_product_attention,
        dict(nn.modules.module._global_forward_hooks),
    ]


class Waiting(nn.LayerNorm):
    """Tells that its forward pass has begun, and ends it when it may."""

    def __init__(self) -> None:
        super().__init__(12)
        self.began, self.may_end = threading.Event(), threading.Event()

    def forward(self, input: Tensor) -> Tensor:
        self.began.set()
        assert self.may_end.wait(PATIENCE)
        assert eval_frame._stance.stance == "force_eager"
        return super().forward(input)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("fails", [False, True])
def test_passes_that_overlap_in_any_order_leave_torch_as_it_was(order: tuple[int, int], fails: bool) -> None:
    seen: list[int] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(is_probing()))
    before = of_torch()
    models = [tiny_lm(seed) for seed in range(2)]
    for model in models:
        convert_model(model, SnipConfig())
        model.layers[0].norm = Waiting()
    if fails:
        models[1].head.forward = None
    with ThreadPoolExecutor(2) as threads:
        passes = []
        for model in models:
            passes.append(threads.submit(run_pass, model, Batch.of(tokens()), {}))
            assert model.layers[0].norm.began.wait(PATIENCE)
        for index in order:
            models[index].layers[0].norm.may_end.set()
            error = passes[index].exception(PATIENCE)
            assert (error is not None) == (fails and index == 1)
    assert of_torch() == before
    assert seen and all(seen)
    handle.remove()


def test_the_first_of_two_overlapping_passes_does_not_end_what_the_second_needs() -> None:
    models = [tiny_lm(seed) for seed in range(2)]
    alone = [estimate_divergence(model, tokens()).loss for model in models]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda model: estimate_divergence(model, tokens()).loss, models))
    assert together == alone


def test_two_trainers_in_two_threads_leave_torch_as_it_was(tmp_path: Path) -> None:
    before = of_torch()
    config = SnipConfig(**SCHEDULE | {"refresh_every": 2})
    # One after the other: all Accelerators of a process share their state, which each new Trainer makes anew.
    runs = [prepare(tmp_path / str(index), config, max_steps=6) for index in range(2)]
    with one_thread(), ThreadPoolExecutor(2) as threads:
        for training in [threads.submit(run.trainer.train) for run in runs]:
            training.result(200)
    assert [[line["status"] for line in run.refreshes] for run in runs] == [["applied"] * 2] * 2
    assert of_torch() == before
