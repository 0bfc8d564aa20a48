"""Writes the section of a model card on how a model was trained, or on a plan, with tags and metadata."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping

from huggingface_hub import ModelCard

from ..config import changed_fields
from ..estimation.coverage import Coverage
from ..numerics.formats import FORMATS
from ..planning.plan import PrecisionPlan
from ..policies.target import describe_target
from ..records.run_folder import FOLDER
from ..shipped_files import REPOSITORY
from ..text import printable

PLAN_FILE = f"{FOLDER}/plan.json"
"""The plan in a repository."""
# The first lines of the two sections, and the last line of both.
_TRAINED, _PLAN = (f"<!-- snip-hf: {what}, written anew at every push -->" for what in ("the training", "the plan"))
_END = "<!-- snip-hf: end -->"
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Maximum length of a name.
_NAME = 60
# Kinds of uncovered weights that a card lists.
_MOST_KINDS = 8

_SECTION = """{begin}
{head}

| | |
|---|---|
{rows}

{tail}

The method is SNIP's, the software is [snip-hf]({repository}):

```bibtex
@article{{pan2026snip,
  title   = {{SNIP: An Adaptive Mixed Precision Framework for Subbyte Large Language Model Training}},
  author  = {{Pan, Yunjie and Yang, Yongyi and Yang, Hanmei and Mahlke, Scott}},
  journal = {{arXiv preprint arXiv:2602.01410}},
  year    = {{2026}}
}}
```
{end}
"""
_TRAINED_HEAD = """## How this model was trained

