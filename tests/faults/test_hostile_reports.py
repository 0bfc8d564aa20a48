"""Do reports and inspections of hostile folders end in one sentence, or in a report with notes, in bounded time?

Whatever a folder holds: no traceback, nothing that a terminal would obey, no text without bound.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import Page
from slow_cases import slow
from written_runs import random_assignments, write_checks, write_divergence, write_losses, write_run

from snip_hf.cli import empty_model, main
from snip_hf.field_ranges import LONGEST_WAIT
from snip_hf.integrations import report_command
from snip_hf.numerics.gemms import GEMMS
from snip_hf.records import events
from snip_hf.records import history as history_module

# Seconds that a report without figures may take on a busy machine; most take a hundredth.
BOUND = 30.0
MOST_PRINTED = 200_000
HOSTILE = "\x1b]0;title\x07\u202e\u200b[red]\ud800$\\frac{$:skull:"
HUGE = "1" + "0" * 400
# Lines of the history, counted from 0: a check, and refreshes that were applied, kept, and applied.
CHECK, REFRESH, KEPT, LAST = 2, 4, 5, 6

Spoil = Callable[[Path], None]


def good_run(folder: Path) -> None:
    """A run with a kept refresh, an applied one, checks, divergences and losses."""
    assignments = random_assignments(4, granularity="layer")
    write_run(folder, assignments, kept=(2,))
    write_checks(folder, 3)
    write_losses(folder / "trainer_state.json", 400)
    for step in (100, 300):
        write_divergence(folder, step, {(layer, "layer"): (0.1, 0.2) for layer in assignments[0]})
    start, *refreshes = (
        history(folder).read_text().replace('"granularity": "gemm"', '"granularity": "layer"', 1).split("\n")
    )
    checks = refreshes[3:]
    history(folder).write_text("\n".join([start, *checks[:-1], *refreshes[:3], ""]))


def history(folder: Path) -> Path:
    return folder / "snip" / "history.jsonl"


def edit_line(number: int, change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Spoils one line of the history, counted from 0; `change` edits the record or returns another one."""

    def spoil(folder: Path) -> None:
        lines = history(folder).read_text().splitlines()
        record = json.loads(lines[number])
        other = change(record)
        lines[number] = other if isinstance(other, str) else json.dumps(record if other is None else other)
        history(folder).write_text("\n".join(lines) + "\n")

    return spoil


def start(**values: Any) -> Spoil:
    return edit_line(0, lambda record: record.update(values))


def config(**values: Any) -> Spoil:
    return edit_line(0, lambda record: record["config"].update(values))


def refresh(**values: Any) -> Spoil:
    return edit_line(REFRESH, lambda record: record.update(values))


def raw(number: int, old: str, new: str) -> Spoil:
    return edit_line(number, lambda record: json.dumps(record).replace(old, new, 1))


def content(name: str, text: str | bytes) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return spoil


def sparse(name: str, size: int) -> Spoil:
    def spoil(folder: Path) -> None:
        with open(folder / name, "r+b" if (folder / name).exists() else "wb") as file:
            file.truncate(size)

    return spoil


def special(name: str, kind: str) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to({"device": "/dev/zero", "loop": path.name, "nothing": "no-such-file"}[kind])

    return spoil


def state(**values: Any) -> Spoil:
    return content("trainer_state.json", json.dumps({"global_step": 400, "log_history": []} | values))


def table(step: int = 300, **values: Any) -> Spoil:
    """Spoils the first record of the divergences of the last refresh."""

    def spoil(folder: Path) -> None:
        path = folder / "snip" / f"divergence-{step}.json"
        document = json.loads(path.read_text())
        document["records"][0] |= values
        path.write_text(json.dumps(document))

    return spoil


def rename(name: str) -> Spoil:
    """Gives one layer another name in all files."""

    def spoil(folder: Path) -> None:
        for path in folder.glob("snip/*.json*"):
            old, new = '"model.layers.1.mlp.down_proj', json.dumps(name).removesuffix('"')
            path.write_text(path.read_text().replace(old, new))

    return spoil


def lines_of(count: int, line: str) -> Spoil:
    def spoil(folder: Path) -> None:
        with open(history(folder), "a") as file:
            file.write((line + "\n") * count)

    return spoil


def many_refreshes(folder: Path) -> None:
    record = json.loads(history(folder).read_text().splitlines()[REFRESH]) | {"changes": {}}
    head, _, tail = json.dumps(record).partition('"step": 100, "applied_step": 110')
    with open(history(folder), "a") as file:
        file.writelines(f'{head}"step": {n}, "applied_step": {n}{tail}\n' for n in range(1000, 101_000))


