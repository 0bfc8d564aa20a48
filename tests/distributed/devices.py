"""Places the ranks of the tests and builds their Accelerators: on the CPU over gloo, on GPUs over NCCL.

A rank computes on a GPU of its own if its process group is NCCL's. A process without a group computes on the CPU.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.experimental._context_parallel import _attention
from transformers import trainer

NCCL = "nccl"
"""The word among a script's arguments that puts its ranks on GPUs."""
FAILURES = "failures"
"""The entry of `Survivors` with the tracebacks, by the name of the run."""
_NCCL_SECONDS = 60.0  # after which a collective that nobody answers ends the rank


def join(words: list[str], timeout: float | None = None, offloads: bool = False) -> None:
    """Joins the process group of a script's ranks.

    Args:
        words: the script's arguments.
        timeout: seconds that a collective of the group waits; None: gloo's own default, a minute for NCCL.
        offloads: whether ranks with a GPU exchange tensors in host memory, too, over gloo, as `accelerate launch` lets
            them.
    """
    if NCCL not in words:
        # Without a GPU no memory can be pinned.
        CPUOffloadPolicy.__init__.__defaults__ = (False,)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", timeout=None if timeout is None else timedelta(seconds=timeout))
        return
    waiting = timedelta(seconds=_NCCL_SECONDS if timeout is None else timeout)
    backend = "cpu:gloo,cuda:nccl" if offloads else "nccl"
    dist.init_process_group(backend, timeout=waiting, device_id=_own_gpu())


@contextmanager
def without_others(words: list[str]) -> Iterator[None]:
    """Makes this rank the only process of a run, on the device of `join`, before that."""
    backend = NCCL if NCCL in words else "gloo"
    if backend == NCCL:
        _own_gpu()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _own_gpu() -> torch.device:
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    return own


def on_gpu() -> bool:
    return dist.is_initialized() and "nccl" in dist.get_backend()


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")


def accelerator(
    wrapper: str, block: str = "LlamaDecoderLayer", mixed_precision: str = "no", **plugin: Any
) -> Accelerator:
    """Returns a new Accelerator in a process that may have had others.

    Args:
        wrapper: "ddp", "ddp-views", in which gradients are views of buckets, "fsdp2", or "context": FSDP2 with context
            parallelism over all ranks.
        block: the class that FSDP2 shards one by one.
        mixed_precision: "no" or "bf16".
        plugin: further settings of FSDP2.
    """
    AcceleratorState._reset_state(reset_partial_state=False)
    # An earlier one's FSDP2 would be taken over.
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    cpu = not on_gpu()
    processes = PartialState(cpu=cpu)
    several = DistributedType.MULTI_CPU if cpu else DistributedType.MULTI_GPU
    is_alone = cpu and processes.num_processes == 1
    processes.distributed_type = DistributedType.NO if is_alone else several
    if wrapper.startswith("ddp"):
        handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=wrapper == "ddp-views")]
        return Accelerator(cpu=cpu, mixed_precision=mixed_precision, kwargs_handlers=handlers)
    settings = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[block],
        cpu_ram_efficient_loading=False,
        **plugin,
    )
    sizes = ParallelismConfig(cp_size=processes.num_processes) if wrapper == "context" else None
    with _unchecked():
        made = Accelerator(cpu=cpu, fsdp_plugin=settings, mixed_precision=mixed_precision, parallelism_config=sizes)
    _shard(made, settings)
    return made


@contextmanager
def trainers_that_shard() -> Iterator[None]:
    """Lets transformers' Trainers with `fsdp` among their arguments shard on CPUs."""

    def made(fsdp_plugin: FullyShardedDataParallelPlugin, **settings: Any) -> Accelerator:
        found = Accelerator(fsdp_plugin=fsdp_plugin, **settings)
        _shard(found, fsdp_plugin)
        return found

    original = vars(trainer)["Accelerator"]
    vars(trainer)["Accelerator"] = made
    try:
        yield
    finally:
        vars(trainer)["Accelerator"] = original
        os.environ.pop("ACCELERATE_USE_FSDP", None)
        AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def trainers_that_split() -> Iterator[None]:
    """Lets transformers' Trainers train models on CPUs whose weights or sequences the ranks split."""
    try:
        with _unchecked(), context_parallelism():
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def _unchecked() -> Iterator[None]:
    """Lets Accelerate split on CPUs."""
    original = ParallelismConfig._validate_accelerator
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    try:
        yield
    finally:
        ParallelismConfig._validate_accelerator = original


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks, joined along their third dimension."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [own.new_empty(own.shape) for _ in range(group.size())]
        dist.all_gather(parts, own.contiguous(), group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(ctx.group.size(), 2)[ctx.group.rank()], None


@contextmanager
def context_parallelism() -> Iterator[None]:
    """Lets torch's `context_parallel` train on CPUs, on which its ring attention has no kernels."""
    names = "_enable_context_parallel_dispatcher_impl", "_disable_context_parallel_dispatcher_impl"
    before, by_torch = [vars(_attention)[name] for name in names], nn.functional.scaled_dot_product_attention

    def enable(seq_dim: int, mesh: DeviceMesh) -> None:
        group, ranks = mesh.get_group(), mesh.size()

        def attention(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
            assert given.pop("is_causal") and given.pop("attn_mask", None) is None
            # Rank r holds the chunks r and 2 N - 1 - r of each sequence.
            chunks = torch.arange(query.shape[2] * ranks).chunk(2 * ranks)
            parts = [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)]
            mask = parts[mesh.get_local_rank()][:, None] >= torch.cat(parts)
            keys, values = (_Gathered.apply(one, group) for one in (key, value))
            return by_torch(query, keys, values, mask, **given)

        attention.__module__ = _attention.__name__  # as torch's own
        nn.functional.scaled_dot_product_attention = attention

    def disable() -> None:
        nn.functional.scaled_dot_product_attention = by_torch

    vars(_attention).update(zip(names, (enable, disable), strict=True))
    try:
        yield
    finally:
        vars(_attention).update(zip(names, before, strict=True))


class Survivors(dict[str, Any]):
    """Name -> what became of a run. Each is written to a file at once.

    Args:
        folder: gets rank<N>.pt.
        survives: whether the traceback of a run that fails is written, too, and others follow. On GPUs, whose time is
            short, a failure then costs the other runs nothing unless the ranks wait for each other.
    """

    def __init__(self, folder: Path, survives: bool) -> None:
        super().__init__()
        self._path = folder / f"rank{os.environ['RANK']}.pt"
        self._survives = survives
        self._began = time.monotonic()

    def add(self, name: str, train: Callable[[], Any]) -> None:
        """Adds what `train` returns."""
        try:
            self[name] = train()
        except Exception:
            if not self._survives:
                raise
            self.setdefault(FAILURES, {})[name] = traceback.format_exc()
            print(traceback.format_exc(), flush=True)
        print(f"{name}: ended after {time.monotonic() - self._began:.1f} s", flush=True)
        torch.save(dict(self), self._path)


def _shard(made: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """Marks an Accelerator as sharding, which Accelerate does itself on accelerators and never on CPUs."""
    PartialState().distributed_type = made.state.distributed_type = DistributedType.FSDP
    made.state.fsdp_plugin = plugin
