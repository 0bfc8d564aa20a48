"""Stand-ins for optimizers of packages that tests do without: their names, their states, and steps as published.

Each has the constructor's arguments, the groups and the state that the package's class has, so that a case runs on
either. The steps are written from the papers and the packages' documentation.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, optim


class _EachWeight(optim.Optimizer):
    """Steps the weights one by one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in trained:
                self.one(group, parameter)
            self.end_step(group)

    def one(self, group: dict[str, Any], parameter: Tensor) -> None:
        raise NotImplementedError

    def end_step(self, group: dict[str, Any]) -> None:
        pass


def _averaged(state: dict[str, Any], key: str, new: Tensor, beta: float) -> Tensor:
    state[key] = beta * state.get(key, torch.zeros_like(new)) + (1 - beta) * new
    return state[key]


# bitsandbytes


class _Quantizing(_EachWeight):
    """States in blocks of 256 codes of a table, with a scale each, for weights of 4,096 elements or more."""

    count = 2
    averages = 1
    """Number of averages in state1."""

    def __init__(self, params: Any, defaults: dict[str, Any], optim_bits: int) -> None:
        super().__init__(params, defaults)
        self.args = SimpleNamespace(optim_bits=optim_bits, max_unorm=0.0, skip_zeros=False)
        self.mng = GlobalOptimManager()

    def one(self, group: dict[str, Any], parameter: Tensor) -> None:
        state = self.state[parameter]
        numbers = []
        for number in range(1, self.count + 1):
            shape = (2, *parameter.shape) if number == 1 and self.averages == 2 else parameter.shape
            if f"state{number}" not in state:
                is_packed = self.args.optim_bits == 8 and parameter.numel() >= 4096
                self._pack(state, number, torch.zeros(shape), is_packed)
            numbers.append(self._unpack(state, number))
        state["step"] = state.get("step", 0) + 1
        parameter.mul_(1 - group["lr"] * group["weight_decay"] * self.decays_apart)
        gradient = parameter.grad.float() + group["weight_decay"] * (1 - self.decays_apart) * parameter
        parameter.sub_(group["lr"] * self.direction(group, gradient, numbers, state["step"]))
        for number, new in enumerate(numbers, 1):
            self._pack(state, number, new, state[f"state{number}"].dtype == torch.uint8)

    decays_apart = True

    def direction(self, group: dict[str, Any], gradient: Tensor, numbers: list[Tensor], step: int) -> Tensor:
        """Returns the step in units of the learning rate, and updates the averages in place."""
        raise NotImplementedError

    def _pack(self, state: dict[str, Any], number: int, new: Tensor, is_packed: bool) -> None:
        if not is_packed:
            state[f"state{number}"] = new
            return
        table = torch.linspace(-1, 1, 256) ** 3 if number == 1 else torch.linspace(0, 1, 256) ** 3
        parts = list(new) if new.dim() == 3 else [new]
        blocks = [part.reshape(-1, 256) for part in parts]
        scales = [block.abs().amax(1) for block in blocks]
        units = [block / scale.clamp(min=1e-30)[:, None] for block, scale in zip(blocks, scales, strict=True)]
        between = (table[1:] + table[:-1]) / 2
        codes = [torch.bucketize(unit, between).to(torch.uint8).view(parts[0].shape) for unit in units]
        state[f"qmap{number}"] = table
        state[f"state{number}"] = torch.stack(codes) if new.dim() == 3 else codes[0]
        state[f"absmax{number}"] = torch.stack(scales) if new.dim() == 3 else scales[0]

    def _unpack(self, state: dict[str, Any], number: int) -> Tensor:
        codes = state[f"state{number}"]
        if codes.dtype != torch.uint8:
            return codes.clone()
        numbers = state[f"qmap{number}"][codes.long()].view(*state[f"absmax{number}"].shape, 256)
        return (numbers * state[f"absmax{number}"][..., None]).view(codes.shape)


class GlobalOptimManager:
    """Overrides hyperparameters of single weights."""

    def __init__(self) -> None:
        self.pid2config: dict[int, dict[str, Any]] = {}


class AdamW(_Quantizing):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        optim_bits: int = 32,
        is_paged: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, optim_bits)

    def direction(self, group: dict[str, Any], gradient: Tensor, numbers: list[Tensor], step: int) -> Tensor:
        beta1, beta2 = group["betas"]
        numbers[0] = beta1 * numbers[0] + (1 - beta1) * gradient
        numbers[1] = beta2 * numbers[1] + (1 - beta2) * gradient**2
        return numbers[0] / (1 - beta1**step) / ((numbers[1] / (1 - beta2**step)).sqrt() + group["eps"])


