"""The integer program against brute force and between solvers, and malformed input."""

from __future__ import annotations

import copy
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from oracles.brute_force import best_map
from slow_cases import slow
from solver_problems import make_speed_problem

from snip_hf.planning.solver import ilp

EXACT = ("cbc", "highs")


def group(name: str, *options: tuple[str, float, float]) -> dict[str, Any]:
    return {"name": name, "options": [{"name": n, "cost": c, "weight": w} for n, c, w in options]}


def row(name: str, minimum: float, groups: list[str] | None = None) -> dict[str, Any]:
    return {"name": name, "groups": groups, "minimum": minimum}


def two_groups(**fields: Any) -> dict[str, Any]:
    groups = [group(name, ("fp8", 1.0, 0.0), ("fp4", cost, 0.5)) for name, cost in (("a", 4.0), ("b", 3.0))]
    return {"groups": groups, "constraints": [row("all", 0.5)], **fields}


def random_problem(draw: random.Random, kind: str) -> dict[str, Any]:
    """1 to 7 groups with 1 to 5 options; weights in eighths, so that sums are exact; some minimums out of reach.

    `kind`: "global", "stages" (disjoint constraints) or "signed" (stages, with negative costs, weights and minimums:
    "at most"). Half of them have ties.
    """
    names = [f"g{index}" for index in range(draw.randint(1, 7))]
    scale = 10.0 ** draw.randint(-6, 3)
    low = -8 if kind == "signed" else 0
    labels = [f"o{index}" for index in range(5)]
    groups = [
        group(name, *((o, scale * (draw.random() + low / 16), draw.randint(low, 16) / 8) for o in labels[:count]))
        for name, count in ((name, draw.choice([1, 2, 2, 3, 4, 5])) for name in names)
    ]
    sets: list[list[str] | None] = [None]
    stage = dict.fromkeys(names, 0)
    if kind != "global":
        stage = {name: draw.randrange(3) for name in names}
        sets = [[name for name in names if stage[name] == index] for index in range(3)]
    rows = []
    for index, members in enumerate(sets):
        inside = [g for g in groups if members is None or g["name"] in members]
        least, most = (sum(pick(o["weight"] for o in g["options"]) for g in inside) for pick in (min, max))
        rows.append(row(f"c{index}", round((least + (most - least) * draw.uniform(-0.1, 1.1)) * 8) / 8, members))
    ties: list[list[str]] = []
    if draw.random() < 0.5:
        for count in (2, 3):
            alike = [g["name"] for g in groups if len(g["options"]) == count]
            alike = [name for name in alike if stage[name] == stage[alike[0]]]
            if len(alike) > 1:
                ties.append(alike[:2])
    return {"groups": groups, "constraints": rows, "ties": ties, "relative_gap": 0.0}


def size(problem: dict[str, Any]) -> float:
    return math.fsum(max(abs(o["cost"]) for o in g["options"]) for g in problem["groups"])


