"""Is the share of matrix products that a plan decides on the one counted by hand, and the rest told with its reason?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from configs import fp4_config
from models import (
    CHOSEN,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYERS,
    PATCHES,
    VISION_HIDDEN,
    VISION_INNER,
    VOCABULARY,
    build,
    text,
    with_images,
)
from small import convert_in_formats, tiny_llama
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from snip_hf import convert_model, coverage, restore_model
from snip_hf.estimation.coverage import Coverage, FlopsByWeight, Uncovered, count_pass

TOKENS = 16
# Products per token: multiplications of one pass through all weights of a part.
ATTENTION = 3 * HIDDEN * HIDDEN
MLP = 3 * HIDDEN * INNER
ROUTER = EXPERTS * HIDDEN
MAMBA = HIDDEN * 256 + 128 * (8 + 2 * 8) + 128 * HIDDEN
TIME_STEP = 8 * 128  # of Mamba: a linear that is not called
LATENT = HIDDEN * 24 + 24 * 4 * 24 + HIDDEN * (16 + 8) + 16 * 4 * (16 + 16) + HIDDEN * HIDDEN
# Linears, experts, routers, linears that are not called.
BY_HAND = {
    "gpt2": (LAYERS * 12 * HIDDEN * HIDDEN, 0, 0, 0),
    "llama": (LAYERS * (ATTENTION + MLP), 0, 0, 0),
    "mixtral": (LAYERS * ATTENTION, LAYERS * CHOSEN * MLP, LAYERS * ROUTER, 0),
    "deepseek": (LAYERS * LATENT + MLP + 3 * HIDDEN * 32, CHOSEN * 3 * HIDDEN * 32, ROUTER, 0),
    "mamba": (LAYERS * MAMBA, 0, 0, LAYERS * TIME_STEP),
    "jamba": (MAMBA + MLP + ATTENTION, CHOSEN * MLP, ROUTER, TIME_STEP),
}


def send_all_tokens_to(model: nn.Module, experts: tuple[int, ...]) -> None:
    """Lets the routers of a "mixtral" choose these experts for every token."""

    def chosen(module: nn.Module, args: Any, output: Any) -> Any:
        logits, weights, indices = output
        return logits, weights, torch.tensor(experts, device=indices.device).expand_as(indices).contiguous()

    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(chosen)


def flops(products: float, tokens: int = TOKENS) -> float:
    """Returns the FLOPs of the three GEMMs: a multiplication and an addition are two."""
    return 3 * 2.0 * products * tokens


def shares(found: Coverage) -> dict[str, float]:
    """Kind -> share of what is left."""
    result: dict[str, float] = {}
    for one in found.uncovered:
        result[one.kind] = result.get(one.kind, 0.0) + one.share
    return result


class Block(nn.Module):
    """A linear that plans decide on, and anything else."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.up, self.other = nn.Linear(8, 8, bias=False), other


class Model(nn.Module):
    """One block that computes `run`."""

    def __init__(self, other: nn.Module, run: Any) -> None:
        super().__init__()
        self.layers, self.run = nn.ModuleList([Block(other)]), run

    def forward(self, x: Tensor) -> Tensor:
        block = self.layers[0]
        return self.run(block.other, block.up(x))


