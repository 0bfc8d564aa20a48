"""Tables of what `plan_flips.py` measured: how much of what changes from plan to plan is noise, and what damping does.

python benchmarks/plan_flips_report.py benchmarks/results/plan_flips.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from plan_flips import new_base
from scipy.stats import t as student
from shared.json_lines import read_lines

from snip_hf import SnipConfig
from snip_hf.costs.flops import linear_flops
from snip_hf.estimation.pending import LAYER, ROWS
from snip_hf.estimation.table import Divergence, DivergenceTable
from snip_hf.layers.convert import convert_model
from snip_hf.planning.price_memory import with_memory
from snip_hf.planning.program import problem
from snip_hf.planning.solver import ilp
from snip_hf.policies.setting import Setting
from snip_hf.policies.stages import find_stages

Plan = Mapping[str, Mapping[str, str]]
Line = Mapping[str, Any]
PLAIN = "plain"
# Ways of damping, of a run that refreshes at every probed step.
DAMPED: dict[str, dict[str, Any]] = {
    "none (default)": {},
    **{f"memory {weight}": {"estimate_memory": weight} for weight in (0.3, 0.5, 0.8, 0.9)},
    **{f"switching cost {cost}": {"switching_cost": cost} for cost in (0.01, 0.03, 0.1, 0.3)},
}
GRANULARITIES = ("layer", "gemm")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, nargs="+")
    lines = [line for path in parser.parse_args().lines for line in read_lines(path)]
    probes = [line for line in lines if line["part"] == "probes"]
    forks = [line for line in lines if line["part"] == "forks"]
    if probes:
        print(noise_table(probes), damping_table(probes), sep="\n\n")
    if forks:
        print("", fork_table(forks), sep="\n")


# -------------------------------------------------------------------------------------------------------------- plans


@cache
def flops_of(hidden: int) -> dict[str, dict[str, float]]:
    model = new_base(argparse.Namespace(hidden=hidden, rows=1, device="cpu"), 0).model
    convert_model(model, SnipConfig())
    return linear_flops(model)


def setting_of(line: Line, granularity: Any, **changes: Any) -> Setting:
    """Returns the setting of the quickstart: 75% in each of two stages."""
    flops = flops_of(line["hidden"])
    config = SnipConfig(granularity=granularity, stages=2, solver="highs", solver_gap=0.0, policy="min-abs-err")
    config = SnipConfig(**{**config.to_dict(), **changes})
    return Setting(config, flops, find_stages(list(flops), config))


def table_of(line: Line, extra: Mapping[str, Sequence[float]]) -> DivergenceTable:
    """Returns a table whose prices are what a probe found: FP8 costs nothing, FP4 what it costs more."""
    rows = [
        Divergence(layer, gemm, name, 0.0, 0.0, 1.0, absolute_error=extra[gemm][index] if name == "fp4" else 0.0)
        for index, layer in enumerate(flops_of(line["hidden"]))
        for gemm in ROWS
        for name in ("fp8", "fp4")
    ]
    return DivergenceTable(1.0, tuple(rows))


def solved(setting: Setting, table: DivergenceTable, before: Plan) -> Plan:
    return setting.assignment(ilp.solve(problem(setting, table, before))["choices"])


def in_fp8(setting: Setting) -> Plan:
    return {layer: dict.fromkeys(row, "fp8") for layer, row in setting.flops.items()}


def flips(setting: Setting, one: Plan, other: Plan) -> int:
    """Returns how many layers, or GEMMs, two plans have in different formats."""
    cells = [(layer, gemm) for layer, row in one.items() for gemm in row]
    unlike = [(layer, gemm) for layer, gemm in cells if one[layer][gemm] != other[layer][gemm]]
    return len(unlike) if setting.config.granularity == "gemm" else len({layer for layer, _ in unlike})


def cost_of_plan(setting: Setting, table: DivergenceTable, plan: Plan) -> float:
    by_cell = {(row.layer, row.gemm): row.absolute_error or 0.0 for row in table.rows if row.format == "fp4"}
    by_layer = setting.config.granularity == "layer"
    cells = {(layer, LAYER if by_layer else gemm): name for layer, row in plan.items() for gemm, name in row.items()}
    return math.fsum(by_cell[cell] for cell, name in cells.items() if name == "fp4")


# ----------------------------------------------------------------------------------------------------- noise of probes


def states(lines: Sequence[Line]) -> dict[tuple[int, int], dict[str, list[Line]]]:
    """(seed, step) -> variant -> lines, of the states that were probed in every way."""
    found: dict[tuple[int, int], dict[str, list[Line]]] = {}
    for line in lines:
        found.setdefault((line["seed"], line["step"]), {}).setdefault(line["variant"], []).append(line)
    variants = {line["variant"] for line in lines}
    return {key: found[key] for key in sorted(found) if found[key].keys() == variants}


def mean_table(lines: Sequence[Line]) -> DivergenceTable:
    """Returns the mean of probes: the nearest to the truth that there is."""
    extra = {gemm: list(np.mean([line["extra"][gemm] for line in lines], 0)) for gemm in ROWS}
    return table_of(lines[0], extra)


def single_plans(lines: Sequence[Line], granularity: str) -> list[Plan]:
    """Returns the plan of each probe."""
    setting = setting_of(lines[0], granularity)
    return [solved(setting, table_of(line, line["extra"]), in_fp8(setting)) for line in lines]


def excess(lines: Sequence[Line], plans: Sequence[Plan], others: Sequence[Line], granularity: str) -> list[float]:
    """Returns what plans of single probes cost more, in parts of the best plan's cost, by the mean of other probes."""
    setting = setting_of(lines[0], granularity)
    found = []
    for line, plan in zip(lines, plans, strict=True):
        truth = mean_table([other for other in others if other is not line])
        best = cost_of_plan(setting, truth, solved(setting, truth, in_fp8(setting)))
        found.append(cost_of_plan(setting, truth, plan) / best - 1)
    return found


