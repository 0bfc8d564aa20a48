"""A pass of the probe uses stand-ins for parameters and puts everything back, whatever shares what."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from configs import fp4_config
from models import batch as words
from models import build
from same_samples import assert_same_samples
from small import TinyLM, text, tiny_llama, tiny_lm, tokens, trained_tiny_lm
from tiny_runs import differing
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.distributed.fsdp import fully_shard
from transformers import LlamaForCausalLM

from snip_hf import is_probing
from snip_hf.estimation import passes, samples
from snip_hf.estimation.batch import Batch, Objective
from snip_hf.estimation.divergence import estimate_divergence
from snip_hf.estimation.memory import Savings
from snip_hf.estimation.passes import run_pass
from snip_hf.estimation.probe import ProbeSettings, run_probe
from snip_hf.layers.convert import convert_model
from snip_hf.parallel.sharding import is_sharded, whole


def aliased(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Gives blocks, a norm, the embedding, the head and a linear of a model second names."""
    model.blocks, model.last_norm = model.model.layers, model.model.norm
    model.words, model.to_words = model.model.embed_tokens, model.lm_head
    model.model.layers[1].first_up = model.model.layers[0].mlp.up_proj
    return model


class Shared(TinyLM):
    """ALBERT's kind: one block runs three times, and has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 3)
        self.block = self.layers[0]


class State:
    """The parameters of a model, as they are now: objects and bits, under all names."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = list(model.named_parameters(remove_duplicate=False))
        self.bits = {name: value.detach().clone() for name, value in model.state_dict().items()}

    def assert_unchanged(self) -> None:
        now = list(self.model.named_parameters(remove_duplicate=False))
        assert [name for name, _ in now] == [name for name, _ in self.parameters]
        assert all(one is other for (_, one), (_, other) in zip(now, self.parameters, strict=True))
        assert all(type(parameter) is nn.Parameter for _, parameter in now)
        assert differing(dict(self.model.state_dict()), self.bits) == []
        assert list(self.model.state_dict()) == list(self.bits)


def test_aliases_leave_divergences_and_parameters_as_they_are() -> None:
    model, batch = tiny_llama(hidden=32, layers=2), text(2, 8)
    wanted = estimate_divergence(model, batch)
    aliased(model).register_parameter("one_weight", model.model.layers[0].mlp.gate_proj.weight)
    state = State(model)
    assert estimate_divergence(model, batch) == wanted
    state.assert_unchanged()


def test_a_block_that_runs_three_times_and_has_two_names_trains_on() -> None:
    def losses(probes: bool) -> list[float]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Shared()
        model.reentrant = True
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for step in range(3):
            loss = model(**tokens(seed=step))["loss"]
            loss.backward()
            if probes:
                state = State(model)
                estimate_divergence(model, tokens(seed=step), optimizer)
                state.assert_unchanged()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_a_stand_in_that_is_asked_for_by_any_name_is_used_under_all() -> None:
    model, batch = tiny_lm(), tokens()
    convert_model(model, fp4_config())
    model.register_parameter("alias", model.layers[0].up.weight)
    weight = model.layers[0].up.weight.detach().clone().requires_grad_()
    assert next(iter(model.named_parameters()))[0] == "alias"
    run_pass(model, Batch.of(batch), {"layers.0.up.weight": weight})
    assert weight.grad is not None


