"""Lets torch.compile recompute layers of this library under activation checkpointing."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._higher_order_ops.wrap import TagActivationCheckpoint


@cache
def compile_checkpoints() -> None:
    """Lets torch.compile take checkpointed decoder layers as one graph, and recompute all of it in the backward pass.

    Both changes hold for the whole process. torchtitan makes the first, too.
    """
    # Tied inputs are noted in Python, which torch.compile does not repeat in the backward pass. Nothing there reads the
    # notes. Otherwise such layers run uncompiled.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    # torch 2.11 saves tensors inside autograd functions instead of recomputing them; torch 2.13 does not.
    if hasattr(TagActivationCheckpoint, "tag_nodes"):
        tag_nodes, function = TagActivationCheckpoint.tag_nodes, torch.ops.higher_order.autograd_function_apply

        def tag_all_nodes(graph: Any, is_sac: bool) -> Any:
            """Tags the operations in the forward passes of autograd functions like the functions themselves."""
            graph = tag_nodes(graph, is_sac)
            for node in graph.graph.find_nodes(op="call_function", target=function):
                for inner in getattr(graph, node.args[0].target).graph.nodes:
                    inner.meta |= {key: node.meta[key] for key in ("recompute", "ac_graph_id")}
            return graph

        TagActivationCheckpoint.tag_nodes = staticmethod(tag_all_nodes)
