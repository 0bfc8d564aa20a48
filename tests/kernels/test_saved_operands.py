"""The tensors that a compiled decoder layer saves for its backward pass on the backend "tensor-scaled".

torch.compile decides what is saved and what is computed again, by the same rules on every device.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from configs import fp4_config
from small import tiny_llama
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from snip_hf import convert_model
from snip_hf.kernels.tensor_scaled import linear
from snip_hf.kernels.tensor_scaled.backend import TENSOR_SCALED
from snip_hf.kernels.tensor_scaled.encoding import PARAMETERS
from snip_hf.kernels.tensor_scaled.exponents import LARGEST
from snip_hf.layers.gated import put_gates
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.gemms import GEMMS

MXFP4 = ("mxfp4",) * 3
FP8, HIDDEN, TOKENS = torch.float8_e4m3fn, 128, 128
TIES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
PARTITIONED = "aot_eager_decomp_partition"


class Launches(TorchDispatchMode):
    """Notes the elements of the tensors that encodings wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.awaited: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.snip_hf.encode_operand.default:
            after = dict(enumerate(args)).get(7, (kwargs or {}).get("after"))
            self.awaited += [] if after is None else [after.numel()]
        return function(*args, **(kwargs or {}))


class Block:
    """A decoder layer in MXFP4, its weights' gradients and what it noted after one pass."""

    def __init__(
        self,
        tied: bool,
        compiler: str | None = PARTITIONED,
        formats: tuple[str, ...] = MXFP4,
        gated: bool = False,
    ):
        model = tiny_llama(hidden=HIDDEN, layers=1).train()
        convert_model(model, fp4_config())
        self.layers = snip_linears(model)
        for layer in self.layers.values():
            layer.use_backend(TENSOR_SCALED)
            layer.set_formats(dict(zip(GEMMS, formats, strict=True)))
        if tied:
            TENSOR_SCALED.share_inputs(
                self.layers, [[name for name in self.layers if name.endswith(tie)] for tie in TIES]
            )
        if gated:
            assert put_gates(model, logging.getLogger("snip_hf.test")) == 1
        block = model.model.layers[0]
        if compiler is not None:
            block.compile(backend=compiler)
        x = torch.randn(2, TOKENS // 2, HIDDEN, generator=torch.Generator().manual_seed(0)).requires_grad_()
        positions = model.model.rotary_emb(x, torch.arange(TOKENS // 2)[None])
        known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        storages: dict[int, tuple[torch.dtype, int]] = {}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known and storage.nbytes() > 0:
                storages[storage.data_ptr()] = (tensor.dtype, storage.nbytes())
            return tensor

        with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(note, lambda tensor: tensor):
            y = block(x, position_embeddings=positions)
        self.saved: dict[torch.dtype, int] = {}
        """Dtype -> bytes per token and hidden channel, parameters aside."""
        for dtype, size in storages.values():
            self.saved[dtype] = self.saved.get(dtype, 0) + size
        self.saved = {dtype: round(size / (TOKENS * HIDDEN)) for dtype, size in self.saved.items()}
        with Launches() as launches:
            y.float().square().sum().backward()
        self.awaited = launches.awaited
        self.gradients = {name: layer.weight.grad for name, layer in self.layers.items()}
        records = {name: layer.snip_cache.records.record for name, layer in self.layers.items()}
        self.largest = {name: record[:, LARGEST].tolist() for name, record in records.items()}


@functools.cache
def block(tied: bool) -> Block:
    """The block in MXFP4 that several tests look at."""
    return Block(tied)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(linear, "SMALL", 0)  # weights of this size are too large to be kept in FP8
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


pytestmark = pytest.mark.slow


def test_an_operand_that_can_be_computed_again_is_not_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, tied = block(tied=False), block(tied=True)
    # Columns of the inputs of gate and up, which have more outputs than inputs.
    assert alone.saved[FP8] == 2
    # Those of q, k, v together and of gate and up together.
    assert tied.saved[FP8] == 2
    # q is square. Its input is taken for one that is saved anyway, as that of o is.
    assert alone.saved[torch.bfloat16] == tied.saved[torch.bfloat16] + 2
    monkeypatch.setattr(type(TENSOR_SCALED), "quantizes_late", False)
    torch._dynamo.reset()
    before = Block(tied=True)
    assert before.saved[FP8] >= tied.saved[FP8] + 3  # of o and down too, whose input has 2.5 times the channels
    assert before.saved[torch.bfloat16] == tied.saved[torch.bfloat16]


@pytest.mark.parametrize("formats", [MXFP4, ("bf16", "fp8-tensor", "mxfp4"), ("fp8-delayed",) * 3], ids="/".join)
def test_gradients_and_notes_are_those_of_columns_that_were_saved(
    formats: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    late = block(tied=False) if formats == MXFP4 else Block(tied=False, formats=formats)
    monkeypatch.setattr(type(TENSOR_SCALED), "quantizes_late", False)
    torch._dynamo.reset()
    before = Block(tied=False, formats=formats)
    assert late.largest == before.largest
    for name, gradient in before.gradients.items():
        assert torch.equal(late.gradients[name], gradient), name


def test_a_gated_mlp_that_runs_as_one_saves_no_more() -> None:
    gated, tied = Block(tied=True, gated=True), block(tied=True)
    assert gated.saved == tied.saved
    assert gated.awaited == [PARAMETERS]  # of o; down's input is encoded with the gradients of gate and up
    assert len(tied.awaited) == 2


def test_late_encoding_waits_for_no_copy_of_a_gradient() -> None:
    """Inductor would write a gradient that is cast from FP32 once more for each operator that reads it."""
    assert block(tied=True).awaited == [PARAMETERS] * 2  # of down and of o
