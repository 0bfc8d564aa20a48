"""Is what the probe cannot work with refused before training, with a message that says what to do?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import tiny_llama
from torch import nn

from snip_hf import SnipConfig, SnipController, convert_model
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.probe import ProbeSettings, run_probe
from snip_hf.layers.selection import skip_reasons
from snip_hf.parallel.ranks import Processes, Ranks
from snip_hf.training.checks import check_model, check_parts


def test_stages_in_bf16_are_refused() -> None:
    check_parts([tiny_llama()])
    with pytest.raises(ValueError, match=r"parameter 'weight' is torch\.bfloat16; the probe runs its passes in FP32"):
        check_parts([nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)])


def test_passes_of_a_pipeline_under_autocast_are_refused() -> None:
    model = tiny_llama()
    convert_model(model, SnipConfig())
    tokens = torch.randint(50, (2, 16))

    def run(kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**kwargs).loss

    with pytest.raises(ValueError, match=r"leave autocast out of what Pipeline\.run does"):
        run_probe(model, Batch.of({"input_ids": tokens, "labels": tokens}), {}, ProbeSettings(0), Processes(run=run))


def test_fsdp_1_is_refused() -> None:
    wrapper = type("FullyShardedDataParallel", (nn.Module,), {})()
    with pytest.raises(ValueError, match=r"FSDP version 1, which flattens the weights\. Use version 2"):
        check_model(nn.ModuleList([wrapper]))


def test_tensor_parallel_models_are_refused() -> None:
    model = nn.ModuleList()
    model.tp_size = 2
    with pytest.raises(ValueError, match="tensor-parallel"):
        check_model(model)


def test_layers_on_which_another_forward_is_set_are_left_alone_and_the_reason_is_said() -> None:
    model = tiny_llama()
    layer = model.model.layers[0].mlp.up_proj
    layer.forward = layer.forward
    reason = skip_reasons(model, SnipConfig())["model.layers.0.mlp.up_proj"]
    assert reason is not None and "another forward function" in reason
    assert "model.layers.0.mlp.up_proj" not in convert_model(model, SnipConfig())


class OtherConfig(Ranks):
    """Two ranks, the second of which gives what the first does but for the seed."""

    def gather(self, value: Any, what: str = "figures") -> list[Any]:
        return [value, value | {"seed": 1, "solver_time_limit": 5.0}]


def test_another_configuration_on_another_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "of_all", lambda timeout: OtherConfig())
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"not that of rank 1: they differ in seed\. Expected the same SnipConfig"):
        SnipController(model, optimizer, SnipConfig())
