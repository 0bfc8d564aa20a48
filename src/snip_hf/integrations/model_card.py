"""What a model card says of how a model was trained: the section, its figures, and the tags."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import POLICIES
from ..estimation.coverage import Coverage
from ..extras import EXTRAS
from ..numerics.formats import FORMATS
from ..planning.forward_shares import forward_shares
from ..planning.plan import PrecisionPlan
from ..records.coverage import Counted
from ..records.events import Event, Refresh
from ..records.load import load_run
from ..records.run_folder import FOLDER
from ..schedule_checks import read_shares, shares_text
from ..shipped_files import REPOSITORY
from ..text import printable

logger = logging.getLogger(__name__)

MARKS = ("<!-- snip-hf: this section is written anew at every push -->", "<!-- snip-hf: end -->")
"""What a section begins and ends with."""
PLAN_TAG = "snip-plan"
"""Tag of a repository that has a plan, to search by."""
# Figures that `snip-hf report` draws too, and what they show.
_FIGURES = {
    "plan.png": "Formats of the layers over the run",
    "divergence.png": "Divergences of the layers at each probe",
    "losses.png": "Losses over the run, with a mark wherever a plan came into force",
}
# Characters of a name.
_NAME = 60
# Kinds of weights that a card names.
_MOST_KINDS = 8
_NOT_CODE = str.maketrans("", "", "`|")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the record of a run does not hold of its training."""

    arithmetic: str
    """How the products were computed (`Backend.arithmetic`)."""
    device: str | None = None
    """What the model was trained on, e.g. a GPU's name."""
    figures: Sequence[str] = ()
    """Files of figures in OUTPUT/snip."""
    log: Sequence[Mapping[str, Any]] = ()
    """The Trainer's log (`state.log_history`)."""


def model_tags(plan: PrecisionPlan) -> list[str]:
    """Tags for the Hub: "snip-hf", "snip-plan", the low formats and, if there are any, "mixed-precision-training"."""
    in_plan = {name for formats in plan.assignment.values() for name in formats.values()}
    low = sorted((x for x in in_plan if FORMATS[x].is_quantized), key=lambda name: (FORMATS[name].bits, name))
    return ["snip-hf", PLAN_TAG, *low, *(["mixed-precision-training"] if low else [])]


def device_name(model: nn.Module) -> str | None:
    """Returns the name of the GPU that a model is on; None for a CPU or a model without parameters."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def draw_figures(output_dir: Path) -> list[str]:
    """Draws a run's figures into OUTPUT/snip, unless they are there and nothing is newer; returns the files' names.

    Without Matplotlib, or where the record is broken, there are none; the log says why.
    """
    if missing := EXTRAS["report"].missing:
        logger.info("The model card has no figures without %s: %s", ", ".join(missing), EXTRAS["report"].command)
        return []
    from ..reporting.figures import write_figures

    folder = output_dir / FOLDER
    shown = [folder / "plan.json", folder / "history.jsonl", output_dir / "trainer_state.json"]
    shown += output_dir.glob("checkpoint-*/trainer_state.json")
    try:
        latest = max(path.stat().st_mtime_ns for path in shown if path.exists())
        present = [folder / name for name in _FIGURES if (folder / name).is_file()]
        if present and min(path.stat().st_mtime_ns for path in present) > latest:
            return [path.name for path in present]
        return [path.name for path in write_figures(load_run(output_dir)) if path.name in _FIGURES]
    except (OSError, ValueError) as error:
        logger.warning("The model card has no figures: %s", printable(error, 1000))
        return []


def model_card_section(plan: PrecisionPlan, history: Iterable[Event], training: Training) -> str:
    """Markdown section on how a model was trained, for a reader who has never heard of SNIP.

    Args:
        plan: the plan in force.
        history: the events of the run.
        training: the rest.
    """
    # Not kept: a history may be long.
    refreshes, applied, seconds = 0, 0, {"probe": 0.0, "waited": 0.0}
    covered: Coverage | None = None
    for event in history:
        if isinstance(event, Refresh):
            refreshes += 1
            applied += event.applied_step is not None
            seconds = {part: total + (event.seconds.get(part) or 0.0) for part, total in seconds.items()}
        elif isinstance(event, Counted):
            covered = event.coverage
    rows = {
        **plan_rows(plan, covered),
        "refreshes of the plan": f"{applied} applied of {refreshes}",
        **_speed(training.log),
        "time for refreshes": f"{seconds['probe']:.1f} s in probes, {seconds['waited']:.1f} s waiting for the solver",
        "arithmetic": training.arithmetic,
        **({} if training.device is None else {"trained on": as_text(training.device)}),
    }
    if not any(seconds.values()):
        del rows["time for refreshes"]
    figures = [f"![{text}]({name})" for name, text in _FIGURES.items() if name in training.figures]
    parts = [_HEAD.format(formats=_formats(plan)), as_table(rows), *figures, _TAIL, CITATION]
    return "{}\n{}\n{}\n".format(MARKS[0], "\n\n".join(parts), MARKS[1])


def with_figures_from_the_top(section: str) -> str:
    """Returns a section of `snip/README.md` with links to the figures that work one folder above."""
    return re.sub(rf"\]\(({'|'.join(map(re.escape, _FIGURES))})\)", rf"]({FOLDER}/\1)", section)


def plan_rows(plan: PrecisionPlan, covered: Coverage | None = None) -> dict[str, str]:
    """Returns what a card's table says of a plan."""
    return {
        "policy": _as_code(plan.provenance.policy),
        "target": _target(plan),
        "attained by the plan in force": _attained(plan),
        "formats": _format_shares(plan),
        **({} if covered is None else _covered(covered, plan)),
    }


