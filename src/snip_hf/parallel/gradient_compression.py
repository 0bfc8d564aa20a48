"""A communication hook for DDP that averages gradients in a quarter of the bytes (ours).

Legend: W ranks, n elements in one of DDP's buckets, B blocks of 128 elements per chunk; a bucket, padded with zeros,
is W chunks. A block travels as 129 bytes: 128 E4M3 numbers and the exponent of its scale, a power of two.

1. Each rank adds its error of the step before to its bucket, rounds it and sends chunk i to rank i.
2. Rank i averages the W versions of chunk i in FP32, rounds the mean and sends it to all.
3. All decode the same bytes, so that all have the same gradient, bit for bit.

Rounding errors are not lost: a rank keeps the error of the data that it sent, and rank i adds W times the error of the
mean of its chunk (the mean divides it by W again). So the sum of all averaged gradients stays within one step's errors
of the sum of the true means. Errors belong to parameters, not to buckets, which DDP lays out anew after the first step.

A NaN or an infinity makes its block NaN on all ranks (128 elements, or fewer at the end of a bucket), never a
clipped number; the errors there start again from zero.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..numerics.formats import E4M3
from ..numerics.gemms import ROW_TILE, TILE
from ..numerics.rounding import round_to_grid, tile_scales

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

# Fields of an FP32 number: the bits of the mantissa, their count, and the bits of the exponent.
_MANTISSA, _MANTISSA_BITS, _EXPONENT = 0x007FFFFF, 23, 0x7F800000
# Elements averaged at a time: DDP's first bucket is the whole model, and a reduction needs some 40 bytes per element.
_PIECE = 2**23


def compress_gradients(model: nn.Module, error_feedback: bool = True) -> GradientCompression:
    """Makes a DDP model average its gradients in FP8 from the next backward pass on.

    Args:
        model: in `DistributedDataParallel`, also compiled around it; before its first backward pass. Its gradients are
            FP32 or BF16 and dense. `no_sync` works as without the hook: only synchronised gradients are compressed.
        error_feedback: add rounding errors to the next step's gradient. Takes 4 bytes of memory per trainable
            parameter on every rank.

    Returns: the hook's state, which counts bytes and can be saved. In a group of one process nothing is registered.

    Raises:
        TypeError: the model is not in DDP (FSDP and DeepSpeed reduce gradients themselves).
        RuntimeError: it has a communication hook already.
    """
    ddp = getattr(model, "_orig_mod", model)
    if not isinstance(ddp, nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"Gradients are compressed in DistributedDataParallel only; got {type(ddp).__name__}. Wrap the model first "
            "(`accelerator.prepare`, or `trainer.model_wrapped` when training begins), or leave the compression out."
        )
    compression = GradientCompression(ddp, error_feedback)
    if compression.world == 1:
        logger.info("snip-hf: one process sends no gradients, so they are not compressed.")
    else:
        # A lambda: DDP refuses annotations that are strings, which all of this module's are.
        ddp.register_comm_hook(compression, lambda state, bucket: state.start(bucket))
    return compression


class GradientCompression:
    """The state of the hook: counters and, per parameter, the error that this rank carries over."""

    bytes_sent: int = 0
    """Bytes that this rank has sent to others."""
    bytes_uncompressed: int = 0
    """Bytes that a ring all-reduce in the gradients' own dtype would have sent instead."""
    step: int = 0
    """Backward passes whose gradients were averaged."""

    def __init__(self, ddp: nn.parallel.DistributedDataParallel, error_feedback: bool) -> None:
        self.error_feedback = error_feedback
        self.group = ddp.process_group
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._parameters: dict[str, Tensor] = {name: p for name, p in ddp.module.named_parameters() if p.requires_grad}
        self._errors: dict[Tensor, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def start(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Returns the future of `reduce`. On CUDA it runs beside the rest of the backward pass, in a separate stream.

        All collectives are issued here, in the order of the buckets, which is the same on all ranks.
        """
        device = bucket.buffer().device
        stream: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if device.type == "cuda":
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            stream = torch.cuda.stream(self._stream)
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else [])
        with stream:
            future.set_result(self.reduce(bucket))
        return future

    @torch.no_grad()
    def reduce(self, bucket: GradBucket) -> Tensor:
        """Returns the bucket's gradients, (n,), after their mean over the ranks was put in their place.

        Raises:
            TypeError: gradients that are sparse, or neither FP32 nor BF16.
        """
        gradient: Tensor = bucket.buffer()
        parameters = bucket.parameters()
        if gradient.is_sparse or gradient.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(
                f"Got {'sparse ' if gradient.is_sparse else ''}gradients in {gradient.dtype}; expected dense ones in "
                "float32 or bfloat16. Leave the compression of gradients out."
            )
        errors = torch.cat([self._error(p) for p in parameters]) if self.error_feedback else None
        for i, piece in enumerate(gradient.split(_PIECE)):
            self._average(piece, None if errors is None else errors[i * _PIECE :][: len(piece)])
        if errors is not None:
            self._errors.update(zip(parameters, errors.split([p.numel() for p in parameters]), strict=True))
        self.bytes_uncompressed += (self.world - 1) * 2 * gradient.numel() * gradient.element_size() // self.world
        self.step += bucket.is_last()
        return gradient

    def _average(self, piece: Tensor, errors: Tensor | None) -> None:
        """Puts the mean over the ranks into `piece`, (m,), and the new errors into `errors`, (m,), FP32."""
        count, chunk = len(piece), -(-len(piece) // (self.world * TILE))  # m, B
        own = piece.new_zeros((self.world * chunk, TILE), dtype=torch.float32)
        own.view(-1)[:count] = piece if errors is None else piece + errors
        sent = encode(own)  # (W * B, 129)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        mean = decode(received).view(self.world, chunk, TILE).mean(0)
        sent_mean = encode(mean)  # (B, 129)
        gathered = torch.empty_like(sent)
        dist.all_gather(list(gathered.chunk(self.world)), sent_mean, group=self.group)
        piece.copy_(decode(gathered).view(-1)[:count])
        self.bytes_sent += (self.world - 1) * 2 * sent_mean.numel()
        if errors is not None:
            own -= decode(sent)
            own.view(self.world, chunk, TILE)[self.rank] += (mean - decode(sent_mean)) * self.world
            errors.copy_(own.view(-1)[:count].nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))

    def state_dict(self) -> dict[str, Any]:
        """Returns this rank's step and errors, by the parameters' names; each rank saves its own."""
        errors = {name: self._error(p).view(p.shape).clone() for name, p in self._parameters.items() if self._errors}
        return {"step": self.step, "rank": self.rank, "world": self.world, "errors": errors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state of the same rank in a run of as many ranks; without it errors start from zero.

        A resumed run is not the same bit for bit: DDP starts with other buckets, and so with other blocks.

        Raises:
            ValueError: another rank's state, or another model's.
        """
        if (state["rank"], state["world"]) != (self.rank, self.world):
            raise ValueError(
                f"Got the gradient errors of rank {state['rank']} of {state['world']}, expected those of rank "
                f"{self.rank} of {self.world}. Load each rank's own; on another number of ranks load none."
            )
        shapes = {name: p.shape for name, p in self._parameters.items()}
        if state["errors"] and {name: error.shape for name, error in state["errors"].items()} != shapes:
            raise ValueError(
                f"Got gradient errors of {len(state['errors'])} parameters, expected those of this model's "
                f"{len(shapes)} trainable ones, by name and shape. Load the state of a run of the same model."
            )
        self.step = state["step"]
        self._errors = {
            self._parameters[name]: error.to(self._parameters[name].device, torch.float32).reshape(-1)
            for name, error in state["errors"].items()
        }

    def _error(self, parameter: Tensor) -> Tensor:
        """Returns the error carried over for a parameter, (its number of elements,), FP32."""
        error = self._errors.get(parameter)
        return parameter.new_zeros(parameter.numel(), dtype=torch.float32) if error is None else error


def encode(x_fp32: Tensor) -> Tensor:
    """Rounds blocks to E4M3: (R, 128) in FP32 -> (R, 129) bytes, a block and its scale's exponent (biased by 127).

    The scale is the smallest power of two that keeps the block's largest magnitude within E4M3; 255 stands for NaN.
    """
    scales = tile_scales(x_fp32, E4M3, ROW_TILE)  # (R, 1)
    powers = (scales.view(torch.int32) + _MANTISSA).bitwise_and_(_EXPONENT).view(torch.float32)
    powers = torch.where(scales.isnan(), scales, powers)
    values = round_to_grid(x_fp32 * powers.reciprocal(), E4M3, None).to(torch.float8_e4m3fn)
    exponents = (powers.view(torch.int32) >> _MANTISSA_BITS).to(torch.uint8)
    return torch.cat([values.view(torch.uint8), exponents], 1)


def decode(blocks: Tensor) -> Tensor:
    """Returns the numbers of encoded blocks: (R, 129) bytes -> (R, 128) in FP32."""
    powers = (blocks[:, TILE:].to(torch.int32) << _MANTISSA_BITS).view(torch.float32)
    return blocks[:, :TILE].view(torch.float8_e4m3fn).to(torch.float32) * powers
