"""A single process gathers its own value; only FSDP2's hooks are removed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import tiny_lm, tokens
from torch import Tensor, nn

from snip_hf.estimation.passes import traceless
from snip_hf.parallel.ranks import Attempt, FailedElsewhere, Processes, RankError, Ranks, describe
from snip_hf.parallel.sharding import is_sharded, own_part, sharded_as, whole


def test_a_process_that_is_alone_is_the_first_of_one() -> None:
    for ranks in (Ranks(), Ranks.of_all()):
        assert (ranks.rank, ranks.size, ranks.is_first) == (0, 1, True)
    processes = Processes()
    assert [ranks.size for ranks in (processes.data, processes.pipeline, processes.everyone)] == [1, 1, 1]
    assert processes.run is None


def test_it_gets_back_what_it_gave_without_a_copy() -> None:
    value, piece = {"a": object()}, torch.ones(3)
    assert Ranks().gather(value)[0] is value
    assert Ranks().by_first(lambda: value) is value
    assert Ranks().all_to_all(lambda: [piece], [3])[0] is piece


def test_its_errors_are_its_own() -> None:
    error = KeyError("missing")

    def fail() -> None:
        raise error

    for call in (lambda: Ranks().by_first(fail), lambda: Ranks().agree(error)):
        with pytest.raises(KeyError) as caught:
            call()
        assert caught.value is error
    Ranks().agree(None)


def test_an_attempt_keeps_the_first_error_and_lets_go_of_those_that_all_know_or_that_end_the_run() -> None:
    attempt = Attempt()
    with attempt:
        pass
    assert attempt.error is None
    first = ValueError("first")
    for error in (first, RuntimeError("second")):
        with attempt:
            raise error
    assert attempt.error is first
    for ending in (RankError("gone"), FailedElsewhere("known"), KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(ending)), attempt:
            raise ending
    assert attempt.error is first


def test_an_error_is_described_by_its_kind_and_text() -> None:
    assert describe(ValueError("too much")) == "ValueError: too much"


def test_an_error_of_many_lines_is_described_on_one_and_cut() -> None:
    assert describe(ValueError("too much:\n\n  of this\n  of that\n")) == "ValueError: too much: of this of that"
    text = describe(ValueError("\n".join(f"line {number:03d}" for number in range(1000))))
    assert len(text) == 1000
    assert text.startswith("ValueError: line 000 line 001 ") and text.endswith("...")


def test_a_tensor_that_is_not_sharded_stays_what_it_is() -> None:
    tensor = torch.ones(2, 3)
    assert not is_sharded(tensor)
    assert whole(tensor) is own_part(tensor) is sharded_as(tensor, torch.zeros(2, 3)) is tensor


class FSDPState:
    """Has the name of FSDP2's."""

    def __init__(self) -> None:
        self.calls = 0

    def before(self, module: nn.Module, args: Any) -> None:
        self.calls += 1

    def after(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.calls += 1


def test_only_the_hooks_of_fsdp_are_taken_away_and_all_are_put_back_in_their_order() -> None:
    model, state, others = tiny_lm(), FSDPState(), []
    for module in (model, model.layers[1]):
        module.register_forward_pre_hook(lambda *_: others.append("before"))
        module.register_forward_pre_hook(state.before)
        module.register_forward_hook(state.after)
        module.register_forward_hook(lambda *_: others.append("after"))
    order = [list(module._forward_pre_hooks.values()) for module in model.modules()]
    with pytest.raises(RuntimeError), traceless(model):
        model(**tokens())
        assert state.calls == 0 and len(others) == 4
        raise RuntimeError
    assert [list(module._forward_pre_hooks.values()) for module in model.modules()] == order
    model(**tokens())
    assert state.calls == 4 and len(others) == 8
