"""The running mean of prices over refreshes: its numbers, layers that are missing, and that a run keeps it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loop import Loop
from policy_settings import plain_flops, setting_of
from slow_cases import slow_but
from tiny_runs import SCHEDULE

from snip_hf import SnipConfig
from snip_hf.estimation.pending import LAYER, ROWS
from snip_hf.estimation.table import Divergence, DivergenceTable
from snip_hf.numerics.gemms import GEMMS
from snip_hf.planning.price_memory import read_prices, with_memory
from snip_hf.planning.program import problem
from snip_hf.policies.registry import cost_of
from snip_hf.policies.setting import Setting
from snip_hf.records.divergences import read_divergence
from snip_hf.training.checkpoint import SavedState


def setting(**options: Any) -> Setting:
    return setting_of(
        plain_flops(1.0, 1.0), **{"policy": "min-abs-err", "granularity": "layer", "estimate_memory": 0.75, **options}
    )


def table_of(first: float, second: float | None = None, fp8: float = 0.0) -> DivergenceTable:
    """Absolute errors in FP4 of two layers, or of the first alone; those of single GEMMs are a fourth of a layer's."""
    rows = []
    for layer, error in (("layers.0.fc", first), ("layers.1.fc", second)):
        for gemm in ROWS if error is not None else ():
            part = 1.0 if gemm == LAYER else 0.25
            for name, size in (("fp8", fp8), ("fp4", 1.0)):
                figure = part * size * (error or 0.0)
                rows.append(Divergence(layer, gemm, name, figure, figure, 1.0, 0.0, figure, figure, figure))
    return DivergenceTable(2.0, tuple(rows))


def prices(table: DivergenceTable, gemm: str = LAYER) -> list[float | None]:
    return [row.price for row in table.rows if (row.gemm, row.format) == (gemm, "fp4")]


def test_a_price_is_the_running_mean_of_its_shares_times_the_new_total() -> None:
    first, memory = with_memory(setting(), table_of(1.0, 3.0), {})
    assert prices(first) == [1.0, 3.0]
    # Shares 1/4 and 3/4 before, 3/4 and 1/4 now: 3/4 of the old ones, a quarter of the new, of a total of 80.
    second, memory = with_memory(setting(), table_of(60.0, 20.0), memory)
    assert prices(second) == [pytest.approx(80 * 0.375), pytest.approx(80 * 0.625)]
    assert prices(second, "forward") == [pytest.approx(20 * 0.375), pytest.approx(20 * 0.625)]
    third, _ = with_memory(setting(), table_of(1.0, 0.0), memory)
    assert prices(third) == [pytest.approx(0.75 * 0.375 + 0.25), pytest.approx(0.75 * 0.625)]
    # What was measured stays as it is.
    assert [row.absolute_error for row in third.rows] == [row.absolute_error for row in table_of(1.0, 0.0).rows]


def test_many_refreshes_of_one_state_come_to_its_prices_and_a_scale_means_nothing() -> None:
    """A change of batch or learning rate may scale all figures."""
    memory: Any = {}
    for scale in (1.0, 10.0, 0.1, 3.0):
        found, memory = with_memory(setting(), table_of(2 * scale, 6 * scale), memory)
        assert prices(found) == [pytest.approx(2 * scale), pytest.approx(6 * scale)]


@pytest.mark.parametrize("policy", ["snip", "min-abs-err", "min-rel-err", "fisher", "hessian-trace", "greedy", "kl"])
def test_the_first_refresh_has_the_program_of_a_run_without_memory(policy: str) -> None:
    flops = plain_flops(1.0, 1.0)
    before = {layer: dict.fromkeys(GEMMS, "fp8") for layer in flops}
    table = table_of(1.0, 3.0, fp8=0.25)
    plain = setting(policy=policy, estimate_memory=0.0)
    assert with_memory(plain, table, {}) == (table, {})
    priced, _ = with_memory(setting(policy=policy), table, {})
    expected, found = problem(plain, table, before), problem(setting(policy=policy), priced, before)
    for one, other in zip(expected.pop("groups"), found.pop("groups"), strict=True):
        assert one["name"] == other["name"]
        for option, priced_option in zip(one["options"], other["options"], strict=True):
            assert option["cost"] == pytest.approx(priced_option["cost"], rel=1e-12)
            assert option["weight"] == priced_option["weight"]
    assert expected == found


def test_a_layer_that_took_no_part_keeps_its_price_and_one_that_comes_later_has_its_own() -> None:
    """An expert without tokens. What the others cost together says what its share is worth now."""
    for policy, unit in (("min-abs-err", 32.0), ("fisher", 4.0)):
        chosen = setting(policy=policy)
        _, memory = with_memory(chosen, table_of(1.0, 3.0), {})
        found, memory = with_memory(chosen, table_of(8.0), memory)
        assert [row.layer for row in found.rows] == ["layers.0.fc"] * 8 + ["layers.1.fc"] * 8
        assert prices(found) == [pytest.approx(unit * 0.25), pytest.approx(unit * 0.75)]
        absent = found.rows[-1]
        assert (absent.loss_divergence, absent.weight_divergence, absent.criterion) == (0.0, 0.0, None)
        before = {layer: dict.fromkeys(GEMMS, "fp8") for layer in chosen.flops}
        options = [group["options"] for group in problem(chosen, found, before)["groups"]]
        spare = 1e-3 / 2 if policy == "fisher" else 0.0
        assert [row[-1]["cost"] for row in options] == [pytest.approx(price + spare) for price in prices(found)]
    _, memory = with_memory(setting(), table_of(1.0), {})
    found, _ = with_memory(setting(), table_of(2.0, 6.0), memory)
    assert prices(found) == [pytest.approx(2.0), pytest.approx(6.0)]


