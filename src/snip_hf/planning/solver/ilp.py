"""The integer program of a refresh: picks one option per group, at the least total cost that meets every constraint.

    min sum_g cost[g, choice(g)]   subject to   sum_{g in S} weight[g, choice(g)] >= minimum_S for every constraint S

This file runs as ``python ilp.py [PARENT SECONDS]`` beside the training process: a JSON problem (`process.Problem`) on
standard input, a JSON solution on standard output. It imports only the standard library and, when needed, the chosen
solver. It ends when the process PARENT has ended, or after SECONDS. The caller checks problem and solution.

Constraints share no group, so each is solved by itself: on two shared cores, 882 groups in 8 stages took CBC 12-37 s as
one program and 0.8 s stage by stage.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Version of the hull-greedy solver, for the provenance of plans: raise it when its answers change.
GREEDY_VERSION = "1"
# A constraint counts as met if it is short by at most this share of its scale.
CONSTRAINT_TOLERANCE = 1e-9
# "auto" takes hull-greedy above this many units: it is within 1e-4 of its bound there, and exact solvers get slow.
GREEDY_ABOVE = 3000
# Sum of the costs as the exact solvers see them. Their tolerances are absolute: with costs near 1e-4 CBC reports
# "optimal" on maps that are 2.6e-4 worse than the optimum.
SCALED_SUM = 1000.0
_WATCH_SECONDS = 0.25


class MissingSolverError(RuntimeError):
    """The wanted solver is not installed, or its library does not load."""


@dataclass(frozen=True)
class Unit:
    """Groups decided together: tied groups, or one group. Costs and weights are sums over its groups."""

    groups: tuple[str, ...]
    options: tuple[str, ...]
    costs: tuple[float, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Part:
    """The units of one constraint, or those of none (`minimum` None)."""

    units: list[Unit]
    name: str = ""
    minimum: float | None = None
    tolerance: float = 0.0

    @property
    def reach(self) -> float:
        """The largest attainable sum of weights."""
        return math.fsum(max(unit.weights) for unit in self.units)

    def total(self, picks: Sequence[int]) -> float:
        """Cost of a map: the index of the chosen option for each unit."""
        return math.fsum(unit.costs[pick] for unit, pick in zip(self.units, picks, strict=True))

    def shortfall(self, picks: Sequence[int]) -> float:
        """The amount by which a map misses the minimum (negative: slack)."""
        attained = math.fsum(unit.weights[pick] for unit, pick in zip(self.units, picks, strict=True))
        return (self.minimum or 0.0) - attained


def _tied_sets(names: Sequence[str], ties: Sequence[Sequence[str]]) -> list[list[str]]:
    """Groups that are decided together, in the order of their first member; ties that share a group are joined."""
    leader = {name: name for name in names}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for tie in ties:
        for name in tie[1:]:
            leader[find(name)] = find(tie[0])
    sets: dict[str, list[str]] = {}
    for name in names:
        sets.setdefault(find(name), []).append(name)
    return list(sets.values())


def tolerance(constraint: dict[str, Any], options: dict[str, dict[str, Any]]) -> float:
    """The amount by which a constraint may be missed, relative to its minimum or, if larger, to its largest sum."""
    members = options if constraint["groups"] is None else constraint["groups"]
    largest = math.fsum(max(abs(option["weight"]) for option in options[name].values()) for name in members)
    return float(CONSTRAINT_TOLERANCE * max(abs(constraint["minimum"]), largest))


def options_of(problem: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Group -> option -> its cost and weight."""
    return {group["name"]: {option["name"]: option for option in group["options"]} for group in problem["groups"]}


def evaluate(problem: dict[str, Any], choices: dict[str, str]) -> tuple[float, dict[str, float]]:
    """Objective, and attained value per constraint, of a map {group: option}, from the problem's own numbers."""
    options = options_of(problem)
    chosen = {name: options[name][choices[name]] for name in options}
    attained = {}
    for row in problem["constraints"]:
        members = chosen if row["groups"] is None else row["groups"]
        attained[row["name"]] = math.fsum(chosen[name]["weight"] for name in members)
    return math.fsum(option["cost"] for option in chosen.values()), attained


def parts_of(problem: dict[str, Any]) -> list[Part]:
    """The parts to be solved one by one: one per constraint, and one for units that weigh nothing in any."""
    options = options_of(problem)
    rows = problem["constraints"]
    row_of = {name: k for k, row in enumerate(rows) for name in (options if row["groups"] is None else row["groups"])}
    parts = [Part([]), *(Part([], row["name"], row["minimum"], tolerance(row, options)) for row in rows)]
    for members in _tied_sets(list(options), problem.get("ties", ())):
        names = tuple(options[members[0]])
        costs = tuple(math.fsum(options[member][name]["cost"] for member in members) for name in names)
        inside = [member for member in members if member in row_of]
        weights = tuple(math.fsum(options[member][name]["weight"] for member in inside) for name in names)
        part = parts[1 + row_of[inside[0]] if any(weights) else 0]
        part.units.append(Unit(tuple(members), names, costs, weights))
    return parts


