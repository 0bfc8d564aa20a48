"""The integer program: picks one option per group, at the least total cost that meets every constraint.

    min sum_g cost[g, choice(g)]   subject to   sum_{g in S} weight[g, choice(g)] >= minimum_S for every constraint S

Numbers in, numbers out. This file is run as ``python -I path/to/ilp.py`` beside the training process: JSON problem on
standard input, JSON solution on standard output. It therefore stands alone: it imports only the standard library and,
inside the function that needs it, the chosen solver.

With ``--parent`` and the id of the process that waits for the answer, it ends soon after that process has ended. With
``--path``, once or more often, it imports the solver from that folder too, if it is not found without.

Exit codes: 0 a solution (also "infeasible"), 2 bad input, 3 the solver is not installed, 4 no solution was found in
time; 2 to 4 with ``{"error": "..."}`` on standard output.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

SOLVERS = ("auto", "cbc", "highs", "greedy")
# Version of the hull-greedy below, for the provenance of plans: raise it when its answers change.
GREEDY_VERSION = "1"
# A constraint counts as met when it is short by at most this share of its scale (see `Constraint.tolerance`).
CONSTRAINT_TOLERANCE = 1e-9
# Above this many units "auto" takes hull-greedy: there it is within 1e-4 of its bound, and exact solvers get slow.
GREEDY_ABOVE = 3000
# Sum of the costs as the exact solvers see them. Their tolerances are absolute: with costs near 1e-4 CBC reports
# "optimal" on maps that are 2.6e-4 worse than the optimum.
SCALED_SUM = 1000.0
# Largest number taken, so that no sum of them overflows.
LARGEST = 1e100
# Most that the process may write into a file: a solver's library that prints without end must not fill the disk.
LARGEST_FILE = 64 * 2**20
# How often it looks whether the process that waits for its answer still lives.
WATCH_SECONDS = 0.25
_PACKAGES = {"cbc": "mip", "highs": "scipy"}
_INSTALL = {"cbc": 'pip install "snip-hf[cbc]"', "highs": "pip install scipy"}
BAD_INPUT, MISSING_SOLVER, NO_SOLUTION = 2, 3, 4
_KINDS: dict[str, tuple[type, ...]] = {
    "a name": (str,),
    "a number": (int, float),
    "a list": (list,),
    "a list or null": (list, type(None)),
}


class ProblemError(ValueError):
    """The problem is malformed; the message begins with the field's path, e.g. ``groups[3].options[0].cost``."""

    exit_code = BAD_INPUT


class MissingSolverError(RuntimeError):
    """The wanted solver is not installed, or its library does not load."""

    exit_code = MISSING_SOLVER


class NoSolutionError(RuntimeError):
    """The solver stopped without a map that holds, and hull-greedy does not apply."""

    exit_code = NO_SOLUTION


@dataclass(frozen=True)
class Constraint:
    """sum of the chosen weights >= minimum, missed by at most `tolerance`."""

    name: str
    minimum: float
    tolerance: float


@dataclass(frozen=True)
class Unit:
    """Groups decided together: tied groups, or one group alone. Costs and weights are sums over its groups."""

    groups: tuple[str, ...]
    options: tuple[str, ...]
    costs: tuple[float, ...]
    weights: dict[int, tuple[float, ...]]
    """Index of a constraint -> weight of each option there; constraints in which all weights are 0 are left out."""


