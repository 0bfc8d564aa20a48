"""A run that chooses among five formats per GEMM: it trains, resumes, reports and exports."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_runs import SCHEDULE, differing, train, weights

from snip_hf import SnipCallback, SnipConfig
from snip_hf.cli import main
from snip_hf.integrations.export import TARGETS
from snip_hf.layers.state import snip_linears
from snip_hf.planning.plan import PrecisionPlan
from snip_hf.records.load import read_divergence
from snip_hf.reporting.run_report import run_report

NAMES = ("nvfp4-rht", "mxfp4", "mxfp6", "fp8-tensor", "bf16")


def test_five_formats_train_resume_to_the_bit_report_and_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SnipConfig(**SCHEDULE, formats=NAMES, target_fp4_fraction=0.5, granularity="gemm")
    whole = train(tmp_path / "whole", config, max_steps=5, save_strategy="steps", save_steps=3)
    plan = PrecisionPlan.load(tmp_path / "whole" / "snip" / "plan.json")
    used = {name for row in plan.assignment.values() for name in row.values()}
    assert used <= set(NAMES) and used & {"nvfp4-rht", "mxfp4"} and plan.fp4_fraction >= 0.5
    assert {name: layer.formats for name, layer in snip_linears(whole.model).items()} == plan.to_dict()["assignment"]
    _, table = read_divergence(tmp_path / "whole" / "snip" / "divergence-2.json")
    assert {row.format for row in table.rows} == set(NAMES) - {"bf16"}
    # Finer formats disturb less: over all layers.
    size = {name: sum(row.weight_divergence for row in table.rows if row.format == name) for name in NAMES}
    assert size["fp8-tensor"] < size["mxfp6"] < min(size["mxfp4"], size["nvfp4-rht"])
    # Saved between a probe and the application of its plan.
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    resumed = train(tmp_path / "resumed", callback=SnipCallback(config), resume=checkpoint, max_steps=5)
    assert differing(weights(resumed.model), weights(whole.model)) == []
    run_report(tmp_path / "whole")
    assert (tmp_path / "whole" / "snip" / "plan.png").stat().st_size > 10_000
    model = ["--model", str(checkpoint)]
    for target in TARGETS:
        command = ["export", str(tmp_path / "whole" / "snip" / "plan.json"), "--to", target, *model]
        command += ["-o", str(tmp_path / target)]
        assert main(command) == 1 and not (tmp_path / target).exists()
        assert "cannot express the plan: it does not support" in capsys.readouterr().err