def many_tables(folder: Path) -> None:
    for step in range(1000, 3000):
        (folder / "snip" / f"divergence-{step}.json").write_text("[]")


def many_checkpoints(folder: Path) -> None:
    for step in range(500):
        content(f"checkpoint-{step}/trainer_state.json", "[]")(folder)


def many_layers(count: int) -> Spoil:
    """Layers of as many kinds as there are layers, each in a stage of its own."""

    def spoil(folder: Path) -> None:
        names = [f"model.layers.0.kind{n}" for n in range(count)]
        record = json.loads(history(folder).read_text().splitlines()[0])
        record |= {"plan": {name: dict.fromkeys(GEMMS, "fp8") for name in names}, "stages": [[name] for name in names]}
        record["flops"] = {name: dict.fromkeys(GEMMS, 1.0) for name in names}
        history(folder).write_text(json.dumps(record) + "\n")
        fields = {"schema_version": 1, "kind": "snip-hf precision plan", "provenance": {"step": 0, "policy": "snip"}}
        plan = fields | {"assignment": record["plan"], "flops": record["flops"], "stages": record["stages"]}
        names = ("granularity", "target_fp4_fraction", "objective", "bound", "gap", "solver", "solver_version")
        plan["provenance"] |= dict.fromkeys((*names, "seconds", "config", "model_name"))
        (folder / "snip" / "plan.json").write_text(json.dumps(plan))

    return spoil