class Bank(nn.Module):
    """A parameter and no forward of its own."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))


def beside(run: Any, *shape: int) -> float:
    """Returns the FLOPs of one pass of 6 tokens through what a block does with a parameter beside its linear."""
    found = coverage(Model(Bank(*shape), run), {"x": torch.ones(6, 8, requires_grad=True)})
    assert found.covered == flops(64, 6)
    return (found.flops - found.covered) / 3


@pytest.mark.parametrize("family", BY_HAND)
def test_the_flops_of_every_kind_of_weight_are_those_counted_by_hand(family: str) -> None:
    linears, experts, routers, uncalled = map(flops, BY_HAND[family])
    found = coverage(build(family), text())
    assert (found.flops, found.covered) == (linears + experts + routers + uncalled, linears + experts)
    left = {"router": routers / found.flops, "Linear": uncalled / found.flops}
    assert shares(found) == {kind: share for kind, share in left.items() if share}
    assert found.aside["output head"] == flops(HIDDEN * VOCABULARY)


@pytest.mark.parametrize(("converts", "is_sharded"), [(False, False), (True, False), (True, True)])
def test_a_weight_that_is_used_without_a_call_of_its_layer_is_listed_and_sees_no_tokens(
    converts: bool, is_sharded: bool, alone: None
) -> None:
    model = build("jamba")
    if converts:
        convert_model(model, fp4_config())
    if is_sharded:
        fully_shard(model)

    def hooks() -> list[int]:
        return [hook for module in model.modules() for hook in (*module._forward_hooks, *module._forward_pre_hooks)]

    before = hooks()
    counted = count_pass(model, text(), None)
    (left,) = [one for one in counted.coverage.uncovered if one.kind == "Linear"]
    reason = "the model multiplies with its weight without a call of the layer"
    assert (left.name, left.reason) == ("model.layers.*.mamba.dt_proj", reason)
    assert counted.tokens.get("model.layers.0.mamba.dt_proj") == (0 if converts else None)
    assert hooks() == before


def test_activations_that_ranks_share_are_counted_as_they_are_and_not_gathered(alone: None) -> None:
    """torch's ring attention gives its operands to torch as such tensors."""
    mesh = init_device_mesh("cpu", (1,))

    def attend(_: nn.Module, x: Tensor) -> Tensor:
        shared = DTensor.from_local(x, mesh, [Shard(1)])
        attended: Tensor = torch.matmul(shared, shared.mT).to_local()
        return attended

    found = coverage(Model(nn.Identity(), attend), {"x": torch.ones(2, 6, 8, requires_grad=True)})
    assert found.covered == found.flops == flops(64, 12)
    assert sum(found.aside.values()) == flops(8, 2 * 6 * 6)


def test_a_layer_that_is_called_and_whose_weight_is_used_otherwise_too_is_covered_in_part() -> None:
    """A weight that is clamped only in training is an example."""
    model = Model(nn.Linear(8, 8, bias=False), lambda linear, x: linear(x) + x @ linear.weight.t().clamp(-1, 1))
    found = coverage(model, {"x": torch.ones(6, 8, requires_grad=True)})
    assert (found.flops, found.covered) == (flops(3 * 64, 6), flops(2 * 64, 6))
    assert [(one.name, one.share) for one in found.uncovered] == [("layers.*.other", 1 / 3)]


def test_experts_that_are_refused_are_told_with_the_reason() -> None:
    model = build("mixtral")
    for block in model.model.layers:
        block.mlp.experts.forward = block.mlp.experts.forward
    linears, experts, routers, _ = map(flops, BY_HAND["mixtral"])
    found = coverage(model, text())
    assert (found.flops, found.covered) == (linears + experts + routers, linears)
    reason = "another forward function is set on it (device_map, tensor parallelism)"
    assert [one for one in found.uncovered if one.kind == "MoE experts"] == [
        Uncovered("model.layers.*.mlp.experts.gate_up_proj", "MoE experts", experts * 2 / 3 / found.flops, reason),
        Uncovered("model.layers.*.mlp.experts.down_proj", "MoE experts", experts / 3 / found.flops, reason),
    ]


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_count_alike_however_they_are_run(implementation: str, dtype: torch.dtype) -> None:
    model = build("mixtral").to(dtype)
    model.set_experts_implementation(implementation)
    expected = sum(map(flops, BY_HAND["mixtral"]))
    assert coverage(model, text()).flops == expected
    convert_model(model, fp4_config())
    assert coverage(model, text()).flops == expected


