"""Compiled gated MLPs of encoded operands against the same layers one by one, and when they run one by one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from configs import fp4_config
from functorch.compile import make_boxed_func
from small import tiny_llama
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from snip_hf import SnipConfig, SnipController, convert_model
from snip_hf.kernels.emulated import EMULATED
from snip_hf.kernels.tensor_scaled import linear
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.kernels.tensor_scaled.exponents import LARGEST
from snip_hf.kernels.tensor_scaled.gated import activation_of, gradients_of
from snip_hf.layers.gated import put_gates
from snip_hf.layers.layer import SnipLayer
from snip_hf.layers.state import set_step, snip_linears
from snip_hf.numerics.gemms import GEMMS
from snip_hf.parallel.ranks import Ranks

HIDDEN = 64
LOG = logging.getLogger("snip_hf.test")
MXFP4, WITH_FP8 = ("mxfp4",) * 3, ("fp8-tensor", "mxfp4", "fp8-tensor")
DELAYED, WITH_DELAYED = ("fp8-delayed",) * 3, ("fp8-delayed", "mxfp4", "fp8-delayed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Gate(torch.autograd.Function):
    """silu(gate) * up as the operators compute it, in BF16."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return activation_of(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradients_of(grad, *ctx.saved_tensors)


def one_by_one(mlp: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = mlp.down_proj(Gate.apply(mlp.gate_proj(x), mlp.up_proj(x)))
    return y


class Graphs:
    """Compiles as `aot_eager` does, and holds what came out: first forward, then backward."""

    def __init__(self, **more: Any) -> None:
        self.all: list[torch.fx.GraphModule] = []
        self.backend = aot_autograd(fw_compiler=self._note, bw_compiler=self._note, **more)

    def _note(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        self.all.append(graph)
        boxed: Callable[..., Any] = make_boxed_func(graph)
        return boxed

    def gated(self) -> int:
        """Returns the number of gated MLP operators."""
        return sum("encode_gated" in str(node.target) for graph in self.all for node in graph.graph.nodes)


def mlp_of(formats: Mapping[str, tuple[str, ...]] | None = None, ties: bool = True) -> nn.Module:
    """A MLP on the backend, tied or not; formats by the linears' last names."""
    model = tiny_llama(hidden=HIDDEN, layers=1).train()
    convert_model(model, fp4_config())
    found = {name: layer for name, layer in snip_linears(model).items() if ".mlp." in name}
    for name, layer in found.items():
        layer.use_backend(TENSOR_SCALED)
        layer.set_formats(dict(zip(GEMMS, (formats or {}).get(name.rpartition(".")[2], MXFP4), strict=True)))
    set_step(found, 0, 1, 0)
    TENSOR_SCALED.share_inputs(found, [[name for name in found if "down" not in name]] if ties else [])
    assert put_gates(model, LOG) == 1
    mlp: nn.Module = model.model.layers[0].mlp
    return mlp


def linears(mlp: nn.Module) -> dict[str, SnipLayer]:
    return snip_linears(mlp)


def trained(mlp: nn.Module, call: Callable[[Tensor], Tensor], steps: int = 3) -> list[dict[str, Any]]:
    """Outputs, gradients and notes of some steps under autocast."""
    found = []
    for step in range(steps):
        x = torch.randn(2, 40, HIDDEN, generator=torch.Generator().manual_seed(step)).requires_grad_()
        mlp.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = call(x)
        y.float().square().sum().backward()
        gradients = {name: layer.weight.grad for name, layer in linears(mlp).items()}
        notes = {name: layer.snip_cache.records.record[:, LARGEST].tolist() for name, layer in linears(mlp).items()}
        found.append({"y": y.detach(), "x": x.grad, **gradients, "notes": notes})
        TENSOR_SCALED.after_step(linears(mlp))
    return found


def check(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.pop("notes") == other.pop("notes")
        for name, value in other.items():
            assert torch.equal(one[name], value), name


@pytest.mark.parametrize("ties", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "formats",
    [{}, {"up_proj": WITH_FP8, "down_proj": WITH_FP8}, {"gate_proj": DELAYED, "down_proj": WITH_DELAYED}],
    ids=["mxfp4", "with fp8-tensor", "with fp8-delayed"],
)
def test_a_compiled_mlp_trains_as_its_layers_do_one_by_one(formats: Any, ties: bool) -> None:
    mlp, twin = mlp_of(formats, ties), mlp_of(formats, ties)
    graphs = Graphs()
    found = trained(mlp, torch.compile(mlp, backend=graphs.backend, fullgraph=True))
    assert graphs.gated() == 2 and len(graphs.all) == 2
    check(found, trained(twin, lambda x: one_by_one(twin, x)))


def test_one_of_bf16_weights_and_inputs_does_so_too() -> None:
    mlp, twin = mlp_of().to(torch.bfloat16), mlp_of().to(torch.bfloat16)
    graphs = Graphs()
    compiled = torch.compile(mlp, backend=graphs.backend, fullgraph=True)
    found = []
    for one, call in ((mlp, compiled), (twin, lambda x: one_by_one(twin, x))):
        x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
        call(x).float().square().sum().backward()
        found.append([x.grad, *(layer.weight.grad for layer in linears(one).values())])
    assert graphs.gated() == 2
    assert all(map(torch.equal, *found))


def test_weights_that_are_kept_are_read() -> None:
    mlp, twin = mlp_of(), mlp_of()
    TENSOR_SCALED.before_pass(linears(mlp))
    graphs = Graphs()
    found = trained(mlp, torch.compile(mlp, backend=graphs.backend), steps=1)
    targets = [str(node.target) for graph in graphs.all for node in graph.graph.nodes]
    assert graphs.gated() == 2
    assert not any("tensor_scaled_weight_product" in target for target in targets)
    TENSOR_SCALED.before_pass(linears(twin))
    check(found, trained(twin, lambda x: one_by_one(twin, x), steps=1))


def test_small_weights_are_encoded_once_and_large_ones_for_each_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for small in (linear.SMALL, 0):
        monkeypatch.setattr(linear, "SMALL", small)
        torch._dynamo.reset()
        mlp, graphs = mlp_of(), Graphs()
        found.append(trained(mlp, torch.compile(mlp, backend=graphs.backend)))
        targets = [str(node.target) for node in graphs.all[1].graph.nodes]
        assert sum("tensor_scaled_weight_product" in target for target in targets) == (0 if small else 3)
    check(*found)


def test_a_new_plan_compiles_nothing() -> None:
    mlp, twin, graphs = mlp_of(), mlp_of(), Graphs()
    compiled = torch.compile(mlp, backend=graphs.backend, fullgraph=True)
    for formats in (MXFP4, WITH_FP8, DELAYED, ("mxfp4", "fp8-tensor", "mxfp4")):
        for layer in (*linears(mlp).values(), *linears(twin).values()):
            layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
        check(trained(mlp, compiled), trained(twin, lambda x: one_by_one(twin, x)))
    assert len(graphs.all) == 2


def test_activation_checkpointing_computes_the_same() -> None:
    mlp, twin = mlp_of(), mlp_of()
    compiled = torch.compile(mlp, backend=Graphs().backend)
    found = trained(mlp, lambda x: checkpoint(compiled, x, use_reentrant=False))
    check(found, trained(twin, lambda x: one_by_one(twin, x)))


def test_frozen_inputs_have_no_gradient() -> None:
    mlp, twin = mlp_of(), mlp_of()
    compiled = torch.compile(mlp, backend=Graphs().backend)
    for call in (compiled, lambda x: one_by_one(twin, x)):
        x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16):
            call(x).float().square().sum().backward()
    for name, layer in linears(mlp).items():
        assert torch.equal(layer.weight.grad, linears(twin)[name].weight.grad), name


def frozen(mlp: nn.Module) -> None:
    mlp.up_proj.weight.requires_grad_(False)


def with_bias(mlp: nn.Module) -> None:
    mlp.down_proj.bias = nn.Parameter(torch.ones(HIDDEN))


def with_bf16(mlp: nn.Module) -> None:
    mlp.gate_proj.set_formats({**mlp.gate_proj.formats, "grad_weight": "bf16"})


def hooked(mlp: nn.Module) -> None:
    mlp.gate_proj.register_forward_hook(lambda *_: None)


def emulated(mlp: nn.Module) -> None:
    mlp.down_proj.use_backend(EMULATED)


def wrapped(mlp: nn.Module) -> None:
    mlp.up_proj = nn.Sequential(mlp.up_proj)  # as an adapter holds it


def restored(mlp: nn.Module) -> None:
    mlp.up_proj.restore()


def watched(mlp: nn.Module) -> None:
    mlp.act_fn.register_forward_hook(lambda *_: None)


def with_gelu(mlp: nn.Module) -> None:
    mlp.act_fn = nn.GELU()


def with_an_own_forward_of_its_activation(mlp: nn.Module) -> None:
    mlp.act_fn.forward = torch.nn.functional.gelu


def with_another_class(mlp: nn.Module) -> None:
    mlp.__class__ = type("Half", (type(mlp),), {"forward": lambda self, x: 0.5 * one_by_one(self, x)})


def with_its_own_forward(mlp: nn.Module) -> None:
    inner = mlp.gate_proj.forward
    mlp.gate_proj.forward = lambda x: inner(x)


OTHERS = with_gelu, with_an_own_forward_of_its_activation, with_another_class


@pytest.mark.parametrize(
    "change", [frozen, with_bias, with_bf16, hooked, emulated, wrapped, restored, watched, with_its_own_forward]
)
def test_layers_that_need_their_own_call_run_one_by_one(change: Callable[[nn.Module], None]) -> None:
    mlp, graphs = mlp_of(), Graphs()
    change(mlp)
    with torch.autocast("cpu", torch.bfloat16):
        y = torch.compile(mlp, backend=graphs.backend)(torch.randn(40, HIDDEN))
    y.float().sum().backward()
    assert graphs.all and graphs.gated() == 0


@pytest.mark.parametrize("change", OTHERS)
def test_an_activation_that_is_replaced_is_seen_at_the_next_call(change: Callable[[nn.Module], None]) -> None:
    mlp, graphs = mlp_of(), Graphs()
    compiled = torch.compile(mlp, backend=graphs.backend)
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        compiled(x)
        assert graphs.gated() > 0
        change(mlp)
        found, expected = compiled(x), type(mlp).forward(mlp, x)
    assert torch.equal(found, expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_blocks_alike_are_compiled_once() -> None:
    model = tiny_llama(hidden=HIDDEN, layers=3).train()
    convert_model(model, fp4_config())
    layers = snip_linears(model)
    for layer in layers.values():
        layer.use_backend(TENSOR_SCALED)
        layer.set_formats(dict.fromkeys(GEMMS, "mxfp4"))
    TENSOR_SCALED.share_inputs(
        layers, [[f"model.layers.{block}.mlp.{name}_proj" for name in ("gate", "up")] for block in range(3)]
    )
    assert put_gates(model, LOG) == 3
    graphs, ids = Graphs(), torch.arange(32)[None]
    for index, block in enumerate(model.model.layers):
        block.mlp.layer_index = index  # as models number their parts
        block.compile(backend=graphs.backend, fullgraph=True)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    assert graphs.gated() == 2 and len(graphs.all) == 2


def test_evaluation_runs_them_one_by_one_and_other_dtypes_too() -> None:
    mlp, graphs = mlp_of().eval(), Graphs()
    x = torch.randn(4, HIDDEN)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.compile(mlp, backend=graphs.backend)(x).shape == x.shape
    mlp.train()
    assert torch.compile(mlp, backend=graphs.backend)(x).dtype == torch.float32
    assert len(graphs.all) >= 2 and graphs.gated() == 0


def test_a_training_pass_without_gradients_encodes_alike() -> None:
    mlp = mlp_of()
    x = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        graphs = Graphs()
        y = torch.compile(mlp, backend=graphs.backend)(x)
        assert graphs.gated() == 1
        assert torch.equal(y, one_by_one(mlp, x))
    assert all(layer.snip_cache.records.record[:, LARGEST].count_nonzero() == 0 for layer in linears(mlp).values())


@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_puts_the_forwards_in_place_and_takes_them_away(
    is_first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Ranks, "is_first", is_first)
    monkeypatch.setattr(type(TENSOR_SCALED), "lacks", lambda self, device: None)
    monkeypatch.setattr(type(TENSOR_SCALED), "fails", lambda self, format, device: None)
    model = tiny_llama(hidden=HIDDEN, layers=2)
    config = SnipConfig(policy="uniform-mxfp4", formats=("mxfp4", "fp8-delayed"), backend="tensor-scaled")
    with caplog.at_level(logging.INFO, "snip_hf"):
        run = SnipController(model, torch.optim.SGD(model.parameters(), lr=0.1), config)
    # The first rank says it for all.
    assert sum("2 gated MLPs run as one" in record.getMessage() for record in caplog.records) == int(is_first)
    assert ["forward" in vars(layer.mlp) for layer in model.model.layers] == [True, True]
    run.close()
    assert ["forward" in vars(layer.mlp) for layer in model.model.layers] == [False, False]
