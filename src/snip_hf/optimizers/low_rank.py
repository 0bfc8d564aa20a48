"""Update rules of optimizers whose states live in a low-rank projection of the gradient: GaLore and APOLLO.

GaLore (arXiv:2403.03507; package galore_torch) projects the gradient, takes the step of AdamW or Adafactor there, and
projects the step back. APOLLO (arXiv:2412.05270; package apollo_torch) scales the channels of the gradient, or all of
it, by AdamW's step on a random projection. Groups without a `rank` are not projected.

A projection is held fixed under changes of the gradient. One from the gradient's singular vectors is renewed every
`update_proj_gap` steps; in the step that renews it, the rule takes the one before (ours). A random one follows from a
seed, and is the step's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from .update_rules import Autograd, UpdateContext, adafactor_of_transformers

# APOLLO lets the norm of its step grow by this factor from step to step (arXiv:2410.01623).
_GROWTH = 1.01
_LEAST_NORM = 1e-8


class _Projection(NamedTuple):
    """A projection: orthonormal columns on the left, orthonormal rows on the right, or both."""

    left: Tensor | None
    right: Tensor | None

    def down(self, matrix: Tensor) -> Tensor:
        low = matrix if self.left is None else self.left.t() @ matrix
        return low if self.right is None else low @ self.right.t()

    def up(self, low: Tensor) -> Tensor:
        matrix = low if self.left is None else self.left @ low
        return matrix if self.right is None else matrix @ self.right


def galore_adamw(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """GaLoreAdamW."""
    if "rank" not in at.group:
        return _adamw(at, gradient), _everywhere(gradient)
    projection = _projection(at, gradient)
    return at.number("scale") * projection.up(_adamw(at, projection.down(gradient))), _everywhere(gradient)


def galore_adafactor(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """GaLoreAdafactor."""
    if "rank" not in at.group:
        return adafactor_of_transformers(at, gradient)
    projection = _projection(at, gradient)
    update, _ = adafactor_of_transformers(at, projection.down(gradient))
    return at.number("scale") * projection.up(update), _everywhere(gradient)


def apollo(at: UpdateContext, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """APOLLOAdamW, with the limit on the growth of its step."""
    if "rank" not in at.group:
        return _adamw(at, gradient), _everywhere(gradient)
    low = _projection(at, gradient).down(gradient)
    direction, rate = _direction(at, low), _rate(at)
    if at.group["scale_type"] == "channel":
        along = 0 if gradient.shape[0] < gradient.shape[1] else 1
        norms = (torch.linalg.vector_norm(one, dim=along, keepdim=True) for one in (direction, low))
    else:
        norms = (torch.linalg.vector_norm(one) for one in (direction, low))
    of_direction, of_low = norms
    scaled = gradient * (of_direction / (of_low + _LEAST_NORM))
    if "scaled_grad" in at.state:
        growth = torch.linalg.vector_norm(scaled) / (float(at.state["scaled_grad"]) + _LEAST_NORM)
        scaled = scaled / (growth.clamp(min=_GROWTH) / _GROWTH)
    return rate * math.sqrt(at.number("scale")) * scaled, _everywhere(gradient)


def _adamw(at: UpdateContext, gradient: Tensor) -> Tensor:
    """AdamW as in old versions of transformers: eps is added before the bias correction."""
    return _rate(at) * _direction(at, gradient)


def _rate(at: UpdateContext) -> float:
    """Returns the learning rate with Adam's bias correction, less the weight decay that follows."""
    lr = at.number("lr")
    beta1, beta2 = (float(beta) for beta in at.group["betas"])
    correction = math.sqrt(1 - beta2**at.step) / (1 - beta1**at.step) if at.group["correct_bias"] else 1.0
    return lr * correction * (1 - lr * at.number("weight_decay"))


def _direction(at: UpdateContext, gradient: Tensor) -> Tensor:
    beta1, beta2 = (float(beta) for beta in at.group["betas"])
    first = at.average("exp_avg", gradient, 1 - beta1)
    second = at.average("exp_avg_sq", gradient.square(), 1 - beta2)
    # 1 where nothing was ever seen, so that no derivative is infinite there.
    touched = second > 0
    return torch.where(touched, first / (torch.where(touched, second, 1).sqrt() + at.number("eps")), 0)


def _projection(at: UpdateContext, gradient: Tensor) -> _Projection:
    """Returns the projection of the step."""
    projector = at.state.get("projector")
    # GaLore always uses singular vectors; APOLLO may draw its projection.
    if at.group.get("proj", "svd") != "svd":
        return _random_projection(at, gradient)
    if projector is None:
        return _singular_projection(at, gradient)
    held = projector.ortho_matrix
    if at.group["proj_type"] == "full":
        left, right = (one.to(gradient.dtype) for one in held)
        return _Projection(left, right)
    held = held.to(gradient.dtype)
    return _Projection(held, None) if _is_left(at, gradient) else _Projection(None, held)


def _is_left(at: UpdateContext, gradient: Tensor) -> bool:
    """Returns True if the gradient is projected from the left."""
    is_wide = gradient.shape[0] < gradient.shape[1]
    return {"std": is_wide, "reverse_std": not is_wide, "left": True, "right": False}[at.group["proj_type"]]


def _singular_projection(at: UpdateContext, gradient: Tensor) -> _Projection:
    """Returns GaLore's first projection, on the gradient's largest singular vectors."""
    rank = int(at.group["rank"])
    left, _, right = torch.linalg.svd(gradient.detach(), full_matrices=False)
    if at.group["proj_type"] == "full":
        return _Projection(left[:, :rank], right[:rank])
    return _Projection(left[:, :rank], None) if _is_left(at, gradient) else _Projection(None, right[:rank])


def _random_projection(at: UpdateContext, gradient: Tensor) -> _Projection:
    """Returns APOLLO's projection, redrawn with the next seed every `update_proj_gap` steps."""
    projector, rank, is_left = at.state.get("projector"), int(at.group["rank"]), _is_left(at, gradient)
    if projector is not None and int(at.step - 1) % projector.update_proj_gap:
        matrix = projector.ortho_matrix
    else:
        seed = at.state["seed"] if projector is None else projector.seed
        shape = (gradient.shape[0], rank) if is_left else (rank, gradient.shape[1])
        generator = torch.Generator(gradient.device).manual_seed(seed)
        drawn = torch.randn(shape, generator=generator, device=gradient.device, dtype=torch.float32)
        matrix = drawn / math.sqrt(rank)
    matrix = matrix.to(gradient.dtype)
    return _Projection(matrix, None) if is_left else _Projection(None, matrix)


def _everywhere(gradient: Tensor) -> Tensor:
    return torch.ones_like(gradient, dtype=torch.bool)


AUTOGRAD: Mapping[str, Autograd] = {
    "galore_torch.adamw.AdamW": galore_adamw,
    "galore_torch.adafactor.Adafactor": galore_adafactor,
    "apollo_torch.apollo.AdamW": apollo,
}
