"""Linears that receive the same tensor, found by a forward pass of the model that computes nothing.

Tensors of the pass have shapes and no values (torch's fake tensors): it takes no memory, draws no random numbers and
leaves no trace. A model that cannot run so is searched for names instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ..layers.layer import Dispatch, ForwardRecorder, SnipLayer
from ..layers.state import snip_linears
from ..numerics.random_state import RandomState
from .passes import stand_in, traceless

logger = logging.getLogger(__name__)

Ties = tuple[tuple[str, ...], ...]
# Last names of linears that take the same input, in most families.
_BY_NAME: Ties = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_LENGTH = 8


def find_ties(model: nn.Module) -> Ties:
    """Returns the last names of siblings that receive the same tensor in every block, as `SnipConfig.ties` has them.

    Args:
        model: a converted causal LM, without wrappers.
    """
    layers = snip_linears(model)
    try:
        groups = _groups(model, layers)
    except Exception as error:
        ties = tuple(tie for tie in _BY_NAME if all(any(_last(name) == one for name in layers) for one in tie))
        logger.info(
            "snip-hf: ties are those of names, %s, since the model does not run without values (%s: %s).",
            ties or "none",
            type(error).__name__,
            str(error)[:200],
        )
        return ties
    found: dict[tuple[str, ...], None] = {}
    for group in groups:
        siblings: dict[str, list[str]] = {}
        for name in group:
            siblings.setdefault(name.rpartition(".")[0], []).append(_last(name))
        found |= {tuple(names): None for names in siblings.values() if len(names) > 1}
    return _consistent(list(found), layers)


def _groups(model: nn.Module, layers: Mapping[str, SnipLayer]) -> list[list[str]]:
    """Returns the names of the layers that are called once, by the tensor that they receive."""
    calls: list[tuple[str, Tensor]] = []  # Held, so that no other tensor gets the place of one.
    before = RandomState.now()
    try:
        for name, layer in layers.items():
            layer.snip_recorder = _noting(name, calls)
        with traceless(model), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            stand_in(model, {})  # also for buffers, which the model may write to
            ids = torch.zeros(1, _LENGTH, dtype=torch.long, device=next(model.parameters()).device)
            model._call_impl(input_ids=ids)
    finally:
        before.restore()
        for layer in layers.values():
            layer.snip_recorder = None
    names = [name for name, _ in calls]
    groups: dict[int, list[str]] = {}
    for name, tensor in calls:
        if names.count(name) == 1:
            groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _noting(name: str, calls: list[tuple[str, Tensor]]) -> ForwardRecorder:
    def forward(layer: SnipLayer, input: Tensor, dispatch: Dispatch | None) -> Tensor:
        calls.append((name, input))
        return input.new_empty(*input.shape[:-1], layer.out_features)

    return forward


def _consistent(ties: list[tuple[str, ...]], layers: Mapping[str, SnipLayer]) -> Ties:
    """Returns those ties whose names are tied alike wherever they occur."""
    parents: dict[str, set[str]] = {}
    for name in layers:
        parents.setdefault(name.rpartition(".")[0], set()).add(_last(name))

    def is_everywhere(tie: set[str]) -> bool:
        others = [set(other) for other in ties if set(other) != tie]
        return all(tie.isdisjoint(other) for other in others) and all(
            tie <= names or tie.isdisjoint(names) for names in parents.values()
        )

    return tuple(tie for tie in ties if is_everywhere(set(tie)))


def _last(name: str) -> str:
    return name.rpartition(".")[2]
