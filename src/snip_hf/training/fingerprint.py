"""The digest by which a checkpoint compares its state with its weights."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import nn

from ..layers.state import unwrapped_name
from ..parallel.sharding import has_first_rows, own_part


def weights_fingerprint(model: nn.Module) -> str | None:
    """Returns a digest of the first row of every parameter, with its name; None where this process lacks these rows.

    To be called on the first rank, where FSDP2 puts the first row of everything on any number of ranks. In BF16, so
    that weights are the same whether they are saved or loaded in FP32 or in BF16. Names have what PEFT adds, as in
    states of earlier versions.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted((unwrapped_name(name), parameter) for name, parameter in model.named_parameters()):
        if not has_first_rows(parameter):
            return None
        row = own_part(parameter.detach()).reshape(-1)[: parameter.shape[-1] if parameter.ndim > 1 else 1]
        digest.update(json.dumps([name, list(parameter.shape)]).encode())
        digest.update(row.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