def test_idle_experts_cost_nothing_and_busy_ones_their_tokens() -> None:
    """Which experts are busy makes no difference; of a module whose experts are linears, that is told apart."""
    model = build("mixtral")
    before = coverage(model, text())
    send_all_tokens_to(model, (1, 3))
    assert coverage(model, text()) == before
    convert_model(model, fp4_config())
    assert coverage(model, text()) == before
    pairs = TOKENS * CHOSEN
    tokens = count_pass(model, text()).tokens
    assert {name: count for name, count in tokens.items() if "experts" in name} == {
        f"model.layers.{block}.mlp.experts.{part}": pairs
        for block in range(LAYERS)
        for part in ("gate_up_proj", "down_proj")
    }

    experts = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])

    def first_alone(experts: nn.ModuleList, x: Tensor) -> Tensor:
        return experts[0](x[:4])

    sparse = Model(experts, first_alone)
    convert_model(sparse, fp4_config())
    counted = count_pass(sparse, {"x": torch.ones(6, 8, requires_grad=True)})
    assert counted.tokens == {"layers.0.up": 6, "layers.0.other.0": 4, "layers.0.other.1": 0}
    assert counted.coverage.flops == flops(64, 6) + flops(64, 4)


def test_a_layer_that_is_called_twice_counts_twice() -> None:
    model = Model(nn.Linear(8, 8, bias=False), lambda linear, x: linear(linear(x)))
    assert coverage(model, {"x": torch.ones(6, 8, requires_grad=True)}).flops == flops(64, 6) + 2 * flops(64, 6)
    convert_model(model, fp4_config())
    assert count_pass(model, {"x": torch.ones(6, 8, requires_grad=True)}).tokens == {
        "layers.0.up": 6,
        "layers.0.other": 12,
    }


def test_layers_that_share_a_weight_each_see_their_own_tokens() -> None:
    model = Model(nn.Linear(8, 8, bias=False), lambda linear, x: linear(x[:2]))
    model.layers[0].other.weight = model.layers[0].up.weight
    assert coverage(model, {"x": torch.ones(6, 8, requires_grad=True)}).flops == flops(64, 8)
    convert_model(model, fp4_config())
    assert count_pass(model, {"x": torch.ones(6, 8, requires_grad=True)}).tokens == {
        "layers.0.up": 6,
        "layers.0.other": 2,
    }


@pytest.mark.parametrize("images", [False, True])
def test_a_vision_tower_counts_only_where_there_are_images(images: bool) -> None:
    found = coverage(build("llava"), with_images() if images else text())
    decoder = LAYERS * (ATTENTION + MLP)
    if not images:
        assert (found.flops, found.share) == (flops(decoder), 1.0)
        return
    blocks = flops(LAYERS * (4 * VISION_HIDDEN**2 + 2 * VISION_HIDDEN * VISION_INNER), 2 * (PATCHES + 1))
    patches = flops(VISION_HIDDEN * 3 * 4 * 4, 2 * PATCHES) * 2 / 3  # images need no gradient
    projector = flops(VISION_HIDDEN * HIDDEN + HIDDEN * HIDDEN, 2 * PATCHES)
    assert found.flops == flops(decoder, TOKENS + 2 * PATCHES) + blocks + patches + projector
    assert shares(found)["Conv2d"] == pytest.approx(patches / found.flops)


