"""The host's notes of encoded layers: whether their scales need a separate launch."""

from __future__ import annotations

import copy
import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernels.test_hopper_layers import gradients, layer_of, linear, randn

from snip_hf import SnipLinear
from snip_hf.kernels.tensor_scaled import exponents, operators
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.kernels.tensor_scaled.exponents import COUNT_EVERY, EXPONENT, UNSET, Records, follow, view_of
from snip_hf.numerics.gemms import GEMMS

T, I = 40, 200  # noqa: E741
MXFP4, WITH_FP8 = ("mxfp4",) * 3, ("mxfp4", "fp8-tensor", "mxfp4")
ACTIVATION, GRADIENT, WEIGHT = range(3)
ALL = {ACTIVATION: (0, 2), GRADIENT: (1, 2), WEIGHT: (0, 1)}


@pytest.fixture
def layer() -> SnipLinear:
    """After one step in MXFP4."""
    found = layer_of(linear(), MXFP4, TENSOR_SCALED.name)
    train(found)
    return found


def train(layer: SnipLinear) -> None:
    gradients(layer, randn(T, I))
    TENSOR_SCALED.after_step({"": layer})


def launches(layer: SnipLinear, counts: bool = False) -> list[bool]:
    """Operand -> whether its scales need a launch."""
    record = layer.snip_cache.records.record
    return [operators.facts_of(record, operand, gemms, counts).needs_scales for operand, gemms in ALL.items()]


def test_scales_need_a_launch_until_there_are_exponents(layer: SnipLinear) -> None:
    assert launches(layer) == [False] * 3
    assert launches(layer_of(linear(), MXFP4, TENSOR_SCALED.name)) == [True] * 3


def test_they_do_for_gemms_whose_format_does_not_encode(layer: SnipLinear) -> None:
    layer.set_formats(dict(zip(GEMMS, WITH_FP8, strict=True)))
    assert launches(layer) == [False, True, True]
    record = layer.snip_cache.records.record
    assert not operators.facts_of(record, GRADIENT, (-1, 2), False).needs_scales
    layer.set_formats(dict(zip(GEMMS, MXFP4, strict=True)))
    assert launches(layer) == [False] * 3


def test_in_one_step_of_many_they_do_so_that_blocks_are_counted(layer: SnipLinear) -> None:
    found = []
    for _ in range(2 * COUNT_EVERY):
        found.append(launches(layer, counts=True))
        assert launches(layer, counts=False) == [False] * 3
        train(layer)
    assert found == ([[True] * 3] + [[False] * 3] * (COUNT_EVERY - 1)) * 2


def test_a_layer_that_got_no_input_has_none_until_it_gets_one(layer: SnipLinear) -> None:
    idle = layer_of(linear(), MXFP4, TENSOR_SCALED.name)
    layers = {"idle": idle, "busy": layer}
    for _ in range(5):
        TENSOR_SCALED.after_step(layers)
    assert launches(idle) == [True] * 3
    found = []
    for _ in range(8):
        gradients(idle, randn(T, I))
        TENSOR_SCALED.after_step(layers)
        found.append(launches(idle))
    assert found == [[True] * 3] * 2 + [[False] * 3] * 6  # the host looks after steps 1, 2, 4, 8, ...


def test_loaded_exponents_are_known_and_those_that_are_missing_are_not(layer: SnipLinear) -> None:
    state = TENSOR_SCALED.state_dict({"": layer})
    TENSOR_SCALED.load_state_dict({"": layer}, {})
    assert launches(layer) == [True] * 3
    TENSOR_SCALED.load_state_dict({"": layer}, state)
    assert launches(layer) == [False] * 3


def test_notes_go_with_records_that_are_packed_and_copied_and_end_with_them(layer: SnipLinear) -> None:
    twin = copy.deepcopy(layer)
    TENSOR_SCALED.share_inputs({"one": layer, "other": twin}, [])
    assert launches(layer) == launches(twin) == [False] * 3
    twin.set_formats(dict(zip(GEMMS, WITH_FP8, strict=True)))
    assert launches(layer) == [False] * 3 and launches(twin) == [False, True, True]
    own = Records.new(torch.device("cpu"))
    record = own.record
    assert view_of(record) is own.view
    del own
    assert view_of(record) is None


def test_packed_records_move_when_the_facts_change_and_come_back_with_them(layer: SnipLinear) -> None:
    layers = {"one": layer, "other": copy.deepcopy(layer)}
    TENSOR_SCALED.share_inputs(layers, [])

    def addresses(formats: tuple[str, str, str]) -> list[int]:
        layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
        values = [one.snip_cache.records.record.clone() for one in layers.values()]
        TENSOR_SCALED.after_step(layers)
        records = [one.snip_cache.records for one in layers.values()]
        assert all(
            torch.equal(one.record[:, EXPONENT], old[:, EXPONENT]) for one, old in zip(records, values, strict=True)
        )
        assert all(view_of(one.record) is one.view for one in records)
        return [one.record.data_ptr() for one in records]

    narrow, mixed = addresses(MXFP4), addresses(WITH_FP8)
    assert not set(narrow) & set(mixed)
    assert (addresses(WITH_FP8), addresses(MXFP4), addresses(WITH_FP8)) == (mixed, narrow, mixed)
    TENSOR_SCALED.load_state_dict(layers, {})
    assert not {one.snip_cache.records.record.data_ptr() for one in layers.values()} & {*narrow, *mixed}


