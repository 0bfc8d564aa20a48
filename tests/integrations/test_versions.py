"""Does each branch on a version of transformers or torch do its work, whichever version is installed?

Other branches are tested beside what they belong to: meshes without names, expert parallelism and fields that
`DistributedConfig` lacks in tests/parallel/test_tensor_parallel.py, sizes that Accelerate lacks in
tests/training/test_controller.py, Liger under older torch in tests/training/test_setup.py, Adagrad's state in
tests/optimizers/test_response.py, models that cannot switch their attention and those with masks of their own in
tests/estimation/test_attention.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from small import text, tiny_llama
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Gemma2Config, Gemma2ForCausalLM

from snip_hf.estimation.attention import switched_attention
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.passes import call, recomputes_already, run_pass, traceless
from snip_hf.integrations.trainer_loss import _is_scaled_for_step
from snip_hf.parallel import sharding
from snip_hf.parallel.sharding import unwrap


@pytest.mark.parametrize("new", [True, False])
def test_shards_are_gathered_by_either_name_of_the_collective(
    new: bool, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.13 renamed it."""
    calls: list[str] = []

    def all_gather(result: torch.Tensor, part: torch.Tensor, group: Any = None) -> None:
        calls.append("new" if new else "old")
        result.copy_(part)

    monkeypatch.setattr(dist, "all_gather_single", all_gather if new else None, raising=False)
    monkeypatch.setattr(dist, "all_gather_into_tensor", None if new else all_gather)
    spec = importlib.util.find_spec(sharding.__name__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    part = torch.arange(6.0).reshape(3, 2)
    shard = distribute_tensor(part, init_device_mesh("cpu", (1,)), [Shard(0)])
    assert torch.equal(fresh.whole(shard), part)
    fresh.all_gather(torch.empty(3, 2), part)
    assert set(calls) == {"new" if new else "old"}


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_.*able. is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_models_that_recompute_are_known_under_either_name(name: str) -> None:
    """transformers 5.24 has both names."""
    model = tiny_llama(hidden=16)
    enable, disable = (getattr(model, f"{name}_{what}", None) for what in ("enable", "disable"))
    if enable is None or disable is None:
        pytest.skip(f"this transformers has no {name}_enable")
    assert not recomputes_already(model)
    enable()
    assert recomputes_already(model)
    disable()
    assert not recomputes_already(model)


def test_blocks_that_torch_recomputes_are_known() -> None:
    model = tiny_llama(hidden=16)
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    assert recomputes_already(model)


def test_the_language_model_of_a_composed_one_caches_nothing_in_a_pass() -> None:
    """Its config has `use_cache`, behind `get_text_config`; the whole model's has none in some versions."""
    model, seen = models.build("llava"), list[bool]()
    text_config = model.config.get_text_config()
    assert text_config is not model.config and text_config.use_cache
    model.register_forward_pre_hook(lambda *_: seen.append(text_config.use_cache))
    float(run_pass(model, Batch.of(models.with_images()), {}))
    assert seen == [False] and text_config.use_cache


@pytest.mark.parametrize(
    ("trainer", "is_scaled"),
    [
        (SimpleNamespace(compute_loss_func=None), False),
        (SimpleNamespace(compute_loss_func=print), True),
        (SimpleNamespace(compute_loss_func=print, loss_is_scaled_for_ga=None), True),
        (SimpleNamespace(compute_loss_func=print, loss_is_scaled_for_ga=False), False),
        (SimpleNamespace(compute_loss_func=None, loss_is_scaled_for_ga=True), True),
    ],
)
def test_a_trainers_declaration_about_its_loss_goes_before_what_older_ones_imply(trainer: Any, is_scaled: bool) -> None:
    """Trainers declare it from transformers 5.19 on."""
    assert _is_scaled_for_step(trainer) is is_scaled


@pytest.mark.parametrize("supports_sdpa", [True, False])
def test_a_model_with_soft_caps_is_probed_under_eager_whatever_it_says_of_sdpa(
    supports_sdpa: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.17 says that "sdpa" can compute Gemma 2."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=16, hidden_size=16, intermediate_size=16, **sizes))
    for kind in (Gemma2ForCausalLM, type(model.model)):
        monkeypatch.setattr(kind, "_supports_sdpa", supports_sdpa)
    model.config._attn_implementation_internal = "flash_attention_2"
    assert {plain for _, _, plain in switched_attention(model)} == {"eager"}


@pytest.fixture
def bf16() -> Iterator[Accelerator]:
    for state in (AcceleratorState, GradientState):
        state._reset_state()
    yield Accelerator(cpu=True, mixed_precision="bf16")
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.parametrize("compiles", [False, True])
def test_a_pass_runs_the_forward_that_accelerate_wrapped(compiles: bool, bf16: Accelerator) -> None:
    """Accelerate and torch.compile keep it under names of their own."""
    model, batch = tiny_llama(hidden=16), text(1, 16)
    expected = model(**batch).loss
    prepared = bf16.prepare_model(torch.compile(model, backend="eager") if compiles else model)
    assert unwrap(prepared) is model
    with torch.no_grad(), traceless(model):
        vars(prepared)["forward"] = None  # the wrapper, which would run in BF16
        assert torch.equal(call(model, batch).loss, expected)
