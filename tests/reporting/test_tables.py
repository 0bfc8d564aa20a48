"""Do tables tell formats apart, show hand-computed numbers, and a sentence where there is no comparison?"""

from __future__ import annotations

import dataclasses
import io
from typing import Any

from registries import restored
from rich.console import Console
from two_stages import FLOPS, STAGES, measured, plan

from snip_hf.costs.timing import Machine
from snip_hf.numerics.formats import FORMATS, NumberFormat, integers, register_format
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.plan import PlanProvenance, PrecisionPlan
from snip_hf.reporting.tables import plan_table, print_stages


def printed(made: PrecisionPlan, **arguments: Any) -> str:
    text = io.StringIO()
    print_stages(made, Console(file=text, width=110), **arguments)
    return text.getvalue()


def joined(text: str) -> str:
    return " ".join(text.split())


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def printed_plan(*formats: str) -> str:
    """The table of a plan of one block, whose layers' three GEMMs have these formats, three by three."""
    layers = [f"h.0.{letter}" for letter in "abcdef"[: len(formats) // 3]]
    chosen = iter(formats)
    assignment = {layer: {gemm: next(chosen) for gemm in GEMMS} for layer in layers}
    flops = {layer: dict.fromkeys(GEMMS, 1) for layer in layers}
    made = PrecisionPlan(assignment, flops, (tuple(layers),), PlanProvenance(step=0, policy="snip"))
    text = io.StringIO()
    Console(file=text, width=110).print(plan_table(made))
    return text.getvalue()


def test_the_gemms_of_a_layer_are_shown_by_the_bits_of_their_formats() -> None:
    text = printed_plan("fp4", "fp8", "bf16", "fp8", "fp8", "fp8")
    assert ["0", "4/8/16", "8"] in rows(text)
    assert "grad_weight,4:fp4,8:fp8,16:bf16)" in "".join(text.split())  # the title is wrapped to the table's width


def plan_in_80_characters(layers: list[str]) -> str:
    assignment = {layer: dict(zip(GEMMS, ("fp4", "fp8", "fp8"), strict=True)) for layer in layers}
    flops = {layer: dict.fromkeys(GEMMS, 1) for layer in layers}
    made = PrecisionPlan(assignment, flops, (tuple(layers),), PlanProvenance(step=0, policy="snip"))
    text = io.StringIO()
    Console(file=text, width=80).print(plan_table(made))
    return text.getvalue()


def test_columns_and_rows_of_one_last_name_are_told_apart_and_not_cut() -> None:
    text = plan_in_80_characters([f"h.{block}.{kind}" for block in range(2) for kind in ("attn.c_proj", "mlp.c_proj")])
    assert ["block", "attn.c_proj", "mlp.c_proj"] in rows(text)
    stacks = [f"{stack}.block.0.layer.{n}.{name}" for stack, n, name in (("encoder", 0, "q"), ("decoder", 1, "q"))]
    text = plan_in_80_characters(stacks)
    assert ["block", "0.q", "1.q"] in rows(text)
    assert ["encoder", "0", "4/8/8"] in rows(text) and ["decoder", "0", "4/8/8"] in rows(text)
    experts = [f"h.0.mlp.experts.{name}" for name in ("up", "down")]
    text = plan_in_80_characters(["h.0.mlp.shared_expert.down", *experts])
    assert ["block", "shared_expert.down", "up", "experts.down"] in rows(text)
    wide = [f"h.0.{part}.{name}" for part in ("SelfAttention", "EncDecAttention") for name in "abcdef"]
    assert "…" not in plan_in_80_characters(wide)


def test_the_legend_names_the_gemms_that_frozen_layers_have() -> None:
    def legend(*layers: tuple[str, ...]) -> str:
        assignment = {f"h.{index}.a": dict.fromkeys(gemms, "fp4") for index, gemms in enumerate(layers)}
        flops = {layer: dict.fromkeys(formats, 1) for layer, formats in assignment.items()}
        made = PrecisionPlan(assignment, flops, (tuple(assignment),), PlanProvenance(step=0, policy="snip"))
        return str(plan_table(made).title)

    frozen = GEMMS[:2]
    assert legend(frozen, frozen) == "Plan (one format: both GEMMs; a/b: forward/grad_input, 4: fp4)"
    assert legend(GEMMS, frozen) == (
        "Plan (one format: all GEMMs; a/b/c: forward/grad_input/grad_weight; a/b: forward/grad_input, 4: fp4)"
    )


def test_formats_of_the_same_bits_are_told_apart_by_letters_of_their_names() -> None:
    with restored(FORMATS):
        for name in ("mxint4", "fp4-rotated"):
            register_format(NumberFormat(name=name, grid=integers(7), bits=4, speed=2.0, label=name, colour="#000000"))
        assert ["0", "f4/i4/f8"] in rows(printed_plan("fp4", "int4", "fp8"))
        text = printed_plan("mxfp4", "mxint4", "fp8", "mxint4", "mxint4", "mxint4")
        assert ["0", "mxf4/mxi4/fp8", "mxi4"] in rows(text)
        assert "grad_weight,mxf4:mxfp4,mxi4:mxint4,fp8:fp8)" in "".join(text.split())
        assert ["0", "fp4/fp44/bf16"] in rows(printed_plan("fp4", "fp4-rotated", "bf16"))


def test_stages_pipeline_and_saving_are_those_computed_by_hand() -> None:
    text = printed(plan("ab"), micro_batches=4)
    lines = rows(text)
    # 30 of 50 FLOPs are a's, 10 of 50 b's; FP4 halves the time, and all FLOPs in FP8 take 1.
    assert ["0", "2", "0.6000", "0.7000", "0.35"] in lines
    assert ["1", "2", "0.2000", "0.9000", "0.45"] in lines
    assert ["all", "4", "0.4000", "0.8000", "0.8"] in lines
    sentences = joined(text)
    assert "Stages (modelled: FP4 at 2x FP8) " in sentences
    # 3 * 0.45 + 0.8, and 1 - 4 * 0.4 / 2.15.
    assert (
        "Pipeline of 4 micro-batches: stage 1 is the slowest, a step takes 2.15 (1: FP8), and 0.2558 of it is bubble. "
        "Times are those of the linears, forward and backward (modelled, FP4 at 2x FP8, 1 is all linears in FP8). A "
        in sentences
    )


def test_measured_times_are_shown_in_ms_with_both_shares_and_their_machine() -> None:
    cost = measured({"a": 1e-3, "b": 5e-3, "c": 2e-3, "d": 4e-3})
    cost = dataclasses.replace(cost, machine=Machine("a [bold] GPU", "2.11.0", "hopper", "bfloat16"))
    text = printed(plan("ad", measured=cost))
    assert "Stages (measured: a [bold] GPU) " in joined(text)
    assert "(measured). A stage's time is for one micro-batch" in joined(text)
    assert ["0", "2", "0.6000", "0.3333", "0.9333", "8.4"] in rows(text)
    assert ["1", "2", "0.8000", "0.5455", "0.8909", "19.6"] in rows(text)
    assert ["all", "4", "0.7000", "0.4839", "0.9032", "28"] in rows(text)
    # Eight micro-batches: 7 * 19.6 + 28.
    assert "stage 1 is the slowest, a step takes 165.2 (ms), and 0.3220 of it is bubble." in joined(text)


def test_measured_times_without_fp8_are_compared_with_their_own_reference() -> None:
    cost = measured({"a": 1e-3, "b": 5e-3, "c": 2e-3, "d": 4e-3}, ("nvfp4", "mxfp8"))
    formats = {"fp4": "nvfp4", "fp8": "mxfp8"}
    assignment = {x: {gemm: formats[name] for gemm, name in row.items()} for x, row in plan("ad").assignment.items()}
    text = printed(plan("ad", assignment=assignment, measured=cost))
    assert "of FLOPs time all in MXFP8 ms" in joined(text)
    assert ["0", "2", "0.6000", "0.3333", "0.9333", "8.4"] in rows(text)
    assert "FP8" not in text.replace("MXFP8", "")


def test_times_of_a_plan_with_a_format_that_was_not_timed_are_modelled_and_say_so() -> None:
    cost = measured({"a": 1e-3, "b": 5e-3, "c": 2e-3, "d": 4e-3}, ("nvfp4", "mxfp8"))
    text = joined(printed(plan("ad", measured=cost)))
    assert "Stages (modelled: FP4 at 2x FP8) " in text and "1 is all linears in FP8" in text


def test_one_stage_is_a_sentence_and_no_table() -> None:
    text = printed(plan("a", stages=(tuple(FLOPS),)))
    assert text == "0.3000 of the plan's linear FLOPs are in FP4.\n"


def test_the_stages_of_scattered_layers_are_listed_in_their_own_order() -> None:
    assert STAGES == (("a", "c"), ("b", "d"))
    assert list(plan("ad").assignment) == ["a", "c", "b", "d"]
    text = printed(plan("ad"), micro_batches=3)
    lines = rows(text)
    assert ["0", "2", "0.6000", "0.7000", "0.35"] in lines
    assert ["1", "2", "0.8000", "0.6000", "0.3"] in lines
    assert "stage 0 is the slowest, a step takes 1.35 (1: FP8), and 0.2778 of it is bubble." in joined(text)