@pytest.mark.parametrize(
    ("formats", "stays"),
    [
        (("fp8-delayed", "mxfp4", "mxfp4"), True),
        (("mxfp4", "fp8-delayed", "fp8-delayed"), True),
        (("fp8-tensor", "mxfp4", "mxfp4"), False),
        (("mxfp4", "mxfp4", "fp8-tensor"), False),
    ],
)
def test_records_stay_between_block_formats_and_delayed_ones(
    formats: tuple[str, str, str], stays: bool, layer: SnipLinear
) -> None:
    """So that torch.compile captures nothing."""
    TENSOR_SCALED.share_inputs({"": layer}, [])
    records, old = layer.snip_cache.records, layer.snip_cache.records.record
    layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
    assert (records.record is old) == stays
    TENSOR_SCALED.after_step({"": layer})
    assert (records.record.data_ptr() == old.data_ptr()) == stays
    assert view_of(records.record) is records.view and records.view.packed == records.view.facts


def test_captured_launches_are_the_same_under_equal_facts(layer: SnipLinear, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of torch.compile is replayed under all plans with the facts of its capture."""
    monkeypatch.setattr(operators, "is_captured", lambda x: True)
    monkeypatch.setattr(operators, "serves_all_plans", lambda record, view: False)
    record, seen = layer.snip_cache.records.record, {}
    uses = [(operand, (row, column)) for operand, (row, column) in ALL.items() for row in (row, -1)]
    uses += [(operand, (row, -1)) for operand, (row, _) in ALL.items()] + [(WEIGHT, (1, 0))]
    names = ("mxfp4", "ufp4", "fp8-delayed", "fp8-tensor")
    for formats in itertools.product(names, repeat=3):
        layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
        found = [operators.facts_of(record, operand, gemms, True)[1:] for operand, gemms in uses], fast_sums(layer)
        assert seen.setdefault(layer.snip_cache.records.view.facts, found) == found
    assert len(seen) == 2**3


def test_a_packed_record_never_changes_its_facts_where_it_is(layer: SnipLinear) -> None:
    """A plan in the middle of a step, one that the user applies, and passes of the ground truth."""
    TENSOR_SCALED.share_inputs({"": layer}, [])
    records, old = layer.snip_cache.records, layer.snip_cache.records.record
    layer.set_formats(dict(zip(GEMMS, MXFP4, strict=True)))
    assert records.record is old
    layer.set_formats(dict(zip(GEMMS, WITH_FP8, strict=True)))
    assert records.record.data_ptr() != old.data_ptr() and torch.equal(records.record, old)
    assert view_of(records.record) is records.view and records.view.packed is records.everything is None
    layer.set_formats(dict(zip(GEMMS, MXFP4, strict=True)))
    TENSOR_SCALED.after_step({"": layer})
    assert records.record.data_ptr() == old.data_ptr() and records.view.packed == records.view.facts


def test_memory_of_packed_records_outlives_their_run(layer: SnipLinear) -> None:
    """A graph of the ended run would be replayed for records of other facts at this address."""
    TENSOR_SCALED.share_inputs({"": layer}, [])
    memory = weakref.ref(layer.snip_cache.records.everything)
    TENSOR_SCALED.attach(layer)  # as the next run does
    gc.collect()
    assert memory() is not None


def test_records_that_move_to_another_device_are_packed_there(layer: SnipLinear) -> None:
    TENSOR_SCALED.share_inputs({"": layer}, [])
    records, device = layer.snip_cache.records, torch.device("meta")
    assert records.on(device).view.packed is None
    exponents.pack([records])
    assert records.everything.device == records.record.device == device


def test_graphs_that_torch_compile_does_not_capture_serve_all_plans(layer: SnipLinear) -> None:
    """Fails if torch renames the manager of its captures, which is private."""
    records = layer.snip_cache.records
    assert operators.serves_all_plans(records.record, records.view)
    TENSOR_SCALED.share_inputs({"": layer}, [])
    assert operators.serves_all_plans(records.record, records.view)


def test_unpacked_records_stay_where_they_are(layer: SnipLinear) -> None:
    record = layer.snip_cache.records.record
    layer.set_formats(dict(zip(GEMMS, WITH_FP8, strict=True)))
    TENSOR_SCALED.after_step({"": layer})
    assert layer.snip_cache.records.record is record


@pytest.fixture
def scale_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Operands whose kernels were launched, 10 more where the scales had a launch of their own."""
    found: list[int] = []
    reference = operators.reference.encode

    def encoded(*arguments: Any) -> Any:
        (_, record, _), operand, gemms, counts = arguments[1:]
        found.append(operand + 10 * operators.facts_of(record, operand, gemms, bool(counts)).needs_scales)
        return reference(*arguments)

    monkeypatch.setattr(operators.reference, "encode", encoded)
    yield found


@pytest.mark.filterwarnings("default")
def test_in_compiled_layers_operators_find_the_note_and_nothing_is_compiled_for_it(scale_launches: list[int]) -> None:
    layer, graphs = layer_of(linear(), MXFP4, TENSOR_SCALED.name), 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    TENSOR_SCALED.share_inputs({"": layer}, [])
    fast = torch.compile(layer, backend=counting, fullgraph=True)
    found = []
    for formats in (MXFP4, MXFP4, MXFP4, WITH_FP8, MXFP4):
        layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
        scale_launches.clear()
        fast(randn(T, I).requires_grad_()).sum().backward()
        found.append(sorted(scale_launches))
        TENSOR_SCALED.after_step({"": layer})
    torch._dynamo.reset()
    # An input is encoded in both passes.
    first, settled = [10, 10, 11, 12], [0, 0, 1, 2]
    second = [0, 10, 11, 12]  # blocks are counted, of an input where it is encoded first
    assert found == [first, second, settled, [0, 0, 11, 12], settled]
    assert graphs == 1


def test_the_record_alone_decides_what_the_kernel_writes(layer: SnipLinear) -> None:
    """So a note can be late, but not wrong: what `follow` noted as known stays in force."""
    own = layer.snip_cache.records
    before = own.record[:, EXPONENT].clone()
    own.record[:, exponents.LARGEST] = exponents.bits_of(float("inf"))
    follow([own])
    assert torch.equal(own.record[:, EXPONENT], before) and (before != UNSET).all()


def fast_sums(layer: SnipLinear) -> list[bool]:
    """GEMM -> whether its sums are fast."""
    return [operators.sums_fast(layer.snip_cache.records.record, gemm) for gemm in range(len(GEMMS))]


def test_a_graph_of_unpacked_records_serves_all_plans(layer: SnipLinear, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launches(layer) == [False] * 3 and all(fast_sums(layer))
    monkeypatch.setattr(operators, "is_captured", lambda x: True)
    assert launches(layer) == [True] * 3 and not any(fast_sums(layer))
    TENSOR_SCALED.share_inputs({"": layer}, [])
    layer.set_formats(dict(zip(GEMMS, WITH_FP8, strict=True)))
    assert launches(layer) == [True] * 3 and not any(fast_sums(layer))


def test_sums_are_fast_where_formats_encode(layer: SnipLinear) -> None:
    assert fast_sums(layer) == [True] * 3
    layer.set_formats(dict(zip(GEMMS, WITH_FP8, strict=True)))
    assert fast_sums(layer) == [True, False, True]
    layer.set_formats(dict.fromkeys(GEMMS, "fp8-tensor"))
    assert fast_sums(layer) == [False] * 3
    assert not operators.sums_fast(None, 0)


def test_formats_alone_decide_over_sums_so_that_a_resumed_run_has_the_same(layer: SnipLinear) -> None:
    assert fast_sums(layer_of(linear(), MXFP4, TENSOR_SCALED.name)) == fast_sums(layer)
    TENSOR_SCALED.load_state_dict({"": layer}, {})
    assert fast_sums(layer) == fast_sums(copy.deepcopy(layer)) == [True] * 3


@pytest.mark.gpu
@pytest.mark.skipif(TENSOR_SCALED.lacks(torch.device("cuda")) is not None, reason="needs a GPU with FP8")
def test_a_captured_graph_launches_what_any_plan_needs_and_sums_exactly() -> None:
    layer = layer_of(linear(device="cuda"), MXFP4, TENSOR_SCALED.name)
    gradients(layer, randn(T, I, device="cuda"))
    for _ in range(2):
        TENSOR_SCALED.after_step({"": layer})
    assert launches(layer, counts=True) == [False] * 3 and fast_sums(layer) == [True] * 3
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        found = launches(layer), fast_sums(layer)
        torch.zeros(1, device="cuda")
    assert found == ([True] * 3, [False] * 3)


@pytest.mark.parametrize(
    ("name", "expected"), [("mxfp4", [True] * 3), ("fp8-delayed", [True] * 3), ("fp8-tensor", [False] * 3)]
)
def test_block_and_delayed_formats_sum_fast(name: str, expected: list[bool]) -> None:
    layer = layer_of(linear(), (name,) * 3, TENSOR_SCALED.name)
    record = layer.snip_cache.records.record
    assert [operators.sums_fast(record, gemm) for gemm in range(3)] == expected
    assert not operators.sums_fast(None, 0)
