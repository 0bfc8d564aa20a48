"""Encoding into tensor-scaled E4M3: which formats do, what comes out against the reference rounding, how the exponents
follow, and who chooses the backend when."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from torch import Tensor

from snip_hf.kernels import backend as backend_module
from snip_hf.kernels import trials
from snip_hf.kernels.backend import BACKENDS, select_backend
from snip_hf.kernels.tensor_scaled import exponents, operators, trial
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.kernels.tensor_scaled.encoding import (
    SCALE,
    Encoding,
    encoding_of,
    exponents_of,
    has_one_scale,
    is_delayed,
    table_on,
)
from snip_hf.kernels.tensor_scaled.exponents import (
    BLOCKS,
    CLIPPED,
    EXPONENT,
    FALL,
    GRADIENT_HEADROOM,
    HEADROOM,
    LARGEST,
    LIMIT,
    SATURATED,
    SMALL,
    UNSET,
    Records,
    bits_of,
    follow,
)
from snip_hf.numerics.formats import E2M1, E4M3, FORMATS, Operand
from snip_hf.numerics.gemms import OPERANDS
from snip_hf.numerics.rounding import round_operand

CPU = torch.device("cpu")
KEY = -123456789123456789


def numbers(formats: tuple[str, ...], key: int = KEY, rank: int = 0, ranks: int = 1) -> Tensor:
    """A layer's state."""
    return torch.tensor([*[FORMATS[name].code for name in formats], key, rank, ranks])


def rising(rows: int, columns: int) -> Tensor:
    """BF16 numbers whose blocks' magnitudes lie within about 10 binades."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(torch.linspace(-3, 3, columns))
    return (x * torch.exp2(torch.linspace(-2, 2, rows))[:, None]).bfloat16()


def encoded(
    x: Tensor,
    state: Tensor,
    records: Records,
    operand: int,
    gemms: tuple[int, int],
    by_kernel: bool | None = None,
    matrices: int = 0,
    blocks: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The layouts of an operand in a pass that is trained on."""
    layer = state, records.record, records.table
    return operators.encode(x, *layer, operand, gemms, True, None, matrices, blocks, by_kernel)


def value(layout: Tensor, parameters: Tensor, shape: tuple[int, int]) -> Tensor:
    """Decodes a layout; checks that it is padded with zeros."""
    scaled = layout.float() * parameters[SCALE]
    inside = scaled[: shape[0], : shape[1]]
    assert not torch.nn.functional.pad(scaled, (0, 0, 0, 0)).isnan().any()
    assert scaled.count_nonzero() == inside.count_nonzero()
    return inside


# ------------------------------------------------------------------------------------- formats


def test_mxfp4_and_integers_with_power_of_two_scales_encode_and_fp8_per_tensor_has_one_scale() -> None:
    assert encoding_of(FORMATS["mxfp4"]) == Encoding(E2M1, -8, 6)
    assert encoding_of(FORMATS["ufp4"]) == Encoding(FORMATS["ufp4"].grid, -9, 6)
    assert [name for name, fmt in FORMATS.items() if has_one_scale(fmt)] == ["fp8-tensor"]
    assert [name for name, fmt in FORMATS.items() if is_delayed(fmt)] == ["fp8-delayed"]
    run = [name for name, fmt in FORMATS.items() if TENSOR_SCALED.runs(fmt)]
    assert run == ["fp8-tensor", "mxfp4", "ufp4", "fp8-delayed"]


def test_a_format_is_known_by_its_fields() -> None:
    mxfp4 = FORMATS["mxfp4"]
    assert encoding_of(dataclasses.replace(mxfp4, name="mine")) is not None
    others: list[dict[str, Any]] = [
        {"scale_rule": "floor", "gradient": Operand((1, 32))},
        {"gradient": Operand((1, 32))},
        {"weight": Operand((32, 32))},
        {"activation": Operand((1, 16))},
        {"grid": E4M3, "bits": 8},
        {"rotation": 32, "rotated": ("grad_weight",)},
        {"activation": Operand((1, 32), quantized=False)},
    ]
    for changes in others:
        assert encoding_of(dataclasses.replace(mxfp4, name="mine", **changes)) is None, changes