class AdEMAMix(_Quantizing):
    averages = 2

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        optim_bits: int = 32,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**options, "alpha": alpha, "t_alpha": t_alpha, "t_beta3": t_beta3}, optim_bits)

    def direction(self, group: dict[str, Any], gradient: Tensor, numbers: list[Tensor], step: int) -> Tensor:
        beta1, beta2, beta3 = group["betas"]
        alpha = group["alpha"] if group["t_alpha"] is None else min(step / group["t_alpha"], 1.0) * group["alpha"]
        if group["t_beta3"] is not None and step < group["t_beta3"]:
            # The half-life grows in proportion to the steps.
            done, (fast, slow) = step / group["t_beta3"], (math.log(beta1), math.log(beta3))
            beta3 = math.exp(1 / ((1 - done) / fast + done / slow))
        fast_average = beta1 * numbers[0][0] + (1 - beta1) * gradient
        slow_average = beta3 * numbers[0][1] + (1 - beta3) * gradient
        numbers[0] = torch.stack([fast_average, slow_average])
        numbers[1] = beta2 * numbers[1] + (1 - beta2) * gradient**2
        root = (numbers[1] / (1 - beta2**step)).sqrt()
        return (fast_average / (1 - beta1**step) + alpha * slow_average) / (root + group["eps"])


class Lion(_Quantizing):
    count = 1

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        optim_bits: int = 32,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 0.0, "weight_decay": weight_decay}, optim_bits)

    def direction(self, group: dict[str, Any], gradient: Tensor, numbers: list[Tensor], step: int) -> Tensor:
        beta1, beta2 = group["betas"]
        mixed = beta1 * numbers[0] + (1 - beta1) * gradient
        numbers[0] = beta2 * numbers[0] + (1 - beta2) * gradient
        return mixed.sign()


class RMSprop(_Quantizing):
    count = 1
    decays_apart = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        optim_bits: int = 32,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": (alpha, 0), "eps": eps, "weight_decay": weight_decay}, optim_bits)

    def direction(self, group: dict[str, Any], gradient: Tensor, numbers: list[Tensor], step: int) -> Tensor:
        numbers[0] = group["betas"][0] * numbers[0] + (1 - group["betas"][0]) * gradient**2
        return gradient / (numbers[0].sqrt() + group["eps"])


class LAMB(AdamW):
    pass


# schedulefree


class _ScheduleFree(_EachWeight):
    def __init__(self, params: Any, options: dict[str, Any]) -> None:
        common = {"k": 0, "train_mode": False, "weight_sum": 0.0, "lr_max": -1.0, "r": 0.0, "weight_lr_power": 2.0}
        super().__init__(params, {**common, **options})

    def train(self) -> None:
        self._go_to(True)

    def eval(self) -> None:
        self._go_to(False)

    @torch.no_grad()
    def _go_to(self, trains: bool) -> None:
        """Puts y into the weights for training, x for evaluation."""
        for group in self.param_groups:
            momentum = _momentum(group)
            for parameter in group["params"] if group["train_mode"] != trains else ():
                z = self.state[parameter].get("z", parameter)
                parameter.copy_(
                    (1 - momentum) * z + momentum * parameter if trains else (parameter - (1 - momentum) * z) / momentum
                )
            group["train_mode"] = trains

    def one(self, group: dict[str, Any], parameter: Tensor) -> None:
        assert group["train_mode"]
        momentum = _momentum(group)
        state, rate = self.state[parameter], self.rate(group)
        z = state.setdefault("z", parameter.clone())
        # y = (1 - momentum) z + momentum x, from before the step and after it.
        x = (parameter - (1 - momentum) * z) / momentum
        weight = (group["k"] + 1) ** group["r"] * max(rate, group["lr_max"]) ** group["weight_lr_power"]
        total = group["weight_sum"] + weight
        taken = weight / total if total > 0 else 0.0
        z.sub_(rate * (self.direction(group, state, parameter.grad) + group["weight_decay"] * parameter))
        x = (1 - taken) * x + taken * z
        parameter.copy_((1 - momentum) * z + momentum * x)

    def end_step(self, group: dict[str, Any]) -> None:
        group["lr_max"] = max(self.rate(group), group["lr_max"])
        group["weight_sum"] += (group["k"] + 1) ** group["r"] * group["lr_max"] ** group["weight_lr_power"]
        group["k"] += 1

    def rate(self, group: dict[str, Any]) -> float:
        return group["lr"] * min(1.0, (group["k"] + 1) / max(1, group["warmup_steps"]))

    def direction(self, group: dict[str, Any], state: dict[str, Any], gradient: Tensor) -> Tensor:
        second = _averaged(state, "exp_avg_sq", gradient**2, group["betas"][1])
        return gradient / ((second / (1 - group["betas"][1] ** (group["k"] + 1))).sqrt() + group["eps"])


def _momentum(group: dict[str, Any]) -> float:
    return group["momentum"] if "momentum" in group else group["betas"][0]


