"""The device that a process of forks works on, set up so that the same steps give the same bits."""

from __future__ import annotations

import os

import torch


def check_graphs(cuda_graph: bool, kind: str) -> None:
    """Raises ValueError if steps shall come from CUDA graphs on a device that has none.

    Args:
        cuda_graph: `forks.cuda_graph` of the recipe.
        kind: what `--device` names.
    """
    if cuda_graph and torch.device(kind).type != "cuda":
        raise ValueError(
            f"forks.cuda_graph=True on the device {kind!r}; expected 'cuda'. Run without it: --override "
            "forks.cuda_graph=false."
        )


def set_up_device(index: int, kind: str) -> torch.device:
    """Returns the device of a process, which is this process's own from then on.

    Args:
        index: of the process; those on "cuda" take turns on the GPUs.
        kind: what `--device` names: "cpu", "cuda", or one GPU, "cuda:1".
    """
    device = torch.device(kind)
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", index % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.set_num_threads(2)
    # Outside of `fork_base.deterministic` torch only warns of operations that have no deterministic kernel.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it fills what is written anyway
    return device
