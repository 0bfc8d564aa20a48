"""The causal-LM families of transformers: each is converted, trained for a step, restored, saved and loaded again."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path

import pytest
import torch
import transformers
from causal_families import DENSE, EXPERTS, FAMILIES, HYBRID, VOCABULARY, batch, build, class_of, type_of
from configs import fp4_config
from families_table import BEGIN, END, PAGE, documented, names_without_a_row, row, shares, table, versions
from slow_cases import slow_but
from small import convert_in_formats
from tiny_runs import SCHEDULE, data, train
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from snip_hf import PrecisionPlan, convert_model, estimate_divergence, restore_model
from snip_hf.layers.state import set_step, snip_linears

# One that stores its weights transposed, one with a state space, one with experts.
FEW = ("gpt2", "mamba", "qwen3_moe")
each_family = pytest.mark.parametrize("family", slow_but(FAMILIES, *FEW))
# Weights that choose experts or tokens.
CHOICES = re.compile(r"\.(router|gate|wg|indexer|classifier|shared_expert_gate)(\.|$)")

# Weights that models multiply with without calling the layer.
DIRECT = re.compile(r"\.(mixer|mamba)\.dt_proj$|\.correction_coefs$")

# Blocks of Zamba 2 share a part's weights, and each of them calls only its own adapter in it.
OTHER_ADAPTERS = re.compile(r"\.1\.shared_transformer\..*_list\.1\.|\.3\.shared_transformer\..*_list\.0\.")


def committed() -> str:
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]


@each_family
def test_a_step_of_training_in_fp4_leaves_a_model_that_plain_transformers_loads(family: str, tmp_path: Path) -> None:
    model = build(family)
    plain = copy.deepcopy(model)
    names = convert_in_formats(model, fp4_config(start_format="fp4"))
    assert not [name for name in names if CHOICES.search(name)]
    set_step(snip_linears(model), 0, 1, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = model(**batch()).loss
    loss.backward()
    optimizer.step()
    exact = float(plain(**batch()).loss.detach())
    assert 0 < abs(float(loss.detach()) - exact) < 0.1 * exact
    restore_model(model)
    assert not snip_linears(model)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path)
    # Copied, since kernels may round otherwise where a tensor lies as a file has it, and not as torch places it.
    loaded = copy.deepcopy(AutoModelForCausalLM.from_pretrained(tmp_path))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(**batch()).logits, model.eval()(**batch()).logits)


@each_family
def test_every_layer_that_runs_and_is_trained_has_finite_divergences(family: str) -> None:
    model = build(family)
    model(**batch()).loss.backward()
    table = estimate_divergence(model, batch(), torch.optim.AdamW(model.parameters(), lr=1e-3), fp4_config())
    convert_model(model, fp4_config())
    trained = {name for name, layer in snip_linears(model).items() if layer.weight.grad is not None}
    uncalled = {name for name in trained if DIRECT.search(name) or OTHER_ADAPTERS.search(name)}
    assert {entry.layer for entry in table.rows} == trained - uncalled
    assert all(math.isfinite(entry.loss_divergence + entry.weight_divergence) for entry in table.rows)


def test_a_layer_that_a_model_never_calls_has_no_part_in_the_fp4_share(tmp_path: Path) -> None:
    rows = [{name: [token % VOCABULARY for token in row] for name, row in one.items()} for one in data()]
    config = fp4_config(**SCHEDULE, granularity="layer", target_fp4_fraction=0.5)
    train(tmp_path, config, model=build("mamba"), trainer={"train_dataset": rows}, max_steps=5)
    plan = PrecisionPlan.load(tmp_path / "snip" / "plan.json")
    uncalled = {layer for layer in plan.assignment if layer.endswith(".dt_proj")}
    assert len(uncalled) == 2 and {layer for layer, tokens in plan.tokens.items() if not tokens} == uncalled
    low = {layer for layer, formats in plan.assignment.items() if formats["forward"] == "fp4"} - uncalled
    flops = {layer: sum(row.values()) for layer, row in plan.flops.items() if layer not in uncalled}
    assert plan.fp4_fraction == pytest.approx(sum(flops[layer] for layer in low) / sum(flops.values()))


@each_family
def test_the_documented_row_is_what_a_family_gives(family: str) -> None:
    assert row(family) == documented()[family], "run tests/support/families_table.py"


def test_the_table_has_a_row_of_every_family() -> None:
    assert documented().keys() == {**DENSE, **HYBRID, **EXPERTS}.keys()
    assert table(documented()) == committed()
    assert all(f"| `{class_of(family)}` |" in documented()[family] for family in FAMILIES)


def test_every_name_that_transformers_maps_to_a_causal_model_is_on_the_page() -> None:
    with_a_row, others = {type_of(family) for family in documented()}, names_without_a_row()
    assert not with_a_row & others
    if transformers.__version__.startswith(f"{versions()[-1]}."):
        assert with_a_row | others == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_at_least_thirty_families_with_ten_of_experts_are_covered_to_95_percent() -> None:
    found = shares("".join(documented().values()))
    assert set(found) >= set(FAMILIES)
    well = {family for family, share in found.items() if share >= 0.95}
    assert len(well) >= 30 and len(well & set(EXPERTS)) >= 10 and len(well & set(HYBRID)) >= 5
    assert f"{len(well)} of {len(found)} families have at least 95%." in committed()