class AdamWScheduleFree(_ScheduleFree):
    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, warmup_steps: int = 0) -> None:
        options = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8}
        super().__init__(params, {**options, "weight_decay": weight_decay, "warmup_steps": warmup_steps})


class SGDScheduleFree(_ScheduleFree):
    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, warmup_steps: int = 0) -> None:
        options = {"lr": lr, "momentum": 0.9}
        super().__init__(params, {**options, "weight_decay": weight_decay, "warmup_steps": warmup_steps})

    def direction(self, group: dict[str, Any], state: dict[str, Any], gradient: Tensor) -> Tensor:
        return gradient


class RAdamScheduleFree(_ScheduleFree):
    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), silent_sgd_phase: bool = True
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0}
        super().__init__(params, {**options, "silent_sgd_phase": silent_sgd_phase})

    def _length(self, group: dict[str, Any]) -> tuple[float, float]:
        """The length of the average of squares, now and in the end."""
        beta2, step = group["betas"][1], group["k"] + 1
        end = 2 / (1 - beta2) - 1
        return end - 2 * step * beta2**step / (1 - beta2**step), end

    def rate(self, group: dict[str, Any]) -> float:
        now, end = self._length(group)
        if now <= 4:
            return group["lr"] * (not group["silent_sgd_phase"])
        return group["lr"] * math.sqrt((now - 4) * (now - 2) * end / ((end - 4) * (end - 2) * now))

    def direction(self, group: dict[str, Any], state: dict[str, Any], gradient: Tensor) -> Tensor:
        normalized = super().direction(group, state, gradient)
        return normalized if self._length(group)[0] > 4 else gradient


# GaLore and APOLLO


class _Projector:
    def __init__(self, group: dict[str, Any], seed: int = 0) -> None:
        self.rank, self.update_proj_gap, self.seed = group["rank"], group["update_proj_gap"], seed
        self.is_random = group.get("proj") == "random"
        self.kind: str = group["proj_type"]
        self.ortho_matrix: Any = None

    def sides(self, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        tall = gradient.shape[0] >= gradient.shape[1]
        is_left = {"std": not tall, "reverse_std": tall, "left": True, "right": False, "full": False}[self.kind]
        if self.kind == "full":
            return self.ortho_matrix[0], self.ortho_matrix[1]
        return (self.ortho_matrix, None) if is_left else (None, self.ortho_matrix)

    def renew(self, gradient: Tensor) -> None:
        rows, columns = gradient.shape
        tall = rows >= columns
        is_left = {"std": not tall, "reverse_std": tall, "left": True, "right": False, "full": False}[self.kind]
        if self.is_random:
            generator = torch.Generator().manual_seed(self.seed)
            shape = (rows, self.rank) if is_left else (self.rank, columns)
            self.ortho_matrix = torch.randn(shape, generator=generator).to(gradient.dtype) / self.rank**0.5
            self.seed = int(torch.randint(2**62, (15,), generator=torch.Generator().manual_seed(self.seed))[-1])
            return
        left, _, right = torch.linalg.svd(gradient, full_matrices=False)
        left, right = left[:, : self.rank], right[: self.rank]
        self.ortho_matrix = [left, right] if self.kind == "full" else left if is_left else right

    def down(self, gradient: Tensor, step: int) -> Tensor:
        if self.ortho_matrix is None or step % self.update_proj_gap == 0:
            self.renew(gradient)
        left, right = self.sides(gradient)
        low = gradient if left is None else left.T @ gradient
        return low if right is None else low @ right.T

    def up(self, low: Tensor, gradient: Tensor) -> Tensor:
        left, right = self.sides(gradient)
        back = low if left is None else left @ low
        return back if right is None else back @ right


class _LowRank(_EachWeight):
    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        options = {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": weight_decay, "correct_bias": True}
        super().__init__(params, options)

    def adam(self, group: dict[str, Any], state: dict[str, Any], gradient: Tensor) -> tuple[Tensor, float]:
        (beta1, beta2), step = group["betas"], state["step"] + 1
        state["step"] = step
        first = _averaged(state, "exp_avg", gradient, beta1)
        second = _averaged(state, "exp_avg_sq", gradient**2, beta2)
        return first / (second.sqrt() + group["eps"]), group["lr"] * math.sqrt(1 - beta2**step) / (1 - beta1**step)


class GaLoreAdamW(_LowRank):
    def one(self, group: dict[str, Any], parameter: Tensor) -> None:
        state, gradient = self.state[parameter], parameter.grad
        state.setdefault("step", 0)
        if "rank" in group:
            projector = state.setdefault("projector", _Projector(group))
            direction, rate = self.adam(group, state, projector.down(gradient, state["step"]))
            direction = group["scale"] * projector.up(direction, gradient)
        else:
            direction, rate = self.adam(group, state, gradient)
        parameter.sub_(rate * direction)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])