def as_table(rows: Mapping[str, str]) -> str:
    return "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in rows.items())


_HEAD = """## How this model was trained

The linear layers inside the transformer blocks were trained in low precision (at the end: {formats}), as a plan says.
The plan was made by snip-hf, a package for SNIP ([arXiv:2602.01410](https://arxiv.org/abs/2602.01410))."""

_TAIL = """This is an ordinary checkpoint: nothing in it is quantized, and it loads with plain `transformers`.
The plan, layer by layer, is in `snip/plan.json`, its history in `snip/history.jsonl`. `snip_hf.load_plan` reads the
plan of this repository, for a run of your own."""

CITATION = f"""The method is SNIP's, the software is [snip-hf]({REPOSITORY}):

```bibtex
@article{{pan2026snip,
  title   = {{SNIP: An Adaptive Mixed Precision Framework for Subbyte Large Language Model Training}},
  author  = {{Pan, Yunjie and Yang, Yongyi and Yang, Hanmei and Mahlke, Scott}},
  journal = {{arXiv preprint arXiv:2602.01410}},
  year    = {{2026}}
}}
```"""


def _speed(log: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns the speed of a training that has ended, as the Trainer logged it; nothing before."""
    for entry in reversed(log):
        steps, seconds = entry.get("train_steps_per_second"), entry.get("train_runtime")
        if isinstance(steps, int | float) and isinstance(seconds, int | float):
            samples = entry.get("train_samples_per_second")
            of_samples = f" and {_rate(samples)} samples" if isinstance(samples, int | float) else ""
            speed = f"{_rate(steps)} steps{of_samples} per second, in {seconds:.1f} s with refreshes"
            return {"speed of the training": speed}
    return {}


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _format_shares(plan: PrecisionPlan) -> str:
    """Returns the share of each format in the FLOPs that plans decide on, the least precise first."""
    totals: dict[str, float] = {}
    work = plan.executed
    for layer, formats in plan.assignment.items():
        for gemm, name in formats.items():
            totals[name] = totals.get(name, 0.0) + work[layer][gemm]
    whole = sum(totals.values())
    order = sorted(totals, key=lambda name: (FORMATS[name].bits, name))
    return ", ".join(f"{FORMATS[name].label} {totals[name] / whole:.1%}" for name in order) + " of the linear FLOPs"


def _formats(plan: PrecisionPlan) -> str:
    """Returns the labels of the formats of a plan, the least precise first."""
    used = {FORMATS[name] for formats in plan.assignment.values() for name in formats.values()}
    return ", ".join(format.label for format in sorted(used, key=lambda format: (format.bits, format.name)))


def _as_code(name: str) -> str:
    """Returns a name in a cell of a table, where nothing of it is Markdown or HTML."""
    # No escape works within backquotes; the two characters that end them, or the cell, are left out.
    return f"`{printable(name, _NAME).translate(_NOT_CODE)}`"


def as_text(name: str) -> str:
    """Returns a name in a line of text, where nothing of it is Markdown or HTML."""
    return re.sub(r"[\\`*\[\]<>&|!]", r"\\\g<0>", printable(name))


def _target(plan: PrecisionPlan) -> str:
    fraction, config = plan.provenance.target_fp4_fraction, plan.provenance.config or {}
    speedup = config.get("target_linear_speedup")
    policy = POLICIES.get(plan.provenance.policy)
    if policy is not None and not policy.aims_at_share:
        return "none"
    if isinstance(speedup, float | int):
        return f"linears at {speedup:g} times BF16's speed or more"
    if fraction is None:
        return "none"
    of = "the linear FLOPs" if forward_shares(plan) is None else "the forward GEMMs' FLOPs"
    text = shares_text(read_shares(config.get("target_fp4_fraction")) or fraction, ".1%")
    return f"at least {text} of {of} in FP4"


def _covered(found: Coverage, plan: PrecisionPlan) -> dict[str, str]:
    """Returns what the plan covers of the model, and what it does not and why."""
    rest = [f"{as_text(kind)} {share:.1%} ({as_text(reason)})" for (kind, reason), share in found.by_kind().items()]
    return {
        "coverage": f"the plan decides on {found.share:.1%} of the model's matmul FLOPs (output head and attention "
        f"products aside), which makes {found.share * plan.fp4_fraction:.1%} of all of them in FP4",
        **({"not covered": "; ".join(rest[:_MOST_KINDS])} if rest else {}),
    }


def _attained(plan: PrecisionPlan) -> str:
    if not plan.is_share_known:
        return "an FP4 share that is not known (no micro-batch was counted, and experts do not see every token)"
    text = f"{plan.fp4_fraction:.1%} of the linear FLOPs in FP4 (not a reduction of FLOPs)"
    forward = forward_shares(plan)
    if forward is not None:
        text = f"{text}, {forward.fp4_fraction:.1%} of the forward GEMMs alone"
    speedup = plan.linear_speedup()
    if speedup is not None:
        text = f"{text}, linears at {speedup:.2f} times BF16's speed"
    if len(plan.stages) == 1:
        return text
    return f"{text}; {min(plan.stage_fp4_fractions):.1%} or more in each of {len(plan.stages)} stages"