@dataclass(frozen=True)
class Program:
    """A checked problem."""

    units: tuple[Unit, ...]
    constraints: tuple[Constraint, ...]
    solver: str
    time_limit: float
    relative_gap: float

    def overlap(self) -> tuple[str, str, str] | None:
        """A group and two constraints that both count it, or None: then the constraints can be solved one by one."""
        for unit in self.units:
            if len(unit.weights) > 1:
                first, second = sorted(unit.weights)[:2]
                return unit.groups[0], self.constraints[first].name, self.constraints[second].name
        return None

    def parts(self) -> list[tuple[list[int], Program]]:
        """(unit indices, program) of pieces to be solved one by one: one per constraint, if constraints share no unit.

        Much faster than the whole, on two shared cores: 882 groups in 8 stages took CBC 12-37 s at once,
        0.8 s stage by stage.
        """
        if self.overlap():
            return [(list(range(len(self.units))), self)]
        indices: dict[int, list[int]] = {k: [] for k in range(-1, len(self.constraints))}  # -1: in no constraint
        for index, unit in enumerate(self.units):
            indices[next(iter(unit.weights), -1)].append(index)
        pieces = []
        for k, members in indices.items():
            units = tuple(
                replace(self.units[index], weights=dict(enumerate(self.units[index].weights.values())))
                for index in members
            )
            rows = self.constraints[k : k + 1] if k >= 0 else ()
            if units:
                pieces.append((members, replace(self, units=units, constraints=rows)))
        return pieces


# ------------------------------------------------------------------------------------------------ reading the problem


def _field(container: dict[str, Any], key: str, path: str, kind: str, default: Any = ...) -> Any:
    """``container[key]``, checked to be of a kind in `_KINDS`; `path` is the container's own, for the message."""
    where = f"{path}.{key}" if path else key
    if key not in container:
        if default is ...:
            raise ProblemError(f"{where}: missing, expected {kind}")
        return default
    value: Any = container[key]
    if not isinstance(value, _KINDS[kind]) or isinstance(value, bool):
        raise ProblemError(f"{where}: got {str(value)[:80]!r}, expected {kind}")
    if isinstance(value, (int, float)) and not abs(value) <= LARGEST:
        raise ProblemError(f"{where}: got {str(value)[:80]}, expected a finite number of at most {LARGEST:g} in size")
    return value


