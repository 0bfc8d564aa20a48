"""A small language model, batches and text for tests of the probe and the divergences."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from configs import fp4_config
from models import built
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, PhiConfig, PreTrainedModel

from snip_hf import SnipConfig
from snip_hf.estimation.table import DivergenceTable
from snip_hf.layers.convert import convert_model
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.gemms import GEMMS

Batch = dict[str, Tensor]
Exact = dict[str, Tensor]
BYTES: dict[str, Any] = {
    "vocab_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
"""Of the configs of byte-level models."""


class Block(nn.Module):
    def __init__(self, hidden: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, inner)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))


class TinyLM(nn.Module):
    """An MLP over embeddings with the interface of a Hugging Face causal LM; swapped are `layers.<n>.up` and `.down`.

    `reentrant` None runs without activation checkpointing; otherwise the blocks are checkpointed in that way.
    """

    def __init__(
        self,
        hidden: int = 12,
        inner: int = 20,
        blocks: int = 2,
        vocabulary: int = 17,
        dropout: float = 0.0,
        reentrant: bool | None = None,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList([Block(hidden, inner, dropout) for _ in range(blocks)])
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.reentrant = reentrant

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        # A token sees the mean of those before it, so that tokens depend on each other.
        x = x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device)[:, None]
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        logits = self.head(x)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tiny_lm(seed: int = 0, **options: Any) -> TinyLM:
    """A `TinyLM` of its own seed, with weights large enough to bend the tanh."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TinyLM(**options)
        with torch.no_grad():
            for layer in model.layers:
                layer.up.weight.mul_(2)
    return model


def tokens(rows: int = 2, length: int = 9, vocabulary: int = 17, seed: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def drawn(*shape: int, seed: int, mean: float = 0.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean


def tiny_llama(seed: int = 0, hidden: int = 64, layers: int = 2, **options: Any) -> PreTrainedModel:
    """A byte-level Llama."""
    config = LlamaConfig(
        **BYTES,
        hidden_size=hidden,
        intermediate_size=2 * hidden + hidden // 2,
        num_hidden_layers=layers,
        num_key_value_heads=2,
        **options,
    )
    return built(config, seed)


def tiny_phi() -> PreTrainedModel:
    """A byte-level Phi: in its first block the linears of the MLP see nothing of a token but which byte it is."""
    return built(PhiConfig(**BYTES, hidden_size=64, intermediate_size=256, num_hidden_layers=2))


def convert_in_formats(model: nn.Module, config: SnipConfig | None = None) -> list[str]:
    """Swaps the layers and puts them into the format that the config starts with, as a run does. Returns their names.

    `convert_model` alone leaves them plain.
    """
    config = config or fp4_config()
    names = convert_model(model, config)
    for layer in snip_linears(model).values():
        layer.set_formats(dict.fromkeys(GEMMS, config.format_at_start))
    return names


def text(rows: int, length: int, index: int = 0) -> Batch:
    """Rows of the ASCII text of Python's own json and inspect modules; different text for every index."""
    data = (inspect.getsource(inspect) + inspect.getsource(json)).encode("ascii", "ignore")
    start = index * rows * length % (len(data) - rows * length)
    ids = torch.tensor(list(data[start : start + rows * length])).view(rows, length)
    return {"input_ids": ids, "labels": ids}


def adamw_after(model: nn.Module, steps: int, lr: float = 3e-3, rows: int = 4, length: int = 96) -> torch.optim.AdamW:
    """The optimizer after so many steps on `text`, with all gradients cleared."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        model(**text(rows, length, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def weight_divergences(table: DivergenceTable) -> dict[tuple[str, str, str], float]:
    """Layer, GEMM and format -> the divergence of the weights."""
    return {(row.layer, row.gemm, row.format): row.weight_divergence for row in table.rows}


def trained_tiny_lm(**options: Any) -> tuple[nn.Module, torch.optim.AdamW]:
    """A `TinyLM` after four steps, and the optimizer that took them."""
    model = tiny_lm(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        model(**tokens(seed=step))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def exact_tensors(
    model: nn.Module, batch: Batch, weights: dict[str, Tensor], names: list[str]
) -> tuple[Tensor, Exact, Exact]:
    """Loss, every named linear's input (T, I) and its output gradient (T, O), as a differentiable function of weights.

    The gradient is taken by `torch.func.grad` with respect to zeros added to the layers' outputs; `model` is a plain,
    unconverted model.
    """
    modules = dict(model.named_modules())
    inputs: Exact = {}

    def run(added: Exact) -> tuple[Tensor, Exact]:
        def add(name: str) -> Any:
            def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
                inputs[name] = args[0].flatten(0, -2)
                return output + added[name].view_as(output)

            return hook

        handles = [modules[name].register_forward_hook(add(name)) for name in names]
        try:
            loss = torch.func.functional_call(model, weights, (), dict(batch))["loss"]
        finally:
            for handle in handles:
                handle.remove()
        return loss, (loss.detach(), dict(inputs))

    count = batch["input_ids"].numel()
    dtype = next(model.parameters()).dtype
    zeros = {name: torch.zeros(count, modules[name].out_features, dtype=dtype) for name in names}
    gradients, (loss, found) = torch.func.grad(run, has_aux=True)(zeros)
    return loss, found, gradients


def relative_error(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected| in float64."""
    expected = expected.detach().double()
    return float((got.detach().double() - expected).norm() / expected.norm())


def checkpoint_activations(model: PreTrainedModel, reentrant: bool) -> None:
    """Switches it on under the method's old or new name (transformers 5.23 warns of the old one)."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": reentrant})


def watched(module: nn.Module, look: Callable[[Any], Any]) -> Callable[[], list[Any]]:
    """Looks at a module's outputs, in the probe's passes too: the hook acts, and what it notes is not put back.

    Returns: gives what was seen since it was last asked.
    """
    notes: SimpleQueue[Any] = SimpleQueue()

    def hook(_: nn.Module, args: Any, output: Any) -> Any:
        notes.put(look(output))
        return output

    module.register_forward_hook(hook)
    return lambda: [notes.get() for _ in range(notes.qsize())]