def model_problem(groups: int, stages: int, seed: int = 0, **fields: Any) -> dict[str, Any]:
    """Log-normal costs, shares of a Llama block's FLOPs, 75% of every stage."""
    draw = random.Random(seed)
    flops = [(1.0, 0.125, 0.125, 1.0, 3.5, 3.5, 3.5)[index % 7] for index in range(groups)]
    stage = [index * stages // groups for index in range(groups)]
    totals = [math.fsum(f for f, s in zip(flops, stage, strict=True) if s == k) for k in range(stages)]
    made = []
    for index in range(groups):
        fp8 = draw.lognormvariate(0, 1) / 10
        fp4 = fp8 + draw.lognormvariate(0, 1)
        made.append(group(f"l{index}", ("fp8", fp8, 0.0), ("fp4", fp4, flops[index] / totals[stage[index]])))
    rows = [row(f"stage {k}", 0.75, [f"l{i}" for i in range(groups) if stage[i] == k]) for k in range(stages)]
    return {"groups": made, "constraints": rows, **fields}


def run_child(problem: Any, *flags: str) -> subprocess.CompletedProcess[str]:
    text = problem if isinstance(problem, str) else json.dumps(problem)
    return subprocess.run(
        [sys.executable, "-I", *flags, ilp.__file__], input=text, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("kind", ["global", "stages", "signed"])
@pytest.mark.parametrize("solver", EXACT)
def test_the_exact_solvers_find_what_brute_force_finds(solver: str, kind: str) -> None:
    draw = random.Random(kind)
    verdicts = set()
    for number in range(40):
        problem = random_problem(draw, kind) | {"solver": solver}
        truth, found = best_map(problem), ilp.solve(problem)
        verdicts.add(found["status"])
        if truth is None:
            assert found["status"] == "infeasible" and found["choices"] == {}, (number, problem)
            continue
        assert found["status"] == "optimal", (number, problem, found)
        assert found["objective"] == pytest.approx(truth[0], rel=0, abs=1e-9 * size(problem)), (number, problem, found)
        assert found["bound"] == pytest.approx(truth[0], rel=0, abs=1e-9 * size(problem)), (number, problem, found)
        # The map itself, priced by the oracle: with all other options taken away it is the only one left.
        only = copy.deepcopy(problem)
        for g in only["groups"]:
            g["options"] = [o for o in g["options"] if o["name"] == found["choices"][g["name"]]]
        assert best_map(only) == (pytest.approx(found["objective"], rel=1e-12), found["choices"]), (number, problem)
    assert verdicts == {"optimal", "infeasible"}


@pytest.mark.parametrize("kind", ["global", "stages", "signed"])
def test_greedy_holds_and_brute_force_lies_between_its_bound_and_its_map(kind: str) -> None:
    draw = random.Random(kind)
    gaps = []
    for number in range(120):
        problem = random_problem(draw, kind) | {"solver": "greedy"}
        truth, found = best_map(problem), ilp.solve(problem)
        if truth is None:
            assert found["status"] == "infeasible", (number, problem)
            continue
        slack = 1e-8 * size(problem)
        assert found["bound"] - slack <= truth[0] <= found["objective"] + slack, (number, problem, found, truth)
        gaps.append((found["objective"] - truth[0]) / size(problem))
        for wanted in problem["constraints"]:
            assert found["constraints"][wanted["name"]] >= wanted["minimum"]
    assert len(gaps) > 80
    assert sum(gap < 1e-9 for gap in gaps) > 0.8 * len(gaps)  # it usually finds the optimum itself


@pytest.mark.parametrize("solver", EXACT)
@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e9])
def test_the_map_does_not_depend_on_the_unit_of_the_costs(solver: str, scale: float) -> None:
    problem = model_problem(140, 2, solver=solver, relative_gap=0.0)
    whole = ilp.solve(problem)
    for g in problem["groups"]:
        for option in g["options"]:
            option["cost"] *= scale
    scaled = ilp.solve(problem)
    assert scaled["status"] == "optimal"
    assert scaled["objective"] == pytest.approx(scale * whole["objective"], rel=1e-9)


@pytest.mark.parametrize("solver", EXACT)
def test_one_huge_cost_does_not_blind_the_solver_to_small_ones(solver: str) -> None:
    problem = model_problem(140, 2, solver=solver, relative_gap=0.0)
    plain = ilp.solve(problem)
    for g in problem["groups"][::20]:
        g["options"].append({"name": "never", "cost": 1e7, "weight": 0.5})
    problem["groups"].append(group("unavoidable", ("only", 1e7, 0.0)))
    found = ilp.solve(problem)
    assert found["solver"] == solver
    assert found["objective"] - 1e7 == pytest.approx(plain["objective"], rel=1e-8)


@pytest.mark.parametrize(("groups", "stages"), [(560, 1), slow(882, 8)])
def test_all_solvers_agree_on_the_linears_of_large_models(groups: int, stages: int) -> None:
    found = {solver: ilp.solve(model_problem(groups, stages, solver=solver)) for solver in (*EXACT, "greedy")}
    for solver in EXACT:
        assert found[solver]["status"] == "optimal" and found[solver]["solver"] == solver
        assert min(found[solver]["constraints"].values()) >= 0.75 - 1e-9
    assert found["cbc"]["objective"] == pytest.approx(found["highs"]["objective"], rel=2e-4)
    best = min(found[solver]["objective"] for solver in EXACT)
    assert found["greedy"]["bound"] <= best <= found["greedy"]["objective"] * (1 + 1e-4)
    assert found["greedy"]["objective"] <= 1.02 * best
    assert max(found[solver]["bound"] for solver in found) <= best * (1 + 1e-9)


@pytest.mark.parametrize(("solver", "stages", "measured"), [("cbc", 8, True), ("highs", 1, False)])
def test_five_options_for_the_gemms_of_a_large_model_are_solved_to_a_ten_thousandth(
    solver: str, stages: int, measured: bool
) -> None:
    problem = make_speed_problem(1680, stages, 0, options=5, measured=measured, solver=solver, relative_gap=1e-4)
    found = ilp.solve(problem)
    assert found["status"] == "optimal" and found["gap"] <= 1e-4
    assert min(found["constraints"].values()) >= 0.6 - 1e-9


def test_greedy_is_within_a_thousandth_of_its_bound_on_4500_groups_and_auto_takes_it() -> None:
    found = ilp.solve(model_problem(4_500, 8, solver="auto", relative_gap=1e-3))
    assert found["solver"] == "greedy"
    assert found["status"] == "optimal"
    assert 0 < (found["objective"] - found["bound"]) / found["objective"] <= 1e-3
    assert min(found["constraints"].values()) >= 0.75 - 1e-9


