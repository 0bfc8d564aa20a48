"""Layers of several matrices on the backend "tensor-scaled": places, operands byte for byte, and layers against the
emulated backend; on a CPU by the reference and Triton's interpreter, and on a GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from configs import fp4_config
from expert_models import tiny_gpt_oss, tiny_qwen3_moe
from kernel_runs import either
from kernels.test_hopper_layers import assert_close, randn
from kernels.test_tensor_scaled import encoded, numbers, rising
from kernels.test_tensor_scaled_layers import SNIP, everywhere, on_gpu  # noqa: F401
from models import batch
from operator_calls import Calls, assert_same
from own_loop import take_steps
from torch import Tensor, nn

from snip_hf import SnipController
from snip_hf.kernels.backend import BACKENDS, Backend
from snip_hf.kernels.emulated import EMULATED
from snip_hf.kernels.tensor_scaled import trial
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.kernels.tensor_scaled.encoding import PARAMETERS, SCALE, table_on
from snip_hf.kernels.tensor_scaled.exponents import EXPONENT, LARGEST, UNSET, Records
from snip_hf.kernels.tensor_scaled.slots import slots_of
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.formats import FORMATS, format_of_code
from snip_hf.numerics.gemms import OPERANDS
from snip_hf.numerics.random_streams import matrix_keys
from snip_hf.numerics.rounding import round_operand
from snip_hf.training.swapped_layers import use_backend

Run = Callable[..., tuple[Tensor, ...]]
MXFP4 = ("mxfp4", "mxfp4", "mxfp4")
MIXED = ("ufp4", "fp8-tensor", "mxfp4")
DELAYED = ("fp8-delayed",) * 3
GEMMS_OF = {"activation": (0, 2), "gradient": (1, 2), "weight": (0, 1)}
# Tokens of each matrix, and of none.
TOKENS, OF_NONE = (70, 0, 3, 64), 5
FEW = [MXFP4, ("bf16", "fp8-tensor", "mxfp4"), ("fp8-tensor", "mxfp4", "bf16"), ("mxfp4", "bf16", "fp8-tensor")]
FEW += [DELAYED, ("mxfp4", "fp8-delayed", "bf16")]


def ends_on(where: str | torch.device = "cpu") -> Tensor:
    return torch.tensor(TOKENS, device=where).cumsum(0)


# ------------------------------------------------------------------------------------- places


def test_each_matrix_gets_slots_that_are_a_multiple_of_32_and_at_least_32() -> None:
    slots = slots_of(ends_on(), sum(TOKENS) + OF_NONE)
    assert slots.ends.tolist() == [70, 70, 73, 137] and slots.padded_ends.tolist() == [96, 128, 160, 224]
    assert slots.blocks.tolist() == [
        [0, 0, 32, 0, 70],
        [0, 32, 32, 32, 70],
        [0, 64, 6, 64, 70],
        [1, 70, 0, 0, 0],
        [2, 70, 3, 0, 3],
        [3, 73, 32, 0, 64],
        [3, 105, 32, 32, 64],
        [3, 137, 0, 64, 64],
    ]
    own = [*range(70), *range(128, 131), *range(160, 224)]
    assert slots.slot[:137].tolist() == own and int(slots.slot.max()) < 32 * len(slots.blocks)
    assert slots.matrix.tolist() == [0] * 70 + [2] * 3 + [3] * 64 + [4] * 5


@pytest.mark.parametrize("tokens", [(0, 0, 0), (1,), (31, 31, 31, 31), (33, 1, 0, 32), (96,)])
def test_there_are_always_enough_slots(tokens: tuple[int, ...]) -> None:
    for of_none in (0, 40):
        slots = slots_of(torch.tensor(tokens).cumsum(0), sum(tokens) + of_none)
        assert int(slots.padded_ends[-1]) <= 32 * len(slots.blocks)
        assert ((slots.slot >= 0) & (slots.slot < 32 * len(slots.blocks))).all()


# ------------------------------------------------------------------------------------- operands


def record_with(exponent: int) -> Tensor:
    record = Records.new(torch.device("cpu")).record
    record[:, EXPONENT] = exponent
    return record


def by_kernel(
    x: Tensor, blocks: Tensor | None, state: Tensor, record: Tensor, operand: int, gemms: tuple[int, int], settled: bool
) -> tuple[Tensor, ...]:
    records = Records(record, table_on(x.device))
    if settled:
        records.view.set_formats([format_of_code(code) for code in state[:3].tolist()])
        records.view.known = tuple(index == operand for index in range(3))
    return *encoded(x, state, records, operand, gemms, True, len(TOKENS), blocks), records.record


@pytest.fixture(
    params=[pytest.param("interpreter", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def run(request: pytest.FixtureRequest) -> Run:
    return either(request, by_kernel)


def check(run: Run, formats: tuple[str, ...], operand: str, exponent: int = UNSET, settled: bool = False) -> None:
    number, gemms = OPERANDS.index(operand), GEMMS_OF[operand]
    if operand == "weight":
        x, blocks = rising(len(TOKENS) * 64, 96), None
    else:
        x = rising(sum(TOKENS) + OF_NONE, 96)
        blocks = slots_of(ends_on(), len(x)).blocks
    records = Records(record_with(exponent), table_on(torch.device("cpu")))
    expected = encoded(x, numbers(formats), records, number, gemms, False, len(TOKENS), blocks)
    *got, record = run(x, blocks, numbers(formats), record_with(exponent), number, gemms, settled)
    for one, other in zip(got, expected, strict=True):
        assert one.shape == other.shape and torch.equal(one.float(), other.float())
    noted = slice(LARGEST + 1) if settled else slice(None)  # blocks are counted by the other launch
    assert torch.equal(record[:, noted], records.record[:, noted])


@pytest.mark.parametrize("formats", [MXFP4, MIXED, DELAYED], ids="/".join)
@pytest.mark.parametrize("operand", OPERANDS)
def test_the_kernels_write_the_bytes_of_the_reference(operand: str, formats: tuple[str, ...], run: Run) -> None:
    check(run, formats, operand)
    check(run, formats, operand, 3)


@pytest.mark.parametrize("operand", OPERANDS)
def test_one_launch_writes_them_where_the_exponent_and_encoded_formats_are_known(operand: str, run: Run) -> None:
    for formats in (MXFP4, DELAYED, ("mxfp4", "fp8-delayed", "mxfp4")):
        check(run, formats, operand, 3, settled=True)
        check(run, formats, operand, -20, settled=True)


@on_gpu[0]
@on_gpu[1]
def test_over_two_million_tokens_are_encoded() -> None:
    tokens = 32 * 65_536  # one block more than CUDA takes along a second axis of programs
    ends = torch.tensor([tokens // 2 + 7, tokens], device="cuda")
    x, blocks = rising(tokens, 32).cuda(), slots_of(ends, tokens).blocks
    for records in (Records.new(x.device), Records(record_with(3).cuda(), table_on(x.device))):
        state = numbers(MXFP4).cuda()
        got, expected = (encoded(x, state, records, 0, (0, 2), by_kernel, 2, blocks) for by_kernel in (True, False))
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one.float(), other.float())


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")
@pytest.mark.parametrize("operand", OPERANDS)
def test_the_kernel_assembles_for_hopper_and_converts_to_fp8_in_hardware(operand: str) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from snip_hf.kernels.tensor_scaled.tiles import encode_matrices_kernel as kernel

    row_gemm, column_gemm = GEMMS_OF[operand]
    constants: dict[str, Any] = dict.fromkeys(("HAS_ROWS", "HAS_COLUMNS", "COUNTS"), True)
    constants |= {"ROW_GEMM": row_gemm, "COLUMN_GEMM": column_gemm, "IS_GRADIENT": operand == "gradient"}
    constants |= {"EVEN": operand == "weight", "FINDS": False, "IN_BLOCKS": False, "CHANNELS": 32}
    kinds = {"x": "*bf16", "table": "*fp32", "amaxes": "*i32", "rows": "*fp8e4nv", "columns": "*fp8e4nv"}
    kinds |= dict.fromkeys(("blocks", "state", "record"), "*i64") | dict.fromkeys(
        ("row_parameters", "column_parameters"), "*fp32"
    )
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in names}
    divisible = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name not in constants}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1, "enable_fp_fusion": True})
    assert len(code.asm["cubin"]) > 1000 and "cvt.rn.satfinite.e4m3x2.f32" in code.asm["ptx"]


@pytest.mark.parametrize("operand", OPERANDS)
def test_a_matrix_has_the_values_of_a_layer_of_its_own(operand: str) -> None:
    """The result equals `numerics.rounding` to the bit, with the matrix's own random numbers."""
    is_weight, (row_gemm, _) = operand == "weight", GEMMS_OF[operand]
    x = rising(len(TOKENS) * 64 if is_weight else sum(TOKENS), 96)
    slots = slots_of(ends_on(), sum(TOKENS))
    state, number = numbers(MIXED, rank=1, ranks=2), OPERANDS.index(operand)
    blocks = None if is_weight else slots.blocks
    rows, parameters, columns, column_parameters = encoded(
        x, state, Records.new(x.device), number, GEMMS_OF[operand], None, len(TOKENS), blocks
    )
    scales, column_scales = parameters[SCALE::PARAMETERS], column_parameters[SCALE::PARAMETERS]
    keys = matrix_keys(int(state[3]) % 2**64, len(TOKENS))
    for matrix, (key, end, count) in enumerate(zip(keys, ends_on().tolist(), TOKENS, strict=True)):
        start = int(slots.padded_ends[matrix]) - max(-(-count // 32), 1) * 32
        at, own = (matrix * 64, x[matrix * 64 : matrix * 64 + 64]) if is_weight else (start, x[end - count : end])
        if len(own) == 0:
            continue
        got = rows[at : at + len(own)].float() * scales[matrix], columns[:, at : at + len(own)].t().float()
        for value, contracts, gemm in (
            (got[0], 1, row_gemm),
            (got[1] * column_scales[matrix], 0, GEMMS_OF[operand][1]),
        ):
            format = FORMATS[MIXED[gemm]]
            expected = round_operand(own, format, operand, contracts, key, 1, 2).dequantize()
            assert torch.equal(value, expected), (matrix, contracts)


# ------------------------------------------------------------------------------------- layers


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def where(request: pytest.FixtureRequest) -> str:
    return request.param


class Experts:
    """A layer of several matrices as backends see one."""

    def __init__(self, formats: tuple[str, ...], backend: Backend, transposed: bool, dtype: Any, where: str) -> None:
        weight = randn(len(TOKENS), 64, 96, dtype=dtype, device=where)
        self.weight = nn.Parameter(weight.transpose(1, 2).contiguous() if transposed else weight)
        self.bias = nn.Parameter(randn(len(TOKENS), 64, seed=3, device=where))
        self.num_matrices, self.out_features, self.in_features = len(TOKENS), 64, 96
        self.training, self.transposed, self.snip_backend = True, transposed, backend
        self.snip_cache: Any = None
        self.snip_state = self.states = numbers(formats, rank=1, ranks=2).to(where)
        backend.attach(self)  # type: ignore[arg-type]

    @property
    def matrix(self) -> Tensor:
        return self.weight.transpose(1, 2) if self.transposed else self.weight

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        with torch.autocast(x.device.type, x.dtype, enabled=x.dtype == torch.bfloat16):
            return self.snip_backend.forward(self, x, x, bias, ends_on(x.device))  # type: ignore[arg-type]

    def gradients(self, biased: bool = False) -> dict[str, Tensor]:
        """Output and gradients of a pass."""
        where = self.weight.device
        x = randn(sum(TOKENS) + OF_NONE, 96, seed=1, device=where.type).requires_grad_()
        self.weight.grad = self.bias.grad = None
        y = self.forward(x, self.bias if biased else None)
        y.backward(randn(*y.shape, seed=2, device=where.type))
        assert x.grad is not None and self.weight.grad is not None
        found = {"y": y.detach(), "x": x.grad, "weight": self.weight.grad}
        return found | ({"bias": self.bias.grad} if biased else {})  # type: ignore[dict-item]


@pytest.mark.parametrize("formats", FEW, ids="/".join)
def test_a_layer_computes_what_the_emulated_backend_does(formats: tuple[str, ...], where: str) -> None:
    for transposed, dtype, biased in ((False, torch.float32, False), (True, torch.bfloat16, True)):
        layers = (Experts(formats, backend, transposed, dtype, where) for backend in (TENSOR_SCALED, EMULATED))
        got, expected = (layer.gradients(biased) for layer in layers)
        assert_close(got, expected, torch.full((), 8.0) if biased else None)
        assert not got["y"][sum(TOKENS) :].any() and not got["x"][sum(TOKENS) :].any()
        assert not got["weight"][TOKENS.index(0)].any()


@pytest.mark.parametrize("transposed", [False, True])
def test_kept_weights_give_the_same_bits(transposed: bool, where: str) -> None:
    layer: Any = Experts(("mxfp4", "fp8-tensor", "mxfp4"), TENSOR_SCALED, transposed, torch.bfloat16, where)
    expected = layer.gradients()
    TENSOR_SCALED.before_pass({"": layer})
    with Calls() as seen:
        assert_same(layer.gradients(), expected)
    assert seen.names.count("encode_operand") == 2
    with torch.no_grad():
        layer.weight.mul_(2)
    TENSOR_SCALED.before_pass({"": layer}, everything=False)
    doubled = layer.gradients()
    layer.snip_cache.weights = ()
    assert_same(layer.gradients(), doubled)


def test_a_layer_that_computes_in_fp32_runs_emulated() -> None:
    layers = (Experts(MXFP4, backend, False, torch.float32, "cpu") for backend in (TENSOR_SCALED, EMULATED))
    x = randn(sum(TOKENS), 96, dtype=torch.float32)
    got, expected = (layer.forward(x) for layer in layers)
    assert torch.equal(got, expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_pass_on_a_gpu_does_not_wait_for_it() -> None:
    layer = Experts(MXFP4, TENSOR_SCALED, False, torch.bfloat16, "cuda")
    layer.gradients()
    ends, x = ends_on("cuda"), randn(sum(TOKENS), 96, device="cuda").requires_grad_()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        layer.snip_backend.forward(layer, x, x, None, ends).sum().backward()  # type: ignore[arg-type]
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_gpu_passes_the_trial_or_says_why_not() -> None:
    device = torch.device("cuda", 0)
    fault = trial.grouped_fault(device)
    if torch.cuda.get_device_capability(device) == (9, 0):
        assert fault is None
    else:
        assert fault is not None and "need compute capability 9.0" in fault


# ------------------------------------------------------------------------------------- models


@pytest.mark.parametrize("model", [tiny_qwen3_moe, tiny_gpt_oss])
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_model_trains_as_emulated(model: Any, compiles: bool, everywhere: None) -> None:  # noqa: F811
    """Dense layers and experts, in two steps; on a CPU sums are those of the same products."""
    losses = {}
    for name in ("emulated", TENSOR_SCALED.name):
        built = model().to(torch.bfloat16)
        optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
        controller = SnipController(built, optimizer, fp4_config(**{**SNIP, "backend": name}))
        assert {layer.snip_backend.name for layer in snip_linears(built).values()} == {name}
        for layer in built.model.layers if compiles and name != "emulated" else ():
            layer.compile(backend="aot_eager", fullgraph=True)
        losses[name] = take_steps(built, optimizer, controller, [batch()] * 2)
        controller.close()
    assert losses[TENSOR_SCALED.name] == pytest.approx(losses["emulated"], rel=2e-3)


def test_experts_that_it_cannot_run_are_emulated_and_the_log_says_why(
    everywhere: None,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    built = tiny_qwen3_moe()
    experts = built.model.layers[0].mlp.experts
    experts.gate_up_proj = nn.Parameter(torch.zeros(8, 72, 64))
    experts.down_proj = nn.Parameter(torch.zeros(8, 64, 36))
    controller = SnipController(built, torch.optim.SGD(built.parameters()), fp4_config(backend="emulated"))
    layers = snip_linears(built)
    with caplog.at_level(logging.WARNING, "snip_hf"):
        use_backend(layers, BACKENDS[TENSOR_SCALED.name], None, fp4_config(), logging.getLogger("snip_hf"))
    emulated = [name for name, layer in layers.items() if layer.snip_backend is EMULATED]
    assert emulated == [f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    assert (
        "grouped FP8 products need features that are multiples of 32: 2 layers, such as "
        "model.layers.0.mlp.experts.gate_up_proj, are emulated, slower than BF16." in caplog.text
    )
    controller.close()