def tiny_stage(folder: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        first, second, *rest = record["stages"][0]
        record["stages"] = [[first], [second], rest]
        record["flops"] |= {first: dict.fromkeys(GEMMS, 1e300), second: dict.fromkeys(GEMMS, 1e-300)}

    edit_line(0, change)(folder)


def without_a_layer(folder: Path) -> None:
    """As of an expert without tokens."""
    path = folder / "snip" / "divergence-300.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"records": document["records"][2:]}))


def by_columns(change: Callable[[dict[str, Any]], None] = lambda document: None) -> Spoil:
    """The divergences of the last refresh as of schema version 2."""

    def spoil(folder: Path) -> None:
        path = folder / "snip" / "divergence-300.json"
        records = json.loads(path.read_text())["records"]
        document = {"schema_version": 2, "step": 300, "columns": list(records[0])}
        document["rows"] = [list(record.values()) for record in records]
        change(document)
        path.write_text(json.dumps(document))

    return spoil


def many_ties(folder: Path) -> None:
    many_layers(2000)(folder)
    edit_line(0, lambda record: record.update(stages=[[name for (name,) in record["stages"]]]))(folder)
    config(ties=[[f"n{number}" for number in range(5001)]])(folder)
    with open(history(folder), "a") as file:
        applied = {"event": "refresh", "step": 300, "applied_step": 310, "reason": None, "fp4_fraction": 0.5}
        file.write(json.dumps(applied | {"changes": {}, "layers_changed": 0}) + "\n")
    content("snip/divergence-300.json", '{"step": 300, "records": []}')(folder)


KINDS = ("pipe", "folder", "device", "loop", "nothing")
# name -> how it is spoiled, and what the report or the one sentence says
REFUSED: dict[str, tuple[Spoil, str]] = {
    "a start that is a list": (edit_line(0, lambda record: []), "the line is a list of 0, expected a JSON object."),
    "a start that is a number": (edit_line(0, lambda record: "7"), "the line is 7, expected a JSON object."),
    "a start that is null": (edit_line(0, lambda record: "null"), "the line is None"),
    "a start of depth 10^5": (edit_line(0, lambda record: "[" * 10**5), "nested too deeply"),
    "a start without an event": (edit_line(0, lambda record: record.pop("event") and record), "no entry 'event'"),
    "a start without a config": (edit_line(0, lambda record: record.pop("config") and record), "no entry 'config'"),
    "a config that is a list": (start(config=[]), "config is a list of 0, expected a JSON object."),
    "a config without a policy": (start(config={}), "it has no entry 'policy'."),
    "a policy that is a list": (config(policy=[[]]), "provenance.policy is [[]], expected"),
    "a plan that is a list": (start(plan=["a"]), "plan is a list of 1, expected a JSON object."),
    "a plan whose rows are lists": (start(plan={"a": []}), "expected a mapping from GEMMs"),
    "a plan whose formats are lists": (start(plan={"a": {gemm: [] for gemm in GEMMS}}), "Unknown format []"),
    "flops that are text": (start(flops="many"), "expected a mapping"),
    "flops that are negative": (raw(0, '"forward": 1.0', '"forward": -1.0'), "of at least 0"),
    "flops of 1e999": (raw(0, '"forward": 1.0', '"forward": 1e999'), "1e999, which is too large"),
    "flops of 10^400": (raw(0, '"forward": 1.0', f'"forward": {HUGE}'), "an integer of 401 digits"),
    "flops of NaN": (raw(0, '"forward": 1.0', '"forward": NaN'), "it holds NaN"),
    "stages that are a dict": (start(stages={}), "stages is {}, expected a list"),
    "stages of numbers": (start(stages=[[1, 2]]), "a layer name in stages[0] is 1"),
    "a stage next to nothing": (tiny_stage, "stage 1 takes no time next to the others"),
    "a negative start": (start(step=-1), "step is -1, expected an integer from 0"),
    "a start at 10^18": (start(step=10**18), "step is 1000000000000000000, expected"),
    "a start at true": (start(step=True), "step is True, expected"),
    "a model name that is a list": (start(model_name=[1]), "provenance.model_name is [1]"),
    "a name of 5,000 characters": (start(model_name="x" * 5000), "has 5000 characters"),
    "a refresh that is a list": (edit_line(REFRESH, lambda record: []), "the line is a list of 0"),
    "a refresh that is text": (edit_line(REFRESH, lambda record: '"x"'), "the line is 'x', expected"),
    "a refresh without an event": (edit_line(REFRESH, lambda record: {}), "it has no entry 'event'."),
    "an event that is a dict": (refresh(event={}), "event is a JSON object of 0, expected 'refresh'."),
    "an event of escapes": (refresh(event=HOSTILE), "event is '\\x1b]0;title\\x07\\u202e\\u200b[red]\\ud800"),
    "an event of a megabyte": (refresh(event="x" * 10**6), "..., expected 'refresh'."),
    "a negative step": (refresh(step=-5), "step is -5, expected an integer from 0"),
    "a step that is text": (refresh(step="5"), "step is '5', expected"),
    "a step that is a fraction": (refresh(step=5.5), "step is 5.5, expected"),
    "a step of 10^18": (refresh(applied_step=10**18), "applied_step is 1000000000000000000, expected"),
    "a step of 10^400": (raw(REFRESH, '"step": 100', f'"step": {HUGE}'), "an integer of 401 digits"),
    "a share that is text": (refresh(fp4_fraction="half"), "fp4_fraction is 'half', expected a number"),
    "a share that is true": (refresh(fp4_fraction=True), "fp4_fraction is True"),
    "an objective of 1e999": (raw(REFRESH, "12.345678", "1e999"), "1e999, which is too large"),
    "an objective of infinity": (raw(REFRESH, "12.345678", "Infinity"), "it holds Infinity"),
    "an objective of 1e300": (refresh(objective=1e300), "objective is 1e+300, expected a number up to 1e+100"),
    "a gap that is a dict": (refresh(gap={"a": 1}), "gap is a JSON object of 1"),
    "seconds that are a list": (refresh(seconds=[1, 2]), "seconds is a list of 2"),
    "seconds that are text": (refresh(seconds={"probe": "x"}), "seconds.probe is 'x'"),
    "a reason that is a dict": (refresh(reason={"x": 1}), "reason is a JSON object of 1, expected text or null."),
    "changes that are a list": (refresh(changes=["a"]), "changes is a list of 1"),
    "a change that is text": (refresh(changes={"model.layers.0.mlp.down_proj:forward": "fp4"}), "expected the old and"),
    "a change to a format of ours to be": (
        refresh(changes={"model.layers.0.mlp.down_proj:forward": ["fp8", "fp2"]}),
        "Unknown format 'fp2'",
    ),
    "a change of no GEMM": (refresh(changes={"model.layers.0.mlp.down_proj": ["fp8", "fp4"]}), "names no GEMM"),
    "a change of a fourth GEMM": (refresh(changes={"a:x": ["fp8", "fp4"]}), "names no GEMM"),
    "a change of another layer": (refresh(changes={HOSTILE + ":forward": ["fp8", "fp4"]}), "which the start does not"),
    "a check whose correlation is text": (edit_line(CHECK, lambda r: r.update(correlation="x")), "correlation is 'x'"),
    "a check at no step": (edit_line(CHECK, lambda r: r.update(step=None)), "step is None"),
    "a history of 250 MB": (sparse("snip/history.jsonl", 250 * 10**6), "history.jsonl is larger than"),
    "a history of a terabyte": (sparse("snip/history.jsonl", 2**40), "history.jsonl is larger than"),
    "a history of empty lines": (content("snip/history.jsonl", b"\n" * 10**7), "Line 1 of"),
    "a history of millions of objects": (content("snip/history.jsonl", b"{}\n" * 3 * 10**6), "no entry 'event'"),
    "a history of too many lines": (
        lines_of(12_000, '{"event":"drift","step":1,"correlation":1,"refresh":0,"reason":null}'),
        "more than 12,000 lines",
    ),
    "a history that is a pickle": (content("snip/history.jsonl", b"\x80\x04\x95\xff\n"), "not UTF-8 text"),
    "a history of more layers than any model": (many_layers(5001), "plan names 5,001 layers, expected at most"),
    **{f"a history that is a {kind}": (special("snip/history.jsonl", kind), "history.jsonl") for kind in KINDS},
}
REPORTED: dict[str, tuple[Spoil, str]] = {
    "nothing spoiled": (lambda folder: None, "Why (probe of step 300"),
    "a config of other types": (
        config(granularity=[1], target_fp4_fraction={}, first_refresh=[[]], budget=3, fixed_plan=None),
        "There is no table of reasons: target_fp4_fraction=",
    ),
    "a config of another version": (config(of_tomorrow=1), "There is no table of reasons: Unknown SnipConfig field"),
    "a config whose plan is a list": (config(fixed_plan=["x"]), "Plan file a list of 1, held fixed"),
    "100,000 ties": (config(ties=[[f"a{n}"] for n in range(10**5)]), "Why (probe of step 300"),
    "a config with too many ties": (many_ties, "There is no table of reasons: ties has 5,001 names"),
    "a config with endless solving": (config(solver_time_limit=1e101), ""),
    "a reason of escapes": (
        edit_line(KEPT, lambda r: r.update(reason=HOSTILE)),
        "plan kept. \\x1b]0;title\\x07\\u202e",
    ),
    "a reason of ten megabytes": (edit_line(KEPT, lambda r: r.update(reason="x" * 10**7)), "xxx..."),
    "a reason of lines": (edit_line(KEPT, lambda r: r.update(reason="a\nb\r\x1b[2Jc")), "a\\nb\\r\\x1b[2Jc"),
    "a history that goes back": (
        edit_line(LAST, lambda r: r.update(step=5, applied_step=5)),
        "goes back from step 200 to",
    ),
    "a step twice": (edit_line(LAST, lambda r: r.update(step=100, applied_step=110)), "goes back from step 200 to"),
    "a last line of 60 MB of nothing": (sparse("snip/history.jsonl", 60 * 10**6), "is not complete"),
    "a last line that is a list": (lines_of(1, "[]"), "The last line of history.jsonl is not complete"),
    "a last line of 10^400": (lines_of(1, f'{{"event": "drift", "step": {HUGE}}}'), "is not complete"),
    "100,000 refreshes": (many_refreshes, "plans"),
    "2,000 layers in as many stages": (many_layers(2000), "kinds."),
    "2,000 broken divergences": (many_tables, "and 108 more such lines."),
    "500 broken checkpoints": (many_checkpoints, "checkpoint-499/trainer_state.json cannot be used"),
    "a model name of markup": (start(model_name="[red]:skull:$x$[/nothing]"), "Model: [red]:skull:$x$[/nothing]."),
    "layers called formulas": (rename("model.layers.1.mlp.$\\frac{$"), "$\\frac{$"),
    "layers called markup": (rename("model.layers.1.mlp.[red]:skull:"), "[red]:skull:"),
    "layers of 4,096 characters": (rename("x" * 4000), "xxx"),
    **{
        f"a plan that is a {kind}": (special("snip/plan.json", kind), "Note: plan.json cannot be used")
        for kind in KINDS
    },
    "a plan of 250 MB": (sparse("snip/plan.json", 250 * 10**6), "Note: plan.json cannot be used"),
    "a plan of empty lists": (content("snip/plan.json", "[" + "[]," * 10**5 + "1]"), "Note: plan.json cannot be used"),
    "a plan of escapes": (content("snip/plan.json", json.dumps({HOSTILE: HOSTILE})), "Note: plan.json cannot be used"),
    "a state that is a list": (content("trainer_state.json", "[]"), "trainer_state.json cannot be used"),
    "a state of depth 10^6": (content("trainer_state.json", "[" * 10**6), "trainer_state.json cannot be used"),
    "a state of 250 MB": (sparse("trainer_state.json", 250 * 10**6), "trainer_state.json cannot be used"),
    "a state of empty lists": (content("trainer_state.json", "[" + "[]," * (3 * 10**6) + "1]"), "more than 2,000,000"),
    "a state of bytes": (content("trainer_state.json", b"\xff\xfe\x00"), "trainer_state.json cannot be used"),
    "a state whose log is a dict": (state(log_history={"step": 1}), "log_history is a JSON object of 1"),
    "a state whose log is text": (state(log_history="abc"), "log_history is 'abc', expected a list."),
    "a state whose step is text": (state(global_step="1"), "global_step is '1', expected"),
    "a state whose step is 1e999": (
        content("trainer_state.json", '{"global_step": 1e999, "log_history": []}'),
        "global_step is inf",
    ),
    "a state of 10^400": (
        content("trainer_state.json", f'{{"global_step": {HUGE}, "log_history": []}}'),
        "global_step is inf",
    ),
    "log entries of all kinds": (
        state(log_history=[1, None, [], "x", {}, {"step": "1"}, {"step": -1, "loss": 1}, {"step": 10**18, "loss": 1}]),
        "8 entries of the Trainer's log are at no step",
    ),
    "losses of all kinds": (
        content(
            "trainer_state.json",
            '{"global_step": 9, "log_history": [{"step": 1, "loss": NaN}, {"step": 2, "loss": 1e999}, '
            '{"step": 3, "loss": -1e308, "eval_loss": "x"}, {"step": 4, "loss": true}, {"step": 5, "eval_loss": [1]}, '
            f'{{"step": 6, "loss": {HUGE}}}, {{"step": 7, "loss": 0.5}}, {{"step": 7, "loss": 0.25}}]}}',
        ),
        "0.2500",
    ),
    **{f"a state that is a {kind}": (special("trainer_state.json", kind), "") for kind in KINDS},
    "divergences that are a list": (content("snip/divergence-300.json", "[]"), "divergence-300.json cannot be used"),
    "divergences without records": (content("snip/divergence-300.json", '{"step": 300}'), "has no entry 'records'"),
    "divergences whose records are a dict": (
        content("snip/divergence-300.json", '{"step": 300, "records": {}}'),
        "records is a JSON object of 0, expected a list.",
    ),
    "divergences whose records are lists": (
        content("snip/divergence-300.json", '{"step": 300, "records": [[]]}'),
        "records[0] is a list of 0, expected a JSON object.",
    ),
    "divergences of another step": (content("snip/divergence-300.json", '{"step": 7, "records": []}'), "of step 7"),
    "divergences of 250 MB": (sparse("snip/divergence-300.json", 250 * 10**6), "divergence-300.json cannot be used"),
    "divergences of step 10^400": (
        content(f"snip/divergence-{10**200}.json", "[]"),
        "Why (probe of step 300",
    ),
    "divergences of a layer that is a dict": (table(layer={}), "records[0].layer is a JSON object of 0"),
    "divergences of another layer": (table(layer=HOSTILE), "it names layer '\\x1b]0;title"),
    "divergences of no GEMM": (table(gemm=[]), "records[0].gemm is a list of 0"),
    "divergences of no format": (table(format={}), "records[0].format is a JSON object of 0"),
    "divergences of an unknown format": (table(format="fp2"), "Unknown format 'fp2' for records[0].format"),
    "divergences of a long format": (table(format="f" * 10**6), "records[0].format is 'fff"),
    "divergences that are text": (table(loss_divergence="1.0"), "records[0].loss_divergence is '1.0'"),
    "divergences that are null": (table(loss_divergence=None), "records[0].loss_divergence is None"),
    "divergences of 1e300": (table(weight_divergence=1e300), "records[0].weight_divergence is 1e+300"),
    "divergences of 1e99": (table(weight_divergence=1e99), "Why (probe of step 300"),
    "divergences of 5e-324": (table(loss_divergence=5e-324), "Why (probe of step 300"),
    "divergences below 0": (table(loss_divergence=-1e99), "Why (probe of step 300"),
    "divergences twice": (table(format="fp8"), "has a layer, GEMM and format twice"),
    "divergences of one layer fewer": (without_a_layer, "Why (probe of step 300"),
    "divergences by columns": (by_columns(), "Why (probe of step 300"),
    "columns that are a dict": (by_columns(lambda d: d.update(columns={})), "columns is a JSON object of 0"),
    "columns of numbers": (by_columns(lambda d: d.update(columns=[1])), "columns is a list of 1, expected at most"),
    "a million columns": (by_columns(lambda d: d.update(columns=["a"] * 10**6)), "columns is a list of 1000000"),
    "rows of another length": (by_columns(lambda d: d["rows"][1].pop()), "rows[1] has 5 values, expected 6"),
    "rows that are text": (by_columns(lambda d: d.update(rows="x")), "rows is 'x', expected a list."),
    **{f"divergences that are a {kind}": (special("snip/divergence-300.json", kind), "") for kind in KINDS},
}


def run_cli(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Runs the CLI, checks how long it takes and what it prints; returns the exit code, and the text on one line."""
    capsys.readouterr()
    began = time.monotonic()
    code = main([str(argument) for argument in arguments])
    assert time.monotonic() - began < BOUND
    printed = capsys.readouterr()
    text = printed.out + printed.err
    assert printed.err.count("\n") == (code == 2)
    assert len(text) < MOST_PRINTED
    assert [line for line in text.splitlines() if not line.isprintable()] == []
    assert "Traceback" not in text and "\N{SKULL}" not in text
    return code, " ".join(text.split())


# Of these the figures are drawn too.
DRAWN = (
    "nothing spoiled",
    "100,000 refreshes",
    "2,000 layers in as many stages",
    "a history that goes back",
    "layers called formulas",
    "layers of 4,096 characters",
    "losses of all kinds",
    "divergences of 1e99",
    "divergences of 5e-324",
    "divergences below 0",
)


DRAWN_FAST = ("nothing spoiled", "layers called formulas", "losses of all kinds")
SLOW = {"100,000 refreshes", "100,000 ties", "a config with too many ties", *DRAWN} - set(DRAWN_FAST)


@pytest.mark.parametrize("case", [*REFUSED, *(slow(case) if case in SLOW else case for case in REPORTED)])
def test_a_report_of_a_hostile_folder_is_one_sentence_or_a_report_with_notes(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_module, "_MOST_LINES", 120_000 if case == "100,000 refreshes" else 12_000)
    monkeypatch.setattr(events, "_MOST_LAYERS", 5000)
    if case not in DRAWN:
        monkeypatch.setattr(report_command, "write_figures", lambda run, out: [])
    good_run(tmp_path)
    spoil, expected = (REFUSED | REPORTED)[case]
    spoil(tmp_path)
    code, text = run_cli(capsys, "report", tmp_path, "--html", "--out", tmp_path / "out")
    assert code == (2 if case in REFUSED else 0), text[:500]
    # A line of the report may be broken anywhere.
    assert expected.replace(" ", "") in text.replace(" ", ""), text[-1500:]
    if case in DRAWN:
        assert (tmp_path / "out" / "plan.png").read_bytes().startswith(b"\x89PNG")
    if case in REPORTED:
        page = Page((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
        assert [tag for tag, _ in page.elements].count("script") == 2 and len(page.data["runs"]) == 1
        assert sum(map(len, page.scripts)) < 2e6


@pytest.mark.slow
def test_names_that_may_or_may_not_be_in_a_plan_are_never_printed_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index, letter in enumerate(["\x1b[2J", "\u202e", "\u200b", "\u3000", "\u00a0", "\ud800", "\x9b"]):
        folder = tmp_path / str(index)
        good_run(folder)
        rename(f"model.layers.1.mlp.{letter}down_proj")(folder)
        start(model_name=letter)(folder)
        run_cli(capsys, "report", folder)
        run_cli(capsys, "inspect", folder / "snip" / "plan.json")
        config(policy=letter)(folder)
        run_cli(capsys, "report", folder)


def plan_document(folder: Path) -> dict[str, Any]:
    good_run(folder)
    document: dict[str, Any] = json.loads((folder / "snip" / "plan.json").read_text())
    return document


def staged(document: dict[str, Any]) -> None:
    (layers,) = document["stages"]
    document["stages"] = [layers[:2], layers[2:]]


def timed(seconds: float, **machine: str) -> Callable[[dict[str, Any]], None]:
    """A plan whose measured times are all the same."""

    def change(document: dict[str, Any]) -> None:
        times = {gemm: dict.fromkeys(("bf16", "fp8", "fp4"), seconds) for gemm in GEMMS}
        fields = {"device": "a GPU", "torch_version": "2.11.0", "backend": "hopper", "dtype": "bfloat16"} | machine
        measured = {"machine": fields, "tokens": 8, "seconds": dict.fromkeys(document["assignment"], times)}
        document["measured"] = measured

    return change


PLANS: dict[str, tuple[Callable[[dict[str, Any]], Any], int, str]] = {
    "nothing spoiled": (lambda d: None, 0, "policy: snip"),
    "a list": (lambda d: [], 2, "the document is [], expected a JSON object."),
    "text": (lambda d: "x", 2, "the document is 'x', expected a JSON object."),
    "version 2": (lambda d: d.update(schema_version=2), 2, "schema_version is 2, expected 1."),
    "version 10^30": (
        lambda d: d.update(schema_version=10**30),
        2,
        "schema_version is 1000000000000000000000000000000",
    ),
    "version true": (lambda d: d.update(schema_version=True), 2, "schema_version is True, expected 1."),
    "a kind of escapes": (lambda d: d.update(kind=HOSTILE), 2, "kind is '\\x1b]0;title\\x07\\u202e\\u200b[red]\\ud800"),
    "an unknown entry of a megabyte": (lambda d: d.update({"x" * 10**6: 1}), 2, "has an unknown entry 'xxx"),
    "a missing entry": (lambda d: d.pop("flops") and d, 2, "the document has no entry 'flops'"),
    "a provenance that is a list": (lambda d: d.update(provenance=[]), 2, "provenance is [], expected a JSON object."),
    "a step below 0": (lambda d: d["provenance"].update(step=-1), 2, "provenance.step is -1"),
    "a step of 10^30": (lambda d: d["provenance"].update(step=10**30), 0, "step: 1000000000000000000000000000000"),
    "a gap of a list": (lambda d: d["provenance"].update(gap=[]), 2, "provenance.gap is [], expected a finite number."),
    "a config of a megabyte": (lambda d: d["provenance"].update(config={"x": "y" * 10**6}), 0, "yyy..."),
    "a config of escapes": (lambda d: d["provenance"].update(config={HOSTILE: HOSTILE}), 0, "\\u001b]0;title"),
    "a solver of markup": (lambda d: d["provenance"].update(solver="[red]:skull:[/x]"), 0, "solver: [red]:skull:[/x]"),
    "times of 1e308 s": (timed(1e308), 2, "A figure cannot be computed (intermediate overflow in fsum)"),
    "times of 1e-320 s": (timed(1e-320), 0, "Cost (time share"),
    "a machine of markup": (timed(1.0, device="[red]:skull:"), 0, "[red]:skull:"),
    "a machine of 4,096 characters": (timed(1.0, device="x" * 4096), 0, "xxx..."),
    "two stages": (staged, 0, "Not compared with one global constraint: there are no divergences of its refresh."),
    "two stages of an endless solver": (
        lambda d: (
            staged(d),
            d["provenance"].update(step=300, config={"granularity": "layer", "solver_time_limit": LONGEST_WAIT}),
        )[0],
        0,
        "Against one global constraint, one per stage saves",
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_an_inspection_of_a_hostile_plan_is_one_sentence_or_its_tables(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = plan_document(tmp_path)
    change, code, expected = PLANS[case]
    other = change(document)
    path = tmp_path / "snip" / "plan.json"
    path.write_text(json.dumps(document if other is None else other))
    found, text = run_cli(capsys, "inspect", path)
    assert found == code, text[:500]
    assert expected.replace(" ", "") in text.replace(" ", ""), text[-1500:]


def test_an_inspection_of_many_kinds_and_stages_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good_run(tmp_path)
    many_layers(2000)(tmp_path)
    code, text = run_cli(capsys, "inspect", tmp_path / "snip" / "plan.json")
    assert code == 0
    assert "The first 1 of 1 blocks and 32 of 2,000 kinds." in text
    assert len([word for word in text.split() if word == "0.0005"]) == 63


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop", "nothing"])
@pytest.mark.parametrize("name", ["plan.json", "divergence-0.json"])
def test_an_inspection_of_what_is_no_file_is_one_sentence(
    name: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_document(tmp_path)
    special(f"snip/{name}", kind)(tmp_path)
    code, text = run_cli(capsys, "inspect", tmp_path / "snip" / "plan.json")
    is_missing = name == "divergence-0.json" and kind == "nothing"
    assert code == (0 if is_missing else 2)
    assert is_missing or name in text


LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 50}
MODELS: dict[str, tuple[object, str]] = {
    "no layers that fit": (LLAMA | {"num_hidden_layers": 2}, "10 layers are in "),
    "200,000 layers": (LLAMA | {"num_hidden_layers": 200_000}, "num_hidden_layers is or has 200,000, expected at most"),
    "10^400 layers": ('{"model_type": "llama", "num_hidden_layers": ' + HUGE + "}", "num_hidden_layers is or has inf"),
    "10^30 layers inside": (
        {"model_type": "llava", "text_config": LLAMA | {"num_hidden_layers": 10**30}},
        "num_hidden_layers is or has 1,000,000",
    ),
    "a list of 200,000 layers": (
        LLAMA | {"layer_types": ["full_attention"] * 200_000},
        "layer_types is or has 200,000",
    ),
    "layers by another name": ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer is or has 1,000,000,000"),
    "layers below 0": (LLAMA | {"num_hidden_layers": -1}, "No layer of LlamaForCausalLM can be swapped"),
    "text for a number": (LLAMA | {"num_hidden_layers": "many"}, "Cannot build the model"),
    "a width of 10^18": (LLAMA | {"hidden_size": 10**18, "num_hidden_layers": 1}, "Cannot build the model"),
    "a list": ([1, 2], "Cannot build the model"),
    "depth 10^5": ("[" * 10**5, "Cannot build the model"),
    "a type of escapes": ({"model_type": HOSTILE}, "Cannot build the model"),
    "code of its own": ({"model_type": "x", "auto_map": {"AutoConfig": "x.Y"}}, "Cannot build the model"),
    "no text": (b"\xff\xfe", "Cannot build the model"),
    "nothing": ("", "Cannot build the model"),
}


@pytest.mark.parametrize("case", MODELS)
def test_an_inspection_with_a_hostile_model_is_one_sentence(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan_document(tmp_path)
    given, expected = MODELS[case]
    text = given if isinstance(given, str | bytes) else json.dumps(given)
    content("model/config.json", text)(tmp_path)
    code, printed = run_cli(capfd, "inspect", tmp_path / "snip" / "plan.json", "--model", tmp_path / "model")
    assert code == (1 if case == "no layers that fit" else 2)
    assert expected in printed, printed[-1500:]


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop", "nothing", "250 MB"])
def test_an_inspection_with_a_config_that_is_no_file_is_one_sentence(
    kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan_document(tmp_path)
    (tmp_path / "model").mkdir()
    (sparse if kind == "250 MB" else special)("model/config.json", 250 * 10**6 if kind == "250 MB" else kind)(tmp_path)
    code, printed = run_cli(capfd, "inspect", tmp_path / "snip" / "plan.json", "--model", tmp_path / "model")
    assert code == 2
    assert "config.json" in printed


def test_a_model_of_too_many_modules_is_refused_while_it_is_built(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_document(tmp_path)
    content("model/config.json", json.dumps(LLAMA | {"num_hidden_layers": 2}))(tmp_path)
    monkeypatch.setattr(empty_model, "_MOST_MODULES", 20)
    code, printed = run_cli(capfd, "inspect", tmp_path / "snip" / "plan.json", "--model", tmp_path / "model")
    assert code == 2
    assert printed.endswith("from its config: it has more than 20 modules.")


def test_too_many_patterns_for_a_model_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = plan_document(tmp_path)
    document["provenance"]["config"] = {"skip_modules": [f"{n}*" for n in range(500_000)]}
    content("snip/plan.json", json.dumps(document))(tmp_path)
    content("model/config.json", json.dumps(LLAMA | {"num_hidden_layers": 2}))(tmp_path)
    code, printed = run_cli(capfd, "inspect", tmp_path / "snip" / "plan.json", "--model", tmp_path / "model")
    assert code == 2
    assert "The plan's skip_modules has 500,000 patterns, which are too many to compare with the" in printed


def test_figures_are_never_written_through_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good_run(tmp_path)
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "snip" / "plan.png").symlink_to(victim)
    run_cli(capsys, "report", tmp_path)
    assert victim.read_text() == "mine"


def test_paths_of_any_characters_are_printed_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / os.fsdecode(b"\x1b[2J\xe2\x80\xae\xff")
    good_run(folder)
    code, text = run_cli(capsys, "report", folder)
    assert code == 0
    assert "\\x1b[2J\\u202e\\udcff/snip/plan.png" in text
    code, text = run_cli(capsys, "report", folder / "snip")
    assert code == 2


MEMORY = """
import resource, sys
import snip_hf.integrations.report_command
from snip_hf.cli import main

def peak():  # in MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

before = peak()
codes = [main(["report", folder]) for folder in sys.argv[1:]]
print(*codes, peak() - before)
"""


@pytest.mark.slow
def test_hostile_files_take_a_bounded_memory(tmp_path: Path) -> None:
    spoils = {
        "terabyte": sparse("trainer_state.json", 2**40),
        "lists": content("trainer_state.json", b"[" + b"[]," * 10**7 + b"1]"),
        "lines": content("snip/history.jsonl", b"{}\n" * 10**7),
    }
    for name, spoil in spoils.items():
        good_run(tmp_path / name)
        spoil(tmp_path / name)
    command = [sys.executable, "-c", MEMORY, *(str(tmp_path / name) for name in spoils)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    *codes, used = map(int, done.stdout.split()[-4:])
    assert codes == [0, 0, 2]
    # Beyond what the imports take; the figures of a small run take some 60 MiB.
    assert used < 250
