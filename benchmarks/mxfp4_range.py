r"""The share of MXFP4's blocks that lie outside the binades that tensor-scaled E4M3 holds, early and late in training.

    python benchmarks/mxfp4_range.py --shape 1.1B --steps 300 --output runs/mxfp4_range.jsonl
    python benchmarks/mxfp4_range.py --steps 20
    python benchmarks/mxfp4_range.py --report runs/mxfp4_range.jsonl

Trains a Llama in BF16 (autocast over FP32 masters) on text, with labels for all tokens and with the first part of every
sequence masked, as instruction tuning does. At some steps every linear's input X, output gradient G and weight W are
looked at in blocks of 1x32, along the channels and along the tokens: how many binades the exponent of a block's scale
lies below that of the tensor's largest block. E4M3 holds 15 binades of E2M1 (`kernels.tensor_scaled`), of which the
headroom takes two at the top, four for G: blocks 13 or more below, 11 for G, lose bits. Blocks of zeros are left out.

Between steps it also follows how far each tensor's largest magnitude rises, and how often it would have saturated under
the backend's rule with several headrooms. JSON lines go to --output, with the machine, versions and the command.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from shared import texts
from shared.origin import origin_of
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from snip_hf.kernels.tensor_scaled.folding import BLOCK
from snip_hf.kernels.tensor_scaled.records import GRADIENT_HEADROOM, HEADROOM, UNSET, next_exponents, saturates

# Hidden size, inner size, layers, heads, heads of keys.
SHAPES = {"small": (256, 640, 4, 8, 4), "1.1B": (2048, 5632, 22, 32, 4)}
BINADES = 15
_DEEPEST = 40
OPERANDS = {"X": HEADROOM, "G": GRADIENT_HEADROOM, "W": HEADROOM}
# Those for which it is followed how often something would have saturated.
HEADROOMS = (1, 2, 3, 4, 6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    texts.add_text_arguments(parser)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--looks", type=int, nargs="+", help="steps to look at (default 1, 3, 10, 30, ... and the last)"
    )
    parser.add_argument("--rows", type=int, default=8, help="sequences per step")
    parser.add_argument(
        "--masked", type=float, nargs="+", default=[0.0, 0.75], help="parts of a sequence without labels"
    )
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSONL file; lines are added")
    parser.add_argument("--report", type=Path, nargs="+", help="print a Markdown table of these files instead")
    options = parser.parse_args()
    if options.report:
        rows = [json.loads(line) for path in options.report for line in path.read_text().splitlines()]
        print(table(rows))
        return
    source = {**origin_of(options.device), "seed": options.seed}
    text = texts.load_text(options.text, options.device)
    found = []
    for masked in options.masked:
        for row in run(options, text, masked):
            found.append(row)
            if options.output:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                with options.output.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps({**row, **source}) + "\n")
    print(table(found))


def looks_of(options: argparse.Namespace) -> list[int]:
    """Returns the steps to look at: 1, 3, 10, 30, ... and the last one."""
    if options.looks:
        return list(options.looks)
    steps = [mantissa * 10**power for power in range(8) for mantissa in (1, 3)]
    return sorted({step for step in steps if step < options.steps} | {options.steps})


def run(options: argparse.Namespace, text: texts.Text, masked: float) -> Iterator[dict[str, Any]]:
    """Trains, and yields a row per look and operand, and at the end one per operand for the rises between steps."""
    model = llama(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, fused=options.device == "cuda")
    watch, looks = Watch(model), looks_of(options)
    for step in range(1, options.steps + 1):
        watch.looks = step in looks
        batch = text.batch(step, options.rows)
        labels = batch["labels"].clone()
        labels[:, : int(masked * labels.shape[1])] = -100
        with torch.autocast(options.device, torch.bfloat16):
            loss = model(input_ids=batch["input_ids"], labels=labels).loss
        loss.backward()
        identity = {"shape": options.shape, "masked": masked, "step": step}
        if watch.looks:
            for operand, figures in watch.shares().items():
                yield {**identity, "operand": operand, "loss": float(loss.detach()), **figures}
        watch.end_step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for operand, figures in watch.rises().items():
        yield {"shape": options.shape, "masked": masked, "step": None, "operand": operand, **figures}
    watch.close()


def llama(options: argparse.Namespace) -> LlamaForCausalLM:
    hidden, inner, layers, heads, key_heads = SHAPES[options.shape]
    torch.manual_seed(options.seed)
    with torch.device(options.device):
        config = LlamaConfig(
            vocab_size=texts.VOCABULARY,
            hidden_size=hidden,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            max_position_embeddings=texts.LENGTH,
            use_cache=False,
        )
        return LlamaForCausalLM(config).train()


class Watch:
    """Looks at the operands of the linears in numbered blocks, as BF16."""

    def __init__(self, model: nn.Module) -> None:
        self.looks = False
        # Operand -> histogram of depths, and of the same weighted by the blocks' energy, of this look.
        self._depths: dict[str, Tensor] = {}
        self._amax: dict[tuple[str, str], Tensor] = {}
        self._before: dict[tuple[str, str], Tensor] = {}
        self._rises: dict[str, list[Tensor]] = {operand: [] for operand in OPERANDS}
        # Operand, headroom -> the exponents that would be in force, and how often something saturated, by tensor.
        self._exponents: dict[tuple[str, int], Tensor] = {}
        self._saturated: dict[tuple[str, int], Tensor] = {}
        self._handles = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and any(part.isdigit() for part in name.split(".")):
                self._handles.append(module.register_forward_hook(self._forward(name)))
                self._handles.append(module.register_full_backward_hook(self._backward(name)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _forward(self, name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            self._note(name, "X", args[0])
            self._note(name, "W", module.weight)

        return hook

    def _backward(self, name: str) -> Any:
        def hook(module: nn.Module, grad_input: Any, grad_output: tuple[Tensor, ...]) -> None:
            self._note(name, "G", grad_output[0])

        return hook

    @torch.no_grad()
    def _note(self, name: str, operand: str, tensor: Tensor) -> None:
        matrix = tensor.detach().reshape(-1, tensor.shape[-1]).to(torch.bfloat16).float()
        self._amax[name, operand] = matrix.abs().amax()
        if self.looks:
            depths = sum(depths_of(view) for view in (matrix, matrix.t()))
            self._depths[operand] = self._depths.get(operand, 0) + depths

    def shares(self) -> dict[str, dict[str, Any]]:
        """Returns, per operand, the shares of blocks and of squares at depths that do not fit; begins anew."""
        found = {}
        for operand, histograms in self._depths.items():
            blocks, energy = (histogram / histogram.sum() for histogram in histograms.cpu())
            found[operand] = {
                "outside": float(blocks[BINADES - OPERANDS[operand] :].sum()),
                "outside_without_headroom": float(blocks[BINADES:].sum()),
                "energy_outside": float(energy[BINADES - OPERANDS[operand] :].sum()),
                "depths": [round(float(share), 9) for share in blocks],
            }
        self._depths.clear()
        return found

    def end_step(self) -> None:
        """Notes how far each largest magnitude has risen since the last step, in binades."""
        for key, amax in self._amax.items():
            if key in self._before:
                self._rises[key[1]].append(torch.log2(amax / self._before[key]))
            self._before[key] = amax
        for operand in OPERANDS:
            amax = torch.stack([amax for key, amax in self._amax.items() if key[1] == operand])
            bits = amax.view(torch.int32).to(torch.int64)
            for headroom in HEADROOMS:
                key = operand, headroom
                exponents = self._exponents.get(key, torch.full_like(bits, UNSET))
                self._saturated[key] = self._saturated.get(key, 0) + saturates(exponents, bits).to(torch.int64)
                self._exponents[key] = next_exponents(exponents, bits, headroom)
        self._amax.clear()

    def _tensors(self, operand: str) -> list[tuple[str, str]]:
        return [key for key in self._before if key[1] == operand]

    def rises(self) -> dict[str, dict[str, float]]:
        """Returns, per operand, the largest rise and fall, and the shares of steps and tensors that would saturate."""
        found = {}
        for operand, rises in self._rises.items():
            values = torch.stack(rises).cpu() if rises else torch.zeros(0)
            values = values[values.isfinite()]
            if len(values):
                found[operand] = {"largest_rise": float(values.max()), "largest_fall": float(-values.min())}
                for headroom in HEADROOMS:
                    share = self._saturated[operand, headroom].double().mean() / (
                        len(rises) / len(self._tensors(operand))
                    )
                    found[operand][f"saturated_{headroom}"] = float(share)
        return found


def depths_of(matrix: Tensor) -> Tensor:
    """Returns, for blocks of 1x32, how many lie so many binades below the largest, and their sums of squares; (2, 41).

    matrix: (R, C), FP32. Depths from 40 on count as 40. The exponents are those of E2M1's scales by "rceil".
    """
    columns = matrix.shape[1] // BLOCK * BLOCK
    blocks = matrix[:, :columns].reshape(matrix.shape[0], -1, BLOCK)
    amax, squares = blocks.abs().amax(-1).flatten(), blocks.square().sum(-1).flatten().double()
    is_used = amax > 0
    exponents = ((amax.view(torch.int32) + 0x3FFFFF) >> 23)[is_used]
    depths = (exponents.amax() - exponents).clamp_max(_DEEPEST).long() if len(exponents) else exponents.long()
    energy = torch.zeros(_DEEPEST + 1, dtype=torch.float64, device=matrix.device)
    energy.index_add_(0, depths, squares[is_used])
    return torch.stack([torch.bincount(depths, minlength=_DEEPEST + 1).double(), energy])


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as two Markdown tables."""
    lines = [
        "| shape | masked | step | loss | operand | lose bits | without headroom | their share of squares |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row["step"] is not None:
            shares = (row["outside"], row["outside_without_headroom"], row["energy_outside"])
            cells = " | ".join(f"{share:.2e}" for share in shares)
            head = f"| {row['shape']} | {row['masked']:.0%} | {row['step']} | {row['loss']:.3f} | {row['operand']} | "
            lines.append(f"{head}{cells} |")
    lines += [
        "",
        f"| shape | masked | operand | largest rise, binades | largest fall | saturate with {HEADROOMS[0]} binade | "
        + " | ".join(f"{headroom} binades" for headroom in HEADROOMS[1:])
        + " |",
        f"|{'---|' * (5 + len(HEADROOMS))}",
    ]
    for row in rows:
        if row["step"] is None:
            cells = " | ".join(f"{row.get(f'saturated_{headroom}', float('nan')):.1e}" for headroom in HEADROOMS)
            lines.append(
                f"| {row['shape']} | {row['masked']:.0%} | {row['operand']} | {row['largest_rise']:.2f} | "
                f"{row['largest_fall']:.2f} | {cells} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