# ------------------------------------------------------------------------------------------------ hull-greedy


def _hull(costs: Sequence[float], weights: Sequence[float]) -> list[int]:
    """Options on the lower convex hull of (weight, cost), from the cheapest one on; ties go to the earlier option."""

    def slope(a: int, b: int) -> float:
        return (costs[b] - costs[a]) / (weights[b] - weights[a])

    hull: list[int] = []
    for option in sorted(range(len(costs)), key=lambda i: (costs[i], -weights[i], i)):
        if hull and weights[option] <= weights[hull[-1]]:
            continue
        while len(hull) > 1 and slope(hull[-2], hull[-1]) > slope(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _cover(units: Sequence[Unit], goal: float) -> tuple[list[int], float]:
    """Map and LP bound of the least cost at which the weights of one option per unit sum to at least `goal`.

    The multiple-choice knapsack's linear relaxation walks along the units' hulls by growing cost per weight; only its
    last step is cut. In place of that cut step the cheapest single change that reaches the goal is taken, then changes
    that save cost within the weight left over.
    """
    hulls = [_hull(unit.costs, unit.weights) for unit in units]
    picks = [hull[0] for hull in hulls]
    steps = []
    for u, (unit, hull) in enumerate(zip(units, hulls, strict=True)):
        costs, weights = unit.costs, unit.weights
        for position, (a, b) in enumerate(itertools.pairwise(hull)):
            more_cost, more_weight = costs[b] - costs[a], weights[b] - weights[a]
            steps.append((more_cost / more_weight, u, position, b, more_cost, more_weight))
    need = goal - math.fsum(unit.weights[pick] for unit, pick in zip(units, picks, strict=True))
    cut = 0.0
    for _, u, _, option, more_cost, more_weight in sorted(steps):
        if need <= 0:
            break
        if more_weight >= need:
            cut = more_cost * (need / more_weight)
            break
        picks[u] = option
        need -= more_weight
    bound = math.fsum(unit.costs[pick] for unit, pick in zip(units, picks, strict=True)) + cut

    def moves(least_gain: float) -> list[tuple[float, int, int, float]]:
        """(more cost, unit, option, more weight) of every single change that gains at least so much weight."""
        found = []
        for u, unit in enumerate(units):
            costs, weights = unit.costs, unit.weights
            for option in range(len(costs)):
                gain = weights[option] - weights[picks[u]]
                if option != picks[u] and gain >= least_gain:
                    found.append((costs[option] - costs[picks[u]], u, option, gain))
        return sorted(found)

    if need > 0:
        candidates = moves(need)
        if candidates:  # none is left if only rounding made the goal look out of reach
            _, u, option, gain = candidates[0]
            picks[u] = option
            need -= gain
    changed: set[int] = set()
    for more_cost, u, option, gain in moves(need):
        if more_cost >= 0:
            break
        if u not in changed and gain >= need:
            picks[u] = option
            need -= gain
            changed.add(u)
    return picks, bound


def greedy(part: Part) -> tuple[list[int], float]:
    """Map and bound, in milliseconds; without a constraint the cheapest option of each unit."""
    if part.minimum is not None:
        # Half of the tolerance, so that rounding in the sums does not force one more step.
        return _cover(part.units, part.minimum - part.tolerance / 2)
    picks = [min(range(len(unit.costs)), key=unit.costs.__getitem__) for unit in part.units]
    return picks, math.fsum(min(unit.costs) for unit in part.units)


# ------------------------------------------------------------------------------------------------ exact solvers


@dataclass(frozen=True)
class Scaled:
    """A part as the exact solvers see it: 0/1 columns, ``sum coefficients * x >= minimum``, one 1 per unit."""

    columns: list[tuple[int, int]]  # (unit, option)
    costs: list[float]
    coefficients: list[float]
    minimum: float
    unit_columns: list[range]
    total: float
    offset: float

    def unscaled(self, cost: float) -> float:
        return cost / SCALED_SUM * self.total + self.offset

    def picks(self, x: Sequence[float]) -> list[int]:
        return [self.columns[max(columns, key=x.__getitem__)][1] for columns in self.unit_columns]


def _scale(part: Part, raised: float, incumbent: Sequence[int]) -> Scaled:
    """Counts costs from each unit's cheapest option; costs and weights sum to SCALED_SUM.

    An option that costs more than the whole incumbent is left out: one huge cost would press all others below the
    solver's tolerances. `raised` is added to the minimum.
    """
    floors = [min(unit.costs) for unit in part.units]
    offset = math.fsum(floors)
    limit = (part.total(incumbent) - offset) * (1 + 1e-9)
    columns: list[tuple[int, int]] = []
    unit_columns = []
    for u, unit in enumerate(part.units):
        left = [(u, option) for option, cost in enumerate(unit.costs) if cost - floors[u] <= limit]
        unit_columns.append(range(len(columns), len(columns) + len(left)))
        columns += left
    costs = [part.units[u].costs[option] - floors[u] for u, option in columns]
    total = math.fsum(costs) or 1.0
    size = math.fsum(max(map(abs, unit.weights)) for unit in part.units)
    coefficients = [SCALED_SUM * (part.units[u].weights[option] / size) for u, option in columns]
    minimum = SCALED_SUM * (((part.minimum or 0.0) + raised) / size)
    return Scaled(
        columns, [SCALED_SUM * (cost / total) for cost in costs], coefficients, minimum, unit_columns, total, offset
    )


Answer = tuple[list[int] | None, float]
"""The map of an exact solver, if it found one, and its bound."""


def cbc(scaled: Scaled, time_limit: float, relative_gap: float) -> Answer:
    import mip

    model = mip.Model(sense=mip.MINIMIZE, solver_name=mip.CBC)
    # Serial (threads = 0; 1 would be the parallel code with one worker) and seeded: same problem, same answer.
    model.verbose, model.threads, model.seed = 0, 0, 1
    model.max_mip_gap, model.max_mip_gap_abs = relative_gap, 1e-10
    x = [model.add_var(var_type=mip.BINARY, obj=cost) for cost in scaled.costs]
    for columns in scaled.unit_columns:
        model.add_constr(mip.xsum(x[column] for column in columns) == 1)
    model.add_constr(mip.xsum(value * x[k] for k, value in enumerate(scaled.coefficients)) >= scaled.minimum)
    status = model.optimize(max_seconds=time_limit)
    bound = model.objective_bound
    picks = scaled.picks([float(column.x) for column in x]) if model.num_solutions else None
    # By rounding only, since hull-greedy has a map: the bound is worthless.
    is_infeasible = status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE)
    return picks, -math.inf if bound is None or is_infeasible else float(bound)