@pytest.mark.parametrize("name", ["mxfp4", "ufp4"])
def test_every_value_of_the_grid_in_every_binade_of_the_range_is_an_e4m3_number(name: str) -> None:
    encode = encoding_of(FORMATS[name])
    assert encode is not None
    values = torch.arange(0, encode.grid.max + encode.grid.smallest, encode.grid.smallest)
    if name == "mxfp4":
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for exponent in range(encode.lowest, encode.highest + 1):
        scaled = values * 2.0**exponent
        assert torch.equal(scaled.to(torch.float8_e4m3fn).float(), scaled)
    for exponent in (encode.lowest - 1, encode.highest + 1):
        scaled = values * 2.0**exponent
        assert not torch.equal(scaled.to(torch.float8_e4m3fn).float(), scaled)


def test_the_exponent_of_a_tensor_is_the_smallest_that_fits() -> None:
    for amax, expected in ((384.0, 0), (385.0, 1), (768.0, 1), (192.0, -1), (193.0, 0), (6.0, -6), (6.03125, -5)):
        assert int(exponents_of(torch.tensor([bits_of(amax)]))) == expected


# ------------------------------------------------------------------------------------- operands


@pytest.mark.parametrize("name", ["mxfp4", "ufp4", "fp8-tensor"])
@pytest.mark.parametrize("operand", OPERANDS)
def test_an_encoded_operand_is_the_rounded_one_under_every_exponent_of_the_range(operand: str, name: str) -> None:
    x, state = rising(70, 90), numbers((name, name, name), rank=1, ranks=3)
    gemms = {"activation": (0, 2), "gradient": (1, 2), "weight": (0, 1)}[operand]
    own = int(exponents_of(torch.tensor([bits_of(float(x.abs().max()))])))
    for exponent in (UNSET, own, own + 3):
        found = Records.new(CPU)
        found.record[:, EXPONENT] = exponent
        rows, row_scale, columns, column_scale = encoded(x, state, found, OPERANDS.index(operand), gemms)
        assert rows.shape == (128, 128) and columns.shape == (128, 128)
        key = KEY % 2**64 if operand == "gradient" else None
        expected = [round_operand(x, FORMATS[name], operand, contracts, key, 1, 3) for contracts in (1, 0)]
        assert torch.equal(value(rows, row_scale, (70, 90)), expected[0])
        assert torch.equal(value(columns, column_scale, (90, 70)).t(), expected[1])
        assert not found.record[:, SATURATED].any()


def test_blocks_above_the_range_are_cut_off_and_those_below_are_rounded_to_its_lowest_spacing() -> None:
    found = Records.new(CPU)
    found.record[:, EXPONENT] = 0
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    x[0, :3] = torch.tensor([1024.0, 256.0, 100.0])
    x[1, :3] = torch.tensor([0.003, 0.001, 0.0009])  # the spacing of the lowest block is 2**-9, about 0.002
    x[2, :2] = torch.tensor([384.0, 64.0])
    rows, *_ = encoded(x, numbers(("mxfp4",) * 3), found, 0, (0, -1))
    assert rows[0, :3].tolist() == [448.0, 256.0, 128.0]
    assert rows[1, :3].tolist() == [2.0**-8 if 0.003 > 1.5 * 2**-9 else 2.0**-9, 2.0**-9, 0.0]
    assert rows[2, :2].tolist() == [384.0, 64.0]
    row = found.record[0]
    assert (row[BLOCKS], row[SATURATED], row[SMALL]) == (3, 1, 1) and row[LARGEST] == bits_of(1024.0)


