"""Attention of FP32 tensors from BF16 parts, forward and backward, in a few launches on Hopper (ours).

Every product is three of BF16 parts, as in `bf16_parts`: right to about 2^-17 of its terms. Torch's own kernel for FP32
gets to a tenth of what the tensor cores of Hopper can do. The weights of the attention are cut in two again before they
are multiplied, and so are their gradients. Nothing is added up in an order that changes from run to run.

Legend: B sequences of L queries and S keys in H heads, of which G share the keys of one; D channels of a head.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .rounding import capability, has_kernels

_CHANNELS = (64, 128)
_HOPPER = 9
_LOG2_E = math.log2(math.e)


class Attention(NamedTuple):
    """What is asked for beside the tensors."""

    scale: float
    """What scores are multiplied by."""
    is_causal: bool
    """Whether a query sees the keys up to its own place, and not all."""


def takes(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Returns True if `attend` runs on these: FP32 (B, H, L, D), outside of autocast, on Hopper with Triton."""
    tensors = (query, key, value)
    if any(type(one) is not Tensor or one.dtype != torch.float32 for one in tensors):
        return False
    if torch.is_autocast_enabled("cuda") or not fits(query, key, value, is_causal):
        return False
    return capability(query.device)[0] == _HOPPER and has_kernels(query.device)


def fits(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Returns True if there are kernels for these shapes."""
    if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape or min(query.numel(), key.numel()) == 0:
        return False
    (batch, heads, length, channels), (*_, keys, _) = query.shape, key.shape
    is_shared = heads % key.shape[1] == 0 and key.shape[0] == batch and key.shape[3] == channels
    return is_shared and channels in _CHANNELS and (length == keys or not is_causal)


if TYPE_CHECKING or find_spec("triton") is not None:
    import triton

    from .launching import launch
    from .split_attention_kernel import attend_kernel, cut_kernel, keys_kernel, queries_kernel


def attend(query: Tensor, key: Tensor, value: Tensor, task: Attention) -> tuple[Tensor, Tensor]:
    """Returns the output of attention, (B, H, L, D), laid out as (B, L, H, D), and what its gradients need, (B, H, L).

    Args:
        query: (B, H, L, D), FP32.
        key: (B, H / G, S, D).
        value: as key.
        task: what is asked for.
    """
    batch, heads, length, channels = query.shape
    out = query.new_empty(batch, length, heads, channels)
    logs = query.new_empty(batch, heads, length)
    tensors = (*_Operands.of(query, key, value), out, logs)
    tiles = _TILES[channels].forward
    grid = (batch * heads, triton.cdiv(length, tiles.rows))
    constants = (task.is_causal, channels, tiles.rows, tiles.columns)
    with torch.cuda.device_of(query):
        launch(
            attend_kernel, grid, tensors, _numbers(query, key), constants, (task.scale * _LOG2_E,), **tiles.options()
        )
    return out.transpose(1, 2), logs


def attention_gradients(
    grad_output: Tensor, tensors: tuple[Tensor, Tensor, Tensor], out: Tensor, logs: Tensor, task: Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of query, key and value, each laid out with its heads behind its tokens.

    Args:
        grad_output: (B, H, L, D).
        tensors: query, key and value, as `attend` takes them.
        out, logs: what it returned.
        task: as there.
    """
    query, key, _ = tensors
    (batch, heads, length, channels), (_, shared_heads, count, _) = query.shape, key.shape
    *operands, means = _Operands.of(*tensors)
    of_output, sums = _cut(grad_output, means, out.transpose(1, 2))
    given = (*operands, of_output, logs, sums)
    of_query = query.new_empty(batch, length, heads, channels)
    of_key, of_value = (query.new_empty(batch, count, heads, channels) for _ in range(2))
    numbers, free = _numbers(query, key), (task.scale * _LOG2_E, task.scale)
    by_keys, by_queries = _TILES[channels].keys, _TILES[channels].queries
    blocks = triton.cdiv(count, by_keys.columns), triton.cdiv(length, by_queries.rows)
    with torch.cuda.device_of(query):
        for kernel, found, tiles, programs in (
            (keys_kernel, (of_key, of_value), by_keys, blocks[0]),
            (queries_kernel, (of_query,), by_queries, blocks[1]),
        ):
            constants = (task.is_causal, channels, tiles.rows, tiles.columns)
            launch(kernel, (batch * heads, programs), (*given, *found), numbers, constants, free, **tiles.options())
    if heads != shared_heads:
        of_key, of_value = (one.unflatten(2, (shared_heads, -1)).sum(3) for one in (of_key, of_value))
    return of_query.transpose(1, 2), of_key.transpose(1, 2), of_value.transpose(1, 2)


class _Operands(NamedTuple):
    """BF16 parts, (2, B, H, L, D), and the mean value, (B, H / G, D).

    Keys and values lose their means over the tokens. What all keys have in common changes no weight, and what all
    values have in common is a part of every output: products with it would cancel, and leave their rounding errors.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mean_value: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> _Operands:
        mean_key, mean_value = key.mean(2), value.mean(2)
        return cls(_cut(query)[0], _cut(key, mean_key)[0], _cut(value, mean_value)[0], mean_value)


def _cut(x: Tensor, means: Tensor | None = None, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns BF16 parts of x, (2, B, H, L, D), and where an output is given, the sums of x times it, (B, H, L).

    Args:
        x: (B, H, L, D), FP32.
        means: (B, H / G, D), what x loses first, or where an output is given, the output.
        out: (B, L, H, D)
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, length, channels = x.shape
    parts = torch.empty(2, *x.shape, dtype=torch.bfloat16, device=x.device)
    sums = x.new_empty(0 if out is None else batch, heads, length)
    shared = 1 if means is None else heads // means.shape[1]
    numbers = (length, heads, shared, *x.stride()[:3], x.numel())
    constants = (means is not None and out is None, out is not None, channels, _CUT)
    tensors = (x, x if means is None else means, x if out is None else out, parts, sums)
    with torch.cuda.device_of(x):
        grid = (batch * heads, triton.cdiv(length, _CUT))
        launch(cut_kernel, grid, tensors, numbers, constants, enable_fp_fusion=True)
    return parts, sums


def _numbers(query: Tensor, key: Tensor) -> tuple[int, ...]:
    (_, heads, length, _), (_, shared_heads, count, _) = query.shape, key.shape
    return length, count, heads, heads // shared_heads, query.numel(), key.numel()


class _Tile(NamedTuple):
    rows: int
    columns: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True}


class _Tiles(NamedTuple):
    forward: _Tile
    keys: _Tile
    queries: _Tile


_CUT = 32
_TILES = {
    64: _Tiles(_Tile(128, 64, 8, 2), _Tile(64, 64, 4, 2), _Tile(64, 64, 4, 2)),
    128: _Tiles(_Tile(128, 64, 8, 2), _Tile(32, 128, 8, 2), _Tile(128, 32, 8, 2)),
}
