"""Models that hold the same numbers in transformers' `Conv1D` and in `nn.Linear`."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

BLOCK = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
NAMES = [f"transformer.h.{block}.{part}" for block in (0, 1) for part in BLOCK]
"""The layers of `gpt2`, in its order."""


def gpt2(kind: type[nn.Module] = Conv1D, hidden: int = 32, dropout: float = 0.0) -> GPT2LMHeadModel:
    """A byte-level GPT-2 whose layers are of one class or of the other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=128,
                n_embd=hidden,
                n_layer=2,
                n_head=4,
                n_positions=256,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
            )
        )
        for name in NAMES:
            nn.init.normal_(model.get_submodule(name).bias, std=0.02)
    return as_linears(model, NAMES) if kind is nn.Linear else model


def as_linears(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Puts a linear in the place of each of these `Conv1D`s."""
    for name in names:
        layer = model.get_submodule(name)
        linear = nn.Linear(layer.nx, layer.nf, device="meta")
        linear.weight, linear.bias = transposed(layer.weight), layer.bias
        model.set_submodule(name, linear)
    return model


def as_conv1d(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Puts a `Conv1D` in the place of each of these linears; one without a bias gets zeros."""
    for name in names:
        linear = model.get_submodule(name)
        layer = Conv1D(linear.out_features, linear.in_features)
        layer.weight = transposed(linear.weight)
        if linear.bias is not None:
            layer.bias = linear.bias
        model.set_submodule(name, layer)
    return model


def transposed(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.detach().t().contiguous())


def state_as_linears(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state of `gpt2` with the weights of its layers as (O, I)."""
    return {name: tensor.t() if name.removesuffix(".weight") in NAMES else tensor for name, tensor in state.items()}
