"""Does a shift change what it says, at its step, for every contender alike, and nothing before it?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_forks import BF16, CPU, SNIP, forked, write_recipe

from eval.bakeoff.fork_base import Trainee, check_length, sequences_of, state_path, train_base
from eval.bakeoff.fork_cells import Contender, Fork
from eval.bakeoff.fork_recipe import ForkRecipe, load_recipe
from eval.bakeoff.fork_shifts import Shift, batches, scrambled, sequences_needed
from eval.bakeoff.fork_text import ForkText, read_text, write_text

SHIFTS = [
    None,
    {"name": "fast", "after": 2, "learning_rate": 4.0},
    {"name": "large", "after": 2, "batch": 2.0},
    {"name": "other", "after": 2, "other_text": True},
    {"name": "spike", "after": 2, "scrambled": 1},
]
ROWS = np.arange(40).reshape(20, 2)


@pytest.fixture(scope="module")
def based(tmp_path_factory: pytest.TempPathFactory) -> tuple[ForkRecipe, ForkText, Path]:
    """A recipe with every kind of shift, its text and the folder of its base's states."""
    folder = tmp_path_factory.mktemp("forks")
    forks = {"base_seeds": [0], "points": [3], "data_seeds": [0], "steps": [2, 4], "shifts": SHIFTS}
    path = write_recipe(folder, [{"format": ["bf16", "fp8"]}], forks=forks)
    words = "six six five " * 1500
    (folder / "other.txt").write_text(words, encoding="utf-8")
    other = {"source": "files", "files": [str(folder / "other.txt")], "sequence_length": 32}
    other |= {"validation_files": [str(folder / "held-out.txt")]}
    recipe = load_recipe(path, [f"other_data={other}", "other_sequences=20"])
    text = write_text(recipe, folder / "text.npz")
    train_base(recipe, text, 0, CPU, folder)
    return recipe, text, folder


def sizes(shift: Shift | None, steps: int) -> list[list[int]]:
    return [rows[:, 0].tolist() for rows in batches(shift, ROWS, 1000 + ROWS[:3], 2, steps)]


def test_steps_after_the_shift_have_the_batch_and_the_text_that_it_names() -> None:
    assert sizes(None, 3) == [[0, 2], [4, 6], [8, 10]]
    assert sizes(Shift(name="s", after=1, batch=2.0), 3) == [[0, 2], [4, 6, 8, 10], [12, 14, 16, 18]]
    assert sizes(Shift(name="s", after=1, batch=0.1), 3) == [[0, 2], [4], [6]]
    assert sizes(Shift(name="s", after=1, other_text=True), 3) == [[0, 2], [1000, 1002], [1004, 1000]]


def test_scrambled_steps_hold_the_same_tokens_in_another_order() -> None:
    rows = np.arange(60).reshape(2, 30)
    found = scrambled(rows, 0)
    assert (np.sort(found, axis=1) == rows).all()
    assert (found != rows).any()
    shift = Shift(name="s", after=1, scrambled=1)
    steps = list(batches(shift, np.repeat(rows, 3, 0), rows, 2, 3))
    assert [bool((np.diff(step, axis=1) == 1).all()) for step in steps] == [True, False, True]


@pytest.mark.parametrize(
    ("shift", "needed"),
    [
        (None, 8),
        (Shift(name="s", after=1, batch=2.0), 2 + 3 * 4),
        (Shift(name="s", after=1, other_text=True), 2),
        (Shift(name="s", after=9, batch=2.0), 8),
    ],
)
def test_a_fork_asks_for_as_many_sequences_as_it_takes(shift: Shift | None, needed: int) -> None:
    assert sequences_needed(shift, 2, 4) == needed


