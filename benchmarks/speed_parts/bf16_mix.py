"""Part `bf16_mix`: training steps under plans that leave some GEMMs in BF16, and what a change of such a plan costs."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import probe_cost

from snip_hf.costs.flops import linear_flops
from snip_hf.layers.layer import SnipLayer
from snip_hf.layers.state import snip_linears
from snip_hf.numerics.formats import UNQUANTIZED
from snip_hf.numerics.gemms import GEMMS

from . import setting
from .measuring import compared, compiler, guarded, mark, milliseconds_between, release
from .setting import BF16, TIES, Row
from .training_steps import Training, graph_counts, train

RECIPE = "snip-hf FP4, ties"
# Linear and GEMM, within a decoder layer -> whether it is in BF16.
Pattern = dict[tuple[str, str], bool]
# Layer -> GEMM -> FLOPs.
Flops = Mapping[str, Mapping[str, float]]


def bf16_mix_part(options: argparse.Namespace, found: Sequence[Row]) -> Iterator[Row]:
    model = options.models[0]
    quickly = argparse.Namespace(**{**vars(options), "steps": setting.MIX_STEPS, "quick": True})
    alone = partial(train, model, BF16, quickly)
    rows = guarded({"model": model, "plan": "no snip-hf", "recipe": BF16}, alone, options)
    rows += guarded({"model": model, "recipe": RECIPE}, partial(mixed, model, options), options)
    yield from compared(rows, "step_ms")


def mixed(model: str, options: argparse.Namespace) -> Iterator[Row]:
    """Times steps under one plan after another in one run, and the first step after each change."""
    device = options.device
    release(device)
    batch = (options.rows, options.length)
    training = Training(setting.MODELS[model], batch, RECIPE, options.seed, device, **compiler(options.mode))
    layers = snip_linears(training.model)
    kinds = list(dict.fromkeys(name.rpartition(".")[-1] for name in layers))
    patterns = {share: pattern(kinds, share, options.seed) for share in setting.BF16_SHARES}
    names = {share: f"{share:.0%} of the GEMMs in BF16, the same of each decoder layer" for share in patterns}
    plans = [(names[share], patterns[share], patterns[share]) for share in patterns]
    first, last = setting.BF16_SHARES[0], setting.BF16_SHARES[-1]
    plans.append((f"{first:.0%} again", patterns[first], patterns[first]))
    plans.append((f"{first:.0%}, and {last:.0%} of the first decoder layer", patterns[first], patterns[last]))
    flops = linear_flops(training.model)
    for plan, common, of_first in plans:
        before = graph_counts()["graphs"]
        shares = put_in_force(layers, flops, common, of_first)
        change = probe_cost.clocked(device, training.step)
        graphs = graph_counts()["graphs"] - before
        training.step()
        marks = [mark(device)]
        for _ in range(setting.MIX_STEPS):
            loss = training.step()
            marks.append(mark(device))
        probe_cost.wait(device)
        taken = statistics.median(map(milliseconds_between, marks, marks[1:]))
        yield {
            "plan": plan,
            "accumulation": 1,
            **shares,
            "step_ms": taken,
            "tokens_per_s": 1e3 * options.tokens / taken,
            "first_s": change,
            "graphs": graphs,
            "loss": float(loss),
        }


def pattern(kinds: Sequence[str], share: float, seed: int) -> Pattern:
    """Returns which GEMMs of a decoder layer stay in BF16: a random choice of that share, tied linears alike."""
    ties = {kind: next((tie for tie in TIES if kind in tie), (kind,)) for kind in kinds}
    units = [(tie, gemm) for tie in dict.fromkeys(ties.values()) for gemm in GEMMS]
    random.Random(seed).shuffle(units)
    left = round(share * len(kinds) * len(GEMMS))
    chosen = []
    for tie, gemm in units:
        if len(tie) <= left:
            chosen.append((tie, gemm))
            left -= len(tie)
    return {(kind, gemm): (ties[kind], gemm) in chosen for kind in kinds for gemm in GEMMS}


def put_in_force(layers: Mapping[str, SnipLayer], flops: Flops, common: Pattern, of_first: Pattern) -> Row:
    """Gives GEMMs BF16 by their decoder layer's pattern and the others FP4; returns what is in BF16."""
    first = next(iter(layers)).partition(".self_attn")[0]
    gemms: list[bool] = []
    shares: list[float] = []
    for name, layer in layers.items():
        chosen = of_first if name.startswith(f"{first}.") else common
        in_bf16 = {gemm: chosen[name.rpartition(".")[-1], gemm] for gemm in GEMMS}
        layer.set_formats({gemm: UNQUANTIZED.name if in_bf16[gemm] else "fp4" for gemm in GEMMS})
        gemms += in_bf16.values()
        shares += [flops[name][gemm] * in_bf16[gemm] for gemm in GEMMS]
    total = sum(sum(of_layer.values()) for of_layer in flops.values())
    return {"bf16_gemms": sum(gemms) / len(gemms), "bf16_flops": sum(shares) / total}
