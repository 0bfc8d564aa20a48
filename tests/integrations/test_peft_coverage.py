"""Are the products of PEFT's adapters counted as by hand and as torch counts them, whatever their weights are?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from configs import fp4_config
from models import HIDDEN, INNER, LAYERS, build, text
from slow_cases import slow_but
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from snip_hf import convert_model, coverage
from snip_hf.layers.adapters import ADAPTER

peft = pytest.importorskip("peft")
# PEFT calls transformers' methods by their old names, and makes sparse tensors without a word on checks.
pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning", "ignore:Sparse invariant checks")

RANK = 256
TARGETS = ["q_proj", "v_proj", "down_proj"]
# Methods whose backward pass has no products of its own, such as recomputed ones.
METHODS: dict[str, Callable[[], Any]] = {
    "VeRA": lambda: peft.VeraConfig(r=16, target_modules=TARGETS),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=50, target_modules=TARGETS),
    "VB-LoRA": lambda: peft.VBLoRAConfig(r=4, vector_length=16, num_vectors=20, topk=2, target_modules=TARGETS),
    "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=TARGETS),
    "OFT": lambda: peft.OFTConfig(oft_block_size=8, target_modules=TARGETS),
    "HRA": lambda: peft.HRAConfig(r=4, target_modules=TARGETS),
    "HiRA": lambda: peft.HiraConfig(r=4, target_modules=TARGETS),
    "AdaMSS": lambda: peft.AdamssConfig(target_modules=TARGETS),
    "PEANuT": lambda: peft.PeanutConfig(target_modules=TARGETS),
    "PVeRA": lambda: peft.PveraConfig(r=16, target_modules=TARGETS),
    "TinyLoRA": lambda: peft.TinyLoraConfig(target_modules=TARGETS),
    "target_parameters": lambda: peft.LoraConfig(r=4, target_modules=[], target_parameters=["mlp.up_proj.weight"]),
}
# Methods whose backward pass multiplies anew, solves, or is sparse.
FORWARD: dict[str, Callable[[], Any]] = {
    "RandLoRA": lambda: peft.RandLoraConfig(r=8, target_modules=TARGETS),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS),
    "PSOFT": lambda: peft.PsoftConfig(target_modules=TARGETS),
    "WaveFT": lambda: peft.WaveFTConfig(n_frequency=50, target_modules=TARGETS),
    "FRoD": lambda: peft.FrodConfig(target_modules=TARGETS),
}


def adapted(config: Any) -> Any:
    model = build("llama")
    model.set_attn_implementation("eager")  # torch's counter knows no fused attention on CPUs
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(model, config)


def flops_of_torch(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Returns the FLOPs of the forward and backward pass.

    In transformers 5.17 the angles of positions are a product without gradients, which coverage counts with those that
    a recomputed pass would have.
    """
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    found = counter.get_flop_counts()
    angles = sum(sum(counts.values()) for name, counts in found.items() if name.endswith(".rotary_emb"))
    return counter.get_total_flops() + 2 * angles


@pytest.mark.parametrize("length", [8, HIDDEN])
@pytest.mark.parametrize("converts", [False, True])
def test_the_shared_projections_of_vera_are_counted_by_hand(converts: bool, length: int) -> None:
    """Each layer takes as much of them as it has features, which may be as much as there are tokens."""
    model = adapted(peft.VeraConfig(r=RANK, target_modules=["q_proj", "down_proj"]))
    if converts:
        convert_model(model, fp4_config())
    found = coverage(model, text(length=length))
    tokens = 2 * length
    # Forward and grad_input of both projections, but for the input of the first q_proj, which needs no gradient.
    inputs = {"self_attn.q_proj": HIDDEN * (2 * LAYERS - 1), "mlp.down_proj": INNER * 2 * LAYERS}
    expected = {
        f"model.layers.*.{name}": 2.0 * tokens * RANK * (size + HIDDEN * 2 * LAYERS) for name, size in inputs.items()
    }
    assert {one.name: one.share * found.flops for one in found.uncovered} == pytest.approx(expected)
    assert {one.reason for one in found.uncovered} == {ADAPTER}
    # The base: k and v have half as many features; no gradient flows through the first q, k and v.
    block = 3 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    assert found.covered == 2.0 * tokens * (2 * LAYERS * block - 2 * HIDDEN * HIDDEN)
    assert found.describe().endswith(f"Linear: {1 - found.share:.1%}, not covered (adapter)")


@pytest.mark.parametrize("method", slow_but(METHODS, "PVeRA", "LoKr", "PEANuT", "target_parameters"))
def test_the_counts_are_those_of_torch_and_attention(method: str) -> None:
    found = coverage(adapted(METHODS[method]()), text())
    assert found.covered < found.flops
    assert found.flops + sum(found.aside.values()) == flops_of_torch(adapted(METHODS[method]()), text())


@pytest.mark.parametrize("method", slow_but(FORWARD, "RandLoRA", "LoHa"))
def test_no_product_of_an_adapter_is_taken_for_one_of_activations_or_of_the_head(method: str) -> None:
    found, plain = coverage(adapted(FORWARD[method]()), text()), coverage(adapted(peft.LoraConfig()), text())
    assert found.aside == plain.aside
    assert {one.reason for one in found.uncovered} == {ADAPTER}