The linear layers inside the transformer blocks were trained in low precision (at the end: {formats}), following a plan
by snip-hf, a package for SNIP ([arXiv:2602.01410](https://arxiv.org/abs/2602.01410))."""
_TRAINED_TAIL = """This is an ordinary checkpoint: nothing in it is quantized, and it loads with plain `transformers`.
`{file}` has the plan, layer by layer, and `snip/history.jsonl` has its history. `snip_hf.load_plan` reads the plan of
this repository for your own run."""
_PLAN_HEAD = """## Precision plan

`{file}` lists the number format of each matrix product of the linear layers in training. It was made by snip-hf, a
package for SNIP ([arXiv:2602.01410](https://arxiv.org/abs/2602.01410))."""
_PLAN_TAIL = """```python
from snip_hf import SnipCallback, SnipConfig, load_plan

load_plan("{name}").save("plan.json")
callback = SnipCallback(SnipConfig(fixed_plan="plan.json"))  # trains in these formats from the first step
```"""
_CONFIG = """Fields of `SnipConfig` that differ from their defaults:

```json
{config}
```"""


def trained_section(plan: PrecisionPlan, coverage: Coverage | None, arithmetic: str, device: str | None) -> str:
    """Returns the section on how a model was trained, for readers who have never heard of SNIP.

    Args:
        plan: the plan in force.
        coverage: coverage of the model; None if unknown.
        arithmetic: how the products were computed (`Backend.arithmetic`).
        device: name of the GPU that the model was trained on.
    """
    used = {FORMATS[name] for formats in plan.assignment.values() for name in formats.values()}
    labels = ", ".join(format.label for format in sorted(used, key=lambda format: (format.bits, format.name)))
    rows = _plan_rows(plan) | ({} if coverage is None else _coverage_rows(plan, coverage)) | {"arithmetic": arithmetic}
    if device is not None:
        rows["trained on"] = as_text(device)
    return _section(_TRAINED, plan, _TRAINED_HEAD.format(formats=labels), rows, _TRAINED_TAIL.format(file=PLAN_FILE))


def plan_section(plan: PrecisionPlan, repository: str, base_model: str | None) -> str:
    """Returns the section on a plan in a repository, for a model on the Hub."""
    rows = {} if base_model is None else {"for the model": as_text(base_model)}
    rows |= {"layers": str(len(plan.assignment)), **_plan_rows(plan)}
    return _section(_PLAN, plan, _PLAN_HEAD.format(file=PLAN_FILE), rows, _PLAN_TAIL.format(name=repository))


def _section(begin: str, plan: PrecisionPlan, head: str, rows: Mapping[str, str], tail: str) -> str:
    if changed := changed_fields(plan.provenance.config or {}):
        tail = f"{_CONFIG.format(config=json.dumps(changed, indent=2))}\n\n{tail}"
    return _SECTION.format(
        begin=begin,
        head=head,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
        tail=tail,
        repository=REPOSITORY,
        end=_END,
    )


def model_tags(plan: PrecisionPlan) -> list[str]:
    """Returns the tags for the Hub: "snip-hf", "snip-plan", and with quantized formats these and
    "mixed-precision-training"."""
    in_plan = plan.formats
    low = sorted((x for x in in_plan if FORMATS[x].is_quantized), key=lambda name: (FORMATS[name].bits, name))
    return ["snip-hf", "snip-plan", *low, *(["mixed-precision-training"] if low else [])]


def new_card(title: str, library: str) -> str:
    """Returns a card without text."""
    return f"---\nlibrary_name: {library}\n---\n\n# {as_text(title)}\n"


def completed(card: str, section: str, tags: Iterable[str], base_model: str | None) -> str:
    """Returns a card with a section, tags and, unless it already names one, a base model.

    The section replaces its earlier version, or is appended. The rest of the text does not change; the metadata keep
    their values, but lose comments.

    Raises:
        ValueError: the card's metadata cannot be read.
    """
    earlier = re.compile(re.escape(section.splitlines()[0]) + r".*?" + re.escape(_END), re.DOTALL)
    # A function, because `subn` interprets backslashes in a replacement string.
    card, replaced = earlier.subn(lambda _: section.strip(), card, count=1)
    card = card if replaced else f"{card.rstrip()}\n\n{section}"
    try:
        parsed = ModelCard(card)
    except Exception as error:  # invalid YAML, or values that huggingface_hub does not expect
        raise ValueError(f"the metadata of README.md cannot be read: {error}.") from error
    present = parsed.data.get("tags") or []
    missing = [tag for tag in tags if tag not in present]
    if missing:
        parsed.data["tags"] = [*present, *missing]
    if base_model is not None and not parsed.data.get("base_model"):
        parsed.data["base_model"] = base_model
    return str(parsed.content)


def repository_name(name: object) -> str | None:
    """Returns the name if it can be a repository of the Hub; None for other names and for existing folders."""
    is_one = isinstance(name, str) and _REPOSITORY.fullmatch(name) and not os.path.isdir(name)
    return str(name) if is_one else None


def as_text(name: str) -> str:
    """Escapes Markdown and HTML in a name."""
    return re.sub(r"[\\`*\[\]<>&|!]", r"\\\g<0>", printable(name))


def _plan_rows(plan: PrecisionPlan) -> dict[str, str]:
    policy = printable(plan.provenance.policy, _NAME)
    origin = {"policy": plan.provenance.policy, "target_fp4_fraction": plan.provenance.target_fp4_fraction}
    return {
        "policy": f"`{policy}`",
        "target": describe_target({**origin, **(plan.provenance.config or {})}) or "none",
        "attained by the plan in force": f"{plan.describe()} (not a reduction of FLOPs)",
        "formats": _format_shares(plan),
    }


def _format_shares(plan: PrecisionPlan) -> str:
    """Returns the known share of each format in the FLOPs that plans decide on, least precise first."""
    totals: dict[str, float] = {}
    work = plan.executed
    for layer, formats in plan.assignment.items():
        for gemm, name in formats.items():
            totals[name] = totals.get(name, 0.0) + work[layer][gemm]
    whole = sum(totals.values())
    order = sorted(totals, key=lambda name: (FORMATS[name].bits, name))
    if not plan.is_share_known:
        return ", ".join(FORMATS[name].label for name in order)
    return ", ".join(f"{FORMATS[name].label} {totals[name] / whole:.1%}" for name in order) + " of the linear FLOPs"


def _coverage_rows(plan: PrecisionPlan, coverage: Coverage) -> dict[str, str]:
    rest = [f"{as_text(kind)} {share:.1%} ({as_text(reason)})" for (kind, reason), share in coverage.by_kind().items()]
    return {
        "coverage": f"the plan decides on {coverage.share:.1%} of {coverage.counted}, which makes "
        f"{coverage.share * plan.fp4_fraction:.1%} of all of them in FP4",
        **({"not covered": "; ".join(rest[:_MOST_KINDS])} if rest else {}),
    }
