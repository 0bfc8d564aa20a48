"""Builds the tables of a plan: formats by block, cost by kind of linear, stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..costs.timing import cost_shares, describe_cost
from ..layers.labels import LayerLabels, split_layer
from ..numerics.formats import FORMATS, REFERENCE
from ..planning.pipeline_model import PipelineTimes, pipeline_times
from ..planning.plan import PrecisionPlan, forward_shares
from ..text import printable

# Maximum number of columns of a plan table: models have fewer kinds of linears unless each expert has its own.
_MOST_KINDS = 32
_MOST_ITEMS = 20
# Maximum length of a name in a table, and of a sentence.
_NAME, _SENTENCE = 60, 2000


def plan_table(plan: PrecisionPlan) -> Table:
    """Returns a table with a row per block and a column per kind of linear; cells hold one format, or one per GEMM."""
    cells = {split_layer(layer): formats for layer, formats in _running(plan).items()}
    all_kinds = list(dict.fromkeys(kind for _, kind in cells))
    kinds = all_kinds[:_MOST_KINDS]
    marks = _marks(dict.fromkeys(name for formats in plan.assignment.values() for name in formats.values()))
    legend = ", ".join(f"{mark}: {name}" for name, mark in marks.items())
    if any(name is None for formats in cells.values() for name in formats.values()):
        legend += ", -: does not run"
    table = new_table(f"Plan ({_gemms_legend(plan)}, {legend})")
    labels = LayerLabels(plan.assignment)
    table.add_column("block", justify="right", no_wrap=True)
    for kind in kinds:
        table.add_column(name_text(labels.kind(kind)), overflow="fold")
    for block in dict.fromkeys(block for block, _ in cells):
        row = [_plan_cell(cells[block, kind], marks) if (block, kind) in cells else Text("") for kind in kinds]
        table.add_row(name_text(labels.block(block)), *row)
    if len(kinds) < len(all_kinds):
        table.caption = f"The first {len(kinds):,} of {len(all_kinds):,} kinds."
    return table


def _gemms_legend(plan: PrecisionPlan) -> str:
    """Explains cells with one format and cells with several. Frozen weights have no grad_weight."""
    gemms = list(dict.fromkeys(tuple(formats) for formats in plan.assignment.values()))
    every = {2: "both", 3: "all three"}.get(len(gemms[0]), "all") if len(gemms) == 1 else "all"
    several = [f"{'/'.join('abc'[: len(names)])}: {'/'.join(names)}" for names in gemms if len(names) > 1]
    return "; ".join([f"one format: {every} GEMMs", *several])


def _marks(formats: Iterable[str]) -> dict[str, str]:
    """Returns format -> mark: its bits, after as many letters of its name as are needed to tell all marks apart.

    For example, fp4 and fp8 become 4 and 8, or f4 and f8 if int4 is among them.
    """
    bits = {name: str(FORMATS[name].bits) for name in sorted(formats, key=lambda name: FORMATS[name].bits)}
    for letters in range(1 + max(map(len, bits), default=0)):
        marks = {name: min(name, name[:letters] + bits[name], key=len) for name in bits}
        if len(set(marks.values())) == len(marks):
            break
    return marks  # whole names at the latest, which differ


def _running(plan: PrecisionPlan) -> dict[str, dict[str, str | None]]:
    """Returns layer -> GEMM -> format; None for a GEMM that does not run."""
    work = plan.executed
    return {
        layer: {gemm: name if work[layer][gemm] > 0 else None for gemm, name in formats.items()}
        for layer, formats in plan.assignment.items()
    }


def _plan_cell(formats: Mapping[str, str | None], marks: Mapping[str, str]) -> Text:
    """Returns the text of a layer's formats, with a dash for a GEMM or a layer that does not run."""
    names = list(formats.values())
    if len(set(names)) == 1:
        names = names[:1]
    return Text("/").join(Text("-") if x is None else Text(marks[x], style=FORMATS[x].style) for x in names)


def print_cost(plan: PrecisionPlan, console: Console) -> None:
    """Prints the shares of FLOPs and of measured time of a plan with measured times."""
    times = plan.times
    assert times is not None
    console.print(cost_table(plan))
    shares = plan.stage_fp4_time_fractions or ()
    stages = f" (per stage: {listed([f'{share:.4f}' for share in shares])})" if len(shares) > 1 else ""
    say(
        console,
        f"{describe_cost(plan.executed, times)} The plan runs {plan.fp4_fraction:.4f} of the linear FLOPs and "
        f"{plan.fp4_time_fraction:.4f} of their time in FP4{stages}.",
    )


def cost_table(plan: PrecisionPlan) -> Table:
    """Returns a table with a row per kind of linear and GEMM: shares of FLOPs and time, and time in each format."""
    times = plan.times
    assert times is not None
    reference = FORMATS[times.reference]
    table = new_table(f"Cost (time share: of the time in {reference.label}; ms: per micro-batch, over all blocks)")
    for heading in ("linear", "GEMM", "FLOP\nshare", "time\nshare", "time /\nFLOPs"):
        table.add_column(heading, justify="left" if heading in ("linear", "GEMM") else "right")
    for fmt in times.formats:
        table.add_column(f"{FORMATS[fmt].label}\nms", justify="right")
    for share in cost_shares(plan.executed, times):
        milliseconds = (f"{1e3 * share.seconds[fmt]:.4g}" for fmt in times.formats)
        shares = (f"{share.flops:.4f}", f"{share.time:.4f}", f"{share.ratio:.2f}")
        table.add_row(name_text(share.kind), share.gemm, *shares, *milliseconds)
    return table


