"""Export of a plan to another library: the settings there that say what the plan says, or the nearest ones.

`export_targets` holds the targets as data. A plan that a target cannot express is refused, with the reason for each
module, or rounded to the nearest plan that it can express.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..layers.experts import looks_like_experts
from ..layers.selection import modules_of_layers
from ..layers.state import without_group
from ..numerics.formats import FORMATS, UNQUANTIZED
from ..numerics.gemms import CONTRACTIONS, GEMMS, OPERANDS
from ..planning.plan import PrecisionPlan
from .export_targets import TARGETS, Setting, Target

# Targets pass over a module that is no linear, so that the file would promise what does not happen.
_UNKNOWN_CLASS = (
    "by its name it is a projection of experts, which is no nn.Linear; name the model with --model, so that its class "
    "is known, and add --nearest to leave experts in high precision"
)


class NotExpressible(ValueError):
    """A target cannot say what a plan says."""

    def __init__(self, target: str, reasons: Mapping[str, str], nearest: bool) -> None:
        self.reasons = dict(reasons)
        """Layer, or module of the target -> why."""
        advice = "" if nearest else " --nearest rounds what it can."
        super().__init__(
            f"The target {target!r} cannot express the plan: it lacks the above for {len(reasons)} modules.{advice}"
        )


@dataclass(frozen=True)
class Export:
    """A plan in the words of a target."""

    text: str
    """Of the file."""
    plan: PrecisionPlan
    """What the file says: the plan that was exported, or the nearest one that the target can express."""
    changes: Mapping[str, Sequence[str]]
    """What differs from the plan that was given, of the GEMMs that run: "layer:gemm" -> (format given, format now)."""
    coarser: float
    """Share (0..1) of the FLOPs that have an operand of fewer bits than in the plan that was given."""
    unfit: Mapping[str, str]
    """Layers left in high precision because the target cannot set them as the plan says -> why."""
    unfit_share: float
    """Share (0..1) of the FLOPs that are theirs."""


def export_plan(
    plan: PrecisionPlan,
    target: str,
    nearest: bool = False,
    outside: Sequence[str] = ("lm_head",),
    model: nn.Module | None = None,
) -> Export:
    """Returns a plan in the words of a target.

    With `nearest` each format that the target lacks becomes the one with the fewest bits that has no fewer in any
    operand, and each module gets the setting that agrees with the plan in most FLOPs; of equally near ones, the one
    with the most bits. Layers that the target cannot set so, for their size for example, stay in high precision.

    Args:
        plan: the plan.
        target: a name in `TARGETS`.
        nearest: round what cannot be expressed.
        outside: linear layers of the model that are not in the plan.
        model: the plan's model, not converted, on any device; None: sizes are not known, and not checked.

    Raises:
        NotExpressible: without `nearest`, a module has no setting that says what the plan says, or a layer does not fit
            its setting; with it or without, a layer's name means nothing to the target, or is that of experts while
            the model is not known.
        ValueError: an unknown target.
    """
    there = TARGETS[TARGETS.checked(target, "--to")]
    units, reasons = _units(plan, there)
    if model is None:
        reasons = {layer: _UNKNOWN_CLASS for layer in plan.assignment if looks_like_experts(layer)} | reasons
    chosen: dict[str, Setting] = {}
    unfit: dict[str, str] = {}
    expected = _expected_parts(units, there)
    modules = None if model is None else modules_of_layers(model)
    for module, layers in units.items():
        missing = sorted(expected[_kind(module)] - _parts(layers))
        agrees, setting = _nearest_setting(plan, there, layers, nearest, bool(missing))
        if not nearest and (missing or not agrees):
            # What rounding would not mend, such as a layer's class, is said with it.
            rounded = _nearest_setting(plan, there, layers, True, bool(missing))[1]
            obstacles = _misfits(there, rounded, layers, modules).values()
            reasons[module] = "; ".join([_reason(plan, there, layers, missing), *dict.fromkeys(obstacles)])
        misfits = _misfits(there, setting, layers, modules)
        unfit |= misfits
        chosen[module] = _unquantized_setting(there) if misfits else setting
    if not nearest:
        reasons |= {layer: why for layer, why in unfit.items() if there.module_of(layer) not in reasons}
    if reasons:
        raise NotExpressible(target, reasons, nearest)
    exported = replace(
        plan,
        assignment={
            layer: dict(zip(GEMMS, chosen[module].formats, strict=True))
            for module, layers in units.items()
            for layer in layers
        },
    )
    changes = plan.changes(exported)
    share = _share(plan, [f"{layer}:{gemm}" for layer in unfit for gemm in plan.flops[layer]])
    return Export(there.write(chosen, outside), exported, changes, _coarser(plan, changes), unfit, share)


def _misfits(
    target: Target, setting: Setting, layers: Sequence[str], modules: Mapping[str, nn.Module] | None
) -> dict[str, str]:
    """Returns which of these layers the target cannot set so, and why; {} where the model's modules are not known."""
    if modules is None:
        return {}
    found = ((layer, target.unfit(setting, modules.get(without_group(layer)))) for layer in layers)
    return {layer: why for layer, why in found if why is not None}


def _unquantized_setting(target: Target) -> Setting:
    return next(setting for setting in target.settings if set(setting.formats) == {UNQUANTIZED.name})


