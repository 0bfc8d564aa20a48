"""Refusals of ranks that differ in what all of a run must have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config import SnipConfig
from ...layers.layer import SnipLayer
from ...parallel.ranks import Attempt, Processes, Ranks
from ...planning.plan import PrecisionPlan
from ..fingerprint import fingerprint

# Fields that do not decide the course of a run: they may differ on resume, and between ranks.
_FREE = ("solver_time_limit", "rank_timeout", "backend", "timing_file")


def differences(config: SnipConfig, other: Mapping[str, Any]) -> list[str]:
    """Returns the names of the deciding fields that another configuration, as a dict, has otherwise."""
    own = config.to_dict()
    return [name for name in own if name not in _FREE and other.get(name) != own[name]]


def check_pipeline(stages: Ranks, data: Ranks, everyone: Ranks) -> None:
    """Refuses process groups of a pipeline that do not share out all processes.

    Args:
        stages: those that hold the stages of one model.
        data: those that hold the same stage.
        everyone: all of the run.

    Raises:
        ValueError: names the three sizes.
    """
    if stages.size * data.size != everyone.size:
        raise ValueError(
            f"The pipeline has {stages.size} processes and the data {data.size}, but the run has {everyone.size}; "
            "expected their product. Give Pipeline(group=..., data=...) the process groups of this rank."
        )


def check_configs(config: SnipConfig, everyone: Ranks) -> None:
    """Refuses ranks with different configurations. Collective.

    Raises:
        ValueError: names another rank and the fields, on all ranks.
    """
    for rank, other in enumerate(everyone.gather(config.to_dict())):
        if different := differences(config, other):
            raise ValueError(
                f"This rank's configuration is not that of rank {rank}: they differ in {', '.join(different)}. "
                "Expected the same SnipConfig on all ranks."
            )


def check_alike(
    layers: Mapping[str, SnipLayer], plan: PrecisionPlan, max_steps: int | None, processes: Processes
) -> None:
    """Refuses ranks that swapped different layers, or start with different plans or lengths of training. Collective.

    Raises:
        ValueError: says which ranks differ, and in what, on all ranks.
    """
    attempt = Attempt()
    with attempt:
        _check_layers(layers, processes.data)
    processes.everyone.agree(attempt.error)
    check_plans(plan, processes.everyone)
    steps = processes.everyone.gather(max_steps)
    if others := [rank for rank, given in enumerate(steps) if given != steps[0]]:
        raise ValueError(
            f"max_steps is {steps[others[0]]} on rank {others[0]} and {steps[0]} on rank 0; expected the same on all "
            "ranks, since it decides which refreshes are run."
        )


def check_plans(plan: PrecisionPlan, everyone: Ranks) -> None:
    """Refuses ranks with different plans, of different files for example. Collective.

    Raises:
        ValueError: names the ranks and a layer, on all ranks.
    """
    assignment = {layer: dict(formats) for layer, formats in plan.assignment.items()}
    others = _unlike_first(assignment, everyone)
    if not others:
        return
    plans = everyone.gather(assignment)
    mine, theirs = plans[0], plans[others[0]]
    layer = next(name for name in [*mine, *theirs] if mine.get(name) != theirs.get(name))
    raise ValueError(
        f"{_names(others)} another plan than rank 0: layer {layer!r} runs in {_formats(theirs.get(layer))} on rank "
        f"{others[0]} and in {_formats(mine.get(layer))} on rank 0. Expected one plan on all ranks: let all of them "
        "read the same file."
    )


def _check_layers(layers: Mapping[str, SnipLayer], data: Ranks) -> None:
    found = {
        name: f"{layer.out_features}x{layer.in_features}, {'trained' if layer.weight.requires_grad else 'frozen'}"
        for name, layer in layers.items()
    }
    others = _unlike_first(list(found.items()), data)
    if not others:
        return
    models = data.gather(found)
    mine, theirs = models[0], models[others[0]]
    unlike = [name for name in dict.fromkeys([*mine, *theirs]) if mine.get(name) != theirs.get(name)]
    layer = (unlike or list(mine))[0]
    raise ValueError(
        f"{_names(others)} other swapped layers than rank 0, of {len(theirs)} against {len(mine)}: {layer!r} is "
        f"({theirs.get(layer, 'not swapped')}) on rank {others[0]} and ({mine.get(layer, 'not swapped')}) on rank 0"
        f"{'' if unlike else '; they come in another order'}. Expected the same model, frozen and swapped alike, on "
        "all ranks that share it."
    )


def _unlike_first(value: Any, ranks: Ranks) -> list[int]:
    """Returns the ranks whose value is not that of the first one; all of them know."""
    digests = ranks.gather(fingerprint(value))
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]]


def _names(ranks: list[int]) -> str:
    numbers = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"Rank {numbers} has" if len(ranks) == 1 else f"Ranks {numbers} have"


def _formats(formats: Mapping[str, str] | None) -> str:
    return "no format" if formats is None else "/".join(formats.values())
