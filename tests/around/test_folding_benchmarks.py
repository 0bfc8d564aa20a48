"""What the benchmarks of folded operands count and compare, on a CPU."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mxfp4_range
import pytest
import torch
from shared import texts
from speed_parts import folding, gates, setting, switches
from test_benchmarks import speed_options

from snip_hf.config import SnipConfig
from snip_hf.kernels.tensor_scaled import gated_operators, operators
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.numerics.formats import FORMATS
from snip_hf.numerics.gemms import GEMMS
from snip_hf.numerics.scales import block_scales


def test_every_recipe_is_a_configuration() -> None:
    for fields in setting.OURS.values():
        SnipConfig(**fields)


def test_layouts_and_products_are_timed_and_compared_with_exact_sums() -> None:
    options = speed_options()
    identity = {"operand": "gradient", "format": "mxfp4", "rows": 64, "columns": 96}
    (row,) = folding.layouts(1e9, identity, options)
    assert {"both_us", "rows_ratio", "columns_bound_us"} <= set(row)
    for data in folding.DATA:
        rows = list(folding.products((64, 96), "mxfp4", data, options))
        assert [(row["gemm"], row["fast"]) for row in rows] == [
            (gemm, fast) for gemm in GEMMS for fast in (False, True)
        ]
        assert all(row["largest_error"] < 1e-6 and row["error_norm"] < 1e-6 for row in rows)


def test_gates_are_timed_by_tile_with_exponents_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    def note(*given: Any) -> None:
        operands = [given[2]] if len(given) == 4 else given[1]
        launched.append([one.is_plain for one in operands])

    launched: list[list[bool]] = []
    monkeypatch.setattr(gated_operators, "launch_forward", note)
    monkeypatch.setattr(gated_operators, "launch_backward", note)
    for gate, bytes_per_element in (("forward", 2 * 2 + 1), ("backward", 3 * 2 + 2 * 2 + 1)):
        identity = {"gate": gate, "rows": 64, "columns": 128}
        (row,) = gates.one_tile(1e6, identity, gates.FORWARD_TILES[0], speed_options())
        assert row["both_bound_us"] == pytest.approx(1e-3 * 64 * 128 * bytes_per_element, rel=0.05)  # and scales
    assert {tuple(plain) for plain in launched} == {(False,), (False, False, False)}


def test_depths_are_those_of_the_reference_s_scales_below_the_largest() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 100, generator=generator) * torch.exp2(torch.randint(-30, 1, (40, 1), generator=generator))
    x[3] = 0.0
    x = x.bfloat16().float()
    blocks, energy = mxfp4_range.depths_of(x)
    format = FORMATS["mxfp4"]
    amax = x[:, :96].reshape(40, 3, 32).abs().amax(-1)
    scales = block_scales(amax, format, format.activation, 6.0, None).scales[amax > 0]
    depths = torch.log2(scales.max() / scales).long()
    assert blocks.tolist() == torch.bincount(depths, minlength=41).tolist() and blocks.sum() == 39 * 3
    assert energy.sum() == pytest.approx(float(x[:, :96].double().square().sum()), rel=1e-5)


def test_a_run_looks_at_all_operands_and_follows_their_largest_magnitudes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mxfp4_range.SHAPES, "small", (64, 96, 1, 2, 1))
    options = argparse.Namespace(
        shape="small", steps=3, looks=None, rows=1, rate=1e-3, seed=0, device="cpu", output=Path("none")
    )
    ids = torch.randint(0, texts.VOCABULARY, (4, texts.LENGTH), generator=torch.Generator().manual_seed(0))
    rows = list(mxfp4_range.run(options, texts.Text(ids, ids), masked=0.5))
    looked, rises = rows[:-3], rows[-3:]
    assert [row["step"] for row in looked] == [1] * 3 + [3] * 3 and {row["operand"] for row in rows} == {"X", "G", "W"}
    for row in looked:
        assert sum(row["depths"]) == pytest.approx(1.0, abs=1e-6)
        assert row["outside_without_headroom"] <= row["outside"] < 0.1
    assert all(row["largest_rise"] >= -row["largest_fall"] for row in rises)
    assert len(mxfp4_range.table(rows).splitlines()) == 2 + 6 + 3 + 3


def test_a_recipe_has_the_changes_that_it_names_and_others_have_all() -> None:
    def in_force() -> tuple[bool, dict[str, bool], bool, bool]:
        sums = dict(operators.FAST_SUMS_FOLDED)
        return operators.SPARES_LAUNCHES, sums, TENSOR_SCALED.quantizes_late, TENSOR_SCALED.fuses_gates

    before = in_force()
    switches.turn_on(setting.WITH_CHANGES["snip-hf MXFP4, ties, before"])
    assert in_force() == (False, dict.fromkeys(GEMMS, False), False, False)
    switches.turn_on(setting.WITH_CHANGES["snip-hf MXFP4, ties, + sums"])
    assert in_force() == (True, before[1] | {"grad_weight": False}, False, False)
    switches.turn_on(setting.WITH_CHANGES["snip-hf MXFP4 75%, ties, + weights"])
    assert in_force() == (*before[:3], False)
    assert before[1] == dict.fromkeys(GEMMS, True)
    with pytest.raises(ValueError, match="expected some of spared launches, fast sums, late columns, fast w"):
        switches.turn_on(["other"])
    switches.turn_on(switches.CHANGES)
    assert in_force() == before
