"""Sequences whose tokens several ranks share (context parallelism), and the attention of a probe's passes over them.

In training, torch's `context_parallel` cuts the sequences, and its ring attention exchanges keys and values. A probe
runs outside that, on fewer sequences: it puts the sequences together again, chooses as one process would, and shares
out the chosen tokens in order. Each rank then has tokens of its own, as under FSDP2; only attention needs those of the
others.

Legend: B sequences, S tokens of each, N ranks, H heads, D features of a head. Rank r holds tokens r B S / N to
(r + 1) B S / N of the sequences in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

# Not by its name in the module, which `context_parallel` replaces while it is in force.
from torch.nn.functional import scaled_dot_product_attention as torch_attention

from ..text import WITHOUT_PROBE

ContextMesh = DeviceMesh
"""The ranks that hold parts of the same sequences, in one dimension."""

# Queries at a time, so that masks stay small: (QUERIES, S).
QUERIES = 1024


def context_mesh(accelerator: Any) -> ContextMesh | None:
    """Returns the ranks that hold parts of the same sequences as this one; None if there are none."""
    state = getattr(accelerator, "state", accelerator)
    if (getattr(getattr(state, "parallelism_config", None), "cp_size", None) or 1) == 1:
        return None
    return state.device_mesh["cp"]


def in_context() -> bool:
    """Returns True within torch's `context_parallel`, which cuts sequences and replaces this function."""
    module = getattr(nn.functional.scaled_dot_product_attention, "__module__", None)
    return str(module).startswith("torch.distributed.tensor.experimental.")


def whole_inputs(inputs: Mapping[str, Any], mesh: ContextMesh) -> dict[str, Any]:
    """Returns a model's inputs with whole sequences, (B, S, ...), from the parts that each rank holds. Collective.

    Inputs that are the same for all sequences, (1, S, ...), are repeated.
    """
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    shape = inputs["shift_labels"].shape
    parts = {
        name: value.expand(shape[0], *value.shape[1:])
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] in (1, shape[0])
        if value.shape[1] == shape[1]
    }
    whole = context_parallel_unshard(mesh, list(parts.values()), [1] * len(parts))
    return {**inputs, **dict(zip(parts, whole, strict=True))}


@dataclass(frozen=True)
class SharedSequences:
    """The sequences of which a batch holds this rank's tokens."""

    mesh: ContextMesh
    length: int
    """S"""
    labelled: int
    """Number of tokens with a label in all of them."""

    def own(self, value: Tensor) -> Tensor:
        """Returns this rank's tokens, (1, B S / N, ...), of an input (B, S, ...)."""
        return value.flatten(0, 1).chunk(self.mesh.size())[self.mesh.get_local_rank()][None]

    @contextmanager
    def attention(self) -> Iterator[None]:
        """Replaces `nn.functional.scaled_dot_product_attention` within the context.

        The function itself is replaced, since backward passes that recompute run in threads of their own.
        """
        before = nn.functional.scaled_dot_product_attention

        def attention(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            if attn_mask is not None or not is_causal or dropout_p:
                raise ValueError(
                    "The probe of a model under context parallelism computes causal attention without other masks and "
                    "without dropout. Use a causal model whose attention modules are named `self_attn`, with "
                    f"attention_dropout=0.0, or use {WITHOUT_PROBE}."
                )
            return _Attention.apply(query, key, value, self, scale)

        nn.functional.scaled_dot_product_attention = attention
        try:
            yield
        finally:
            nn.functional.scaled_dot_product_attention = before

    def blocks(self, tokens: int) -> Iterator[tuple[slice, slice]]:
        """Yields runs of this rank's queries, of which there are `tokens`, and the keys of their sequence up to their
        end, among those of all ranks."""
        first, begin = tokens * self.mesh.get_local_rank(), 0
        while begin < tokens:
            of_sequence = (first + begin) % self.length
            end = min(begin + QUERIES, begin + self.length - of_sequence, tokens)
            yield slice(begin, end), slice(first + begin - of_sequence, first + end)
            begin = end

    def gathered(self, own: Tensor) -> Tensor:
        """Returns keys or values (1, H, B S, D) of all ranks. Collective."""
        own = own.contiguous()
        parts = [torch.empty_like(own) for _ in range(self.mesh.size())]
        dist.all_gather(parts, own, group=self.mesh.get_group())
        return torch.cat(parts, 2)


class _Attention(torch.autograd.Function):
    """Causal attention of this rank's queries over the keys and values of all ranks; saves this rank's only."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sequences: SharedSequences, scale: float | None
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.sequences, ctx.scale = sequences, scale
        keys, values = sequences.gathered(key), sequences.gathered(value)
        blocks = sequences.blocks(query.shape[2])
        return torch.cat(
            [_causal(query[:, :, own], keys[:, :, seen], values[:, :, seen], scale) for own, seen in blocks], 2
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value = ctx.saved_tensors
        sequences: SharedSequences = ctx.sequences
        keys, values = sequences.gathered(key), sequences.gathered(value)
        grad_query, grad_keys, grad_values = (torch.zeros_like(tensor) for tensor in (query, keys, values))
        for own, seen in sequences.blocks(query.shape[2]):
            of_block = query[:, :, own], keys[:, :, seen], values[:, :, seen]
            q, k, v = (tensor.detach().requires_grad_() for tensor in of_block)
            with torch.enable_grad():
                output = _causal(q, k, v, ctx.scale)
            gradients = torch.autograd.grad(output, (q, k, v), grad_output[:, :, own])
            grad_query[:, :, own] = gradients[0]
            grad_keys[:, :, seen] += gradients[1]
            grad_values[:, :, seen] += gradients[2]
        rank, group = sequences.mesh.get_local_rank(), sequences.mesh.get_group()
        for gradient in (grad_keys, grad_values):
            dist.all_reduce(gradient, group=group)
        own_keys, own_values = (gradient.chunk(sequences.mesh.size(), 2)[rank] for gradient in (grad_keys, grad_values))
        return grad_query, own_keys, own_values, None, None


def _causal(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Returns causal attention of queries (1, H, Q, D) over keys (1, H, K, D), whose last Q are the queries' own."""
    queries, keys = query.shape[2], key.shape[2]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    # Not by `enable_gqa`, which the memory-efficient kernel for FP32 does not support.
    key, value = (shared.repeat_interleave(query.shape[1] // shared.shape[1], 1) for shared in (key, value))
    return torch_attention(query, key, value, attn_mask=mask, scale=scale)