class APOLLOAdamW(_LowRank):
    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        for seed, parameter in enumerate((one for group in self.param_groups for one in group["params"]), 1):
            self.state[parameter]["seed"] = seed

    def one(self, group: dict[str, Any], parameter: Tensor) -> None:
        state, gradient = self.state[parameter], parameter.grad
        state.setdefault("step", 0)
        if "rank" in group:
            projector = state.setdefault("projector", _Projector(group, state["seed"]))
            low = projector.down(gradient, state["step"])
            direction, rate = self.adam(group, state, low)
            along = (0, 1)
            if group["scale_type"] == "channel":
                along = (0,) if gradient.shape[0] < gradient.shape[1] else (1,)
            sizes = [one.square().sum(along, keepdim=True).sqrt() for one in (direction, low)]
            scaled = gradient * sizes[0] / (sizes[1] + 1e-8)
            if "scaled_grad" in state:
                scaled = scaled / max(1.0, float(scaled.norm()) / (float(state["scaled_grad"]) + 1e-8) / 1.01)
            state["scaled_grad"] = scaled.norm()
            direction = group["scale"] ** 0.5 * scaled
        else:
            direction, rate = self.adam(group, state, gradient)
        parameter.sub_(rate * direction)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])


class GaLoreAdafactor(_EachWeight):
    """The variant with a given learning rate."""

    def __init__(self, params: Any, lr: float, scale_parameter: bool = False, relative_step: bool = False) -> None:
        options = {"lr": lr, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None}
        more = {"weight_decay": 0.0, "scale_parameter": scale_parameter, "relative_step": relative_step}
        super().__init__(params, {**options, **more, "warmup_init": False})

    def one(self, group: dict[str, Any], parameter: Tensor) -> None:
        state, gradient = self.state[parameter], parameter.grad
        state.setdefault("step", 0)
        projector = state.setdefault("projector", _Projector(group))
        low = projector.down(gradient, state["step"])
        state["step"] += 1
        beta = 1 - state["step"] ** group["decay_rate"]
        squares = low**2 + group["eps"][0]
        rows = _averaged(state, "exp_avg_sq_row", squares.mean(-1), beta)
        columns = _averaged(state, "exp_avg_sq_col", squares.mean(-2), beta)
        update = low / (rows[:, None] * columns / rows.mean()).sqrt()
        update = update / max(1.0, float(update.square().mean().sqrt()) / group["clip_threshold"])
        parameter.sub_(group["lr"] * group["scale"] * projector.up(update, gradient))


# Optimizers that scale whole weights


class StableAdamW(_EachWeight):
    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float = 1e-2,
        decouple_lr: bool = False,
        max_lr: float | None = None,
        foreach: bool | None = None,
        triton: bool | None = None,
    ) -> None:
        options = {"lr": lr, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": weight_decay}
        super().__init__(params, {**options, "decouple_lr": decouple_lr, "max_lr": max_lr})

    def one(self, group: dict[str, Any], parameter: Tensor) -> None:
        step, state, gradient = float(group.get("step", 0)) + 1, self.state[parameter], parameter.grad
        beta1, beta2 = (beta * (1 - beta ** (step - 1)) / (1 - beta**step) for beta in (group["beta1"], group["beta2"]))
        first = _averaged(state, "exp_avg", gradient, beta1)
        second = _averaged(state, "exp_avg_sq", gradient**2, beta2)
        outgrown = (gradient**2 / second.clamp(min=group["eps"] ** 2)).mean().sqrt()
        rate = group["lr"] / max(1.0, float(outgrown))
        parameter.mul_(1 - rate * group["weight_decay"] / (group["max_lr"] if group["decouple_lr"] else 1.0))
        parameter.sub_(rate * first / (second.sqrt() + group["eps"]))

    def end_step(self, group: dict[str, Any]) -> None:
        group["step"] = torch.tensor(float(group.get("step", 0)) + 1)


class Lomo(optim.Optimizer):
    """LOMO of lomo_optim, which steps within the backward pass."""

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        super().__init__(model.parameters(), {"lr": lr})


def _of(module: str, *kinds: type, name: str | None = None) -> None:
    for kind in kinds:
        kind.__module__ = module
        kind.__qualname__ = name or kind.__qualname__


_of("bitsandbytes.optim", AdamW, AdEMAMix, Lion, RMSprop, LAMB)
_of("schedulefree", AdamWScheduleFree, RAdamScheduleFree, SGDScheduleFree)
_of("galore_torch.adamw", GaLoreAdamW, name="AdamW")
_of("galore_torch.adafactor", GaLoreAdafactor, name="Adafactor")
_of("apollo_torch.apollo", APOLLOAdamW, name="AdamW")
_of("optimi.stableadamw", StableAdamW)
_of("lomo_optim.lomo", Lomo)