def _units(plan: PrecisionPlan, target: Target) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Returns the modules of the target with the layers that each consists of, and why others have none."""
    units: dict[str, list[str]] = {}
    unknown: dict[str, str] = {}
    for layer in plan.assignment:
        module = target.module_of(layer)
        if module is None:
            unknown[layer] = "no module there is known for this name"
        elif _parts([layer]) & _parts(units.get(module, ())):
            unknown[layer] = f"{module} is already that of {units[module][0]}"
        else:
            units.setdefault(module, []).append(layer)
    return units, unknown


def _kind(module: str) -> str:
    """Returns the name of a module without the number of its block."""
    return ".".join(part for part in module.split(".") if not part.isdigit())


def _parts(layers: Iterable[str]) -> set[str]:
    return {layer.rsplit(".", 1)[-1] for layer in layers}


def _expected_parts(units: Mapping[str, Sequence[str]], target: Target) -> dict[str, set[str]]:
    """Returns, by kind of module, the layers that make up one: those of all blocks, and what only comes together."""
    expected: dict[str, set[str]] = {}
    for module, layers in units.items():
        expected.setdefault(_kind(module), set()).update(_parts(layers))
    return {kind: parts | target.together if parts & target.together else parts for kind, parts in expected.items()}


def _nearest_setting(
    plan: PrecisionPlan, target: Target, layers: Sequence[str], nearest: bool, is_partial: bool
) -> tuple[bool, Setting]:
    """Returns whether a setting says all that the plan says, and the one that agrees with it in most FLOPs."""
    offered = list(dict.fromkeys(name for setting in target.settings for name in setting.formats))

    def wanted(layer: str, gemm: str) -> str:
        # The part of a module that is not in the plan is not quantized, so neither is the rest of it.
        name = UNQUANTIZED.name if is_partial else plan.assignment[layer][gemm]
        return _stand_in(name, offered) if nearest else name

    seen: list[tuple[int, str, float]] = []
    unseen: list[tuple[int, str, float]] = []
    for layer in layers:
        # What a setting can say does not depend on tokens: a layer that saw none counts with its FLOPs per token, where
        # layers that saw some agree equally.
        is_seen = any(number > 0 for number in plan.executed[layer].values())
        rows, work = (seen, plan.executed[layer]) if is_seen else (unseen, plan.flops[layer])
        rows += [(GEMMS.index(gemm), wanted(layer, gemm), number) for gemm, number in work.items()]

    def cost(setting: Setting) -> tuple[float, float]:
        by_tokens, without = (
            math.fsum(number for column, name, number in rows if setting.formats[column] != name)
            for rows in (seen, unseen)
        )
        return by_tokens, without

    best = min(target.settings, key=lambda setting: (cost(setting), -sum(sum(_bits(x)) for x in setting.formats)))
    return not any(cost(best)), best


def _stand_in(name: str, offered: Sequence[str]) -> str:
    """Returns the format for one that a target lacks: the fewest bits that are no fewer in any operand, and scales of
    its kind."""
    if name in offered:
        return name
    least = _bits(name)
    enough = [x for x in offered if all(bits >= low for bits, low in zip(_bits(x), least, strict=True))]
    return min(enough or [UNQUANTIZED.name], key=lambda x: (sum(_bits(x)), FORMATS[x].scale != FORMATS[name].scale))


def _bits(name: str) -> list[int]:
    """Returns the bits of an element of each operand of a format, those of BF16 where the operand is left alone."""
    format = FORMATS[name]
    return [format.bits if format.operand(x).quantized else UNQUANTIZED.bits for x in OPERANDS]


def _reason(plan: PrecisionPlan, target: Target, layers: Sequence[str], missing: Sequence[str]) -> str:
    """Returns why no setting says what the plan says of these layers, which are one module of the target."""
    if missing:
        return f"{', '.join(missing)} is a part of the module that the plan leaves in {UNQUANTIZED.name}"
    offered = {name for setting in target.settings for name in setting.formats}
    rows = [tuple(plan.assignment[layer].values()) for layer in layers]
    lacking = dict.fromkeys(name for row in rows for name in row if name not in offered)
    if lacking:
        return f"{', '.join(lacking)} is no format there (it has {', '.join(sorted(offered))})"
    if len(set(rows)) > 1:
        said = "; ".join(f"{x.rsplit('.', 1)[-1]} {'/'.join(row)}" for x, row in zip(layers, rows, strict=True))
        return f"its parts differ in the plan: {said}"
    return f"{', '.join(GEMMS)} cannot be {', '.join(rows[0])} in one module"


def _flops(plan: PrecisionPlan, place: str) -> float:
    layer, gemm = place.rsplit(":", 1)
    return plan.flops[layer][gemm]


def _coarser(plan: PrecisionPlan, changes: Mapping[str, Sequence[str]]) -> float:
    def is_coarser(gemm: str, old: str, new: str) -> bool:
        before, after = (dict(zip(OPERANDS, _bits(name), strict=True)) for name in (old, new))
        return any(after[operand] < before[operand] for operand, _ in CONTRACTIONS[gemm])

    fewer = [place for place, (old, new) in changes.items() if is_coarser(place.rsplit(":", 1)[1], old, new)]
    return _share(plan, fewer)


def _share(plan: PrecisionPlan, places: Iterable[str]) -> float:
    """Returns the share of the plan's FLOPs that these GEMMs ("layer:gemm") have."""
    work = plan.executed
    total = math.fsum(number for row in work.values() for number in row.values())
    found = (place.rsplit(":", 1) for place in places)
    return math.fsum(work[layer][gemm] for layer, gemm in found) / total
