"""Is every field of SnipConfig checked when it is built, and does it survive YAML and JSON?"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from snip_hf.config import _CHOICES, _TYPES, DEFAULT_FP4_FRACTION, POLICIES, RATES, SnipConfig, mean_share, shares_text
from snip_hf.numerics.formats import FORMATS

REPOSITORY = Path(__file__).parents[1]

FIELDS = list(_TYPES)
# One value per field that differs from the default.
OTHER: dict[str, Any] = {
    "target_fp4_fraction": 0.5,
    "formats": ("fp4", "fp8", "bf16"),
    "policy": "random",
    "fixed_plan": "plan.json",
    "granularity": "layer",
    "ties": (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
    "skip_modules": ("*.down_proj", "model.layers.0.mlp.up_proj"),
    "include_modules": ("model.vision_tower.*", "score"),
    "start_format": "bf16",
    "first_refresh": 3,
    "refresh_every": 7,
    "apply_delay": 0,
    "guard": "raise",
    "backend": "emulated",
    "seed": 5,
    "target_linear_speedup": 2.5,
    "rates": "ideal",
    "budget": "measured",
    "timing_file": "times.json",
    "timing_tokens": 4096,
    "decides": "forward",
    "stages": (("a.0", "a.1"), ("a.2",)),
    "objective": "paper",
    "loss_estimator": "token-fisher",
    "probes": 2,
    "probe_tokens": None,
    "probe_batch_tokens": None,
    "solver": "greedy",
    "solver_time_limit": 1,
    "guard_patience": 20,
}
# For all of them at once: a speed-up excludes a share, and a table of rates measured times.
ONE_BUDGET = {"target_linear_speedup": None, "rates": None}

EXAMPLE = "e.g. 0.5, or ((1, 0.9), (800, 0.5)): 0.9 from step 1 on, 0.5 from step 800 on"
OWN_POLICY = (
    " A policy of your own is registered first: by `register_policy` of `snip_hf.policies.registry`, or by `--import "
    "MODULE` on the command line."
)
CHANGING = "Shares that change are pairs of a step and a share, e.g. ((1, 0.9), (800, 0.5))."

BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    *(
        (
            {"target_fp4_fraction": value},
            f"target_fp4_fraction={value} is outside 0..1; it is the share of the linear FLOPs "
            "that run in FP4, e.g. 0.5.",
        )
        for value in (-0.01, 1.01, 75, float("nan"), float("inf"))
    ),
    *(
        (
            {"target_linear_speedup": value, "rates": "ideal"},
            f"target_linear_speedup={value} is not a finite number of at least 1 (the speed of BF16); expected "
            "e.g. 1.8.",
        )
        for value in (0.99, 0, -2, float("nan"), float("inf"))
    ),
    ({"budget": "time"}, "budget='time' is not known; expected one of flops, measured."),
    ({"timing_file": "a.json"}, "timing_file='a.json' is for budget='measured'; set that too."),
    ({"timing_tokens": 16}, "timing_tokens=16 is for budget='measured'; set that too."),
    *(
        ({"budget": "measured", "timing_tokens": value}, f"timing_tokens={value} is too small; expected at least 1.")
        for value in (0, -1)
    ),
    *(
        (
            {"budget": "measured", "policy": policy},
            f"budget='measured' with policy={policy!r} needs timing_tokens, the size of a micro-batch: its "
            "plan is made before the first one. Set it to batch size times sequence length, e.g. 16384.",
        )
        for policy in ("random", "layer-type", "layer-position", "first2-last8", "last-15-percent")
    ),
    (
        {"policy": "backward-first", "granularity": "layer"},
        "granularity='layer' with policy='backward-first' cannot work: it decides on the GEMMs of a linear separately. "
        "Omit granularity (set it to None in dataclasses.replace and to_dict), or choose another policy.",
    ),
    (
        {"policy": "snip-paper", "granularity": "gemm"},
        "granularity='gemm' with policy='snip-paper' cannot work: it decides on whole linears. Omit granularity "
        "(set it to None in dataclasses.replace and to_dict), or choose another policy.",
    ),
    *(
        ({"target_fp4_fraction": value}, f"target_fp4_fraction={value!r} {what}, {EXAMPLE}.")
        for value, what in (
            ((), "has no entry; expected step 1 first"),
            (((5, 0.9),), "begins at step 5; expected step 1 first"),
            (((0, 0.9),), "begins at step 0; expected step 1 first"),
            (((1, 0.9), (8, 0.5), (8, 0.4)), "has step 8 after step 8; expected increasing steps"),
            (((1, 0.9), (8, 0.5), (7, 0.4)), "has step 7 after step 8; expected increasing steps"),
        )
    ),
    *(
        (
            {"target_fp4_fraction": ((1, 0.5), (8, value))},
            f"target_fp4_fraction[1]={value!r} is outside 0..1; it is the share of the linear FLOPs that run in FP4, "
            "e.g. 0.5.",
        )
        for value in (-0.01, 1.01, 75, float("nan"), float("inf"))
    ),
    (
        {"target_fp4_fraction": ((1, 0), (8, 0.5)), "formats": ("fp8", "bf16")},
        "target_fp4_fraction=0.5 cannot be met with the formats ('fp8', 'bf16'): none of them rounds both "
        "operands to at most 4 bits. Add one that does, e.g. 'fp4', or set target_linear_speedup with rates, or "
        "policy='uniform-fp8'.",
    ),
    (
        {"target_fp4_fraction": ((1, 0.9), (8, 0.5)), "target_linear_speedup": 2.0, "rates": "ideal"},
        "target_fp4_fraction=((1, 0.9), (8, 0.5)) and target_linear_speedup=2.0 are two targets; expected one of them. "
        "Leave the other one out, or set it to None.",
    ),
    ({"decides": "backward"}, "decides='backward' is not known; expected one of all, forward."),
    (
        {"decides": "forward", "granularity": "layer"},
        "decides='forward' with granularity='layer' cannot work: it decides only on the forward GEMM of a "
        "linear. Set granularity='gemm'.",
    ),
    *(
        (
            {"decides": "forward", "granularity": "gemm", "policy": policy, "formats": ("fp4", "bf16")},
            f"decides='forward' with policy={policy!r} has no effect: that policy has no target. Leave it out, or "
            "choose a policy with a target (docs/policies.md).",
        )
        for policy in ("uniform-fp8", "uniform-fp4", "bf16", "first2-last8-bf16", "last-15-percent-bf16")
    ),
    (
        {"decides": "forward", "granularity": "gemm", "target_linear_speedup": 2.0, "rates": "ideal"},
        "decides='forward' with target_linear_speedup=2.0 cannot work: a speed-up counts all GEMMs of the linears. Set "
        "target_fp4_fraction, a share of the forward GEMMs, instead.",
    ),
    ({"guard": "on"}, "guard='on' is not known; expected one of off, raise."),
    ({"guard_patience": 0}, "guard_patience=0 is too small; expected at least 1."),
    ({"granularity": "block"}, "granularity='block' is not known; expected one of layer, gemm."),
    (
        {"policy": "snap"},
        f"policy='snap' is not known. Did you mean 'snip'? `list(snip_hf.config.POLICIES)` lists all {len(POLICIES)}."
        + OWN_POLICY,
    ),
    (
        {"policy": "paper"},
        "policy='paper' is not known. 'paper' is a preset: SnipConfig.preset('paper'). "
        f"`list(snip_hf.config.POLICIES)` lists all {len(POLICIES)}." + OWN_POLICY,
    ),
    (
        {"policy": "maximal"},
        f"policy='maximal' is not known. `list(snip_hf.config.POLICIES)` lists all {len(POLICIES)}." + OWN_POLICY,
    ),
    (
        {"policy": "SNIP"},
        f"policy='SNIP' is not known. Did you mean 'snip'? `list(snip_hf.config.POLICIES)` lists all {len(POLICIES)}."
        + OWN_POLICY,
    ),
    (
        {"solver": "hihgs"},
        "solver='hihgs' is not known. Did you mean 'highs'? Expected one of auto, cbc, highs, greedy.",
    ),
    (
        {"start_format": "int8"},
        "start_format='int8' is not among formats=('mxfp4', 'fp8-delayed'); expected one of mxfp4, fp8-delayed, "
        "bf16, or None for the last of formats.",
    ),
    (
        {"start_format": "int9"},
        f"Unknown format 'int9' for start_format. Did you mean 'int8'? `list(snip_hf.formats)` lists all "
        f"{len(FORMATS)}. A format of your own is registered first: by `snip_hf.register_format`, or by `--import "
        "MODULE` on the command line.",
    ),
    (
        {"start_format": "fp4", "formats": ("fp8", "bf16")},
        "start_format='fp4' is not among formats=('fp8', 'bf16'); expected one of fp8, bf16, or None for the last of "
        "formats.",
    ),
    ({"formats": ()}, "formats=() names no format; expected e.g. ('mxfp4', 'fp8-delayed')."),
    ({"formats": ("fp4", "fp4")}, "formats=('fp4', 'fp4') are not distinct, least precise first; expected ('fp4',)."),
    *(
        (
            {"formats": (first, second)},
            f"formats={(first, second)!r} are not distinct, least precise first; expected {(second, first)!r}.",
        )
        for first, second in (("fp8", "fp4"), ("mxfp8", "mxfp4"), ("bf16", "fp8"))
    ),
    (
        {"formats": ("bf16",)},
        "policy='snip' has nothing to decide between the formats ('bf16',); expected at least one that is quantized.",
    ),
    (
        {"formats": ("fp4-pqt", "nvfp4", "fp8"), "policy": "random"},
        "target_fp4_fraction=0.5 cannot be met with the formats ('fp4-pqt', 'fp8'): none of them rounds both "
        "operands to at most 4 bits. Add one that does, e.g. 'fp4', or set target_linear_speedup with rates, or "
        "policy='uniform-fp4-pqt'.",
    ),
    (
        {"formats": ("fp8", "bf16"), "target_fp4_fraction": 0.1},
        "target_fp4_fraction=0.1 cannot be met with the formats ('fp8', 'bf16'): none of them rounds both "
        "operands to at most 4 bits. Add one that does, e.g. 'fp4', or set target_linear_speedup with rates, or "
        "policy='uniform-fp8'.",
    ),
    (
        {"formats": ("fp8", "bf16")},
        "target_fp4_fraction=0.5 cannot be met with the formats ('fp8', 'bf16'): none of them rounds both "
        "operands to at most 4 bits. Add one that does, e.g. 'fp4', or set target_linear_speedup with rates, or "
        "policy='uniform-fp8'.",
    ),
    (
        {"formats": ("fp4", "int9")},
        f"Unknown format 'int9' for formats. Did you mean 'int8'? `list(snip_hf.formats)` lists all {len(FORMATS)}. A "
        "format of your own is registered first: by `snip_hf.register_format`, or by `--import MODULE` on the command "
        "line.",
    ),
    ({"objective": "sum"}, "objective='sum' is not known; expected one of additive, paper, gradients."),
    ({"loss_estimator": "hessian"}, "loss_estimator='hessian' is not known; expected one of saliency, token-fisher."),
    ({"solver": "gurobi"}, "solver='gurobi' is not known; expected one of auto, cbc, highs, greedy."),
    ({"guard": True}, "guard=True is not known; expected one of off, raise."),
    (
        {"backend": "cuda"},
        "backend='cuda' is not known; expected one of auto, emulated, hopper, blackwell, tensor-scaled.",
    ),
    ({"refresh_every": 0}, "refresh_every=0 is too small; expected at least 1."),
    ({"first_refresh": 0}, "first_refresh=0 is too small; expected at least 1."),
    ({"apply_delay": -1}, "apply_delay=-1 is too small; expected at least 0."),
    ({"probes": 0}, "probes=0 is too small; expected at least 1."),
    ({"seed": -1}, "seed=-1 is too small; expected at least 0."),
    (
        {"apply_delay": 11, "refresh_every": 10},
        "apply_delay=11 is larger than refresh_every=10; a plan must be applied before the next probe. "
        "Lower apply_delay or raise refresh_every.",
    ),
    ({"probe_batch_tokens": 127}, "probe_batch_tokens=127 is too small; expected at least 128."),
    ({"probe_tokens": 127}, "probe_tokens=127 is too small; expected at least 128."),
    *(
        ({name: value}, f"{name}={value!r} is not a number of seconds above 0.")
        for name in ("solver_time_limit",)
        for value in (0, -1.0, float("inf"), float("nan"))
    ),
    ({"stages": 0}, "stages=0 is too small; expected at least 1."),
    ({"stages": [["a"], []]}, "stages: stage 1 names no layer; expected at least one per stage."),
    (
        {"ties": [["q_proj", "k_proj"], ["k_proj", "v_proj"]]},
        "ties: 'k_proj' is in more than one tie; put all names that share a format into one.",
    ),
]

BAD_TYPES: list[tuple[str, Any, str]] = [
    *(
        (
            "target_fp4_fraction",
            value,
            f"target_fp4_fraction={value!r} has type {type(value).__name__}; expected a number from 0 to 1, or "
            f"None. {CHANGING}",
        )
        for value in ("0.75", True, {1: 0.9})
    ),
    *(
        (
            "target_fp4_fraction",
            [[1, 0.9], pair],
            f"target_fp4_fraction[1]={pair!r} is not a step and a share; expected {EXAMPLE}.",
        )
        for pair in (0.5, [8], [8, 0.5, 0.4], [8.0, 0.5], [True, 0.5], ["8", 0.5], [8, "0.5"], [8, None])
    ),
    *(
        (
            "target_linear_speedup",
            value,
            f"target_linear_speedup={value!r} has type {type(value).__name__}; expected float | None. Only "
            "target_fp4_fraction can change during a run.",
        )
        for value in ("2", [[1, 2.0], [800, 1.5]])
    ),
    ("guard_patience", None, "guard_patience=None has type NoneType; expected int."),
    (
        "rates",
        {"fp4": 4},
        "rates={'fp4': 4} has type dict; expected str | None. Give the name of a table; register your own with "
        "`snip_hf.costs.rates.register_rates`.",
    ),
    ("timing_file", 1, "timing_file=1 has type int; expected str | None."),
    ("timing_tokens", 4096.0, "timing_tokens=4096.0 has type float; expected int | None."),
    ("policy", ["snip"], "policy=['snip'] has type list; expected str."),
    ("fixed_plan", 3, "fixed_plan=3 has type int; expected str | None."),
    ("refresh_every", 10.0, "refresh_every=10.0 has type float; expected int | None."),
    ("first_refresh", True, "first_refresh=True has type bool; expected int | None."),
    ("apply_delay", "10", "apply_delay='10' has type str; expected int."),
    (
        "formats",
        "fp4",
        "formats='fp4' has type str; expected tuple[str, ...]. For example formats=('mxfp4', 'fp8-delayed').",
    ),
    ("formats", ("fp4", 8), "formats: got ('fp4', 8); expected a list of names."),
    ("start_format", 8, "start_format=8 has type int; expected str | None."),
    ("probes", None, "probes=None has type NoneType; expected int."),
    ("probe_tokens", 256.0, "probe_tokens=256.0 has type float; expected int | None."),
    ("probe_batch_tokens", "4096", "probe_batch_tokens='4096' has type str; expected int | None."),
    (
        "skip_modules",
        "*.q_proj",
        "skip_modules='*.q_proj' has type str; expected tuple[str, ...]. For example skip_modules=('*.q_proj',), with "
        "the comma, or ['*.q_proj'].",
    ),
    (
        "include_modules",
        "*",
        "include_modules='*' has type str; expected tuple[str, ...]. For example "
        "include_modules=('model.vision_tower.*',), with the comma, or a list.",
    ),
    ("skip_modules", [3], "skip_modules: got [3]; expected a list of names."),
    ("ties", "q_proj", "ties='q_proj' has type str; expected 'auto' or lists of names."),
    ("ties", 3, "ties=3 has type int; expected str | tuple[tuple[str, ...], ...]."),
    ("ties", ["q_proj", "k_proj"], "ties: got 'q_proj'; expected a list of names."),
    ("stages", True, "stages=True has type bool; expected int | tuple[tuple[str, ...], ...] | None."),
    ("stages", 2.0, "stages=2.0 has type float; expected int | tuple[tuple[str, ...], ...] | None."),
    ("stages", ["a", "b"], "stages: got 'a'; expected a list of names."),
    ("solver_time_limit", "60", "solver_time_limit='60' has type str; expected float."),
    ("backend", 1, "backend=1 has type int; expected str."),
    ("seed", 0.5, "seed=0.5 has type float; expected int."),
]


@pytest.mark.parametrize(("values", "message"), BAD_VALUES)
def test_a_value_out_of_range_is_refused_with_the_field_and_what_is_expected(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SnipConfig(**values)


@pytest.mark.parametrize(("name", "value", "message"), BAD_TYPES)
def test_a_value_of_the_wrong_type_is_refused_with_the_field_and_the_type(name: str, value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        SnipConfig(**{name: value})


def test_the_tables_above_leave_no_field_out() -> None:
    assert list(OTHER) == FIELDS
    assert {name for name, *_ in BAD_TYPES} == set(FIELDS) - set(_CHOICES)
    free = {"fixed_plan", "skip_modules", "include_modules"}  # any string will do
    assert {name for values, _ in BAD_VALUES for name in values} == set(FIELDS) - free


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_survives_to_dict_json_and_from_dict(name: str) -> None:
    needed = {"budget": "measured"} if name.startswith("timing_") else {}
    if name == "target_linear_speedup":
        needed = {"rates": "ideal"}
    config = SnipConfig(**{"apply_delay": 1, **needed, name: OTHER[name]})
    assert config != SnipConfig(**needed)
    assert config != SnipConfig()
    assert SnipConfig.from_dict(config.to_dict()) == config
    restored = SnipConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert restored == config
    assert hash(restored) == hash(config)


def test_shares_that_change_survive_yaml_and_json_as_lists_and_are_looked_up_by_step() -> None:
    shares = ((1, 0.9), (800, 0.5), (1000, 0))
    config = SnipConfig(target_fp4_fraction=shares)
    read = yaml.safe_load("target_fp4_fraction: [[1, 0.9], [800, 0.5], [1000, 0]]")
    assert SnipConfig.from_dict(read) == config
    assert config.to_dict()["target_fp4_fraction"] == [[1, 0.9], [800, 0.5], [1000, 0]]
    assert SnipConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    steps = (0, 1, 799, 800, 999, 1000, 10**9)
    assert [config.target_at(step) for step in steps] == [0.9, 0.9, 0.9, 0.5, 0.5, 0, 0]
    assert config.at_step(800) == SnipConfig(target_fp4_fraction=0.5)
    plain = SnipConfig(target_fp4_fraction=0.5)
    assert (plain.target_at(7), plain.at_step(7)) == (0.5, plain)
    by_speed = SnipConfig(target_linear_speedup=2.0, rates="ideal")
    assert (by_speed.target_at(7), by_speed.at_step(7)) == (None, by_speed)


def test_the_mean_share_is_that_over_the_steps_of_a_run() -> None:
    shares = ((1, 0.9), (9, 0.5), (13, 0.1))
    for steps in (1, 8, 9, 12, 13, 20):
        each = [SnipConfig(target_fp4_fraction=shares).target_at(step) for step in range(1, steps + 1)]
        assert mean_share(shares, steps) == pytest.approx(sum(each) / steps)
    assert (shares_text(shares), shares_text(0.75)) == ("0.9 from step 1, 0.5 from step 9, 0.1 from step 13", "0.75")


def test_to_dict_has_every_field_in_order_and_no_tuple() -> None:
    plain = SnipConfig(**OTHER | ONE_BUDGET).to_dict()
    assert list(plain) == FIELDS
    assert plain["ties"] == [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
    assert plain["stages"] == [["a.0", "a.1"], ["a.2"]]
    assert json.loads(json.dumps(plain)) == plain


def test_lists_become_tuples_so_that_a_config_cannot_be_changed_through_them() -> None:
    names = ["a"]
    config = SnipConfig(skip_modules=names, ties=[["a", "b"]], stages=[["x"]])  # type: ignore[arg-type]
    names.append("b")
    assert (config.skip_modules, config.ties, config.stages) == (("a",), (("a", "b"),), (("x",),))


def test_from_dict_checks_values_too() -> None:
    with pytest.raises(ValueError, match=r"^target_fp4_fraction=2 is outside 0\.\.1"):
        SnipConfig.from_dict({"target_fp4_fraction": 2})


def test_an_unknown_field_is_refused_with_the_closest_one() -> None:
    for refused in (
        lambda: SnipConfig(target_fp4_fracton=0.5),  # type: ignore[call-arg]
        lambda: SnipConfig.from_dict({"target_fp4_fracton": 0.5}),
        lambda: SnipConfig.preset("paper", target_fp4_fracton=0.5),
    ):
        with pytest.raises(TypeError) as error:
            refused()
        assert str(error.value) == (
            "SnipConfig has no field 'target_fp4_fracton'. Did you mean 'target_fp4_fraction'? docs/config.md lists "
            "all of them."
        )
    with pytest.raises(
        TypeError, match=r"^SnipConfig has no field 'target_fp4'\. Did you mean 'target_fp4_fraction'\?"
    ):
        SnipConfig(target_fp4=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^SnipConfig has no field 'colour'\. docs/config\.md lists all of them\.$"):
        SnipConfig(colour="red")  # type: ignore[call-arg]


def test_a_value_without_its_name_is_refused_with_what_to_write() -> None:
    with pytest.raises(TypeError) as error:
        SnipConfig(0.5)  # type: ignore[call-arg, misc]
    assert str(error.value) == (
        "Got 0.5 without the name of its field; write e.g. SnipConfig(target_fp4_fraction=0.5)."
    )


def test_a_config_can_be_copied_and_pickled_and_shows_its_fields_as_its_signature() -> None:
    config = SnipConfig(**OTHER | ONE_BUDGET)
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert list(inspect.signature(SnipConfig).parameters) == FIELDS


def test_the_preset_differs_from_the_default_in_what_its_page_says() -> None:
    values = {
        "formats": ["fp4", "fp8"],
        "start_format": "fp8",
        "target_fp4_fraction": 0.75,
        "granularity": "layer",
        "ties": [],
        "objective": "paper",
    }
    assert SnipConfig.preset("paper").to_dict() == SnipConfig().to_dict() | values
    page = (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8")
    [(name, row)] = re.findall(r"^\| `(\w+)` \| [^`|]*(`.*)$", page.partition("## Fields")[0], re.MULTILINE)
    assert name == "paper" and all(f"`{field}" in row for field in values)
    assert SnipConfig.preset("paper", ties="auto", seed=3).ties == "auto"


def test_an_unknown_preset_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Unknown preset 'papr'\. Did you mean 'paper'\? Expected one of paper\.$"):
        SnipConfig.preset("papr")


@pytest.mark.parametrize(
    ("asked", "max_steps", "step"),
    [
        (None, None, 100),
        (None, 5000, 100),
        (None, 999, 99),
        (None, 400, 40),
        (None, 12, 10),
        (7, 400, 7),
        (200, None, 200),
    ],
)
def test_the_first_refresh_is_early_in_short_runs(asked: int | None, max_steps: int | None, step: int) -> None:
    assert SnipConfig(first_refresh=asked).first_refresh_in(max_steps) == step


def test_a_policy_says_what_granularity_is_where_it_is_left_out() -> None:
    by_layer_only = "snip-paper"
    for policy in POLICIES:
        config = SnipConfig(policy=policy, formats=("fp4", "bf16"))
        assert config.granularity == ("layer" if policy == by_layer_only else "gemm")
        assert SnipConfig.from_dict(config.to_dict()) == config
    assert SnipConfig(policy=by_layer_only, granularity=None).granularity == "layer"
    # A plan file is asked in place of the policy.
    assert SnipConfig(policy=by_layer_only, granularity="gemm", fixed_plan="plan.json").granularity == "gemm"


def test_the_readme_shows_the_default() -> None:
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"SnipCallback\((.*)\)\]\)$", text, re.MULTILINE)
    assert eval(shown, {"SnipConfig": SnipConfig}) == SnipConfig()


def test_every_field_has_help_which_its_page_repeats() -> None:
    page = (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8")
    rows = [
        f"| `{field.name}` | `{field.default!r}` | {field.metadata['help'].partition(' Given as ')[0]} |"
        for field in dataclasses.fields(SnipConfig)
    ]
    assert [line for line in page.partition("## Fields")[2].splitlines() if line.startswith("| `")] == rows


def test_a_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SnipConfig().seed = 1  # type: ignore[misc]


def test_the_ends_of_every_range_are_allowed() -> None:
    for target in (0, 1, 0.0, 1.0):
        assert SnipConfig(target_fp4_fraction=target).target_fp4_fraction == target
    config = SnipConfig(refresh_every=1, first_refresh=1, apply_delay=1, probes=1, probe_tokens=128, stages=1, seed=0)
    assert config.apply_delay == config.refresh_every == 1


def test_measured_cost_needs_no_number_of_tokens_where_nothing_or_a_probe_decides() -> None:
    rules = ("random", "layer-type", "layer-position", "first2-last8", "last-15-percent", "backward-first")
    for policy in POLICIES:
        tokens = 1 if policy in rules else None
        # Which published rules need.
        SnipConfig(budget="measured", policy=policy, formats=("fp4", "bf16"), timing_tokens=tokens)
        SnipConfig(budget="measured", policy=policy, fixed_plan="plan.json")


def test_without_refreshes_any_delay_is_allowed() -> None:
    config = SnipConfig(refresh_every=None, apply_delay=10_000)
    assert SnipConfig.from_dict(config.to_dict()) == config


def test_the_defaults_are_those_of_the_contract() -> None:
    assert SnipConfig().to_dict() == {
        "target_fp4_fraction": 0.5,
        "target_linear_speedup": None,
        "rates": None,
        "budget": "flops",
        "timing_file": None,
        "timing_tokens": None,
        "granularity": "gemm",
        "decides": "all",
        "policy": "snip",
        "fixed_plan": None,
        "refresh_every": 500,
        "first_refresh": None,
        "apply_delay": 10,
        "formats": ["mxfp4", "fp8-delayed"],
        "start_format": "fp8-delayed",
        "probes": 1,
        "probe_tokens": 1024,
        "probe_batch_tokens": 4096,
        "guard": "off",
        "guard_patience": 50,
        "loss_estimator": "saliency",
        "objective": "additive",
        "skip_modules": [],
        "include_modules": [],
        "ties": "auto",
        "stages": None,
        "solver": "auto",
        "solver_time_limit": 60.0,
        "backend": "auto",
        "seed": 0,
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (None, {}),
        ({"guard": False}, {"guard": "off"}),
        *(({"refresh_every": text}, {"refresh_every": None}) for text in (None, "none", "None")),
    ],
)
def test_values_that_yaml_reads_differently_are_taken_as_meant(values: Any, expected: dict[str, Any]) -> None:
    assert SnipConfig.from_dict(values) == SnipConfig(**expected)


# Speed as the target

THREE = ("fp4", "fp8", "bf16")


def test_without_either_budget_the_share_is_the_default() -> None:
    assert SnipConfig().target_fp4_fraction == SnipConfig(target_fp4_fraction=None).target_fp4_fraction == 0.5


def test_a_speed_up_takes_the_place_of_the_share() -> None:
    config = SnipConfig(target_linear_speedup=2.5, rates="ideal")
    assert config.target_fp4_fraction is None
    assert SnipConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"target_fp4_fraction": 0.75, "target_linear_speedup": 2.0, "rates": "ideal"},
            "target_fp4_fraction=0.75 and target_linear_speedup=2.0 are two targets; expected one of them. Leave the "
            "other one out, or set it to None.",
        ),
        (
            {"target_linear_speedup": 2.0},
            "target_linear_speedup=2.0 needs the speed of each format. Set rates to one of ideal, h100, b200, "
            "gb300, rtx50, mi355, or set budget='measured'.",
        ),
        (
            {"rates": "a100"},
            "Unknown table of rates 'a100' for rates. Did you mean 'h100'? Expected one of ideal, h100, b200, gb300, "
            "rtx50, mi355.",
        ),
        (
            {"rates": "ideal", "budget": "measured"},
            "rates='ideal' and budget='measured' are two sources of speed; expected only one. Set rates=None, or "
            "budget='flops'.",
        ),
        (
            {"target_linear_speedup": 2.5, "rates": "h100"},
            "target_linear_speedup=2.5 is out of reach: with every GEMM in the fastest of the formats mxfp4, "
            "fp8-delayed, the speed-up is 2 by rates='h100'. Lower it, or add a faster format.",
        ),
    ],
)
def test_budgets_that_cannot_hold_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        SnipConfig(**values)


def test_a_format_that_the_hardware_does_not_run_is_refused_with_those_that_it_runs() -> None:
    with pytest.raises(ValueError, match=r"^rates='b200' has no rate of the format 'fp4', which .* it has bf16, fp8"):
        SnipConfig(rates="b200", formats=("fp4", "fp8"))
    SnipConfig(rates="b200", formats=("fp8", "bf16"), target_linear_speedup=1.5)


def test_the_largest_attainable_speed_up_itself_is_accepted() -> None:
    assert SnipConfig(target_linear_speedup=4, rates="ideal").target_linear_speedup == 4
    assert SnipConfig(target_linear_speedup=1, rates="ideal", formats=THREE).target_linear_speedup == 1


def test_a_rule_reaches_what_its_two_formats_reach() -> None:
    """It uses the first and the last of the formats, and no others."""
    assert SnipConfig(policy="random", target_linear_speedup=4, rates="ideal", formats=THREE)
    options: dict[str, Any] = {"rates": "h100", "formats": ("fp4", "bf16")}
    assert SnipConfig(policy="random", target_linear_speedup=2, **options)
    with pytest.raises(ValueError, match="formats fp4, bf16, the speed-up is 2 by rates='h100'"):
        SnipConfig(policy="random", target_linear_speedup=2.01, **options)


@pytest.mark.parametrize("policy", ["bf16", "uniform-fp8", "first-last-bf16"])
def test_a_speed_up_is_refused_with_a_policy_without_a_target(policy: str) -> None:
    expected = f"target_linear_speedup=1.5 with policy='{policy}' has no effect: that policy has no target. Leave it"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}"):
        SnipConfig(policy=policy, target_linear_speedup=1.5, rates="ideal", formats=THREE)
    assert SnipConfig(policy=policy, target_fp4_fraction=0.9, formats=THREE).target_fp4_fraction == 0.9


def test_a_share_is_attainable_where_any_of_the_formats_counts() -> None:
    """Noise on the weights is the least precise of these, but no format of 4 bits."""
    formats = ("fp4-pqt", "nvfp4", "fp8")
    assert SnipConfig(formats=formats, target_fp4_fraction=0.5).formats == formats
    assert SnipConfig(formats=("fp4-pqt", "nvfp4"), policy="random", target_fp4_fraction=0.5)


def test_rates_alone_only_report() -> None:
    config = SnipConfig(rates="h100")
    assert (config.target_fp4_fraction, config.target_linear_speedup) == (DEFAULT_FP4_FRACTION, None)


def test_every_table_says_where_its_figures_come_from() -> None:
    assert all(table.source for table in RATES.values())
