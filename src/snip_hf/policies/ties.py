"""Ties: the sibling layers, or their GEMMs, that share a format (`SnipConfig.ties`)."""

from __future__ import annotations

from ..config import DoesNotFit, SnipConfig
from ..numerics.gemms import GEMMS
from .setting import Setting


def names_of(config: SnipConfig) -> tuple[tuple[str, ...], ...]:
    """Returns the last names that share a format.

    Raises:
        ValueError: they are not found yet.
    """
    if isinstance(config.ties, str):
        raise ValueError(
            f"ties={config.ties!r} has to be found in the model first, which a run does when it begins. Name the ties "
            "here."
        )
    return config.ties


def check_ties(setting: Setting) -> None:
    """Refuses ties that could not hold.

    Raises:
        DoesNotFit: a name that no swapped layer ends in, or siblings in different stages.
    """
    stage_of = {layer: index for index, stage in enumerate(setting.stages) for layer in stage}
    last_names = {layer.rpartition(".")[2] for layer in stage_of}
    for names in names_of(setting.config):
        for name in names:
            if name not in last_names:
                raise DoesNotFit(
                    f"ties: no swapped layer's last name is {name!r}; the last names are "
                    f"{', '.join(sorted(last_names))}."
                )
        stages: dict[str, int] = {}
        for layer, stage in stage_of.items():
            parent, _, last = layer.rpartition(".")
            if last in names and stages.setdefault(parent, stage) != stage:
                raise DoesNotFit(
                    f"ties: the tied layers of {parent!r} are in stages {stages[parent]} and {stage}; expected all of "
                    "them in one stage."
                )


def siblings(setting: Setting) -> list[list[str]]:
    """Returns the lists of layers that share their formats: siblings whose last names `config.ties` puts together."""
    tied: list[list[str]] = []
    for stage in setting.stages:
        for names in names_of(setting.config):
            parents: dict[str, list[str]] = {}
            for layer in stage:
                parent, _, last = layer.rpartition(".")
                if last in names:
                    parents.setdefault(parent, []).append(layer)
            tied += [layers for layers in parents.values() if len(layers) > 1]
    return tied


def tied_groups(setting: Setting) -> list[list[str]]:
    """Returns the lists of groups that must share a format."""
    if setting.config.granularity == "layer":
        return siblings(setting)
    # A sibling whose weight is frozen has one GEMM less than the others.
    tied = [
        [f"{layer}:{gemm}" for layer in layers if gemm in setting.decided(layer)]
        for layers in siblings(setting)
        for gemm in GEMMS
    ]
    return [groups for groups in tied if len(groups) > 1]