@pytest.mark.parametrize("exponent", [UNSET, 0, 3, 6])
@pytest.mark.parametrize("operand", OPERANDS)
def test_a_delayed_format_is_torch_s_cast_under_the_exponent_in_force(operand: str, exponent: int) -> None:
    x, found = rising(70, 90), Records.new(CPU)
    found.record[:, EXPONENT] = exponent
    gemms = {"activation": (0, 2), "gradient": (1, 2), "weight": (0, 1)}[operand]
    layouts = encoded(x, numbers(("fp8-delayed",) * 3), found, OPERANDS.index(operand), gemms)
    scale = 2.0 ** (int(exponents_of(torch.tensor([bits_of(float(x.abs().max()))]))) if exponent == UNSET else exponent)
    cast = (x.float() / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(value(*layouts[:2], (70, 90)), cast)
    assert torch.equal(value(*layouts[2:], (90, 70)).t(), cast)
    # The exponent matters to subnormal numbers only.
    rounded = round_operand(x, FORMATS["fp8-delayed"], operand, 1)
    is_normal = x.float().abs() >= scale * 2.0**-6
    assert torch.equal(cast[is_normal], rounded[is_normal])


def test_a_delayed_scale_cuts_off_larger_numbers_loses_bits_of_tiny_ones_and_shows_infinities() -> None:
    found = Records.new(CPU)
    found.record[:, EXPONENT] = 0
    x = torch.zeros(3, 32, dtype=torch.bfloat16)
    x[0, :3] = torch.tensor([1024.0, 256.0, 100.0])
    x[1, :3] = torch.tensor([0.0009, 0.0005, 0.0002])  # E4M3's smallest number is 2**-9, about 0.002
    x[2, :3] = torch.tensor([-448.0, 17.0, 0.003])
    rows, scale, columns, _ = encoded(x, numbers(("fp8-delayed",) * 3), found, 0, (0, 2))
    assert scale[SCALE] == 1
    assert rows[0, :3].tolist() == [448.0, 256.0, 96.0]
    assert rows[1, :3].tolist() == [0.0, 0.0, 0.0]
    assert rows[2, :3].tolist() == [-448.0, 16.0, 2.0**-8]
    assert torch.equal(columns.float().t(), rows.float())
    row = found.record[0]
    assert (row[BLOCKS], row[SATURATED], row[SMALL]) == (3, 1, 1) and row[LARGEST] == bits_of(1024.0)
    x[0, 1] = torch.inf
    rows, *_ = encoded(x, numbers(("fp8-delayed",) * 3), found, 0, (0, -1))
    assert rows[:3, :3].float().isnan().nonzero().tolist() == [[0, 1]]


def test_a_gradient_below_the_range_keeps_its_mean() -> None:
    found = Records.new(CPU)
    found.record[:, EXPONENT] = 0
    x = torch.full((4096, 32), 2.0**-11, dtype=torch.bfloat16)  # a quarter of the lowest spacing
    rows, *_ = encoded(x, numbers(("mxfp4",) * 3), found, 1, (1, -1))
    assert set(rows[:4096, :32].float().unique().tolist()) == {0.0, 2.0**-9}
    assert rows.float().sum() / x.numel() == pytest.approx(2.0**-11, rel=0.02)


def test_a_pass_that_is_not_trained_on_leaves_no_note() -> None:
    found = Records.new(CPU)
    before = found.record.clone()
    operators.encode_operand(rising(40, 40), numbers(("mxfp4",) * 3), found.record, found.table, 0, (0, 2), False)
    assert torch.equal(found.record, before)


def test_nan_and_infinities_reach_their_blocks_and_no_exponent() -> None:
    x = torch.ones(64, 64, dtype=torch.bfloat16)
    x[1, 40], x[40, 2] = torch.nan, torch.inf
    found = Records.new(CPU)
    found.record[:, EXPONENT] = 0
    rows, _, columns, _ = encoded(x, numbers(("mxfp4",) * 3), found, 0, (0, 2))
    expected = [round_operand(x, FORMATS["mxfp4"], "activation", contracts).isnan() for contracts in (1, 0)]
    assert torch.equal(rows.float().isnan(), expected[0]) and torch.equal(columns.float().isnan().t(), expected[1])
    follow([found])
    assert found.record[0, EXPONENT] == 0


def test_a_tensor_without_elements_gives_zeros() -> None:
    found = Records.new(CPU)
    layouts = encoded(torch.zeros(0, 40, dtype=torch.bfloat16), numbers(("mxfp4",) * 3), found, 0, (0, 2))
    assert layouts[0].shape == (0, 64) and layouts[2].shape == (64, 0)
    product = operators.multiply("forward", layouts[:2], layouts[:2], (0, 0), torch.bfloat16)
    assert product.shape == (0, 0)


def test_the_operators_are_what_torch_demands_of_operators() -> None:
    """All but the record, whose writes torch does not track."""
    found, state = Records.new(CPU), numbers(("mxfp4", "fp8-tensor", "ufp4"))
    x = rising(40, 70)
    tests = ("test_faketensor", "test_aot_dispatch_dynamic")
    arguments = (x, state, found.record, found.table, 0, (0, 2), False)
    torch.library.opcheck(operators.encode_operand, arguments, test_utils=tests)
    rows, scale, *_ = operators.encode_operand(*arguments)
    product = torch.ops.snip_hf.tensor_scaled_product
    arguments = ([rows, scale, rows, scale], 40, 40, torch.float32, found.record, 0)
    torch.library.opcheck(product, arguments, test_utils=tests)
    own, weight_product = [state, found.record, found.table], torch.ops.snip_hf.tensor_scaled_weight_product
    for gemm, weight, keeps in ((0, rising(30, 70), True), (0, rising(30, 70), False), (1, rising(70, 30), False)):
        arguments = ([rows, scale], weight, own, gemm, keeps, False, 40, torch.float32)
        torch.library.opcheck(weight_product, arguments, test_utils=tests)


# ------------------------------------------------------------------------------------- exponents


def seen(largest: float, exponent: int = UNSET) -> Records:
    found = Records.new(CPU)
    found.record[0, LARGEST], found.record[0, EXPONENT] = bits_of(largest), exponent
    return found


def test_the_next_exponent_leaves_headroom_above_the_largest_magnitude_seen() -> None:
    found = seen(384.0)
    follow([found])
    assert found.record[:, EXPONENT].tolist() == [HEADROOM, UNSET, UNSET]
    assert found.record[0, LARGEST] == 0


def test_gradients_get_more_headroom() -> None:
    found = Records.new(CPU)
    found.record[:, LARGEST] = bits_of(384.0)
    follow([found])
    assert dict(zip(OPERANDS, found.record[:, EXPONENT].tolist(), strict=True)) == {
        "activation": HEADROOM,
        "gradient": GRADIENT_HEADROOM,
        "weight": HEADROOM,
    }


def test_it_rises_at_once_falls_slowly_and_stays_without_news() -> None:
    for largest, before, after in ((384.0 * 2**10, 0, 10 + HEADROOM), (384.0 * 2**-20, 0, -FALL), (0.0, 7, 7)):
        found = seen(largest, before)
        follow([found])
        assert found.record[0, EXPONENT] == after
    for largest in (torch.inf, torch.nan):
        found = seen(largest, 5)
        follow([found])
        assert found.record[0, EXPONENT] == 5 and found.record[0, LARGEST] == 0
    found = seen(3e38)
    follow([found])
    assert found.record[0, EXPONENT] == LIMIT


def test_after_one_step_of_tiny_numbers_those_of_usual_size_still_fit() -> None:
    found = seen(100.0)
    follow([found])
    found.record[0, LARGEST] = bits_of(1e-6)
    follow([found])
    assert 384.0 * 2.0 ** int(found.record[0, EXPONENT]) >= 100.0


def test_a_step_in_which_something_saturated_is_counted() -> None:
    found = seen(384.0, 0)
    follow([found])
    assert found.record[0, CLIPPED] == 0
    found.record[0, EXPONENT], found.record[0, LARGEST] = 0, bits_of(400.0)
    follow([found])
    assert found.record[0, CLIPPED] == 1


def test_packed_records_follow_together() -> None:
    found = [seen(384.0 * 2**index) for index in range(3)]
    exponents.pack(found)
    assert len({one.record.untyped_storage().data_ptr() for one in found}) == 1
    follow(found)
    assert [int(one.record[0, EXPONENT]) for one in found] == [HEADROOM + index for index in range(3)]
    copied = found[1].copy()
    found[1].record[0, EXPONENT] = 9
    assert copied.record[0, EXPONENT] == HEADROOM + 1 and copied.everything is None


def test_exponents_are_saved_and_loaded_as_json() -> None:
    found = {"a": seen(384.0), "b": Records.new(CPU)}
    follow(list(found.values()))
    saved = json.loads(json.dumps(exponents.saved(found)))
    assert saved == {"a": [HEADROOM, None, None], "b": [None, None, None]}
    others = {"a": seen(7.0, 3), "b": seen(7.0, 3), "c": seen(7.0, 3)}
    exponents.load(others, saved)
    assert exponents.saved(others) == saved | {"c": [None, None, None]}
    assert not others["a"].record[:, LARGEST].any()
    for wrong in ([1, 2], "x", [1, 2, 3.5], [True, 1, 1], [0, 0, LIMIT + 1]):
        with pytest.raises(ValueError, match="The state's exponents of layer 'a' are"):
            exponents.load(others, {"a": wrong})


@pytest.mark.parametrize("packs", [False, True], ids=["apart", "packed"])
def test_losses_name_layers_and_operands_the_worst_first_and_begin_anew(packs: bool) -> None:
    found = {"a": Records.new(CPU), "b": Records.new(CPU)}
    if packs:
        exponents.pack(list(found.values()))
    found["a"].record[1, [BLOCKS, SMALL]] = torch.tensor([200, 10])
    found["b"].record[0, [BLOCKS, SATURATED, CLIPPED]] = torch.tensor([1000, 3, 2])
    assert len(exponents.losses(found, resets=False)) == 2
    texts = [str(one) for one in exponents.losses(found)]
    assert texts == [
        "b activation: 0.30% saturated, 0.00% lost bits, something saturated in 2 steps",
        "a gradient: 0.00% saturated, 5.00% lost bits, something saturated in 0 steps",
    ]
    assert exponents.losses(found) == []


# ------------------------------------------------------------------------------------- choice


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretends to be a machine with a GPU, where trials find nothing, or what is said."""

    def pretend(capability: tuple[int, int], fault: str | None = None, cuda: str | None = "13.0") -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(backend_module, "find_spec", lambda name: object())
        monkeypatch.setattr(trial, "fault", lambda name, device: fault)

    return pretend


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)], ids=str)
def test_it_is_taken_where_it_knows_all_formats(machine: Any, capability: tuple[int, int]) -> None:
    machine(capability)
    for formats in (("mxfp4", "fp8-delayed"), ("ufp4", "fp8-tensor", "bf16"), ("fp8-tensor",)):
        assert select_backend("tensor-scaled", "cuda", formats) is TENSOR_SCALED
        assert select_backend("auto", "cuda", formats) is TENSOR_SCALED
    for formats in (("mxfp4", "fp8"), ("nvfp4", "fp8-delayed")):
        with pytest.raises(ValueError, match="backend='tensor-scaled' cannot run: its kernels do not know the format"):
            select_backend("tensor-scaled", "cuda", formats)


def test_a_trial_that_fails_leaves_the_run_emulated_and_says_why(machine: Any) -> None:
    machine((9, 0), fault="the trial of 'mxfp4' failed: no")
    assert select_backend("auto", "cuda", ("mxfp4",)) is BACKENDS["emulated"]
    with pytest.raises(ValueError, match="backend='tensor-scaled' cannot run: the trial of 'mxfp4' failed: no"):
        select_backend("tensor-scaled", "cuda", ("mxfp4",))


def test_missing_requirements_are_named(machine: Any) -> None:
    assert (TENSOR_SCALED.lacks(CPU) or "").startswith("the model is on 'cpu', expected a CUDA device of compute")
    machine((8, 0))
    assert (TENSOR_SCALED.lacks(torch.device("cuda")) or "").startswith("the GPU has compute capability 8.0, expected")
    machine((9, 0), cuda=None)
    assert TENSOR_SCALED.lacks(torch.device("cuda")) == "torch is not built for CUDA"


@pytest.mark.parametrize("name", ["mxfp4", "ufp4", "fp8-tensor", "fp8-delayed"])
def test_a_trial_passes_where_all_is_well(name: str) -> None:
    assert trial.fault.__wrapped__(name, CPU) is None


def test_a_trial_notices_wrong_products_and_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    fault, encode = trial.fault.__wrapped__, operators.encode
    with monkeypatch.context() as patch:
        patch.setattr(trials, "TOLERANCE", 0.0)
        assert "off the reference" in fault("fp8-tensor", CPU)

    def other(*arguments: Any) -> Any:
        *given, by_kernel = arguments
        layouts = encode(*given, False)
        if by_kernel is None:
            layouts[0].view(torch.uint8)[:1] ^= 1
        return layouts

    monkeypatch.setattr(operators, "encode", other)
    assert fault("mxfp4", CPU) == (
        "the trial of 'mxfp4' failed: the kernel and the reference round differently (activation, gradient, weight)"
    )


def test_layers_of_several_matrices_have_a_trial_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = trial.grouped_fault.__wrapped__
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert fault(CPU) == "torch's grouped FP8 products need compute capability 9.0, the GPU has 8.9"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert fault(CPU) is None
    monkeypatch.setattr(trials, "TOLERANCE", 0.0)
    assert "forward is 0 off the reference" in fault(CPU)


def test_the_table_holds_all_formats() -> None:
    assert table_on(CPU).shape[0] == len(FORMATS)
