"""Pooled samples of several ranks: each layer has an owner, which gathers every rank's samples of it.

The owner then computes the layer's divergences as a single process with all the data would. Nothing else in the
estimate depends on the number of ranks, and with more ranks each has fewer layers to work on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layers.layer import SnipLayer
from ..parallel.ranks import Attempt, Ranks
from ..parallel.sharding import compute_device, is_sharded
from ..text import WITHOUT_PROBE
from .samples import LayerSample, Rows


def pooled(
    samples: dict[str, LayerSample], weight: float, layers: Mapping[str, SnipLayer], ranks: Ranks
) -> dict[str, LayerSample]:
    """Returns the samples of the layers that this rank owns, with the tokens of all ranks, in the order of the ranks.

    Args:
        samples: samples of this rank, for the mean loss of its own tokens.
        weight: share of this rank's loss in the mean loss over all ranks' tokens; the result is for that mean.
        layers: name -> layer, all of them, in the same order on all ranks.
        ranks: the data ranks.

    Raises:
        ValueError: on all ranks, if only some of them ran a layer whose weight they share.
    """
    if ranks.size == 1:
        return samples
    summaries = ranks.gather({name: _summary(sample, weight) for name, sample in samples.items()})
    seen = [name for name in layers if any(name in one_rank for one_rank in summaries)]
    for name in seen:
        if is_sharded(layers[name].weight) and not all(name in one_rank for one_rank in summaries):
            raise ValueError(
                f"Only some ranks ran layer {name!r}, and each rank holds a part of its weight: those that gathered it "
                "may have got parts of another layer's. Name layers that only some tokens reach in skip_modules, use "
                f"DDP or ZeRO-2, or use {WITHOUT_PROBE}."
            )
    device = compute_device(next(iter(layers.values())).weight)
    result, attempt = {}, Attempt()
    for first in range(0, len(seen), ranks.size):
        names = seen[first : first + ranks.size]
        # Number of derivatives that all ranks have.
        dots = {name: min(one_rank[name]["probes"] for one_rank in summaries if name in one_rank) for name in names}
        make = partial(_pieces, samples, weight, dots, device, ranks.size)
        if ranks.rank >= len(names):
            ranks.all_to_all(make, [0] * ranks.size)
            continue
        name = names[ranks.rank]
        of_ranks = [one_rank.get(name, _NOTHING) for one_rank in summaries]
        widths = [layers[name].in_features, layers[name].out_features] * (1 + dots[name])
        # Layers of several matrices also send the token of each row.
        is_split = any(one["ends"] is not None for one in of_ranks)
        received = ranks.all_to_all(make, [one["kept"] * (sum(widths) + is_split) for one in of_ranks])
        with attempt:
            result[name] = _joined(received, of_ranks, widths)
    ranks.agree(attempt.error)
    return result


_NOTHING: dict[str, Any] = {"tokens": 0, "kept": 0, "energies": [0.0, 0.0], "amaxes": None, "ends": None, "sampled": 0}


def _summary(sample: LayerSample, weight: float) -> dict[str, Any]:
    """Returns the sizes and scalars of a sample, for the other ranks."""
    return {
        "tokens": sample.tokens,
        "kept": sample.x.shape[0],
        "probes": len(sample.x_dot),
        "energies": [energy * weight**2 for energy in sample.energies],
        "amaxes": sample.amaxes and [sample.amaxes[0].tolist(), (sample.amaxes[1] * weight).tolist()],
        "ends": sample.rows and sample.rows.ends.tolist(),
        "sampled": sample.rows.tokens if sample.rows else 0,
    }


def _pieces(
    samples: dict[str, LayerSample], weight: float, probes: Mapping[str, int], device: torch.device, ranks: int
) -> list[Tensor]:
    """Removes the samples of these layers and returns the tensor for each rank: one layer's sample, or nothing."""
    pieces = [_flat(samples.pop(name, None), weight, count, device) for name, count in probes.items()]
    return pieces + [_nothing(device)] * (ranks - len(pieces))


def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.float32, device=device)


def _flat(sample: LayerSample | None, weight: float, probes: int, device: torch.device) -> Tensor:
    """Returns X, G and the derivatives of each probe, flat, with G for the mean loss over all ranks."""
    if sample is None:
        return _nothing(device)
    parts = [sample.x, sample.grad_output * weight]
    for x_dot, grad_dot in list(zip(sample.x_dot, sample.grad_output_dot, strict=True))[:probes]:
        parts += [x_dot, grad_dot * weight]
    if sample.rows is not None:
        parts.append(sample.rows.token.to(torch.int32).view(torch.float32))  # bits, which travel as they are
    return torch.cat([part.flatten() for part in parts])


def _joined(received: Sequence[Tensor], summaries: Sequence[Mapping[str, Any]], widths: Sequence[int]) -> LayerSample:
    """Returns the pooled sample from the ranks' `_flat` tensors."""
    by_rank, rows_by_rank = [], []
    for flat, one_rank in zip(received, summaries, strict=True):
        sizes = [one_rank["kept"] * width for width in widths]
        *parts, tokens_of_rows = flat.split([*sizes, len(flat) - sum(sizes)])
        by_rank.append([part.view(-1, width) for part, width in zip(parts, widths, strict=True)])
        if one_rank["ends"] is not None:
            ends = torch.tensor(one_rank["ends"], device=flat.device)
            rows_by_rank.append(Rows(ends, tokens_of_rows.view(torch.int32).to(torch.int64), one_rank["sampled"]))
    tensors, rows = [torch.cat(parts) for parts in zip(*by_rank, strict=True)], None
    if rows_by_rank:
        rows, order = Rows.joined(rows_by_rank)
        tensors = [tensor[order] for tensor in tensors]
    x, grad_output, *dots = tensors
    every, sampled = (sum(column) for column in zip(*(one_rank["energies"] for one_rank in summaries), strict=True))
    tokens, energies = sum(one_rank["tokens"] for one_rank in summaries), (every, sampled)
    known = [one_rank["amaxes"] for one_rank in summaries if one_rank["amaxes"]]
    amaxes = tuple(x.new_tensor(column).amax(0) for column in zip(*known, strict=True)) if known else None
    return LayerSample(tokens, x, grad_output, dots[::2], dots[1::2], energies, amaxes, rows)  # type: ignore[arg-type]