def print_stages(plan: PrecisionPlan, console: Console, micro_batches: int | None = None) -> None:
    """Prints the stages and the pipeline's bubble; `micro_batches` as in `pipeline_model.pipeline_times`."""
    if not plan.is_share_known:
        say(console, f"The plan has {plan.describe()}.")
        return
    times, forward = pipeline_times(plan, micro_batches), forward_shares(plan)
    if len(plan.stages) == 1:
        of_forward = "" if forward is None else f", and {forward.fp4_fraction:.4f} of its forward ones"
        say(console, f"{plan.fp4_fraction:.4f} of the plan's linear FLOPs are in FP4{of_forward}.")
        return
    console.print(stage_table(plan))
    slowest = max(range(len(times.stages)), key=lambda index: times.stages[index].time)
    name, scale = _time_unit(times)
    unit = "measured"
    if not times.measured:
        unit = f"modelled, {_modelled(plan)}, 1 is all linears in {FORMATS[times.reference].label}"
    say(
        console,
        f"Pipeline of {times.micro_batches} micro-batches: stage {slowest} is the slowest, a step takes "
        f"{scale * times.step_time:.4g} ({name}), and {times.bubble:.4f} of it is bubble. Times are those of the "
        f"linears, forward and backward ({unit}). A stage's time is for one micro-batch; with m micro-batches, a step "
        "takes the sum over all stages plus (m - 1) times the slowest stage. Communication is not counted.",
    )


def stage_table(plan: PrecisionPlan) -> Table:
    """Returns a table of FP4 shares and predicted times by stage, for one micro-batch, forward and backward."""
    times = pipeline_times(plan)
    basis = f"modelled: {_modelled(plan)}"
    if times.measured and plan.measured is not None:
        basis = f"measured: {plan.measured.machine.device}"
    table = new_table(f"Stages ({basis})")
    unit, scale = _time_unit(times)
    columns = {"FP4 share\nof FLOPs": [*plan.stage_fp4_fractions, plan.fp4_fraction]}
    forward = forward_shares(plan)
    if forward is not None:
        columns["of forward\nFLOPs"] = [*forward.stage_fp4_fractions, forward.fp4_fraction]
    if plan.stage_fp4_time_fractions is not None and plan.fp4_time_fraction is not None:
        columns["of measured\ntime"] = [*plan.stage_fp4_time_fractions, plan.fp4_time_fraction]
    relative = [*(x.relative_time for x in times.stages), times.work / times.reference_work]
    columns[f"time /\nall in {FORMATS[times.reference].label}"] = relative
    for heading in ("stage", "layers", *columns, f"time\n{unit}"):
        table.add_column(heading, justify="right")
    names = [*map(str, range(len(plan.stages))), "all"]
    sizes = [*map(len, plan.stages), len(plan.assignment)]
    absolute = [*(x.time for x in times.stages), times.work]
    for name, size, time, *shares in zip(names, sizes, absolute, *columns.values(), strict=True):
        table.add_row(name, str(size), *(f"{share:.4f}" for share in shares), f"{scale * time:.4g}")
    return table


def _modelled(plan: PrecisionPlan) -> str:
    """Describes the speeds that the modelled times assume."""
    used = plan.formats - {REFERENCE.name}
    speeds = [f"{fmt.label} at {fmt.speed:g}x {REFERENCE.label}" for name, fmt in FORMATS.items() if name in used]
    return ", ".join(speeds) or f"all in {REFERENCE.label}"


def _time_unit(times: PipelineTimes) -> tuple[str, float]:
    """Returns the unit of displayed times, and the factor that converts `PipelineTimes` to it."""
    return ("ms", 1e3) if times.measured else (f"1: {FORMATS[times.reference].label}", 1.0)


def new_table(title: str) -> Table:
    # Without vertical lines and double padding, the nine columns of refreshes fit into 80 characters.
    shown = Text(printable(title))
    table = Table(title=shown, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.pad_edge = False
    return table


def say(console: Console, sentence: str, limit: int = _SENTENCE) -> None:
    """Prints a sentence that may quote a foreign file, with control characters escaped."""
    console.print(Text(printable(sentence, limit)))


def name_text(name: str) -> Text:
    """Returns a name for a table cell, which wraps if it is wider than its column."""
    return Text(printable(name, _NAME), overflow="fold")


def listed(items: Sequence[str]) -> str:
    """Joins the first items with commas, and counts the rest."""
    return ", ".join(items[:_MOST_ITEMS]) + (f", and {len(items) - _MOST_ITEMS:,} more" if items[_MOST_ITEMS:] else "")


def number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
