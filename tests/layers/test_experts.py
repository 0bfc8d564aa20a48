"""Experts modules of transformers: swapped, run in low precision, restored, copied, saved."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import pytest
import torch
from configs import fp4_config
from expert_models import CONFIGS, EXPERTS, HIDDEN, INNER, VOCABULARY, build
from registries import restored
from small import convert_in_formats
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torchao.quantization import quantize_
from transformers import PreTrainedModel

from snip_hf import SnipLinearConfig, convert_model, restore_model
from snip_hf.kernels.backend import BACKENDS, Backend, register_backend
from snip_hf.kernels.emulated import EMULATED, Emulated, forward_gemm
from snip_hf.layers.experts import SnipExperts, inverse, permuted, sorted_tokens
from snip_hf.layers.selection import skip_reasons
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.gemms import GEMMS
from snip_hf.numerics.random_streams import matrix_keys
from snip_hf.training.swapped_layers import use_backend

HIGH = fp4_config(start_format="bf16")
FP4 = dict.fromkeys(GEMMS, "fp4")
each_family = pytest.mark.parametrize("family", CONFIGS)


def ids(seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model: PreTrainedModel) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(input_ids=ids(), labels=ids()).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


def experts_of(model: nn.Module) -> dict[str, SnipExperts]:
    return {name: layer for name, layer in snip_linears(model).items() if isinstance(layer, SnipExperts)}


def owners(model: nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def in_fp4(family: str) -> PreTrainedModel:
    model = build(family)
    convert_in_formats(model, HIGH)
    for layer in snip_linears(model).values():
        layer.set_formats(FP4)
    return model


@each_family
def test_a_swap_names_the_projections_as_checkpoints_do_and_changes_no_key(family: str) -> None:
    model = build(family)
    keys, parameters = list(model.state_dict()), {name: id(p) for name, p in model.named_parameters()}
    names = convert_model(model, fp4_config())
    found = experts_of(model)
    assert set(found) == {name for name in keys if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert [name for name in names if name in found] == list(found)
    assert list(model.state_dict()) == keys and {name: id(p) for name, p in model.named_parameters()} == parameters
    for name, layer in found.items():
        assert layer.weight is model.get_parameter(name) and layer.weight_name(name) == name
        is_down = name.endswith("down_proj")
        shape = (HIDDEN, INNER) if is_down else (2 * INNER, HIDDEN)
        assert (layer.out_features, layer.in_features, layer.num_matrices) == (*shape, EXPERTS)
        assert [tuple(matrix.shape) for matrix in layer.matrices(layer.weight)] == [shape] * EXPERTS
        assert torch.equal(layer.laid_out(layer.matrices(layer.weight)), layer.weight)
        assert (layer.bias is None) == (family != "gpt-oss")


@each_family
def test_in_high_precision_it_gives_what_transformers_gives_up_to_the_order_of_sums(family: str) -> None:
    model, plain = build(family), build(family)
    plain.set_experts_implementation("eager")
    convert_in_formats(model, HIGH)
    (loss, found), (expected_loss, expected) = loss_and_gradients(model), loss_and_gradients(plain)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@each_family
def test_masters_in_fp32_are_multiplied_in_bfloat16_under_autocast_and_get_fp32_gradients(family: str) -> None:
    model, plain = build(family), build(family)
    plain.set_experts_implementation("eager")
    convert_in_formats(model, HIGH)
    generator = torch.Generator().manual_seed(0)
    hidden, weights = torch.randn(12, HIDDEN, generator=generator), torch.rand(12, 2, generator=generator)
    index = torch.rand(12, EXPERTS, generator=generator).topk(2).indices
    ours, theirs = owners(model)[0], owners(plain)[0]
    seen: list[torch.dtype] = []
    for layer in ours.snip_layers.values():
        layer.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    for module in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16):
            module(hidden, index, weights).square().sum().backward()
    assert seen == [torch.bfloat16] * 2
    for (name, mine), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None and expected.grad is not None
        assert mine.grad.dtype == expected.grad.dtype == torch.float32
        assert (mine.grad - expected.grad).norm() <= 0.02 * expected.grad.norm(), name


def test_each_expert_s_tokens_are_multiplied_in_the_layer_s_format_with_the_expert_s_key() -> None:
    model = in_fp4("gpt-oss")
    module, hidden = owners(model)[0], torch.randn(10, HIDDEN, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([[0, 2]] * 6 + [[2, 3]] * 4)  # expert 1 is idle
    weights = torch.rand(10, 2, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(10, HIDDEN)
    up, down = module.snip_layers["gate_up_proj"], module.snip_layers["down_proj"]
    with torch.no_grad():
        for expert in (0, 2, 3):
            tokens, position = torch.where(index == expert)
            inner = module._apply_gate(_alone(up, expert, hidden[tokens]))
            expected.index_add_(0, tokens, _alone(down, expert, inner) * weights[tokens, position, None])
        assert torch.equal(module(hidden, index, weights), expected)


def _alone(layer: SnipExperts, expert: int, x: Tensor) -> Tensor:
    state = layer.snip_state.clone()
    key = matrix_keys(int(state[3]) % 2**64, EXPERTS)[expert]
    state[3] = key - 2**64 if key >= 2**63 else key
    return forward_gemm(x, layer.matrices(layer.weight)[expert], layer.bias[expert], state)


def test_a_norm_behind_every_expert_is_applied_where_transformers_knows_of_any() -> None:
    """Version 5.17 sets no such flag."""
    module, hidden = owners(in_fp4("mixtral"))[0], torch.randn(6, HIDDEN)
    index, weights = torch.arange(6)[:, None] % EXPERTS, torch.ones(6, 1)
    vars(module).pop("has_post_expert_norm", None)
    bare = module(hidden, index, weights)
    module.has_post_expert_norm, module.post_expert_norm = True, nn.LayerNorm(HIDDEN)
    assert torch.equal(module(hidden, index, weights), module.post_expert_norm(bare))


def test_an_index_behind_the_last_expert_stands_for_none() -> None:
    model = in_fp4("mixtral")
    module, hidden = owners(model)[0], torch.randn(6, HIDDEN)
    weights = torch.rand(6, 2, requires_grad=True)
    both = module(hidden, torch.tensor([[1, EXPERTS]] * 6), weights)
    both.sum().backward()
    alone = module(hidden, torch.tensor([[1]] * 6), weights[:, :1])
    assert torch.equal(both, alone) and weights.grad is not None and not weights.grad[:, 1].any()


def test_a_step_trains_every_expert_and_repeats_itself_to_the_bit_under_gradient_checkpointing() -> None:
    model, again = in_fp4("qwen3-moe"), in_fp4("qwen3-moe")
    getattr(again, "activation_checkpointing_enable", again.gradient_checkpointing_enable)()
    (loss, found), (repeated, same) = loss_and_gradients(model), loss_and_gradients(again)
    assert loss == repeated and found.keys() == same.keys()
    assert all(torch.equal(found[name], same[name]) for name in found)
    assert {name for name, _ in model.named_parameters()} == set(found)
    assert all(found[name].isfinite().all() and found[name].any() for name in experts_of(model))


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning")
@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_module_is_one_graph_that_reads_formats_and_keys_as_data(autocast: bool) -> None:
    module = owners(in_fp4("gpt-oss"))[0]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    generator, before = torch.Generator().manual_seed(0), counters["stats"]["unique_graphs"]
    hidden, weights = torch.randn(12, HIDDEN, generator=generator), torch.rand(12, 2, generator=generator)
    for seed, format in enumerate(("fp4", "bf16", "fp8")):
        for layer in module.snip_layers.values():
            layer.set_formats({**FP4, "forward": format})
            layer.snip_state[3] = seed
        index = torch.rand(12, EXPERTS, generator=generator).topk(2).indices
        found = []
        for run in (module, compiled):
            module.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = run(hidden, index, weights)
            y.square().sum().backward()
            found.append([y.detach(), *(p.grad.clone() for p in module.parameters())])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch warns of much while it compiles
def test_on_a_gpu_a_compiled_model_gives_the_loss_of_the_eager_one() -> None:
    model = in_fp4("qwen3-moe").cuda()
    compiled, tokens = torch.compile(model, fullgraph=True), ids().cuda()
    losses = []
    for run in (model, compiled):
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        assert all(layer.weight.grad.isfinite().all() for layer in experts_of(model).values())
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_a_frozen_projection_gets_no_gradient() -> None:
    model = in_fp4("mixtral")
    frozen = owners(model)[0]
    frozen.down_proj.requires_grad_(False)
    _, found = loss_and_gradients(model)
    assert frozen.down_proj.grad is None and found["model.layers.0.mlp.experts.gate_up_proj"].any()


class TestTheConfig:
    def test_only_swapped_modules_name_the_implementation(self, tmp_path: Path) -> None:
        model = build("mixtral")
        before = model.config.to_dict()
        convert_in_formats(model, fp4_config())
        assert {module.config._experts_implementation for module in owners(model)} == {"snip"}
        assert model.config.to_dict() == before and model.get_experts_implementation() == {"": "grouped_mm"}
        model.save_pretrained(tmp_path)
        assert "snip" not in (tmp_path / "config.json").read_text()
        assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "mixtral"

    def test_settings_of_the_user_hold_for_the_model_once_it_is_restored(self) -> None:
        model = build("mixtral")
        convert_model(model, fp4_config())
        model.set_experts_implementation("eager")
        assert {module.config._experts_implementation for module in owners(model)} == {"snip"}
        layers = list(experts_of(model).values())
        restore_model(model)
        assert all(module.config is model.config for module in owners(model))
        assert model.config._experts_implementation == "eager"
        assert not any("snip" in name for module in owners(model) for name in (*vars(module), *module._modules))
        assert {type(layer) for layer in layers} == {nn.Module}, "whoever holds a layer sees that it is none any more"
        plain = build("mixtral")
        plain.set_experts_implementation("eager")
        assert loss_and_gradients(model)[0] == loss_and_gradients(plain)[0]


class TestCopies:
    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_a_copy_runs_alike_and_on_its_own(self, how: str) -> None:
        model = in_fp4("gpt-oss")
        twin = copy.deepcopy(model) if how == "deepcopy" else pickle.loads(pickle.dumps(model))
        assert loss_and_gradients(twin)[0] == loss_and_gradients(model)[0]
        for module, layer in zip(owners(twin), list(experts_of(twin).values())[::2], strict=True):
            assert layer.owner is module and layer.weight is module.gate_up_proj
            assert module.snip_config is twin.config is not model.config
        restore_model(twin)
        assert not experts_of(twin) and len(experts_of(model)) == 4
        assert {module.config._experts_implementation for module in owners(model)} == {"snip"}

    @pytest.mark.parametrize("assign", [False, True])
    def test_loading_a_state_dict_keeps_the_layers(self, assign: bool) -> None:
        model, other = in_fp4("mixtral"), build("mixtral", seed=7)
        model.load_state_dict(other.state_dict(), assign=assign)
        convert_in_formats(other, HIGH)
        for layer in snip_linears(other).values():
            layer.set_formats(FP4)
        assert loss_and_gradients(model)[0] == loss_and_gradients(other)[0]
        for layer in experts_of(model).values():
            assert layer.weight is getattr(layer.owner, layer.parameter)

    def test_a_layer_follows_its_module_to_another_dtype(self) -> None:
        model = in_fp4("mixtral").to(torch.bfloat16)
        assert {layer.weight.dtype for layer in experts_of(model).values()} == {torch.bfloat16}
        assert {layer.snip_state.dtype for layer in experts_of(model).values()} == {torch.int64}
        assert loss_and_gradients(model)[0] == pytest.approx(loss_and_gradients(in_fp4("mixtral"))[0], rel=2e-2)


class TestSelection:
    def test_one_projection_can_be_left_in_high_precision(self) -> None:
        model, skipped = build("gpt-oss"), "model.layers.*.mlp.experts.gate_up_proj"
        convert_in_formats(model, fp4_config(start_format="bf16", skip_modules=(skipped,)))
        assert [name.rpartition(".")[2] for name in experts_of(model)] == ["down_proj"] * 2
        plain = build("gpt-oss")
        convert_in_formats(plain, HIGH)
        assert loss_and_gradients(model)[0] == loss_and_gradients(plain)[0]
        convert_in_formats(model, HIGH)  # takes the other one too, and leaves the first as it is
        assert len(experts_of(model)) == 4
        convert_in_formats(model, fp4_config(start_format="bf16", skip_modules=("*.experts.*",)))
        assert not experts_of(model) and all(module.config is model.config for module in owners(model))

    def test_formats_of_one_projection_leave_the_other_as_it_is(self) -> None:
        losses = []
        for convert in (convert_model, convert_in_formats):
            model = build("gpt-oss")
            convert(model, HIGH)
            for name, layer in experts_of(model).items():
                if name.endswith("down_proj"):
                    layer.set_formats(FP4)
            losses.append(loss_and_gradients(model)[0])
        assert losses[0] == losses[1]

    def test_torchao_s_quantize_swaps_all_projections_of_a_module(self) -> None:
        model = build("gpt-oss")
        quantize_(model, SnipLinearConfig(start_format="fp4"), lambda module, name: name.endswith("0.mlp.experts"))
        block = "model.layers.0.mlp.experts"
        assert list(snip_linears(model)) == [f"{block}.gate_up_proj", f"{block}.down_proj"]
        assert all(layer.formats == FP4 for layer in experts_of(model).values())
        quantize_(model, SnipLinearConfig(), lambda module, name: name.endswith("0.mlp.experts"))
        assert all(layer.formats == FP4 for layer in experts_of(model).values()), "swapped already"
        assert loss_and_gradients(model)[0] != loss_and_gradients(build("gpt-oss"))[0]

    def test_refused_modules_have_their_reason(self) -> None:
        model = build("mixtral")
        odd, without, bare, alike, liger = (copy.deepcopy(owners(model)[0]) for _ in range(5))
        odd.__class__ = type("Odd", (type(odd),), {"forward": lambda self, *args: None})
        del without.config
        bare._parameters["down_proj"] = None
        alike.forward = alike.forward
        fused = FunctionType(loss_and_gradients.__code__, {"__name__": "liger_kernel.transformers.swiglu"})
        liger.forward = MethodType(fused, liger)
        blocks = nn.ModuleDict({"layers": nn.ModuleList([odd, without, bare, alike, liger])})
        reasons = skip_reasons(blocks, fp4_config())
        assert [reasons[f"layers.{index}.down_proj"] for index in range(5)] == [
            "class Odd has a forward of its own",
            "no config that names an experts implementation",
            "no parameters gate_up_proj and down_proj of three dimensions",
            "another forward function is set on it (device_map, tensor parallelism)",
            "Liger's kernel runs these experts; liger_kernel_config={'swiglu': False} lets snip-hf run them",
        ]


class TestBackends:
    def test_experts_run_emulated_where_the_backend_runs_no_groups(self) -> None:
        class Alone(Emulated):
            name = "alone"
            refuses = Backend.refuses

        with restored(BACKENDS):
            register_backend(Alone())
            model = build("mixtral")
            convert_model(model, fp4_config(backend="alone"))
            found = {name: layer.snip_backend.name for name, layer in snip_linears(model).items()}
        assert {name for name, backend in found.items() if backend == "emulated"} == set(experts_of(model))
        assert set(found.values()) == {"alone", "emulated"}
        for layer in snip_linears(model).values():
            layer.use_backend(Alone())
        assert {name: layer.snip_backend.name for name, layer in snip_linears(model).items()} == found

    def test_a_run_says_that_experts_are_emulated_beside_other_kernels(self, caplog: pytest.LogCaptureFixture) -> None:
        class Alone(Emulated):
            name = "alone"
            refuses = Backend.refuses

        model = build("mixtral")
        convert_model(model, fp4_config())
        layers = snip_linears(model)
        logger = logging.getLogger("snip_hf")
        with caplog.at_level(logging.INFO, "snip_hf"):
            use_backend(layers, Alone(), None, fp4_config(), logger)
        assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
            "snip-hf: backend alone runs no grouped products: 4 layers, such as "
            "model.layers.0.mlp.experts.gate_up_proj, are emulated, slower than BF16. Name them in skip_modules to "
            "keep them in high precision."
        ]
        caplog.clear()
        with caplog.at_level(logging.INFO, "snip_hf"):
            use_backend(layers, EMULATED, None, fp4_config(), logger)
        assert "runs no grouped products" not in caplog.text


TOKENS, PER_TOKEN = 6, 3
ORDER = torch.randperm(TOKENS * PER_TOKEN, generator=torch.Generator().manual_seed(0))
BACK = torch.argsort(ORDER)


@pytest.mark.parametrize(
    ("move", "plain", "rows"),
    [
        (sorted_tokens, lambda x, order, back: x[order // PER_TOKEN], TOKENS),
        (permuted, lambda x, order, back: x[order], TOKENS * PER_TOKEN),
        (lambda x, order, back: permuted(x, back, order), lambda x, order, back: x[back], TOKENS * PER_TOKEN),
    ],
)
def test_rows_and_gradients_are_those_of_torchs_indexing(
    move: Callable[..., Tensor], plain: Callable[..., Tensor], rows: int
) -> None:
    x = torch.arange(rows * 4.0).view(rows, 4)  # whole numbers, whose sums are exact
    grad = torch.arange(TOKENS * PER_TOKEN * 4.0).view(-1, 4)
    found = []
    for function in (move, plain):
        leaf = x.clone().requires_grad_()
        y = function(leaf, ORDER, BACK)
        y.backward(grad)
        found.append((y.detach(), leaf.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_tokens_gradient_is_the_sum_of_its_pairs_in_the_order_of_the_batch_in_fp32() -> None:
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    y = sorted_tokens(x, torch.tensor([2, 0, 1]), torch.tensor([1, 2, 0]))
    y.backward(torch.tensor([[1.0], [256.0], [1.0]]).bfloat16())
    assert x.grad is not None and x.grad.item() == 258.0  # one by one in BF16: 256


def test_there_may_be_no_tokens() -> None:
    x = torch.zeros(0, 4, requires_grad=True)
    order = torch.zeros(0, dtype=torch.int64)
    y = sorted_tokens(x, order, inverse(order))
    y.sum().backward()
    assert y.shape == (0, 4) and x.grad is not None and x.grad.shape == (0, 4)