def noise_table(lines: Sequence[Line]) -> str:
    """Returns the flips between probes of one state, and those between probes of neighbouring states."""
    known = states(lines)
    count = len(flops_of(lines[0]["hidden"]))
    steps = sorted({step for _, step in known})
    middle = steps[len(steps) // 2]
    early = {key: found for key, found in known.items() if key[1] <= middle}
    late = {key: found for key, found in known.items() if key[1] >= middle}
    cases = [(variant, known, variant) for variant in next(iter(known.values()))]
    cases += [(f"{PLAIN}, up to step {middle}", early, PLAIN), (f"{PLAIN}, from step {middle} on", late, PLAIN)]
    rows = [
        f"{len(known)} states; changes of {count} layers or {3 * count} GEMMs, mean (quartiles).",
        "",
        "| by | probes | one state | neighbouring states | noise | excess cost |",
        "|---|---|---|---|---|---|",
    ]
    for granularity, (name, chosen, variant) in itertools.product(GRANULARITIES, cases):
        rows.append(f"| {granularity} | {name} | {_noise_row(chosen, variant, granularity)} |")
    return "\n".join(rows)


def _noise_row(known: Mapping[tuple[int, int], Mapping[str, Sequence[Line]]], variant: str, granularity: str) -> str:
    setting = setting_of(next(iter(known.values()))[variant][0], granularity)
    plans = {key: single_plans(found[variant], granularity) for key, found in known.items()}
    same = [flips(setting, *two) for found in plans.values() for two in itertools.combinations(found, 2)]
    apart = [
        flips(setting, *two)
        for one, other in itertools.pairwise(known)
        if one[0] == other[0]
        for two in itertools.product(plans[one], plans[other])
    ]
    cost = [x for key, found in known.items() for x in excess(found[variant], plans[key], found[PLAIN], granularity)]
    share = np.mean(same) / np.mean(apart)
    return " | ".join((_figures(same), _figures(apart), f"{share:.0%}", f"{100 * np.mean(cost):.2f}%"))


def _figures(values: Sequence[float]) -> str:
    low, high = np.percentile(values, (25, 75))
    return f"{np.mean(values):.1f} ({low:.0f}-{high:.0f})"


# -------------------------------------------------------------------------------------------------------------- damping


def damping_table(lines: Sequence[Line]) -> str:
    """Returns what a run changes that refreshes at every probed step, by the way that it is damped."""
    rows = [
        "Changes per refresh, from the third one on, and what the plan costs more than the best one for its state.",
        "",
        "| damping | layers | excess cost | GEMMs | excess cost |",
        "|---|---|---|---|---|",
    ]
    known = states(lines)
    for name, changes in DAMPED.items():
        cells = []
        for granularity in GRANULARITIES:
            changed, cost = zip(*_chains(known, granularity, changes), strict=True)
            cells += [_figures(changed), f"{100 * np.mean(cost):.2f}%"]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _chains(
    known: Mapping[tuple[int, int], Mapping[str, Sequence[Line]]], granularity: str, changes: Mapping[str, Any]
) -> Iterator[tuple[int, float]]:
    """Yields flips and excess cost of each refresh but the first two, of one run per repeat of the probes."""
    for seed in dict.fromkeys(seed for seed, _ in known):
        steps = [step for one, step in known if one == seed]
        for repeat in range(min(len(known[seed, step][PLAIN]) for step in steps)):
            memory: Any = {}
            plan: Plan | None = None
            for index, step in enumerate(steps):
                line = known[seed, step][PLAIN][repeat]
                setting = setting_of(line, granularity, **changes)
                table, memory = with_memory(setting, table_of(line, line["extra"]), memory)
                new = solved(setting, table, plan or in_fp8(setting))
                if plan is not None and index > 1:
                    truth = mean_table([x for x in known[seed, step][PLAIN] if x is not line])
                    plain = setting_of(line, granularity)
                    best = cost_of_plan(plain, truth, solved(plain, truth, in_fp8(plain)))
                    yield flips(setting, plan, new), cost_of_plan(plain, truth, new) / best - 1
                plan = new


# ---------------------------------------------------------------------------------------------------------------- forks


def fork_table(lines: Sequence[Line]) -> str:
    """Returns the paired differences of the held-out loss to the default, in percent, and what refreshes changed."""
    arms: dict[str, dict[tuple[int, int], Line]] = {}
    for line in lines:
        arms.setdefault(line["variant"], {})[line["seed"], line["repeat"]] = line
    base = arms["default"]
    rows = [
        "| arm | forks | layers changed per refresh | loss less the default's, % (95% interval) | p | detectable |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in arms.items():
        shared = [key for key in found if key in base]
        later = [count for key in shared for count in found[key]["layers_changed"][1:]]
        changed = f"{np.mean(later):.1f}" if later else "-"
        if name == "default" or len(shared) < 2:
            rows.append(f"| {name} | {len(shared)} | {changed} | | | |")
            continue
        differences = [100 * (found[key]["loss"] / base[key]["loss"] - 1) for key in shared]
        mean, error = float(np.mean(differences)), float(np.std(differences, ddof=1)) / math.sqrt(len(shared))
        degrees = len(shared) - 1
        half = student.ppf(0.975, degrees) * error
        p = 2 * student.sf(abs(mean / error), degrees) if error > 0 else 1.0
        # Seen with a power of 80% at p < 0.05.
        detectable = (student.ppf(0.975, degrees) + student.ppf(0.8, degrees)) * error
        figures = f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f}) | {p:.2f} | {detectable:.3f}"
        rows.append(f"| {name} | {len(shared)} | {changed} | {figures} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
