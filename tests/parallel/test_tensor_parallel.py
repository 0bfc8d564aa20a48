"""Swapped layers that transformers splits by tensor or expert parallelism, on one process; tests/distributed runs
several."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from configs import fp4_config
from expert_models import build
from same_samples import assert_same_samples
from small import text, tiny_llama
from thread_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from snip_hf import convert_model, coverage, restore_model
from snip_hf.estimation.batch import Batch
from snip_hf.estimation.probe import run_probe
from snip_hf.layers.state import snip_linears
from snip_hf.parallel.ranks import Processes
from snip_hf.parallel.sharding import number_of_parts
from snip_hf.parallel.tensor_parallel import tensor_mesh, without_tensor_parallelism
from snip_hf.training.checks import check_same_batch, check_split

STYLES = {
    "lm_head": "colwise_gather_output",
    "embed_tokens": "embedding_rowwise",
    **dict.fromkeys(["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], "colwise"),
    **dict.fromkeys(["o_proj", "down_proj"], "rowwise"),
}


@pytest.fixture
def second_of_four() -> Iterator[None]:
    """This process is the second of four; the others do not exist."""
    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def plain_llama() -> Any:
    """Returns a tiny Llama whose biases are not 0."""
    model = tiny_llama(hidden=32, attention_bias=True, mlp_bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.constant_(parameter, 0.1)
    return model


def split_llama(ranks: int = 1, names: tuple[str, ...] | None = ("tp",)) -> Any:
    """Returns a tiny Llama that transformers' styles split over so many ranks, as loading it would."""
    model, mesh = plain_llama(), init_device_mesh("cpu", (ranks,), mesh_dim_names=names)
    for name, module in model.named_modules():
        style = STYLES.get(name.rpartition(".")[2])
        if style is None:
            continue
        for kind, parameter in list(module.named_parameters()):
            ALL_PARALLEL_STYLES[style].shard_param(module, kind, mesh)
            placements = getattr(module, kind).placements
            part = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
            setattr(module, kind, nn.Parameter(part))
        ALL_PARALLEL_STYLES[style].install_forward(module, mesh)
    return model


def test_split_linears_are_swapped_and_restored_and_compute_the_same_bits(alone: None) -> None:
    model, plain, batch = split_llama(), plain_llama(), text(2, 16)
    expected = plain(**batch).loss
    expected.backward()
    names = convert_model(plain, fp4_config())
    assert convert_model(model, fp4_config()) == names and len(names) == 14
    loss = model(**batch).loss
    loss.backward()
    assert torch.equal(loss, expected)
    assert convert_model(model, fp4_config()) == names
    for name in names:
        layer, other = model.get_submodule(name), plain.get_submodule(name)
        assert torch.equal(layer.weight.grad.full_tensor(), other.weight.grad)
        assert torch.equal(layer.bias.grad.full_tensor(), other.bias.grad)
        formats = dict.fromkeys(("forward", "grad_input", "grad_weight"), "fp8")
        layer.set_formats(formats), other.set_formats(formats)
    assert torch.equal(model(**batch).loss, plain(**batch).loss) and not torch.equal(model(**batch).loss, expected)
    restore_model(model)
    assert {type(model.get_submodule(name)) for name in names} == {nn.Linear}
    assert torch.equal(model(**batch).loss, expected)
    assert not any(hasattr(module, "_hf_quantized_needs_local_tp") for module in model.modules())


def test_passes_run_the_whole_model_and_leave_it_split(alone: None) -> None:
    model, plain, batch = split_llama(), plain_llama(), text(2, 128)
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}
    names = convert_model(model, fp4_config())
    assert convert_model(plain, fp4_config()) == names
    moves = dict.fromkeys(names, lambda z: z)
    ours, theirs = (run_probe(one, Batch.of(batch), moves) for one in (model, plain))
    assert ours.loss == theirs.loss
    assert_same_samples(ours.layers, theirs.layers)
    restore_model(model), restore_model(plain)
    assert coverage(model, batch) == coverage(plain, batch)
    assert sum(forward is not None for forward in forwards.values()) == 16
    for name, module in model.named_modules():
        was, now = forwards[name], vars(module).get("forward")
        assert (now is None) == (was is None)
        assert now is was or now.__name__ == "tp_forward"


def test_ranks_draw_other_numbers_for_other_output_features_only(second_of_four: None) -> None:
    model = split_llama(2)
    convert_model(model, fp4_config())
    layers = snip_linears(model)
    assert len(layers) == 14 and tensor_mesh([model]) is not None
    for name, layer in layers.items():
        is_whole = name.endswith(("o_proj", "down_proj"))
        assert (layer.snip_key == zlib.crc32(name.encode())) == is_whole
        assert layer.weight.to_local().numel() * 2 == layer.weight.numel()
        assert layer.in_features * layer.out_features == layer.weight.numel()


@pytest.mark.parametrize("names", [("tp",), None])
def test_the_mesh_is_found_with_and_without_names_and_no_other_one_is(
    names: tuple[str, ...] | None, second_of_four: None
) -> None:
    mesh = tensor_mesh([split_llama(2, names)])
    assert mesh is not None and mesh.size() == 2 and mesh.mesh_dim_names == names
    assert tensor_mesh([split_llama(2, ("ep",))]) is None