def test_rounding_in_the_sums_does_not_cost_greedy_a_step() -> None:
    for count in range(3, 40):
        groups = [group(f"g{i}", ("fp8", 0.0, 0.0), ("fp4", 1.0 + i, 1 / count)) for i in range(count)]
        for wanted in range(count + 1):
            problem = {"groups": groups, "constraints": [row("all", wanted / count)], "solver": "greedy"}
            assert list(ilp.solve(problem)["choices"].values()).count("fp4") == wanted


def test_greedy_takes_back_what_its_last_step_made_needless() -> None:
    a = group("a", ("none", 0.0, 0.0), ("some", 1.0, 0.5), ("more", 2.0, 0.75), ("all", 3.0, 1.0))
    b = group("b", ("none", 0.0, 0.0), ("all", 10.0, 2.0))
    found = ilp.solve({"groups": [a, b], "constraints": [row("all", 1.5)], "solver": "greedy"})
    assert (found["choices"], found["objective"]) == ({"a": "none", "b": "all"}, 10.0)
    assert found["bound"] == pytest.approx(3.0 + 0.5 * 5.0)


def test_greedy_status_is_feasible_when_its_own_bound_does_not_prove_the_gap() -> None:
    found = ilp.solve(two_groups(solver="greedy", constraints=[row("all", 0.4)]))
    assert (found["status"], found["choices"]) == ("feasible", {"a": "fp8", "b": "fp4"})
    # By hand: fp8 + fp8 costs 2; the cheaper step costs 2 for a weight of 0.5, and 0.4 of it is needed.
    assert found["bound"] == pytest.approx(3.6)
    assert found["gap"] == pytest.approx(0.1)


@pytest.mark.parametrize("solver", [*EXACT, "greedy"])
def test_without_a_constraint_every_group_takes_its_cheapest_option(solver: str) -> None:
    found = ilp.solve(two_groups(solver=solver) | {"constraints": []})
    assert (found["status"], found["choices"], found["gap"]) == ("optimal", {"a": "fp8", "b": "fp8"}, 0.0)


@pytest.mark.parametrize("solver", [*EXACT, "greedy"])
def test_a_negative_weight_and_minimum_say_at_most(solver: str) -> None:
    problem = two_groups(solver=solver)
    for g in problem["groups"]:
        g["options"][1] |= {"cost": -g["options"][1]["cost"], "weight": -0.5}
    problem["constraints"] = [row("at most one", -0.5)]
    assert ilp.solve(problem)["choices"] == {"a": "fp4", "b": "fp8"}


@pytest.mark.parametrize("solver", [*EXACT, "greedy"])
def test_tied_groups_take_the_option_of_the_same_name_also_in_another_order(solver: str) -> None:
    problem = two_groups(solver=solver, ties=[["b", "a"]])
    problem["groups"][0]["options"].reverse()
    problem["groups"].append(group("c", ("fp8", 1.0, 0.0), ("fp4", 5.9, 0.5)))
    found = ilp.solve(problem)
    assert found["choices"] == {"a": "fp8", "b": "fp8", "c": "fp4"}  # 4.9 more; a and b together would be 5 more
    problem["groups"][2]["options"][1]["cost"] = 6.1
    assert ilp.solve(problem)["choices"] == {"a": "fp4", "b": "fp4", "c": "fp8"}


def test_ties_that_share_a_group_are_joined() -> None:
    problem = model_problem(12, 1, ties=[["l0", "l1"], ["l2", "l3"], ["l3", "l1"]], solver="highs")
    problem["constraints"][0]["minimum"] = 0.4
    assert ilp.parts_of(problem)[1].units[0].groups == ("l0", "l1", "l2", "l3")
    assert len({ilp.solve(problem)["choices"][name] for name in ("l0", "l1", "l2", "l3")}) == 1


@pytest.mark.parametrize("solver", [*EXACT, "greedy"])
def test_everything_in_fp4_is_met_although_the_shares_do_not_quite_sum_to_one(solver: str) -> None:
    problem = model_problem(21, 1, solver=solver)
    problem["constraints"][0]["minimum"] = 1.0
    for g in problem["groups"]:
        g["options"][1]["weight"] *= 1 - 9e-10
    found = ilp.solve(problem)
    assert set(found["choices"].values()) == {"fp4"}
    assert found["solver"] == solver


def test_infeasible_gives_no_map_and_what_each_constraint_could_attain() -> None:
    problem = two_groups(solver="cbc", constraints=[row("a", 0.75, ["a"]), row("b", 0.25, ["b"])])
    found = ilp.solve(problem)
    assert (found["status"], found["choices"], found["objective"]) == ("infeasible", {}, None)
    assert found["constraints"] == {"a": 0.5, "b": 0.5}