@pytest.mark.slow
def test_forks_with_a_shift_are_others_that_begin_alike(based: tuple[ForkRecipe, ForkText, Path]) -> None:
    recipe, text, folder = based
    plain = recipe.forks[0]
    assert [fork.name for fork in recipe.forks][:2] == ["s0-p3-d0", "s0-p3-d0-fast"]
    assert {fork.seed for fork in recipe.forks} == {plain.seed}
    assert all(Fork.of_dict(fork.to_dict()) == fork for fork in recipe.forks)
    assert len({name for run in recipe.runs(text.digest) for name in run.ids.values()}) == 2 * 2 * 5
    assert len({recipe.setting("text", 4, fork) for fork in recipe.forks}) == 5
    for contender in (BF16, Contender("fp4", "all", {})):
        found = [forked(recipe, text, contender, fork, folder, 2, 4) for fork in recipe.forks]
        same, *losses = ([one["loss"]["train"] for one in lengths] for lengths in found)
        assert all(loss[0] == same[0] for loss in losses)
        assert len({loss[1] for loss in (same, *losses)}) == 5


def test_the_learning_rate_jumps_by_its_factor_and_stays(based: tuple[ForkRecipe, ForkText, Path]) -> None:
    recipe, text, folder = based
    rates = []
    for factor in (1.0, 4.0):
        trainee = Trainee(recipe, text, CPU, 0)
        trainee.load(state_path(recipe, text, recipe.forks[0], folder))
        trainee.shift(Shift(name="s", after=1, learning_rate=factor))
        rates.append([])
        for rows in trainee.put(sequences_of(recipe, text, recipe.forks[0], 3)):
            rates[-1].append(trainee.optimizer.param_groups[0]["lr"])
            trainee.step(4, rows, None)
    assert rates[1] == pytest.approx([4 * rate for rate in rates[0]])


def test_after_a_shift_to_another_text_that_one_is_evaluated(based: tuple[ForkRecipe, ForkText, Path]) -> None:
    recipe, text, folder = based
    again = read_text(folder / "text.npz")
    assert (again.digest, again.other.shape, again.other_held_out.shape) == (text.digest, (16, 32), (4, 32))
    trainee = Trainee(recipe, text, CPU, 0)
    before = trainee.evaluate()
    trainee.shift(Shift(name="s", after=1, other_text=True))
    assert trainee.evaluate() != before


@pytest.mark.slow
def test_a_plan_from_before_the_shift_is_held_and_a_refresh_sees_the_shift(
    based: tuple[ForkRecipe, ForkText, Path],
) -> None:
    recipe, text, folder = based
    plain, other = recipe.forks[0], recipe.forks[3]
    stale = [forked(recipe, text, Contender(None, "all", SNIP), fork, folder, 4)[0] for fork in (plain, other)]
    assert stale[0]["plan"] == stale[1]["plan"]
    delayed = Contender(None, "all", SNIP | {"refresh_every": 2, "apply_delay": 1})
    (found,) = forked(recipe, text, delayed, other, folder, 4)
    assert [plan["step"] for plan in found["plans"]] == [4]


@pytest.mark.parametrize(
    ("shift", "message"),
    [
        ({"name": "s", "after": 2, "batch": 0.0}, "s: batch=0.0; expected a factor above 0"),
        ({"name": "s", "after": 0}, "at least one step before the shift"),
        ({"name": "s", "after": 2, "other_text": True}, "s: other_text needs other_data"),
        ({"name": "s", "after": 2, "speed": 2}, "speed"),
    ],
)
def test_a_shift_that_cannot_work_is_refused(tmp_path: Path, shift: dict[str, Any], message: str) -> None:
    forks = {"base_seeds": [0], "points": [3], "data_seeds": [0], "steps": 4, "shifts": [shift]}
    with pytest.raises(ValueError, match=message):
        load_recipe(write_recipe(tmp_path, [{"format": "bf16"}], forks=forks))


def test_a_text_without_the_other_one_is_refused(based: tuple[ForkRecipe, ForkText, Path]) -> None:
    recipe, text, _ = based
    check_length(recipe, text)
    with pytest.raises(ValueError, match="The text holds no other text"):
        check_length(recipe, ForkText(text.train, text.held_out, text.vocab_size, text.eos_token_id))


def test_a_delay_without_refreshes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="apply_delay=3 without refresh_every"):
        load_recipe(write_recipe(tmp_path, [SNIP | {"apply_delay": 3}]))
