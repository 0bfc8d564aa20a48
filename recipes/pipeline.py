"""A pipeline that trains under SNIP without a Trainer: four stages of a small Llama on two processes.

    torchrun --nproc_per_node 2 recipes/pipeline.py --output runs/pipeline

Process r of R holds stages r, r + R, ..., as interleaved 1F1B wants them. Each stage keeps the names that its layers
have in the whole model, so that plans and checkpoints are those of the whole model.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snip_hf import Pipeline, SnipConfig, SnipController  # first: it hides the warnings of torchao's import

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

VOCABULARY, LENGTH = 256, 128


class Stage(nn.Module):
    """Some blocks of a Llama; the first stage has the embedding, the last one the norm and the head."""

    def __init__(self, whole: LlamaForCausalLM, index: int, stages: int) -> None:
        super().__init__()
        blocks = range(len(whole.model.layers))
        self.config = whole.config
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict(
            {str(block): whole.model.layers[block] for block in blocks if block * stages // len(blocks) == index}
        )
        self.model.rotary_emb = whole.model.rotary_emb
        if index == 0:
            self.model.embed_tokens = whole.model.embed_tokens
        if index == stages - 1:
            self.model.norm, self.lm_head = whole.model.norm, whole.lm_head

    def forward(self, x: Tensor) -> Tensor:
        """Maps tokens (B, L) in the first stage, else activations (B, L, hidden); the last stage returns logits."""
        if hasattr(self.model, "embed_tokens"):
            x = self.model.embed_tokens(x)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        rotary = self.model.rotary_emb(x, positions)
        for layer in self.model.layers.values():
            x = layer(x, position_embeddings=rotary, position_ids=positions)
        return self.lm_head(self.model.norm(x)) if hasattr(self, "lm_head") else x


class Training:
    """The schedule of one process."""

    def __init__(self, stages: int, chunks: int, device: torch.device) -> None:
        torch.manual_seed(0)  # every process builds the same whole model and keeps its stages
        whole = AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=8,
                num_attention_heads=4,
                max_position_embeddings=LENGTH,
            )
        )
        rank, size = dist.get_rank(), dist.get_world_size()
        self.chunks, self.is_last = chunks, rank == (stages - 1) % size
        self.parts = [Stage(whole, index, stages).to(device) for index in range(rank, stages, size)]
        pipes = [
            PipelineStage(part, index, stages, device)
            for part, index in zip(self.parts, range(rank, stages, size), strict=True)
        ]
        self.schedule = ScheduleInterleaved1F1B(pipes, chunks, loss_fn=self._loss, scale_grads=False)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The chunk's part of the batch's mean loss."""
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()) / self.chunks

    def run(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Runs a batch forward and backward; returns its loss in the process of the last stage, None elsewhere."""
        losses: list[Tensor] = []
        inputs = (batch["input_ids"],) if dist.get_rank() == 0 else ()
        self.schedule.step(*inputs, **({"target": batch["labels"], "losses": losses} if self.is_last else {}))
        return torch.stack(losses).sum().detach() if self.is_last else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/pipeline"))
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--target", type=float, default=0.75)
    options = parser.parse_args()
    device = torch.device("cuda", dist.get_node_local_rank(0)) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    training = Training(options.stages, options.chunks, device)
    parameters = [parameter for part in training.parts for parameter in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    config = SnipConfig(
        formats=("fp4", "fp8"),
        ties=(),
        target_fp4_fraction=options.target,
        stages=options.stages,
        first_refresh=10,
        refresh_every=10,
        apply_delay=2,
        probe_tokens=None,
    )
    controller = SnipController(
        training.parts,
        optimizer,
        config,
        output_dir=options.output,
        max_steps=options.steps,
        pipeline=Pipeline(training.run),
    )
    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(text) - LENGTH, (options.batch_size,), generator=generator)
        tokens = torch.stack([text[start : start + LENGTH] for start in starts]).to(device, torch.int64)
        batch = {"input_ids": tokens, "labels": tokens}
        controller.capture(batch)
        loss = training.run(batch)
        controller.before_optimizer_step(step)
        optimizer.step()
        optimizer.zero_grad()
        controller.after_step(step)
        losses.append(None if loss is None else float(loss))
    controller.close()
    if training.is_last:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        (options.output / "losses.json").write_text(json.dumps(losses))
    if dist.get_rank() == 0:
        shares = ", ".join(f"{share:.1%}" for share in controller.plan.stage_fp4_fractions)
        print(f"FP4 share per stage: {shares}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