@pytest.mark.parametrize("solver", ["cbc", "greedy"])
def test_the_process_prints_one_line_of_json_and_gives_the_same_map_every_time(solver: str) -> None:
    # Equal costs everywhere: thousands of maps are equally good (string hashes differ from process to process).
    problem = model_problem(56, 2, solver=solver)
    for g in problem["groups"]:
        g["options"][0]["cost"], g["options"][1]["cost"] = 0.0, 1e-7
    first, second = run_child(problem), run_child(problem)
    assert (first.returncode, first.stderr) == (0, "")
    solutions = [json.loads(done.stdout) for done in (first, second)]
    for solution in solutions:
        assert solution.pop("seconds") > 0
    assert solutions[0] == solutions[1]
    fields = ["status", "choices", "objective", "bound", "gap", "constraints", "solver", "solver_version"]
    assert list(solutions[0]) == fields


def test_output_of_the_solver_library_goes_to_standard_error(tmp_path: Path) -> None:
    program = (
        "import os, sys; sys.path.insert(0, sys.argv.pop()); import ilp; real = ilp.greedy;"
        "ilp.greedy = lambda part: (os.write(1, b'Welcome to the CBC MILP Solver'), real(part))[1];"
        "ilp.main()"
    )
    command = [sys.executable, "-I", "-c", program, str(Path(ilp.__file__).parent)]
    done = subprocess.run(command, input=json.dumps(two_groups(solver="greedy")), capture_output=True, text=True)
    assert json.loads(done.stdout)["status"] == "optimal"
    assert "Welcome to the CBC MILP Solver" in done.stderr


def test_a_solver_that_is_not_installed_is_named() -> None:
    done = run_child(two_groups(solver="cbc"), "-S")  # -S: no site-packages, so neither mip nor scipy
    missing = json.loads(done.stdout)["missing"]
    assert missing.startswith("solver='cbc' cannot be used by ") and "No module named 'mip'" in missing
    assert missing.endswith("Install it (pip install \"snip-hf[cbc]\"), or set solver='auto'.")
    assert "solver='highs' cannot be used by " in run_child(two_groups(), "-S").stdout


def test_auto_takes_cbc_where_it_is_installed_and_highs_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ilp.solve(two_groups())["solver"] == "cbc"
    monkeypatch.setitem(sys.modules, "mip", None)  # import mip raises ImportError
    assert ilp.solve(two_groups())["solver"] == "highs"


def solver_that(monkeypatch: pytest.MonkeyPatch, *outcomes: ilp.Answer) -> list[float]:
    """Lets CBC find these outcomes, one after the other; returns a list that fills with the minimums it was given."""
    left, minimums = list(outcomes), []

    def found(scaled: ilp.Scaled, *_: float) -> ilp.Answer:
        minimums.append(scaled.minimum)
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setitem(ilp._SOLVERS, "cbc", found)
    return minimums


def test_without_a_solution_in_time_the_greedy_map_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    solver_that(monkeypatch, (None, -math.inf))
    problem = two_groups(constraints=[row("all", 0.4)])
    found, greedy = ilp.solve(problem | {"solver": "cbc"}), ilp.solve(problem | {"solver": "greedy"})
    del found["seconds"], greedy["seconds"]
    assert found == greedy and found["status"] == "feasible"


def test_a_map_that_misses_the_minimum_is_not_taken_and_more_is_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    short = ([0, 0], -math.inf)  # fp8, fp8: attains nothing
    minimums = solver_that(monkeypatch, short)
    found = ilp.solve(two_groups(solver="cbc"))
    assert (found["choices"], found["solver"]) == ({"a": "fp8", "b": "fp4"}, "greedy")
    assert minimums == sorted(minimums) and len(set(minimums)) == 3
    solver_that(monkeypatch, short, ([0, 1], -math.inf))
    assert ilp.solve(two_groups(solver="cbc"))["solver"] == "cbc"


def test_a_worse_map_than_the_greedy_one_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    solver_that(monkeypatch, ([1, 1], -math.inf))  # fp4, fp4: meets the minimum at cost 7 instead of 4
    found = ilp.solve(two_groups(solver="cbc"))
    assert (found["objective"], found["solver"]) == (4.0, "greedy")
    assert found["bound"] == pytest.approx(4.0)  # hull-greedy's, since the other gave none


def test_importing_the_module_imports_no_solver_and_no_torch() -> None:
    program = "import sys; sys.path.insert(0, sys.argv[1]); import ilp; print(*sys.modules)"
    command = [sys.executable, "-I", "-c", program, str(Path(ilp.__file__).parent)]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "ilp" in loaded
    assert not {"mip", "scipy", "numpy", "torch", "snip_hf"} & set(loaded)
