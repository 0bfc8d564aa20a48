"""What becomes of a model in which a module or a parameter has several names?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_cases import slow
from small import TinyLM, adamw_after, text, tiny_llama, tiny_lm, tokens, trained_tiny_lm
from tiny_runs import FAST, SCHEDULE, differing, model_with_dropout, train, weights, without_seconds
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from snip_hf import SnipConfig
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.divergence import estimate_divergence
from snip_hf.estimation.ground_truth import measure_assignment, measure_divergence
from snip_hf.estimation.passes import run_pass
from snip_hf.estimation.probe import ProbeSettings, run_probe
from snip_hf.estimation.table import DivergenceTable
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears

CONFIG = SnipConfig(**SCHEDULE)
SHORT = {"max_steps": 5}


def aliased(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Gives blocks, a norm, the embedding, the head and a linear of a model second names."""
    model.blocks, model.last_norm = model.model.layers, model.model.norm
    model.words, model.to_words = model.model.embed_tokens, model.lm_head
    model.model.layers[1].first_up = model.model.layers[0].mlp.up_proj
    return model


class Wrapped(nn.Module):
    """Names the blocks before the model that they belong to."""

    def __init__(self, lm: LlamaForCausalLM) -> None:
        super().__init__()
        self.blocks = lm.model.layers
        self.lm = lm
        self.config = lm.config

    def get_output_embeddings(self) -> nn.Module:
        return self.lm.get_output_embeddings()

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.lm(input_ids=input_ids, labels=labels, attention_mask=attention_mask)


class Shared(TinyLM):
    """ALBERT's kind: one block runs three times, and has a second name."""

    def __init__(self, has_alias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 3)
        if has_alias:
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


def rows(table: DivergenceTable) -> list[dict[str, Any]]:
    return table.to_records()


def test_a_run_with_aliases_is_the_run_without_them_to_the_bit(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", CONFIG, model=model_with_dropout(), **SHORT)
    model = aliased(model_with_dropout())
    parameters = list(model.parameters())
    run = train(tmp_path / "aliased", CONFIG, model=model, **SHORT)
    assert run.losses == plain.losses
    assert [line["status"] for line in run.refreshes] == ["applied"]
    assert without_seconds(run.refreshes) == without_seconds(plain.refreshes)
    now = list(model.parameters())
    assert len(now) == len(parameters)
    assert all(one is other for one, other in zip(now, parameters, strict=True))
    assert all(type(parameter) is nn.Parameter for parameter in now)
    mine, theirs = weights(model), weights(plain.model)
    assert differing({name: mine[name] for name in theirs}, theirs) == []


def test_a_wrapper_that_names_the_blocks_first_trains_the_same_parameters(tmp_path: Path) -> None:
    # The blocks' names decide the random numbers: compared is with a run whose probes cannot matter.
    config = {"start_format": "bf16", "first_refresh": 2, "refresh_every": 2, "apply_delay": 2, **FAST}
    probed = Wrapped(model_with_dropout())
    parameters = list(probed.parameters())
    run = train(tmp_path / "probed", SnipConfig(**config), model=probed, max_steps=3)
    bare = train(tmp_path / "bare", model=Wrapped(model_with_dropout()), max_steps=3)
    assert run.losses == bare.losses
    assert all(one is other for one, other in zip(probed.parameters(), parameters, strict=True))
    assert differing(weights(probed), weights(bare.trainer.model)) == []


@pytest.mark.parametrize("action", [estimate_divergence, slow(measure_divergence)])
def test_aliases_leave_divergences_and_parameters_as_they_are(action: Any) -> None:
    model, batch = tiny_llama(hidden=32, layers=2), text(2, 8)
    wanted = rows(action(model, batch))
    aliased(model).register_parameter("one_weight", model.model.layers[0].mlp.gate_proj.weight)
    state = State(model)
    assert rows(action(model, batch)) == wanted
    state.assert_unchanged()


@pytest.mark.parametrize("has_alias", [False, True])
@pytest.mark.parametrize("reentrant", [slow(None), slow(False), True])
def test_a_block_that_runs_three_times_and_has_two_names_trains_on(has_alias: bool, reentrant: bool | None) -> None:
    def losses(probes: bool) -> list[float]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Shared(has_alias)
        model.reentrant = reentrant
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


def test_every_way_to_probe_leaves_an_aliased_model_alone() -> None:
    model = aliased(tiny_llama(hidden=32, layers=1 + 1))
    optimizer = adamw_after(model, 1, rows=2, length=8)
    convert_model(model, SnipConfig())
    state, batch = State(model), text(2, 8)
    layers = snip_linears(model)
    pullbacks = {name: torch.ones_like(layer.weight).mul for name, layer in layers.items()}
    run_probe(model, Batch.of(batch), pullbacks, ProbeSettings(probes=2))
    measure_assignment(model, batch, optimizer, [{name: {"forward": "fp4"} for name in layers}], draws=1)
    state.assert_unchanged()


def test_a_stand_in_that_is_asked_for_by_any_name_is_used_under_all() -> None:
    model, batch = tiny_lm(), tokens()
    convert_model(model, SnipConfig())
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


def test_an_embedding_that_bounds_its_norm_does_so_on_a_copy() -> None:
    model = tiny_lm()
    model.embed.max_norm = 0.5
    before = model.embed.weight.detach().clone()
    estimate_divergence(model, tokens())
    assert torch.equal(model.embed.weight, before)


def test_what_parametrizes_a_weight_acts_and_is_put_back() -> None:
    model, optimizer = trained_tiny_lm()
    nn.utils.parametrizations.spectral_norm(model.head)
    inner = model.head.parametrizations.weight[0]
    before = copy.deepcopy(inner.state_dict())
    loss = estimate_divergence(model, tokens(), optimizer).loss
    assert differing(dict(inner.state_dict()), before) == []
    assert loss == pytest.approx(model(**tokens())["loss"].item(), rel=1e-6)
