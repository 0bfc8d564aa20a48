"""What `benchmarks/gather_speed.py` gathers."""

from __future__ import annotations

import json
from pathlib import Path

import gather_speed
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def test_weights_folded_before_a_gather_are_the_bytes_of_those_folded_after_it() -> None:
    layers = [gather_speed.Layer("small", torch.device("cpu"), rank, 2) for rank in range(2)]
    for way in gather_speed.PASSES:
        found = {}
        for carrier in gather_speed.CARRIERS:
            first, second = (layer.part(carrier, way) for layer in layers)
            first.before()
            second.before()
            first.gathered.copy_(torch.cat([first.own, second.own]))
            first.after()
            found[carrier] = torch.cat([layout.flatten() for layout in first.layouts])
        assert found["byte"].count_nonzero() > 0.9 * found["byte"].numel()
        assert torch.equal(found["byte"], found["BF16"]) and torch.equal(found["BF16"], found["FP32"])


def test_what_a_byte_spares_is_counted_over_both_passes_of_all_layers() -> None:
    figures = {"BF16": (2.0, 4.0, 3.0, 10.0), "byte": (1.0, 3.5, 1.0, 9.0)}
    names = ("before_ms", "after_ms", "gather_ms", "beside_ms")
    rows = [
        {"shape": "small", "layers": 2, "carrier": carrier, "pass": way, **dict(zip(names, values, strict=True))}
        for carrier, values in figures.items()
        for way in gather_speed.PASSES
    ]
    assert gather_speed.spared(rows) == (
        "small, 2 layers, both passes, a byte in the place of BF16: 6.00 ms less of casting, copying and folding, "
        "gathers 8.00 ms shorter, products beside them 4.00 ms."
    )


@pytest.mark.parametrize(
    ("shape", "called", "step_ms"),
    [("8B, 8 layers", "8B shape, 8 layers, a step of 240", 240), ("TinyLlama-1.1B", "1.1B, 22 layers, 185 ms", 185)],
)
def test_what_a_gather_in_bytes_spares_is_what_the_lines_say(shape: str, called: str, step_ms: float) -> None:
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/gather_speed.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["shape"] == shape]

    def spared(figure: str) -> float:
        bf16, byte = (sum(row[figure] for row in rows if row["carrier"] == name) for name in ("BF16", "byte"))
        return rows[0]["layers"] * (bf16 - byte)

    around, products, gathers = spared("before_ms") + spared("after_ms"), spared("beside_ms"), spared("gather_ms")
    hidden, bare = (100 * (around + more) / step_ms for more in (products, gathers))
    figures = f"{around:.1f} ms | {products:.1f} ms | **{hidden:.1f}%** | {gathers:.1f} ms | {bare:.1f}% |"
    page = " ".join((ROOT / "docs/distributed.md").read_text(encoding="utf-8").split())
    assert called in page and figures in page and hidden < 3.0 and all(row["equal"] for row in rows)
    assert f"{hidden:.1f}" in (ROOT / "docs/fsdp2.md").read_text(encoding="utf-8")