def test_an_aliased_buffer_and_a_tensor_without_registration_are_put_back() -> None:
    model, batch = tiny_lm(), tokens()

    class Counting(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            self.seen += 1
            self.plain.add_(1)
            assert self.seen is self.again
            return super().forward(input)

    norm = Counting(12)
    norm.register_buffer("seen", torch.zeros(()))
    norm.register_buffer("again", norm.seen)
    norm.plain = torch.zeros(())
    model.layers[0].norm = norm
    plain, seen = norm.plain, norm.seen
    estimate_divergence(model, batch)
    assert norm.plain is plain and norm.seen is norm.again is seen
    assert plain == seen == 0
    model(**batch)
    assert plain == seen == 1


def test_a_pass_that_writes_to_a_parameter_itself_is_reported() -> None:
    model, batch = tiny_lm(), tokens()

    class Clamped(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(max=1.0)
            return super().forward(input)

    model.layers[1].norm = Clamped(12)
    with pytest.raises(RuntimeError, match=r"wrote to the parameter 'layers\.1\.norm\.weight' in place; expected"):
        estimate_divergence(model, batch)


def test_a_loss_that_runs_the_model_under_autocast_is_computed_in_fp32() -> None:
    model = tiny_llama()
    dtypes = []

    def loss(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(**inputs)
        dtypes.append(outputs.logits.dtype)
        return outputs.loss

    batch = text(2, 32)
    assert float(run_pass(model, Batch.of(batch, Objective(loss)), {})) == float(run_pass(model, Batch.of(batch), {}))
    loss(model, batch)
    assert dtypes == [torch.float32, torch.bfloat16]


def test_a_rank_whose_tokens_have_no_label_adds_nothing_to_the_loss() -> None:
    others: Any = SimpleNamespace(labelled=8, mesh=SimpleNamespace(size=lambda: 2), attention=nullcontext)
    inputs = text(2, 8)
    inputs["shift_labels"] = torch.full_like(inputs["labels"], -100)
    assert float(run_pass(tiny_llama(hidden=32), replace(Batch.of(inputs), sequences=others), {})) == 0


def test_the_parametrization_of_a_weight_acts_and_is_put_back() -> None:
    model, optimizer = trained_tiny_lm()
    nn.utils.parametrizations.spectral_norm(model.head)
    inner = model.head.parametrizations.weight[0]
    before = copy.deepcopy(inner.state_dict())
    loss = estimate_divergence(model, tokens(), optimizer).loss
    assert differing(dict(inner.state_dict()), before) == []
    assert loss == pytest.approx(model(**tokens())["loss"].item(), rel=1e-6)


# ------------------------------------------------------------------------------------------- in two threads at once

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


@pytest.mark.parametrize(("order", "fails"), [((0, 1), False), ((1, 0), True)])
def test_passes_that_overlap_in_any_order_leave_torch_as_it_was(order: tuple[int, int], fails: bool) -> None:
    seen: list[int] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(is_probing()))
    before = of_torch()
    models = [tiny_lm(seed) for seed in range(2)]
    for model in models:
        convert_model(model, fp4_config())
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


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral", "mamba"])
def test_modules_that_read_a_weight_of_a_bf16_model_or_its_dtype_get_all_of_it_in_fp32(
    family: str, is_sharded: bool, alone: None
) -> None:
    model = build(family).to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("down_proj"):  # as T5 casts inputs of its last linear
            module.register_forward_pre_hook(lambda module, args: args[0].to(module.weight.dtype))
    wide = copy.deepcopy(model).float()
    for each in (model, wide):
        convert_model(each, fp4_config())
    if is_sharded:
        fully_shard(model)
    one, other = (run_probe(each, Batch.of(words()), {}, ProbeSettings(0)) for each in (model, wide))
    assert one.loss == other.loss
    assert_same_samples(one.layers, other.layers)


def test_a_recomputed_block_gathers_each_sharded_weight_once_per_product(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    layers = convert_model(model, fp4_config())
    fully_shard(model)
    gathered: list[Tensor] = []

    def noted(tensor: Tensor) -> Tensor:
        gathered.extend([tensor] * is_sharded(tensor))
        return whole(tensor)

    for module in (passes, samples):
        monkeypatch.setattr(module, "whole", noted)
    run_probe(model, Batch.of(words()), {}, ProbeSettings(0, savings=Savings(("model.layers.0", "model.layers.1"))))
    others = len(list(model.parameters())) - len(layers)
    assert len(gathered) == 3 * len(layers) + others  # forward twice, and backward
