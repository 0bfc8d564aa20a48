"""Access to one weight's gradient and state in a DeepSpeed ZeRO optimizer.

Each rank holds a part of the averaged gradients, of the FP32 master weights and of the optimizer's state, on its device
or offloaded to the CPU. In stages 1 and 2 these parts end anywhere in a weight: `ZeroOptimizer` gathers the data of one
weight, whole and in FP32. That is collective: every rank asks for the same weights in the same order, one at a time, so
that no rank holds more than one weight's data. Stage 3 also partitions the weights, each into equal parts:
`Stage3Optimizer` gives the data of one weight as FSDP2 shards it, for the views of `parallel.zero3`.

DeepSpeed clips, steps and drops the gradients in one call, within Accelerate's `backward`. `before_step` is the moment
between: gradients are accumulated and averaged over the ranks, nothing is clipped or updated yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..parallel.sharding import deepspeed_engine, has_class
from ..parallel.zero3 import partitioned, sharded_part
from ..python_state import Wrapped
from ..text import WITHOUT_PROBE
from .response import AnalyticResponse, Response, gradient_itself, rule_name
from .update_rules import ELEMENTWISE, UpdateContext

_STAGE_3 = "DeepSpeedZeroOptimizer_Stage3"
# DeepSpeed's classes -> their attribute with the model's weights by parameter group; in stage 3 by parts of groups.
_WEIGHTS = {"DeepSpeedZeroOptimizer": "bit16_groups", "BF16_Optimizer": "bf16_groups", _STAGE_3: "fp16_groups"}
# Inner optimizers with elementwise updates, which are the same on a flat partition as on single weights.
_RULES = ("torch.SGD", "torch.Adam", "torch.AdamW")
_ADAMS = ("deepspeed.FusedAdam", "deepspeed.DeepSpeedCPUAdam")
_STAGES_INSTEAD = "ZeRO stage 1, 2 or 3 (zero_optimization.stage in the DeepSpeed configuration), or FSDP2"

Value = TypeVar("Value")


def check_deepspeed(config: Mapping[str, Any]) -> None:
    """Refuses a DeepSpeed configuration that a probe cannot work with, as far as `ZeroOptimizer` cannot see it.

    Args:
        config: the content of the JSON file; Accelerate has it as `deepspeed_plugin.deepspeed_config`.

    Raises:
        ValueError: names the setting, the reason and an alternative.
    """
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise _refusal(f"zero_optimization.stage={stage} does not partition, as plain DDP does", _STAGES_INSTEAD)
    for name, kept in (("offload_optimizer", "state"), ("offload_param", "weights")):
        if (zero.get(name) or {}).get("device") == "nvme":
            raise _refusal(f"zero_optimization.{name} keeps the {kept} on disk", "device 'cpu' or 'none' there")
    if (zero.get("offload_optimizer") or {}).get("ratio", 1.0) != 1.0:
        raise _refusal("zero_optimization.offload_optimizer.ratio splits the state among two optimizers", "ratio 1")
    if zero.get("zero_quantized_nontrainable_weights"):
        raise _refusal("zero_quantized_nontrainable_weights stores frozen weights as integers", "false there")
    if config.get("tensor_parallel", {}).get("autotp_size", 0) > 1:
        raise _refusal("tensor_parallel replaces the linears by its own", "only data parallelism")
    if config.get("compile", {}).get("deepcompile", False):
        raise _refusal("compile.deepcompile moves the reduction of gradients into compiled graphs", "torch.compile")


def _refusal(reason: str, instead: str) -> ValueError:
    return ValueError(
        f"SNIP cannot probe under this DeepSpeed configuration: {reason}. Use {instead}; or {WITHOUT_PROBE}."
    )


def find_zero(optimizer: Any, *candidates: Any) -> ZeroOptimizer | None:
    """Returns access to the run's ZeRO optimizer; None without DeepSpeed.

    Args:
        optimizer: the optimizer as a launcher wraps it; a Trainer's callbacks get nothing else of DeepSpeed.
        candidates: objects that may be the engine, or its Accelerator.

    Raises:
        ValueError: DeepSpeed is in use in an unsupported way; names the reason and an alternative.
    """
    engine = deepspeed_engine(*candidates)
    if has_class(engine, "PipelineEngine"):
        raise _refusal("its pipeline engine runs the micro-batches itself", "a DeepSpeed engine without pipeline")
    found, is_deepspeed = (optimizer, False) if engine is None else (engine.optimizer, True)
    while found is not None and not has_class(found, "DeepSpeedOptimizer"):
        is_deepspeed = is_deepspeed or type(found).__name__ == "DeepSpeedOptimizerWrapper"
        found = getattr(found, "optimizer", None)
    if found is None and is_deepspeed:
        raise _refusal("stage 0 does not partition, as plain DDP does", _STAGES_INSTEAD)
    if found is None:
        return None
    return Stage3Optimizer(found) if type(found).__name__ == _STAGE_3 else ZeroOptimizer(found)


class ZeroOptimizer:
    """Access to a DeepSpeed optimizer of ZeRO stage 1 or 2, between the reduction of the gradients and the update.

    Methods marked collective are called by all ranks, for the same weights in the same order, one weight at a time.

    Args:
        optimizer: DeepSpeed's own wrapper around the optimizer that updates the flat partitions (`engine.optimizer`).

    Raises:
        ValueError: another stage, loss scaling, or an inner optimizer whose update is not known.
    """

    def __init__(self, optimizer: Any) -> None:
        kind = type(optimizer).__name__
        if kind not in _WEIGHTS:
            raise _refusal(f"its optimizer is a {kind}", _STAGES_INSTEAD)
        self._zero = optimizer
        self._inner: torch.optim.Optimizer = optimizer.optimizer
        weights = getattr(optimizer, _WEIGHTS[kind])
        self._groups = {id(weight): index for index, group in enumerate(weights) for weight in group}
        self.rule = self._find_rule()
        """Key of the update's rule in `update_rules.ELEMENTWISE`."""
        scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
        if scaler is not None or any(weight.dtype == torch.float16 for group in weights for weight in group):
            raise _refusal("fp16 scales the loss and the gradients that the probe needs", "bf16")

    def _find_rule(self) -> str:
        name = rule_name(type(self._inner))
        if name in _ADAMS:
            return "torch.AdamW" if getattr(self._inner, "adam_w_mode", False) else "torch.Adam"
        if name not in _RULES:
            raise _refusal(
                f"the update of {type(self._inner).__module__}.{type(self._inner).__name__} on flat partitions is not "
                "known",
                "AdamW, Adam or SGD of torch.optim, or DeepSpeed's FusedAdam (Trainer: optim='adamw_torch')",
            )
        return name

    def holds(self, weight: Tensor) -> bool:
        """Returns True if the optimizer updates this weight: not if it is frozen."""
        return id(weight) in self._groups

    def before_step(self, callback: Callable[[], None]) -> Wrapped:
        """Runs `callback` before each update, on every rank, until the handle's `remove`.

        It runs at the boundary of gradient accumulation only, outside any context of DeepSpeed's, and may read what
        the other methods give. Its errors are raised from Accelerate's `backward`.
        """

        def step(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            callback()
            return inner(*args, **kwargs)

        return Wrapped(self._zero, "step", step)

    def clip_factor(self) -> float:
        """Returns the factor by which DeepSpeed is about to clip the gradients. Collective; before the step only.

        Raises:
            ValueError: the norm of all gradients is not finite.
        """
        self._wait()
        bound = float(self._zero.clip_grad or 0.0)
        if bound == 0:
            return 1.0
        norm = self._norm()
        # DeepSpeed uses -1 for NaN.
        if norm < 0 or not math.isfinite(norm):
            raise ValueError("The norm of all gradients is not finite; expected finite numbers.")
        # Both classes divide by norm + 1e-6, in FP32.
        return float(bound / torch.tensor(norm, dtype=torch.float32).add(1e-6).clamp(min=bound))

    def _norm(self) -> float:
        if hasattr(self._zero, "scaled_global_norm"):
            return float(self._zero.scaled_global_norm())
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        gradients, _ = self._zero.get_grads_for_norm()
        return float(get_global_norm_of_tensors(gradients, mpu=self._zero.mpu))

    def gradient(self, weight: Tensor) -> Tensor:
        """Returns the weight's whole gradient in FP32: averaged over ranks, accumulated, not clipped yet.

        The inner optimizer sees it times `clip_factor`. Collective; before the step only.
        """
        self._wait()
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor = safe_get_full_grad(weight)
        return gradient.detach().to(torch.float32)

    def context(self, weight: Tensor) -> UpdateContext:
        """Returns the context of the next update of this weight, for the rule `rule`. Collective.

        The state and the weight are whole: FP32 master weight, and state in FP32.
        """
        group = self._group(weight)
        from deepspeed.utils import safe_get_full_fp32_param

        (flat,) = group["params"]
        held = self._inner.state.get(flat, {})
        # Sorted, so that all ranks gather them in one order.
        state = {key: self._whole(weight, held[key], flat) for key in sorted(held)}
        return self._context(group, state, safe_get_full_fp32_param(weight).detach())

    def _context(self, group: Mapping[str, Any], state: dict[str, Any], weight: Tensor) -> UpdateContext:
        if not group.get("bias_correction", True):
            state["step"] = math.inf  # so that 1 - beta^step is 1
        # DeepSpeed's own Adams have no AMSGrad and no such entry.
        return UpdateContext({"amsgrad": False, **group}, state, weight)

    def responses(self, weights: Mapping[str, Tensor], of_gradients: bool = False) -> Mapping[str, Response]:
        """Returns name -> response for the weights that the optimizer updates, as `response.responses` does.

        Each access makes the response anew, since offloaded states come from the CPU. In stages 1 and 2 each call of a
        response gathers the context anew, and is collective; `gathered` keeps it.
        """
        make = gradient_itself if of_gradients else self._analytic
        return _OnAccess(self._held(weights), lambda weight: self._placed(weight, partial(make, weight)))

    def _analytic(self, weight: Tensor) -> Response:
        return AnalyticResponse(self.context(weight), ELEMENTWISE[self.rule])

    def _placed(self, weight: Tensor, make: Callable[[], Response]) -> Response:
        return _Spread(UpdateContext({}, {}, weight.detach()), make)

    def gradients(self, weights: Mapping[str, Tensor], factor: float) -> Mapping[str, Tensor]:
        """Returns name -> gradient times `factor` (that of `clip_factor`) of the weights that the optimizer updates.

        Each access gathers the gradient anew, and is collective; before the step only.
        """
        return _OnAccess(self._held(weights), lambda weight: self.gradient(weight) * factor)

    def _held(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: weight for name, weight in weights.items() if self.holds(weight)}

    def _wait(self) -> None:
        """Waits for gradients that are on their way to the CPU, as the step would."""
        if getattr(self._zero, "cpu_offload", False):
            self._zero._wait_for_offload_copies()

    def _group(self, weight: Tensor) -> dict[str, Any]:
        return self._inner.param_groups[self._groups[id(weight)]]

    def _whole(self, weight: Tensor, value: Any, flat: Tensor) -> Any:
        """Gathers a weight's state from the flat partitions; anything but one number per element is returned as is.

        DeepSpeed's own accessor for states fails between the loading of a checkpoint and the step after it.
        """
        if not isinstance(value, Tensor) or value.shape != flat.shape:
            return value
        from deepspeed import comm

        whole = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        mapping: Any = weight._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:  # part of the weight is in this rank's partition
            at, source = mapping.lp_fragment_address, mapping.hp_fragment_address
            whole.narrow(0, at.start, at.numel).copy_(value.narrow(0, source.start, source.numel))
        comm.all_reduce(whole, group=weight._dp_group)  # type: ignore[attr-defined]
        return whole.view(weight.shape)


class Stage3Optimizer(ZeroOptimizer):
    """Access to a DeepSpeed optimizer of ZeRO stage 3, for the weights that `partitions_as_shards` shows.

    Gradients, states and FP32 weights are sharded as these are. Methods are collective only if the rows of a weight do
    not divide among the ranks.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        if getattr(optimizer, "zenflow", False):
            raise _refusal("ZenFlow updates parts of the weights at different times", "the same stage without it")

    def holds(self, weight: Tensor) -> bool:
        return super().holds(partitioned(weight))

    def _norm(self) -> float:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        return float(combine_grad_norm_groups(self._zero._get_norm_groups()))

    def gradient(self, weight: Tensor) -> Tensor:
        from deepspeed.utils import safe_get_local_grad

        return sharded_part(safe_get_local_grad(partitioned(weight)), weight)

    def context(self, weight: Tensor) -> UpdateContext:
        from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

        group, source = self._group(weight), partitioned(weight)
        flat = self._zero.fp32_partitioned_groups_flat[self._groups[id(source)]]
        held = self._inner.state.get(flat, {})
        state = {
            key: sharded_part(safe_get_local_optimizer_state(source, key).to(torch.float32), weight)
            if isinstance(held[key], Tensor) and held[key].shape == flat.shape
            else held[key]
            for key in sorted(held)
        }
        own = sharded_part(safe_get_local_fp32_param(source).detach().to(torch.float32), weight)
        return self._context(group, state, own)

    def _group(self, weight: Tensor) -> dict[str, Any]:
        return self._inner.param_groups[self._zero.sub_group_to_group_id[self._groups[id(partitioned(weight))]]]

    def _placed(self, weight: Tensor, make: Callable[[], Response]) -> Response:
        return make()


@dataclass(frozen=True)
class _Spread(Response):
    """A response whose gradient or context is spread over the ranks. Every method is collective."""

    make: Callable[[], Response]
    """Makes the response of the whole parameter."""

    @property
    def is_spread(self) -> bool:
        return True

    def gathered(self) -> Response:
        return self.make()

    def update(self, gradient: Tensor) -> Tensor:
        return self.gathered().update(gradient)

    def pushforward(self, gradient: Tensor, tangent: Tensor) -> Tensor:
        return self.gathered().pushforward(gradient, tangent)

    def pullback(self, gradient: Tensor, cotangent: Tensor) -> Tensor:
        return self.gathered().pullback(gradient, cotangent)

    def meaningful(self, gradient: Tensor) -> Tensor:
        return self.gathered().meaningful(gradient)


@dataclass(frozen=True, eq=False)  # equality is that of mappings
class _OnAccess(Mapping[str, Value]):
    """Values that are made anew each time one is accessed."""

    weights: Mapping[str, Tensor]
    make: Callable[[Tensor], Value]

    def __getitem__(self, name: str) -> Value:
        return self.make(self.weights[name])

    def __contains__(self, name: object) -> bool:  # without making it
        return name in self.weights

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)
