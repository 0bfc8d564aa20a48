"""The noise that rounding adds to operands of a model in training, and their crest factors: one line per format.

    python -m eval.bakeoff.recorded_noise recipes/forks-formats.yaml --text runs/forks-text.npz --steps 600 \
        --output eval/results/format-noise.jsonl

Trains the base of a recipe of forks, in high precision, and records the operands of all three GEMMs of every linear on
one sequence. `python -m eval.bakeoff.forks text` writes the text.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.shared.origin import origin_of
from snip_hf.numerics.formats import FORMATS, NumberFormat
from snip_hf.numerics.gemms import CONTRACTIONS, OPERANDS
from snip_hf.numerics.random_streams import stream_key
from snip_hf.numerics.rotation import rotate
from snip_hf.numerics.rounding import round_operand

from .fork_base import Trainee
from .fork_recipe import ForkRecipe, load_recipe
from .fork_text import ForkText, read_text

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Recorded:
    """Operands of one linear (snip_hf.numerics.gemms has the legend)."""

    activation: Tensor
    """(T, I)."""
    gradient: Tensor
    """(T, O)."""
    weight: Tensor
    """(O, I)."""


def trained(recipe: ForkRecipe, text: ForkText, seed: int, steps: int, device: torch.device) -> Trainee:
    """Returns a base in high precision after some steps of the recipe's schedule."""
    trainee, count = Trainee(recipe, text, device, seed), recipe.base.sequences
    order = np.random.default_rng(seed).permutation(len(text.train))
    for step in range(steps):
        trainee.step(step + 1, *trainee.put([text.train[order[step * count : (step + 1) * count]]]), None)
    return trainee


def record(model: Any, sequence: np.ndarray[Any, Any]) -> dict[str, Recorded]:
    """Returns the operands of every linear but the output head, on one sequence of tokens."""
    head, inputs, gradients, handles = model.get_output_embeddings(), {}, {}, []
    linears = {name: one for name, one in model.named_modules() if isinstance(one, nn.Linear) and one is not head}

    def watch(name: str) -> Any:
        def keep(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name] = args[0].detach().flatten(0, -2).float()
            output.register_hook(lambda gradient: gradients.update({name: gradient.flatten(0, -2).float()}))

        return keep

    try:
        handles += [linear.register_forward_hook(watch(name)) for name, linear in linears.items()]
        parameter = next(model.parameters())
        ids = torch.from_numpy(sequence.astype(np.int64))[None].to(parameter.device)
        with torch.autocast(parameter.device.type, torch.bfloat16, enabled=parameter.device.type == "cuda"):
            model(input_ids=ids, labels=ids).loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    return {
        name: Recorded(inputs[name], gradients[name], linear.weight.detach().float())
        for name, linear in linears.items()
    }


def relative_noise(x: Tensor, format: NumberFormat, operand: str, contracts: int, seed: int = 0) -> float:
    """Returns the squared error of a rounded operand by the sum of its squares."""
    key = stream_key(seed, 0, 0, 0, 0)
    error = round_operand(x, format, operand, contracts, key).double() - x.double()
    return float(error.square().sum() / x.double().square().sum())


def crest_factor(x: Tensor, format: NumberFormat, operand: str, contracts: int) -> float:
    """Returns the largest magnitude of a block by the root of its mean square, the mean over all blocks that are not 0.

    Args:
        x: operand whose sides are multiples of the block's.
    """
    gemm = next(name for name, operands in CONTRACTIONS.items() if (operand, contracts) in operands)
    if gemm in format.rotated:
        x = rotate(x, format.rotation, contracts)
    rows, columns = format.operand(operand).tile(contracts, tuple(x.shape))
    blocks = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(2)
    largest, root = blocks.abs().amax(-1), blocks.square().mean(-1).sqrt()
    return float((largest / root)[root > 0].double().mean())


def figures(recorded: dict[str, Recorded], format: NumberFormat) -> dict[str, dict[str, float]]:
    """Returns noise and crest factor of the six operands of the GEMMs, means over the linears."""
    noise: dict[str, float] = {}
    crest: dict[str, float] = {}
    for gemm, operands in CONTRACTIONS.items():
        for operand, contracts in operands:
            tensors = [getattr(linear, operand) for linear in recorded.values()]
            found = [relative_noise(x, format, operand, contracts) for x in tensors]
            noise[f"{gemm} {operand}"] = float(np.mean(found))
            crests = [crest_factor(x, format, operand, contracts) for x in tensors]
            crest[f"{gemm} {operand}"] = float(np.mean(crests))
    return {"noise": noise, "crest": crest}


def rounds_all(format: NumberFormat) -> bool:
    """Whether a format rounds all operands."""
    rules = [format.operand(name) for name in OPERANDS]
    return format.is_quantized and all(rule.quantized and not rule.noise for rule in rules)


def lines(recorded: dict[str, Recorded], origin: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields one line per registered format that rounds all operands."""
    for name, format in FORMATS.items():
        if rounds_all(format):
            rounded = {
                kind: {use: round(value, 8) for use, value in own.items()}
                for kind, own in figures(recorded, format).items()
            }
            yield {"schema_version": SCHEMA_VERSION, "format": name, "linears": len(recorded), **rounded, **origin}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.bakeoff.recorded_noise",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("recipe", type=Path, help="YAML file of forks; its keys are in eval/README.md")
    parser.add_argument("--override", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="tokens, as `forks text` wrote them")
    parser.add_argument("--steps", type=int, required=True, metavar="N", help="of the base, before it is recorded")
    parser.add_argument("--seed", type=int, default=0, help="of the base")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON lines; written anew")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    recipe, text = load_recipe(options.recipe, options.override), read_text(options.text)
    trainee = trained(recipe, text, options.seed, options.steps, torch.device(options.device))
    loss = trainee.evaluate()
    recorded = record(trainee.model, text.held_out[0])
    origin = origin_of(options.device) | {
        "command": _command(options),
        "text": text.digest,
        "steps": options.steps,
        "seed": options.seed,
        "held_out_loss": round(loss, 6),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    written = "".join(json.dumps(line) + "\n" for line in lines(recorded, origin))
    options.output.write_text(written, encoding="utf-8")
    print(f"{options.output}: {len(written.splitlines())} formats, {len(recorded)} linears, held-out loss {loss:.4f}")
    return 0


def _command(options: argparse.Namespace) -> str:
    """Returns what to type for these lines again, without folders and files that differ between machines."""
    overrides = ["--override", *options.override] if options.override else []
    steps = ["--steps", str(options.steps), "--seed", str(options.seed)]
    return shlex.join(["python", "-m", "eval.bakeoff.recorded_noise", str(options.recipe), *overrides, *steps])


if __name__ == "__main__":
    sys.exit(main())