def test_a_table_without_any_price_teaches_nothing() -> None:
    _, memory = with_memory(setting(), table_of(1.0, 3.0), {})
    table = table_of(0.0, 0.0)
    assert with_memory(setting(), table, memory) == (table, memory)


def test_prices_survive_json_and_layers_that_are_not_there_any_more_are_left_out() -> None:
    _, memory = with_memory(setting(), table_of(1.0, 3.0), {})
    assert read_prices(json.loads(json.dumps(memory))) == memory
    gone = {**memory, "layers.9.fc": {LAYER: {"fp4": 0.5}}}
    assert with_memory(setting(), table_of(1.0, 1.0), gone) == with_memory(setting(), table_of(1.0, 1.0), memory)


def test_memory_makes_a_plan_change_less() -> None:
    """Two layers whose true prices are 1 and 2, measured with noise that now and then turns their order."""
    noise = [(1.0, 2.0), (1.9, 1.7), (0.8, 2.2), (2.0, 1.6), (1.1, 1.9), (1.8, 1.7)]
    cheapest: dict[float, list[int]] = {}
    for weight in (0.0, 0.75):
        memory: Any = {}
        cheapest[weight] = []
        for first, second in noise:
            chosen = setting(estimate_memory=weight)
            table, memory = with_memory(chosen, table_of(first, second), memory)
            cost = cost_of(chosen.config, table)
            found = [
                row.price if weight else cost(row) for row in table.rows if (row.gemm, row.format) == (LAYER, "fp4")
            ]
            cheapest[weight].append(found.index(min(found)))
    assert cheapest == {0.0: [0, 1, 0, 1, 0, 1], 0.75: [0] * 6}


# ------------------------------------------------------------------------------------------------------------ in a run

CONFIG = SnipConfig(**{**SCHEDULE, "refresh_every": 2, "apply_delay": 1, "estimate_memory": 0.5})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loop, Path]:
    """Refreshes at steps 2, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("run")
    loop = Loop(CONFIG, folder).run(8)
    assert loop.controller is not None
    loop.controller.close()
    return loop, folder / "snip"


def test_a_run_writes_the_prices_that_it_decided_by(run: tuple[Loop, Path]) -> None:
    memory: Any = {}
    for step in (2, 4, 6):
        _, records = read_divergence(run[1] / f"divergence-{step}.json")
        raw = DivergenceTable(1.0, tuple(Divergence(**record | {"price": None}) for record in records))
        table, memory = with_memory(setting_of_run(run[0]), raw, memory)
        assert [record["price"] for record in records] == [pytest.approx(row.price, rel=1e-9) for row in table.rows]


def setting_of_run(loop: Loop) -> Setting:
    assert loop.controller is not None
    plan = loop.controller.plan
    return Setting(CONFIG, plan.flops, plan.stages)


@pytest.mark.parametrize("saved_at", slow_but([3, 4], 4))
def test_a_resumed_run_remembers_to_the_bit(run: tuple[Loop, Path], saved_at: int, tmp_path: Path) -> None:
    """Between two refreshes, and while a plan waits."""
    first = Loop(CONFIG).run(saved_at)
    assert first.controller is not None
    state = json.loads(json.dumps(first.controller.state_dict()))
    generator = torch.get_rng_state()
    second = Loop(CONFIG, tmp_path)
    assert second.controller is not None
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.controller.load_state_dict(state)
    assert second.controller.state_dict()["prices"] == state["prices"]
    second.step = saved_at
    torch.set_rng_state(generator)
    second.run(8)
    first.controller.close()
    second.controller.close()
    assert second.losses == run[0].losses[saved_at:]
    own, full = ((folder / "divergence-6.json").read_text() for folder in (tmp_path / "snip", run[1]))
    assert own == full


def test_a_state_without_prices_has_none_and_a_damaged_one_is_refused(run: tuple[Loop, Path]) -> None:
    assert run[0].controller is not None
    state = json.loads(json.dumps(run[0].controller.state_dict()))
    assert SavedState.of(state).prices == state["prices"] != {}
    shares = ("x", "nan", float("nan"), None)
    for damaged in ([1], {"a": 1}, {"a": {"b": 1}}, 7, *({"a": {"b": {"fp4": share}}} for share in shares)):
        with pytest.raises(ValueError, match="The SNIP state is not complete or damaged"):
            SavedState.of(state | {"prices": damaged})
    del state["prices"]  # as earlier versions wrote it
    assert SavedState.of(state).prices == {}
    assert "prices" not in SavedState.of(state).to_dict()