def _object(value: Any, path: str, keys: Iterable[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProblemError(f"{path or 'problem'}: got {type(value).__name__}, expected an object")
    unknown = sorted(set(value) - set(keys))
    if unknown:
        where = f"{path}.{unknown[0]}" if path else unknown[0]
        raise ProblemError(f"{where}: unknown field, expected one of {', '.join(keys)}")
    return value


def _check_names(names: Sequence[Any], path: str, known: dict[str, Any] | None = None) -> None:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if not isinstance(name, str):
            raise ProblemError(f"{path}[{index}]: got {str(name)[:80]!r}, expected a name")
        if name in seen:
            raise ProblemError(f"{path}[{index}]: the name {name!r} occurs twice")
        if known is not None and name not in known:
            raise ProblemError(f"{path}[{index}]: {name!r} is no group (the first group is {next(iter(known))!r})")
        seen.add(name)


def _read_group(group: Any, path: str) -> dict[str, tuple[float, float]]:
    """Option name -> (cost, weight) of one group."""
    options = _field(_object(group, path, ("name", "options")), "options", path, "a list")
    if not options:
        raise ProblemError(f"{path}.options: empty, expected at least one option")
    table = {}
    for index, option in enumerate(options):
        where = f"{path}.options[{index}]"
        _object(option, where, ("name", "cost", "weight"))
        name = _field(option, "name", where, "a name")
        if name in table:
            raise ProblemError(f"{where}.name: the name {name!r} occurs twice")
        cost, weight = (float(_field(option, key, where, "a number")) for key in ("cost", "weight"))
        table[name] = (cost, weight)
    return table


def _tied_sets(names: Sequence[str], ties: Sequence[Any]) -> list[list[str]]:
    """Groups that are decided together, in the order of their first member (ties that share a group are joined)."""
    known = dict.fromkeys(names)
    leader = {name: name for name in names}

    def find(name: str) -> str:
        while leader[name] != name:
            name = leader[name]
        return name

    for index, tie in enumerate(ties):
        if not isinstance(tie, list):
            raise ProblemError(f"ties[{index}]: got {str(tie)[:80]!r}, expected a list")
        _check_names(tie, f"ties[{index}]", known)
        for name in tie[1:]:
            leader[find(name)] = find(tie[0])
    sets: dict[str, list[str]] = {}
    for name in names:
        sets.setdefault(find(name), []).append(name)
    return list(sets.values())


def _unit(members: list[str], tables: dict[str, dict[str, tuple[float, float]]], counted: dict[str, list[int]]) -> Unit:
    options = tuple(tables[members[0]])
    for member in members:
        if set(tables[member]) != set(options):
            raise ProblemError(
                f"ties: {members[0]!r} offers {sorted(options)} and {member!r} offers {sorted(tables[member])}, "
                "but tied groups take the option of the same name and must offer the same ones"
            )
    weights: dict[int, tuple[float, ...]] = {}
    for k in sorted({k for member in members for k in counted[member]}):
        inside = [member for member in members if k in counted[member]]
        sums = tuple(math.fsum(tables[member][option][1] for member in inside) for option in options)
        if any(sums):
            weights[k] = sums
    costs = tuple(math.fsum(tables[member][option][0] for member in members) for option in options)
    return Unit(tuple(members), options, costs, weights)


def parse(problem: Any) -> Program:
    """Check a problem and join its tied groups.

    Raises:
        ProblemError: naming the field, what was got and what was expected.
    """
    _object(problem, "", ("groups", "constraints", "ties", "solver", "time_limit", "relative_gap"))
    groups = _field(problem, "groups", "", "a list")
    if not groups:
        raise ProblemError("groups: empty, expected at least one group")
    tables: dict[str, dict[str, tuple[float, float]]] = {}
    for index, group in enumerate(groups):
        table = _read_group(group, f"groups[{index}]")
        name = _field(group, "name", f"groups[{index}]", "a name")
        if name in tables:
            raise ProblemError(f"groups[{index}].name: the name {name!r} occurs twice")
        tables[name] = table

    constraints: dict[str, Constraint] = {}
    counted: dict[str, list[int]] = {name: [] for name in tables}
    for index, row in enumerate(_field(problem, "constraints", "", "a list")):
        path = f"constraints[{index}]"
        _object(row, path, ("name", "groups", "minimum"))
        name = _field(row, "name", path, "a name")
        if name in constraints:
            raise ProblemError(f"{path}.name: the name {name!r} occurs twice")
        minimum = float(_field(row, "minimum", path, "a number"))
        members = _field(row, "groups", path, "a list or null")
        if members is None:
            members = list(tables)
        _check_names(members, f"{path}.groups", tables)
        for member in members:
            counted[member].append(index)
        # The scale is what the sum could be at most in size, so a minimum of 0 has a tolerance too.
        largest = math.fsum(max(abs(weight) for _, weight in tables[member].values()) for member in members)
        constraints[name] = Constraint(name, minimum, CONSTRAINT_TOLERANCE * max(abs(minimum), largest))

    solver = _field(problem, "solver", "", "a name", "auto")
    if solver not in SOLVERS:
        raise ProblemError(f"solver: got {solver!r}, expected one of {', '.join(SOLVERS)}")
    time_limit = float(_field(problem, "time_limit", "", "a number", 60.0))
    if time_limit <= 0:
        raise ProblemError(f"time_limit: got {time_limit!r}, expected more than 0 seconds")
    relative_gap = float(_field(problem, "relative_gap", "", "a number", 1e-4))
    if relative_gap < 0:
        raise ProblemError(f"relative_gap: got {relative_gap!r}, expected 0 or more")
    tied = _tied_sets(list(tables), _field(problem, "ties", "", "a list", []))
    units = tuple(_unit(members, tables, counted) for members in tied)
    return Program(units, tuple(constraints.values()), solver, time_limit, relative_gap)


# ------------------------------------------------------------------------------------------------ judging a map


def evaluate(problem: dict[str, Any], choices: dict[str, str]) -> tuple[float, dict[str, float]]:
    """Objective and attained value per constraint of a map {group: option}, from the problem's own numbers."""
    chosen = {
        group["name"]: next(option for option in group["options"] if option["name"] == choices[group["name"]])
        for group in problem["groups"]
    }
    attained = {}
    for row in problem["constraints"]:
        members = chosen if row["groups"] is None else row["groups"]
        attained[row["name"]] = math.fsum(chosen[name]["weight"] for name in members)
    return math.fsum(option["cost"] for option in chosen.values()), attained


def missed(program: Program, attained: dict[str, float]) -> list[Constraint]:
    """The constraints that a map with these attained values does not meet, beyond rounding."""
    return [row for row in program.constraints if attained[row.name] < row.minimum - row.tolerance]


def _choices(program: Program, picks: Sequence[int]) -> dict[str, str]:
    pairs = zip(program.units, picks, strict=True)
    return {group: unit.options[pick] for unit, pick in pairs for group in unit.groups}


def _total(program: Program, picks: Sequence[int]) -> float:
    return math.fsum(unit.costs[pick] for unit, pick in zip(program.units, picks, strict=True))


def _cheapest(unit: Unit) -> int:
    return min(range(len(unit.costs)), key=unit.costs.__getitem__)


def _shortfalls(program: Program, picks: Sequence[int]) -> list[float]:
    """By how much each constraint misses its minimum (negative: slack)."""
    short = []
    for k, row in enumerate(program.constraints):
        pairs = zip(program.units, picks, strict=True)
        short.append(row.minimum - math.fsum(unit.weights[k][pick] for unit, pick in pairs if k in unit.weights))
    return short


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


def _cover(units: Sequence[Unit], goal: float) -> tuple[list[int], float, float]:
    """Least cost for constraint 0 alone: one option per unit whose weights sum to `goal` at least.

    Returns the map, the LP bound, and the price of weight there: cost per weight of the step that reaches the goal.

    The multiple-choice knapsack's linear relaxation walks along the units' hulls by growing cost per weight; only its
    last step is cut. In place of that cut step the cheapest single change that reaches the goal is taken, then changes
    that save cost within the weight left over.
    """
    hulls = [_hull(unit.costs, unit.weights[0]) for unit in units]
    picks = [hull[0] for hull in hulls]
    steps = []
    for u, (unit, hull) in enumerate(zip(units, hulls, strict=True)):
        costs, weights = unit.costs, unit.weights[0]
        for position, (a, b) in enumerate(itertools.pairwise(hull)):
            more_cost, more_weight = costs[b] - costs[a], weights[b] - weights[a]
            steps.append((more_cost / more_weight, u, position, b, more_cost, more_weight))
    need = goal - math.fsum(unit.weights[0][pick] for unit, pick in zip(units, picks, strict=True))
    cut = price = 0.0
    for slope, u, _, option, more_cost, more_weight in sorted(steps):
        if need <= 0:
            break
        price = slope
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
            costs, weights = unit.costs, unit.weights[0]
            for option in range(len(costs)):
                gain = weights[option] - weights[picks[u]]
                if option != picks[u] and gain >= least_gain:
                    found.append((costs[option] - costs[picks[u]], u, option, gain))
        return sorted(found)

    if need > 0:
        candidates = moves(need)
        if candidates:  # none is left when rounding alone made the goal look out of reach
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
    return picks, bound, price


def _greedy(part: Program) -> tuple[list[int], float, float]:
    """`_cover` of a program with at most one constraint, in milliseconds."""
    if part.constraints:
        row = part.constraints[0]
        # Not the minimum itself: rounding in the sums must not force one more step.
        return _cover(part.units, row.minimum - row.tolerance / 2)
    return [_cheapest(unit) for unit in part.units], math.fsum(min(unit.costs) for unit in part.units), 0.0


def _hopeless(part: Program, incumbent: Sequence[int], price: float) -> list[set[int]]:
    """The options of each unit that are in no map of less cost than the incumbent, for one constraint.

    A map that meets the minimum costs at least L = price * minimum + sum over units of the least (cost - price *
    weight), and with an option that is dearer than its unit's least one by d, at least L + d (Lagrange). Of five
    options per unit about one is left in most units, and exact solvers take a fifth of the time or less. Programs with
    at most two options are fast as they are: they stay whole.
    """
    row, none = part.constraints[0], (0.0,) * max(len(unit.options) for unit in part.units)
    reduced = [
        [cost - price * weight for cost, weight in zip(unit.costs, unit.weights.get(0, none), strict=False)]
        for unit in part.units
    ]
    least = [min(costs) for costs in reduced]
    rounding = 1e-9 * math.fsum(max(map(abs, unit.costs)) for unit in part.units)
    slack = _total(part, incumbent) - math.fsum(least) - price * (row.minimum - row.tolerance) + rounding
    return [
        {option for option, cost in enumerate(costs) if len(costs) > 2 and cost - floor > slack}
        for costs, floor in zip(reduced, least, strict=True)
    ]


# ------------------------------------------------------------------------------------------------ exact solvers


@dataclass(frozen=True)
class _Scaled:
    """The program as the exact solvers see it: 0/1 columns, rows ``sum coefficient * x >= minimum``, one 1 per unit."""

    columns: list[tuple[int, int]]  # (unit, option)
    costs: list[float]
    rows: list[tuple[dict[int, float], float]]
    unit_columns: list[list[int]]
    total: float
    offset: float

    def unscaled(self, cost: float) -> float:
        return cost / SCALED_SUM * self.total + self.offset

    def picks(self, x: Sequence[float]) -> list[int]:
        return [self.columns[max(columns, key=x.__getitem__)][1] for columns in self.unit_columns]


def _scale(
    program: Program, raised: Sequence[float], incumbent: Sequence[int] | None, hopeless: Sequence[set[int]]
) -> _Scaled:
    """Costs from each unit's cheapest option, without hopeless options, summing to SCALED_SUM; so do the rows.

    `raised`: what to add to each minimum. An option that alone costs more than the whole incumbent is in no better map;
    left in, one huge cost would press all others below the solver's tolerances. Nor are the `hopeless` ones of a unit.
    """
    floors = [min(unit.costs) for unit in program.units]
    offset = math.fsum(floors)
    limit = math.inf if incumbent is None else (_total(program, incumbent) - offset) * (1 + 1e-9)
    columns: list[tuple[int, int]] = []
    costs: list[float] = []
    unit_columns: list[list[int]] = []
    for u, unit in enumerate(program.units):
        kept = [
            option
            for option, cost in enumerate(unit.costs)
            if option not in hopeless[u] and (cost <= floors[u] or cost - floors[u] <= limit)
        ]
        unit_columns.append(list(range(len(columns), len(columns) + len(kept))))
        columns += [(u, option) for option in kept]
        costs += [unit.costs[option] - floors[u] for option in kept]
    total = math.fsum(costs) or 1.0
    rows = []
    for k, row in enumerate(program.constraints):
        size = math.fsum(max(map(abs, unit.weights[k])) for unit in program.units if k in unit.weights)
        coefficients = {
            column: SCALED_SUM * (program.units[u].weights[k][option] / size)
            for column, (u, option) in enumerate(columns)
            if k in program.units[u].weights
        }
        if coefficients:  # a row without any was judged before
            rows.append((coefficients, SCALED_SUM * ((row.minimum + raised[k]) / size)))
    return _Scaled(columns, [SCALED_SUM * (cost / total) for cost in costs], rows, unit_columns, total, offset)


@dataclass(frozen=True)
class _Outcome:
    picks: list[int] | None
    bound: float
    infeasible: bool


_Backend = Callable[[_Scaled, float, float], _Outcome]


def _cbc(scaled: _Scaled, time_limit: float, relative_gap: float) -> _Outcome:
    import mip

    model = mip.Model(sense=mip.MINIMIZE, solver_name=mip.CBC)
    # Serial (threads = 0; 1 would be the parallel code with one worker) and seeded: same problem, same answer.
    model.verbose, model.threads, model.seed = 0, 0, 1
    model.max_mip_gap, model.max_mip_gap_abs = relative_gap, 1e-10
    x = [model.add_var(var_type=mip.BINARY, obj=cost) for cost in scaled.costs]
    for columns in scaled.unit_columns:
        model.add_constr(mip.xsum(x[column] for column in columns) == 1)
    for coefficients, minimum in scaled.rows:
        model.add_constr(mip.xsum(value * x[column] for column, value in coefficients.items()) >= minimum)
    status = model.optimize(max_seconds=time_limit)
    bound = model.objective_bound
    picks = scaled.picks([float(column.x) for column in x]) if model.num_solutions else None
    infeasible = status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE)
    return _Outcome(picks, -math.inf if bound is None else float(bound), infeasible)


def _highs(scaled: _Scaled, time_limit: float, relative_gap: float) -> _Outcome:
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    entries = [(unit, column, 1.0) for unit, columns in enumerate(scaled.unit_columns) for column in columns]
    lower, upper = [1.0] * len(scaled.unit_columns), [1.0] * len(scaled.unit_columns)
    for coefficients, minimum in scaled.rows:
        entries += [(len(lower), column, value) for column, value in coefficients.items()]
        lower.append(minimum)
        upper.append(math.inf)
    row_index, column_index, values = zip(*entries, strict=True)
    matrix = csr_matrix((values, (row_index, column_index)), shape=(len(lower), len(scaled.columns)))
    found = milp(
        scaled.costs,
        integrality=np.ones(len(scaled.columns)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, lower, upper),
        options={"time_limit": time_limit, "mip_rel_gap": relative_gap},
    )
    bound = -math.inf if found.mip_dual_bound is None else float(found.mip_dual_bound)
    # 2: infeasible; 3: "unbounded", which 0/1 columns cannot be.
    return _Outcome(None if found.x is None else scaled.picks(list(found.x)), bound, found.status in (2, 3))


def _solve_exactly(
    part: Program, backend: _Backend, incumbent: list[int] | None, hopeless: Sequence[set[int]], deadline: float
) -> _Outcome:
    """Run an exact solver; the bound is in the program's own costs. If the map misses a constraint, demand more of it.

    Solvers take 0.999999 for 1, so that the rounded map may fall short of a minimum that they report as met.
    """
    raised = [0.0] * len(part.constraints)
    bound, infeasible = -math.inf, False
    for attempt in range(3):
        scaled = _scale(part, raised, incumbent, hopeless)
        outcome = backend(scaled, max(deadline - time.perf_counter(), 0.1), part.relative_gap)
        if attempt == 0:
            bound, infeasible = scaled.unscaled(outcome.bound), outcome.infeasible
        if outcome.picks is None:
            break
        short = _shortfalls(part, outcome.picks)
        if all(short[k] <= row.tolerance for k, row in enumerate(part.constraints)):
            return _Outcome(outcome.picks, bound, False)
        for k, row in enumerate(part.constraints):
            raised[k] += 2 * short[k] if short[k] > row.tolerance else 0.0
    return _Outcome(None, bound, infeasible)


def _solve_part(part: Program, solver: str, deadline: float) -> tuple[_Outcome, bool]:
    """The better of hull-greedy's and the exact solver's map, with the better bound; and whether it is the latter's."""
    outcome = _Outcome(None, -math.inf, False)
    hopeless: list[set[int]] = [set() for _ in part.units]
    if not part.overlap():
        picks, bound, price = _greedy(part)
        outcome = _Outcome(picks, bound, False)
        if part.constraints and _shortfalls(part, picks)[0] <= part.constraints[0].tolerance:
            hopeless = _hopeless(part, picks, price)
    if solver == "greedy" or not part.constraints:
        return outcome, False
    exact = _solve_exactly(part, {"cbc": _cbc, "highs": _highs}[solver], outcome.picks, hopeless, deadline)
    if outcome.picks is None:
        return exact, exact.picks is not None
    if exact.picks is None:
        # Hull-greedy's map holds, so a verdict of "infeasible" was wrong and its bound is worth nothing.
        return (outcome if exact.infeasible else replace(outcome, bound=max(outcome.bound, exact.bound))), False
    best = exact if _total(part, exact.picks) <= _total(part, outcome.picks) else outcome
    return replace(best, bound=max(outcome.bound, exact.bound)), best is exact


def _version(solver: str) -> str:
    """The version of an exact solver's package.

    Raises:
        MissingSolverError: it cannot be used here; the message says why, after "mip" or "which".
    """
    said: list[str] = []
    try:
        if solver == "cbc":
            # Where the library does not load, the package says why in its log only.
            handler = logging.Handler()
            handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
            logging.getLogger("mip").addHandler(handler)
            import mip
            from mip import cbc

            if not cbc.has_cbc:
                raise ImportError(f"it has no CBC. {' '.join(said)}")
            return f"mip {mip.__version__}"
        import scipy
        from scipy.optimize import milp  # noqa: F401  (what is needed must load)

        return f"scipy {scipy.__version__}"
    except Exception as error:  # a package that is broken, or built for another one's version, raises anything
        found = importlib.util.find_spec(_PACKAGES[solver])
        if found is None:
            raise MissingSolverError(
                f"is not installed for {sys.executable} (the script's folder and the working directory do not count). "
                f"Install it ({_INSTALL[solver]})"
            ) from error
        where = found.origin or ", ".join(found.submodule_search_locations or ())
        why = f"{type(error).__name__}: {error}"
        raise MissingSolverError(f"is installed ({where}) but does not load ({why}). Mend it") from error


def _choose_solver(program: Program) -> tuple[str, str]:
    """(name, version) of the solver that "auto" or the user's word comes to."""
    overlap = program.overlap()
    if program.solver == "greedy" and overlap:
        raise ProblemError(
            "solver: 'greedy' needs constraints that share no group (tied groups count as one), but "
            f"{overlap[1]!r} and {overlap[2]!r} both count {overlap[0]!r}. Take 'cbc' or 'highs'."
        )
    if not overlap and (program.solver == "greedy" or (program.solver == "auto" and len(program.units) > GREEDY_ABOVE)):
        return "greedy", GREEDY_VERSION
    reasons = {}
    for name in ("cbc", "highs") if program.solver == "auto" else (program.solver,):
        try:
            return name, _version(name)
        except MissingSolverError as error:
            reasons[_PACKAGES[name]] = str(error)
    if program.solver == "auto" and not overlap:
        return "greedy", GREEDY_VERSION
    each = [f"{package} {reason}" for package, reason in reasons.items()]
    raise MissingSolverError(
        f"solver: {program.solver!r} needs {' or '.join(reasons)}"
        + (f". {'. '.join(each)}" if len(each) > 1 else f", which {next(iter(reasons.values()))}")
        + (", or take 'greedy'." if not overlap else " ('greedy' does not apply: the constraints share groups).")
    )


# ------------------------------------------------------------------------------------------------ the whole


def solve(problem: dict[str, Any]) -> dict[str, Any]:
    """The solution of a problem, both as laid out in the documentation of the solver process.

    Objective and constraints are recomputed from the map that is returned. `status` is "optimal" when the gap to the
    proven bound is within `relative_gap`, "feasible" when the map holds but that is not proven, or "infeasible": then
    `choices` is empty and `constraints` gives the largest value that each constraint could attain by itself.

    Raises:
        ProblemError, MissingSolverError, NoSolutionError.
    """
    started = time.perf_counter()
    program = parse(problem)
    solver, version = _choose_solver(program)

    def solution(status: str, attained: dict[str, float], **found: Any) -> dict[str, Any]:
        values = {"choices": {}, "objective": None, "bound": None, "gap": None, **found}
        origin = {"solver": solver, "solver_version": version, "seconds": time.perf_counter() - started}
        return {"status": status, **values, "constraints": attained, **origin}

    reach = {
        row.name: math.fsum(max(unit.weights[k]) for unit in program.units if k in unit.weights)
        for k, row in enumerate(program.constraints)
    }
    if missed(program, reach):
        return solution("infeasible", reach)
    deadline = started + program.time_limit
    picks, bounds, exact_parts = [0] * len(program.units), [], 0
    parts = program.parts()
    for done, (members, part) in enumerate(parts):
        now = time.perf_counter()
        outcome, exact = _solve_part(part, solver, now + (deadline - now) / (len(parts) - done))
        if outcome.picks is None:
            if outcome.infeasible:
                return solution("infeasible", reach)
            raise NoSolutionError(
                f"{solver} found no map that meets all constraints within time_limit = {program.time_limit} s. "
                "Raise time_limit, or lower the minimums."
            )
        bounds.append(outcome.bound)
        exact_parts += exact
        for index, pick in zip(members, outcome.picks, strict=True):
            picks[index] = pick
    if not exact_parts and any(part.constraints for _, part in parts):
        solver, version = "greedy", GREEDY_VERSION

    choices = _choices(program, picks)
    objective, attained = evaluate(problem, choices)
    short = missed(program, attained)
    if short:
        raise NoSolutionError(f"{solver} returned a map that misses the minimum of {short[0].name!r}")
    bound = min(math.fsum(bounds), objective)
    rounding = 1e-12 * math.fsum(max(map(abs, unit.costs)) for unit in program.units)
    gap = 0.0 if objective - bound <= rounding else (objective - bound) / max(abs(objective), abs(bound))
    proven = gap <= program.relative_gap + 1e-9
    if not math.isfinite(bound):
        return solution("feasible", attained, choices=choices, objective=objective)
    status = "optimal" if proven else "feasible"
    return solution(status, attained, choices=choices, objective=objective, bound=bound, gap=gap)


def end_with(parent: int) -> None:
    """End this process soon after the process `parent` has, even if that is killed and can end nothing itself.

    With it ends all that it started, if it leads a process group of its own.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    # The solvers' C code lets other threads run.
    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Read a problem from standard input, write the solution to standard output; returns the exit code."""
    import resource  # not on Windows, where plans can be read too

    parser = argparse.ArgumentParser(description="Solves the problem on standard input.", allow_abbrev=False)
    parser.add_argument("--parent", type=int, metavar="PID", help="end with this process")
    parser.add_argument("--path", action="append", default=[], metavar="FOLDER", help="import the solver from here too")
    options = parser.parse_args()
    if options.parent is not None:
        end_with(options.parent)
    # Behind the interpreter's own, so that nothing there takes the place of what is found without it.
    sys.path += [path for path in options.path if path not in sys.path]
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    soft = LARGEST_FILE if hard == resource.RLIM_INFINITY else min(hard, LARGEST_FILE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    # The solvers' C code prints on file descriptor 1: keep the real one for the answer, send the rest to stderr.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.nice(10)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"
    code = 0
    try:
        try:
            problem = json.loads(sys.stdin.buffer.read())
        except (ValueError, RecursionError) as error:
            raise ProblemError(f"problem: not JSON ({error})") from error
        reply = solve(problem)
    except (ProblemError, MissingSolverError, NoSolutionError) as error:
        code, reply = error.exit_code, {"error": str(error)}
    with answer:
        json.dump(reply, answer, allow_nan=False)
        answer.write("\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
