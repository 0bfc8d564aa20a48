"""Runs the reference model of a preference loss in the formats of the trained model.

TRL keeps the reference in `trainer.ref_model`. In equal formats, both models return equal log-probabilities as long as
their weights are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import Trainer

from ..config import SnipConfig
from ..kernels.backend import BACKENDS
from ..layers.convert import convert_model, restore_model
from ..layers.state import snip_linears
from ..numerics.formats import UNQUANTIZED
from ..numerics.gemms import GEMMS
from ..parallel.sharding import deepspeed_engine, is_fully_sharded, unwrap
from ..planning.plan import PrecisionPlan
from ..training.controller import SnipController

AS_POLICY, HIGH = "policy", "high"
_ADVICE = f"Use SnipCallback(..., reference={HIGH!r})."


def check_reference(reference: Any) -> None:
    """Raises ValueError for an unknown option."""
    if reference not in (AS_POLICY, HIGH):
        raise ValueError(
            f"reference={reference!r} is not known; expected {AS_POLICY!r} (the arithmetic of the trained model) or "
            f"{HIGH!r} (high precision)."
        )


class ReferenceModel:
    """A reference model that runs in the formats of the plan in force.

    Args:
        model: the reference model.
        config: the config of the run.
        controller: the controller, which has the plan.

    Raises:
        ValueError: its layers differ from those of the trained model, or it is sharded.
    """

    def __init__(self, model: nn.Module, config: SnipConfig, controller: SnipController) -> None:
        if is_fully_sharded(model) or deepspeed_engine(model) is not None:
            raise ValueError(
                "The reference model is sharded by FSDP2 or DeepSpeed; only a whole model can run in the formats of "
                f"the trained model. {_ADVICE}"
            )
        self._model = model = unwrap(model)
        convert_model(model, config)
        self._layers = snip_linears(model)
        own = snip_linears(controller.model)
        if other := [name for name in {**own, **self._layers} if _shape(own, name) != _shape(self._layers, name)]:
            restore_model(model)
            raise ValueError(
                f"The layers of the reference model differ from those of the trained model: {other[0]!r} is "
                f"{_shape(self._layers, other[0])} in the reference and {_shape(own, other[0])} in the trained "
                f"model. {_ADVICE}"
            )
        for layer in self._layers.values():
            layer.use_backend(BACKENDS[controller.backend])
        self._controller = controller
        self._applied: PrecisionPlan | None = None
        self.follow()

    def follow(self) -> None:
        """Sets the layers of the reference to the formats of the plan in force."""
        plan = self._controller.plan
        if plan is not self._applied:
            for name, layer in self._layers.items():
                layer.set_formats(plan.formats_of(name))
            self._applied = plan

    def restore(self) -> None:
        """Restores the plain layers of the reference."""
        restore_model(self._model)

    @contextmanager
    def unquantized(self) -> Iterator[None]:
        """Runs the reference in high precision inside the context, as for the passes of a probe."""
        try:
            for layer in self._layers.values():
                layer.set_formats(dict.fromkeys(GEMMS, UNQUANTIZED.name))
            yield
        finally:
            self._applied = None
            self.follow()


def find_reference(
    trainer: Trainer, option: str, config: SnipConfig, controller: SnipController
) -> ReferenceModel | None:
    """Makes the reference model of a Trainer follow the plan; returns None without one, or if it stays plain.

    Args:
        trainer: the Trainer, perhaps with a `ref_model`.
        option: "policy" or "high".
        config: the config of the run.
        controller: the controller of the trained model.

    Raises:
        ValueError: the option does not fit the reference.
    """
    if not hasattr(trainer, "ref_model"):
        return None
    model: nn.Module | None = getattr(trainer, "ref_model", None)
    if option == AS_POLICY:
        return None if model is None else ReferenceModel(model, config, controller)
    if model is not None:
        restore_model(unwrap(model))  # it may be a copy of a converted model
    elif getattr(controller.model, "peft_config", None) is not None:
        raise ValueError(
            f"reference={HIGH!r} cannot work: the reference is the trained model without its adapters, which runs in "
            f"the formats of the plan. Use reference={AS_POLICY!r}."
        )
    return None


def _shape(layers: Any, name: str) -> str:
    layer = layers.get(name)
    return "not swapped" if layer is None else f"{layer.out_features}x{layer.in_features}"
