"""Which linears choose experts or tokens, and stay in high precision?"""

from __future__ import annotations

import pytest
from causal_families import FAMILIES, build
from configs import fp4_config

from snip_hf.layers.selection import skip_reasons

ROUTERS = {
    "afmoe": "mlp.router.gate",
    "hunyuan_v1_moe": "mlp.gate.wg",
    "jetmoe": "mlp.router.layer",
    "longcat_flash": "mlp.router.classifier",
    "qwen2_moe": "mlp.shared_expert_gate",
}


@pytest.mark.parametrize("family", [family for family in ROUTERS if family in FAMILIES])
def test_routers_that_are_linears_are_left_alone_and_the_gates_of_mlps_are_not(family: str) -> None:
    reasons = skip_reasons(build(family), fp4_config())
    routers = {name for name, reason in reasons.items() if reason == "router"}
    assert [name for name in routers if name.endswith(f".{ROUTERS[family]}")]
    assert not [name for name in routers if name.endswith("gate_proj")]


@pytest.mark.skipif("zaya" not in FAMILIES, reason="this transformers has no Zaya")
def test_all_layers_of_a_module_whose_class_is_called_a_router_are_left_alone() -> None:
    reasons = skip_reasons(build("zaya"), fp4_config())
    layers = ("down_proj", "router_mlp.fc1", "router_mlp.fc2", "router_mlp.out_proj")
    assert {name for name, reason in reasons.items() if reason == "router"} == {
        f"model.layers.{block}.mlp.gate.{layer}" for block in (0, 1) for layer in layers
    }


@pytest.mark.parametrize("family", [family for family in ("deepseek_v32", "glm_moe_dsa") if family in FAMILIES])
def test_indexers_of_sparse_attention_are_left_alone(family: str) -> None:
    reasons = skip_reasons(build(family), fp4_config())
    reason = "chooses the tokens of sparse attention"
    assert {name for name, why in reasons.items() if why == reason} == {
        f"model.layers.{block}.self_attn.indexer.{part}" for block in (0, 1) for part in ("wq_b", "wk", "weights_proj")
    }