@pytest.mark.parametrize(
    ("run", "shape", "products"),
    [
        (lambda bank, x: x @ bank.weight.t(), (5, 8), 6 * 40),
        (lambda bank, x: torch.einsum("td,od->to", x, bank.weight), (5, 8), 6 * 40),
        (lambda bank, x: bank.weight @ x.t(), (5, 8), 6 * 40),
        (lambda bank, x: x @ bank.weight, (8,), 6 * 8),
        (lambda bank, x: x.to(torch.bfloat16) @ bank.weight.to(torch.bfloat16).t(), (5, 8), 6 * 40),
        (lambda bank, x: x @ (bank.weight * 2 + 1)[:3].t().contiguous(), (5, 8), 6 * 24),
        (lambda bank, x: x[:2] @ bank.weight[x.new_ones((), dtype=torch.int64)], (3, 8, 5), 2 * 40),
        (lambda bank, x: torch.bmm(x[:, None], bank.weight[x[:, 0].long() * 0]), (3, 8, 5), 6 * 40),
        (lambda bank, x: torch.baddbmm(x[:3, None, :5], x.view(3, 2, 8), bank.weight), (3, 8, 5), 6 * 40),
        (lambda bank, x: nn.functional.conv1d(x.t()[None], bank.weight), (5, 8, 1), 6 * 40),
        (lambda bank, x: nn.functional.conv_transpose1d(x.t()[None], bank.weight), (8, 5, 2), 6 * 80),
        (lambda bank, x: nn.functional.conv1d(x.t()[None], bank.weight, groups=8), (8, 1, 3), 0),
        (lambda bank, x: nn.functional.conv1d(x[:, None], bank.weight), (5, 1, 3), 6 * 5 * 6 * 3),
        (lambda bank, x: nn.functional.embedding(x[:, 0].long() * 0, bank.weight) @ x.t(), (5, 8), 0),
        (lambda bank, x: (x * bank.weight) @ x.t(), (8,), 0),
        (lambda bank, x: (x.new_ones(6, 1) * bank.weight) @ x.t(), (1, 8), 0),
        (lambda bank, x: bank.weight[x[:, 0].long() * 0] @ x.t(), (8, 8), 0),
        (lambda bank, x: nn.functional.scaled_dot_product_attention(*(x[None, None] * bank.weight,) * 3), (8,), 0),
    ],
)
def test_a_product_counts_if_a_parameter_is_its_operand_in_any_shape(
    run: Any, shape: tuple[int, ...], products: int
) -> None:
    assert beside(run, *shape) == 2.0 * products


def test_a_weight_without_elements_has_no_products() -> None:
    assert beside(lambda bank, x: nn.functional.pad(x @ bank.weight, (0, 8)), 8, 0) == 0.0


@pytest.mark.parametrize("last", [4, 6])
def test_rows_after_the_last_group_do_not_count(last: int) -> None:
    def grouped(bank: Bank, x: Tensor) -> Tensor:
        ends = torch.tensor([2, last], dtype=torch.int32)
        return torch.nn.functional.grouped_mm(x.bfloat16(), bank.weight.bfloat16(), offs=ends)

    assert beside(grouped, 2, 8, 16) == 2.0 * last * 8 * 16


@pytest.mark.parametrize(
    "compose",
    [
        lambda weight: weight / weight.abs().mean(),
        lambda weight: weight + (weight.round() - weight).detach(),
        lambda weight: weight.to(torch.bfloat16).float() * torch.ones(8),
    ],
)
def test_a_tensor_computed_from_a_weight_without_products_counts_as_that_weight(compose: Any) -> None:
    assert beside(lambda bank, x: x @ compose(bank.weight), 8, 8) == 2.0 * 6 * 64