def highs(scaled: Scaled, time_limit: float, relative_gap: float) -> Answer:
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    entries = [(unit, column, 1.0) for unit, columns in enumerate(scaled.unit_columns) for column in columns]
    last = len(scaled.unit_columns)
    entries += [(last, column, value) for column, value in enumerate(scaled.coefficients)]
    row_index, column_index, values = zip(*entries, strict=True)
    matrix = csr_matrix((values, (row_index, column_index)), shape=(last + 1, len(scaled.columns)))
    found = milp(
        scaled.costs,
        integrality=np.ones(len(scaled.columns)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, [1.0] * last + [scaled.minimum], [1.0] * last + [math.inf]),
        options={"time_limit": time_limit, "mip_rel_gap": relative_gap},
    )
    # 2: infeasible, as in `cbc`; 3: "unbounded", which 0/1 columns cannot be.
    is_worthless = found.mip_dual_bound is None or found.status in (2, 3)
    bound = -math.inf if is_worthless else float(found.mip_dual_bound)
    return None if found.x is None else scaled.picks(list(found.x)), bound


_SOLVERS: dict[str, Callable[[Scaled, float, float], Answer]] = {"cbc": cbc, "highs": highs}


def _solve_exactly(part: Part, solver: str, incumbent: list[int], gap: float, deadline: float) -> Answer:
    """Runs an exact solver; the bound is in the part's own costs. Demands more if the map misses the minimum.

    Solvers take 0.999999 for 1, so the rounded map may fall short of a minimum that they report as met.
    """
    raised, bounds = 0.0, []
    for _ in range(3):
        scaled = _scale(part, raised, incumbent)
        picks, bound = _SOLVERS[solver](scaled, max(deadline - time.perf_counter(), 0.1), gap)
        bounds.append(scaled.unscaled(bound))
        if picks is None:
            break
        short = part.shortfall(picks)
        if short <= part.tolerance:
            return picks, bounds[0]
        raised += 2 * short
    return None, bounds[0]


def _solve_part(part: Part, solver: str, gap: float, deadline: float) -> tuple[list[int], float, bool]:
    """The better of hull-greedy's and the exact solver's map, the better bound, and whether the map is the latter's."""
    picks, bound = greedy(part)
    if solver == "greedy" or part.minimum is None:
        return picks, bound, False
    exact, exact_bound = _solve_exactly(part, solver, picks, gap, deadline)
    is_better = exact is not None and part.total(exact) <= part.total(picks)
    return exact if exact is not None and is_better else picks, max(bound, exact_bound), is_better