def test_a_tp_size_that_does_not_divide_the_features_is_refused(second_of_four: None) -> None:
    model = split_llama(4)
    convert_model(model, fp4_config())
    attention = model.model.layers[0].self_attn
    for block in model.model.layers:
        block.self_attn.head_dim = attention.k_proj.out_features // 4
    check_split(model, snip_linears(model))
    model.model.layers[1].mlp.down_proj.in_features = 82
    with pytest.raises(ValueError, match=r"tp_size=4 does not divide the 82 features of layer '.*1\.mlp\.down_proj'"):
        check_split(model, snip_linears(model))
    attention.head_dim = attention.k_proj.out_features // 2
    with pytest.raises(ValueError, match=r"tp_size=4 does not divide the 2 heads of layer '.*0\.self_attn\.k_proj'"):
        check_split(model, snip_linears(model))


def test_parts_of_a_tensor_are_counted(second_of_four: None) -> None:
    mesh, whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")), torch.zeros(8, 8)
    parts = {(Replicate(), Shard(0)): 2, (_StridedShard(0, split_factor=2), Shard(0)): 4, (Replicate(), Replicate()): 1}
    for placements, count in parts.items():
        assert number_of_parts(distribute_tensor(whole, mesh, placements, src_data_rank=None)) == count
    assert number_of_parts(whole) == 1


def spread_mixture(shares_batch: bool = True) -> Any:
    """Returns a model with four experts, one on each of four ranks, as transformers' loading would."""
    model, mesh = build("qwen3-moe"), init_device_mesh("cpu", (4, 1), mesh_dim_names=("ep", "tp"))
    styles, ranks = ALL_PARALLEL_STYLES, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for block in model.model.layers:
        experts = block.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            styles["grouped_gemm"].shard_param(experts, name, ranks)
        if "ep_dispatch_experts" in styles:
            tensor = ranks if shares_batch else mesh["tp"]
            styles["ep_dispatch_experts"].install_forward(experts, mesh["ep"], tp_mesh=tensor)
        else:  # transformers 5.17
            styles["moe_tp_experts"].install_forward(experts, ranks, is_expert_parallel=True)
            styles["ep_router"].install_forward(block.mlp.gate, ranks)
    return model


def test_experts_on_several_ranks_are_swapped_and_draw_other_numbers_on_each(second_of_four: None) -> None:
    model = spread_mixture()
    names = convert_model(model, fp4_config())
    assert names == convert_model(build("qwen3-moe"), fp4_config())
    for name, layer in snip_linears(model).items():
        is_spread = "experts" in name
        assert layer.snip_key == zlib.crc32(f"{name}@1".encode() if is_spread else name.encode())
        if is_spread:
            assert (layer.num_matrices, layer.owner.num_experts, len(layer.weight.to_local())) == (4, 1, 1)
    check_split(model, snip_linears(model))


def test_passes_run_all_experts_and_leave_them_spread(second_of_four: None) -> None:
    model = spread_mixture()
    convert_model(model, fp4_config())
    modules = [block.mlp.experts for block in model.model.layers]
    forwards = [vars(module)["forward"] for module in modules]
    with without_tensor_parallelism(model), without_tensor_parallelism(model):
        for module in model.modules():
            assert "forward" not in vars(module)
        assert [module.num_experts for module in modules] == [4, 4]
    assert [vars(module)["forward"] for module in modules] == forwards
    assert [module.num_experts for module in modules] == [1, 1]


def test_ranks_that_share_a_batch_are_found_by_their_experts(second_of_four: None) -> None:
    mesh = tensor_mesh([spread_mixture()])
    assert mesh is not None and mesh.size() == 4
    if "ep_dispatch_experts" in ALL_PARALLEL_STYLES:
        assert tensor_mesh([spread_mixture(shares_batch=False)]) is None


def test_pipeline_parallel_models_are_refused() -> None:
    model = tiny_llama(hidden=16)
    model.config.distributed_config = DistributedConfig(pp_size=2)
    with pytest.raises(ValueError, match=r"\(pp_size\), so each rank knows only some .*Load it with tp_size"):
        check_split(model, {})


@pytest.mark.parametrize("sizes", [None, SimpleNamespace(pp_size=None)])
def test_models_without_a_number_of_stages_are_accepted(sizes: Any) -> None:
    """transformers 5.17 has none for a model in shards."""
    model = tiny_llama(hidden=16)
    model.config.distributed_config = sizes
    check_split(model, {})


def test_ranks_that_share_weights_must_see_the_same_micro_batch() -> None:
    def check(differs: bool, ranks: Any) -> str:
        batch = {"input_ids": torch.full((2, 3), int(differs) * ranks.rank), "num_items_in_batch": 4}
        try:
            check_same_batch(batch, Processes(tensor=ranks, everyone=ranks))
        except ValueError as error:
            return str(error)
        return ""

    assert on_ranks(2, lambda ranks: check(False, ranks)) == ["", ""]
    for message in on_ranks(2, lambda ranks: check(True, ranks)):
        assert message == (
            "The 2 ranks that split each weight among them (tp_size) got different micro-batches; expected the same "
            "one on all of them: sample the data by torch.distributed.get_rank() // 2."
        )