@pytest.mark.parametrize("autocast", [False, True])
def test_frozen_matrices_belong_to_the_module_that_multiplies_with_them(autocast: bool) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8), requires_grad=False)
            self.register_buffer("fixed", torch.ones(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model = Model(Frozen(), lambda module, x: module(x))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = coverage(model, {"x": torch.ones(6, 8, requires_grad=True)})
    assert [(one.name, one.kind) for one in found.uncovered] == [("layers.*.other", "Frozen")]
    assert found.share == 3 / 5


def test_a_linear_whose_weight_is_a_buffer_is_covered_unless_it_is_left_out() -> None:
    linear = nn.Linear(8, 8, bias=False)
    model, weight = Model(linear, lambda module, x: module(x)), linear.weight.detach()
    del linear.weight
    linear.register_buffer("weight", weight)
    batch = {"x": torch.ones(6, 8, requires_grad=True)}
    assert coverage(model, batch).covered == flops(64, 6) * 5 / 3
    found = coverage(model, batch, fp4_config(skip_modules=("*.other",)))
    assert found.uncovered == [Uncovered("layers.*.other", "Linear", 2 / 5, "skip_modules")]


def test_products_with_masks_and_tables_in_a_block_are_aside() -> None:
    model = Model(nn.Linear(8, 8, bias=False), lambda linear, x: linear(model.layers[0].mask @ x))
    model.layers[0].register_buffer("mask", torch.ones(6, 6).tril())
    found = coverage(model, {"x": torch.ones(6, 8, requires_grad=True)})
    assert (found.share, found.flops) == (1.0, flops(128, 6))
    assert sum(found.aside.values()) == 2 * 2 * 6 * 6 * 8


def casts(family: str, dtype: torch.dtype, other: torch.dtype, which: str) -> Any:
    """A model in one dtype, with the head or the norms in another one."""
    model = build(family).to(dtype)
    for name, module in model.named_modules():
        if which in name and not list(module.children()):
            module.to(other)
    return model


@pytest.mark.parametrize("family", ["mixtral", "mamba"])
@pytest.mark.parametrize("which", ["lm_head", "norm", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_a_model_counts_alike_in_every_combination_of_dtypes(
    family: str, which: str, dtype: torch.dtype, autocast: torch.dtype | None
) -> None:
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    for converts in (False, True):
        model = casts(family, dtype, other, which)
        if converts:
            convert_model(model, fp4_config())
        found = count_pass(model, text(), autocast=autocast).coverage
        linears, experts, routers, uncalled = map(flops, BY_HAND[family])
        assert (found.flops, found.covered) == (linears + experts + routers + uncalled, linears + experts)
        assert found.aside["output head"] == flops(HIDDEN * VOCABULARY)


def test_flops_are_those_that_torch_counts_in_training() -> None:
    model = build("llama")
    found = coverage(model, text())
    with FlopCounterMode(display=False) as counter:
        model(**text()).loss.backward()
    # torch has no formula for attention on CPUs. In transformers 5.17 the angles of positions are a product, without a
    # backward pass.
    angles = counter.get_flop_counts()["Global"].get(torch.ops.aten.bmm, 0)
    assert found.flops + found.aside["output head"] == counter.get_total_flops() - angles
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(**text()).loss.backward()
    eager = coverage(model, text())
    assert eager.flops == found.flops
    assert sum(eager.aside.values()) + eager.flops == counter.get_total_flops() + 2 * angles


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_outside_compiled_graphs_is_aside() -> None:
    x = torch.ones(1, 2, 6, 8)
    with torch.compiler.set_stance("force_eager"), torch.no_grad(), FlopsByWeight({}) as counter:
        flex_attention(x, x, x)
    assert counter.of_activations == 3 * 2 * 2 * 2 * 6 * 6 * 8


def test_products_of_activations_are_aside() -> None:
    found = coverage(Model(Bank(8), lambda bank, x: x @ x.t()), {"x": torch.ones(6, 8, requires_grad=True)})
    assert found.flops == found.covered == flops(64, 6)
    assert found.aside["other products without a weight (masks, tables)"] == 3 * 2 * 6 * 6 * 8
    assert sum(found.aside.values()) == 3 * 2 * 6 * 6 * 8
    batched = coverage(Model(Bank(8), lambda bank, x: x @ x.mT), {"x": torch.ones(2, 6, 8, requires_grad=True)})
    assert batched.aside["products of activations with each other (attention, scans)"] == 2 * 3 * 2 * 6 * 6 * 8


def test_a_frozen_weight_has_no_grad_weight() -> None:
    model = build("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" not in name)
    frozen = LAYERS * HIDDEN * HIDDEN
    assert coverage(model, text()).flops == flops(BY_HAND["llama"][0]) - 2.0 * frozen * TOKENS


def test_a_tied_head_is_aside() -> None:
    model = build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    found = coverage(model, text())
    assert found.share == 1.0 and found.aside["output head"] == flops(HIDDEN * VOCABULARY)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "deepseek", "jamba"])
def test_a_converted_model_has_the_coverage_of_the_plain_one(family: str) -> None:
    model = build(family)
    before = coverage(model, text())
    convert_in_formats(model, fp4_config(start_format="fp8"))
    assert coverage(model, text()) == before
    restore_model(model)
    assert coverage(model, text()) == before


def test_the_swapped_layers_decide_unless_a_config_is_given() -> None:
    model = build("llama")
    skipping = fp4_config(skip_modules=("*.down_proj",))
    expected = coverage(model, text(), skipping)
    assert expected.uncovered == [Uncovered("model.layers.*.mlp.down_proj", "Linear", 6144 / 30720, "skip_modules")]
    convert_model(model, skipping)
    assert [(one.name, one.reason) for one in coverage(model, text()).uncovered] == [
        ("model.layers.*.mlp.down_proj", "not swapped")
    ]
    assert coverage(model, text(), fp4_config()).share == 1.0


def test_labels_are_not_needed_and_compiled_blocks_are_looked_into() -> None:
    model = build("llama")
    expected = coverage(model, text())
    assert coverage(model, {"input_ids": text()["input_ids"]}) == expected
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    assert coverage(torch.compile(model, backend="eager"), text()) == expected


def test_the_uncovered_rest_is_described_by_kind() -> None:
    groups = [
        Uncovered(
            "layers.*.experts.gate_up_proj", "MoE experts", 0.4, "no registered layer kind handles MixtralExperts"
        ),
        Uncovered("layers.*.experts.down_proj", "MoE experts", 0.21, "no registered layer kind handles MixtralExperts"),
        Uncovered("layers.*.gate", "router", 0.01, "no registered layer kind handles MixtralTopKRouter"),
    ]
    assert Coverage(9.0, 9.0, [], {"output head": 0}).describe() == (
        "100.0% of the model's matmul FLOPs (attention products aside)"
    )
    assert Coverage(100.0, 38.0, groups).describe() == (
        "38.0% of the model's matmul FLOPs (output head and attention products aside); MoE experts: 61.0%, not covered "
        "(no registered layer kind handles MixtralExperts); router: 1.0%, not covered (no registered layer kind "
        "handles MixtralTopKRouter)"
    )


def test_a_quantized_model_is_refused() -> None:
    model = build("llama")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match=r"^Layer .model\.layers\.1\.mlp\.up_proj. has torch.int8 weights"):
        coverage(model, text())


def test_a_plan_decides_on_nothing_in_a_model_without_products() -> None:
    found = coverage(nn.Sequential(), {"input": torch.ones(2)})
    assert found == Coverage(
        0.0, 0.0, [], {"output head": 0.0, "products of activations with each other (attention, scans)": 0.0}
    )
    assert found.share == 0.0


BLOCK = "model.layers"


def freeze(model: nn.Module, *trained: str) -> nn.Module:
    """Leaves only parameters trained whose names begin so."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained))
    return model


def recompute(model: Any, reentrant: bool) -> None:
    """Switches gradient checkpointing on."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})


def idle(model: nn.Module) -> set[str]:
    """The layers whose grad_input does not run, after a check that all layers saw all tokens."""
    convert_model(model, fp4_config())
    counted = count_pass(model, text(), None)
    assert set(counted.tokens.values()) == {TOKENS} and set(counted.returned.values()) <= {0, TOKENS}
    return {name for name, tokens in counted.returned.items() if not tokens}


def test_every_grad_input_runs_if_the_whole_model_is_trained() -> None:
    assert idle(build("llama")) == set()


def test_no_gradient_flows_through_the_first_layers_behind_frozen_embeddings() -> None:
    model = build("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    # The input of the first norm needs no gradient, but its weight is trained.
    assert idle(model) == set()
    model = build("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    model.model.layers[0].input_layernorm.weight.requires_grad_(False)
    first = {f"{BLOCK}.0.self_attn.{name}_proj" for name in "qkv"}
    assert idle(model) == first
    every = LAYERS * (ATTENTION + MLP)
    found = coverage(model, text())
    assert found.covered == found.flops == flops(every) - 2.0 * HIDDEN * (HIDDEN + 2 * HIDDEN // 2) * TOKENS


def test_no_gradient_flows_through_frozen_lower_blocks() -> None:
    model = freeze(build("llama"), f"{BLOCK}.1.", "model.norm", "lm_head")
    expected = {name for name, _ in model.named_modules() if name.startswith(f"{BLOCK}.0.") and "_proj" in name}
    assert idle(model) == expected and len(expected) == 7
    found = coverage(model, text())
    # The lower block has the forward GEMM alone.
    assert found.covered == found.flops == flops(ATTENTION + MLP) * (1 + 1 / 3)


def test_grad_inputs_of_experts_in_frozen_blocks_do_not_run_nor_do_those_of_routers() -> None:
    model = freeze(build("mixtral"), f"{BLOCK}.1.mlp.experts", "lm_head")
    convert_model(model, fp4_config())
    counted = count_pass(model, text(), None)
    down = f"{BLOCK}.1.mlp.experts.down_proj"
    assert {name for name, tokens in counted.returned.items() if tokens} == {down}
    found = counted.coverage
    linears, experts, routers = LAYERS * ATTENTION, LAYERS * CHOSEN * MLP, LAYERS * ROUTER
    # Forward of all, grad_weight of one block's experts, grad_input of their last third.
    gemms = linears + experts + routers + experts / 2 + experts / 6
    assert found.flops == flops(gemms) / 3 and found.flops - found.covered == flops(routers) / 3


class Operators(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **kwargs or {})


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@pytest.mark.parametrize(
    ("checkpoints", "asks"), [(None, False), (None, True), (False, False), (False, True), (True, True)]
)
@pytest.mark.parametrize("trained", [("model", "lm_head"), (f"{BLOCK}.1.mlp", "lm_head"), ("lm_head",)])
def test_the_grad_inputs_that_run_in_training_are_those_counted(
    trained: tuple[str, ...], checkpoints: bool | None, asks: bool
) -> None:
    model = freeze(build("llama"), *trained)
    if checkpoints is not None:
        recompute(model, reentrant=checkpoints)  # which asks for gradients of embeddings, too
    (model.enable_input_require_grads if asks else model.disable_input_require_grads)()
    plain = coverage(model.train(), text())
    layers = convert_in_formats(model)
    counted = count_pass(model, text(), None)
    assert counted.coverage == plain
    with Operators() as operators:
        model(**text()).loss.backward()
    run = operators.calls["snip_hf::grad_input_gemm"]
    assert run == sum(tokens > 0 for tokens in counted.returned.values())
    assert len(layers) == 14 and {name for name, one in model.named_parameters() if one.requires_grad} == {
        name for name, _ in model.named_parameters() if name.startswith(trained)
    }


@pytest.mark.parametrize(
    ("batch", "config", "error", "message"),
    [
        ({}, fp4_config(skip_modules=("*.qproj",)), ValueError, r"skip_modules: '\*\.qproj' matches no linear layer"),
    ],
)
def test_arguments_that_cannot_be_counted_are_refused(
    batch: Any, config: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        coverage(tiny_llama(hidden=16, layers=1), batch, config)


def test_a_model_of_which_nothing_can_be_swapped_is_counted() -> None:
    batch = {"input_ids": torch.zeros(1, TOKENS, dtype=torch.long)}
    found = coverage(tiny_llama(), batch, fp4_config(skip_modules=("*",)))
    assert found.share == 0.0
    assert found.uncovered


def test_a_misspelt_name_is_refused_where_nothing_can_be_swapped() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 8)})
    with pytest.raises(ValueError, match="'mlp' matches no linear layer; the model has none"):
        coverage(model, {}, fp4_config(skip_modules=("mlp",)))