def version_of(solver: str) -> str:
    """The version of a solver; raises MissingSolverError if it cannot be used here."""
    if solver == "greedy":
        return GREEDY_VERSION
    try:
        if solver == "cbc":
            import mip
            from mip import cbc as library

            if not library.has_cbc:
                raise ImportError("python-mip could not load its CBC library")
            return f"mip {mip.__version__}"
        import scipy
        import scipy.optimize

        return f"scipy {scipy.__version__}"
    except Exception as error:  # a package that is broken, or built for another version, raises anything
        install = 'pip install "snip-hf[cbc]"' if solver == "cbc" else "pip install scipy"
        raise MissingSolverError(
            f"solver={solver!r} cannot be used by {sys.executable} ({type(error).__name__}: {error}). Install it "
            f"({install}), or set solver='auto'."
        ) from error


def _choose_solver(wanted: str, units: int) -> tuple[str, str]:
    """Name and version of the solver to run; "auto" is CBC if it loads, else HiGHS."""
    if wanted != "auto":
        return wanted, version_of(wanted)
    if units > GREEDY_ABOVE:
        return "greedy", GREEDY_VERSION
    try:
        return "cbc", version_of("cbc")
    except MissingSolverError:
        return "highs", version_of("highs")


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """The solution of a problem; docs/files.md lists both.

    `status` is "optimal" if the gap to the proven bound is within `relative_gap`, "feasible" if the map holds but that
    is not proven, or "infeasible": then `choices` is empty and `constraints` has the largest attainable value of each.

    Raises:
        MissingSolverError: the solver cannot be used.
    """
    started = time.perf_counter()
    parts, wanted_gap = parts_of(problem), problem.get("relative_gap", 1e-4)
    solver, version = _choose_solver(problem.get("solver", "auto"), sum(len(part.units) for part in parts))

    def solution(status: str, attained: dict[str, float], **found: Any) -> dict[str, Any]:
        values = {"choices": {}, "objective": None, "bound": None, "gap": None, **found}
        origin = {"solver": solver, "solver_version": version, "seconds": time.perf_counter() - started}
        return {"status": status, **values, "constraints": attained, **origin}

    if any(part.minimum is not None and part.reach < part.minimum - part.tolerance for part in parts):
        return solution("infeasible", {part.name: part.reach for part in parts if part.minimum is not None})
    parts = [part for part in parts if part.units]
    deadline = started + problem.get("time_limit", 60.0)
    choices: dict[str, str] = {}
    bounds, exact_parts = [], 0
    for done, part in enumerate(parts):
        now = time.perf_counter()
        until = now + (deadline - now) / (len(parts) - done)
        picks, bound, is_exact = _solve_part(part, solver, wanted_gap, until)
        bounds.append(bound)
        exact_parts += is_exact
        for unit, pick in zip(part.units, picks, strict=True):
            choices |= dict.fromkeys(unit.groups, unit.options[pick])
    if not exact_parts and any(part.minimum is not None for part in parts):
        solver, version = "greedy", GREEDY_VERSION

    choices = {group["name"]: choices[group["name"]] for group in problem["groups"]}
    objective, attained = evaluate(problem, choices)
    for part in parts:
        if part.minimum is not None and attained[part.name] < part.minimum - part.tolerance:
            raise ArithmeticError(f"constraint {part.name!r} attains {attained[part.name]!r}, minimum {part.minimum!r}")
    bound = min(math.fsum(bounds), objective)
    rounding = 1e-12 * math.fsum(max(map(abs, unit.costs)) for part in parts for unit in part.units)
    gap = 0.0 if objective - bound <= rounding else (objective - bound) / max(abs(objective), abs(bound))
    status = "optimal" if gap <= wanted_gap + 1e-9 else "feasible"
    return solution(status, attained, choices=choices, objective=objective, bound=bound, gap=gap)


def end_with(parent: int, seconds: float) -> None:
    """Ends this process soon after the process `parent` has ended, even if it was killed, or after so many seconds."""
    end = time.monotonic() + seconds

    def watch() -> None:
        while os.getppid() == parent and time.monotonic() < end:
            time.sleep(_WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    # The solvers' C code lets other threads run.
    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Reads a problem from standard input and writes the solution, or ``{"missing": "..."}``, to standard output."""
    if len(sys.argv) == 3:
        end_with(int(sys.argv[1]), float(sys.argv[2]))
    # The solvers' C code prints on file descriptor 1: keep the real one for the answer, send the rest to stderr.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.nice(10)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    try:
        reply = solve(json.loads(sys.stdin.buffer.read()))
    except MissingSolverError as error:
        reply = {"missing": str(error)}
    with answer:
        json.dump(reply, answer, allow_nan=False)


if __name__ == "__main__":
    main()
