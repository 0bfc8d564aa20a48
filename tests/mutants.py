"""Breaks one line of the source at a time, and checks that a fast test fails.

    python tests/mutants.py              # all mutants, six minutes on one core
    python tests/mutants.py adam-bias    # some of them
    python tests/mutants.py --list

Each mutant is a copy of `src` in which one piece of text is replaced; the tree itself is never edited. If its text no
longer occurs exactly once, adapt its entry (`tests/test_mutants.py` fails until then). If it survives, write a test.

Run it where the fast tests pass: a test that fails anyway kills every mutant. Exits with 1 unless all are killed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SECONDS = 240


class Mutant(NamedTuple):
    """A fault: the text in the source, its replacement, and the tests that must notice."""

    name: str
    text: str
    """Occurs exactly once in all files of `src`."""
    replacement: str
    tests: str
    """Arguments of pytest; the first ones are files, or tests in files."""


LAYER_SUMS = "tests/estimation/test_layer_sums.py"
COMMON_ERRORS = "tests/estimation/test_common_errors.py"
DIVERGENCE = "tests/estimation/test_divergence.py"
POOLING = "tests/estimation/test_pooling.py"
SHARED = "tests/parallel/test_context_parallel.py"
POLICIES = "tests/policies/test_policies.py"
PLAN = "tests/planning/test_plan.py"
ROUNDING = "tests/numerics/test_rounding.py"
BLOCK_FORMATS = "tests/numerics/test_block_formats.py"
ROUNDING_KERNELS = "tests/kernels/test_rounding_of_formats.py"
ENCODING_KERNELS = "tests/kernels/test_tensor_scaled_kernel.py"
REPLAYS = "tests/estimation/test_replayed_sums.py"
RESPONSE = "tests/optimizers/test_response.py"
CONTROLLER = "tests/training/test_controller.py"

MUTANTS = (
    # Divergences: sums of a layer.
    Mutant(
        "bias-from-own-terms",
        "mean = (total - by_piece) / (self.pieces * (self.pieces - 1))",
        "mean = total / self.pieces**2",
        f"{LAYER_SUMS}::test_step_and_bias_are_right_on_the_average_for_known_means_and_variances",
    ),
    Mutant(
        "noise-of-micro-batches",
        "count * by_piece / self.pieces / batches + count * (count - 1 / batches) * mean",
        "count * by_piece / self.pieces + count * (count - 1) * mean",
        f"{LAYER_SUMS}::test_one_sample_estimates_the_average_effect_of_whole_steps_of_several_micro_batches",
    ),
    Mutant(
        "elements-counted-twice",
        "* (by_token - elements), by_channel.bias",
        "* by_token, by_channel.bias",
        f"{LAYER_SUMS}::test_the_squares_are_the_written_out_formulas",
    ),
    Mutant(
        "random-rounding-adds-up",
        "return Squares(self.scale / self.micro_batches * elements, 0.0)",
        "return Squares(self.scale * elements, 0.0)",
        f"{LAYER_SUMS}::test_the_squares_are_the_written_out_formulas",
    ),
    Mutant(
        "parts-upside-down",
        "return max(1, self.micro_batch_labelled) / max(1, self.labelled)",
        "return max(1, self.labelled) / max(1, self.micro_batch_labelled)",
        f"{LAYER_SUMS}::test_a_part_of_a_micro_batch_is_to_a_step_what_one_of_more_micro_batches_is",
    ),
    Mutant(
        "two-errors-of-a-weight",
        "both = forward[0] + grad_input[1] + of_both - of_first - of_second",
        "both = forward[0] + grad_input[1] + of_both",
        f"{LAYER_SUMS}::test_they_are_for_weights_that_each_gemm_quantizes_for_itself",
    ),
    Mutant(
        "error-of-the-gradient",
        "return _joined(g, -exact_g, lengths), _joined(x, exact_x, lengths)",
        "return _joined(g, exact_g, lengths), _joined(x, exact_x, lengths)",
        f"{LAYER_SUMS}::test_the_squares_are_the_written_out_formulas",
    ),
    Mutant(
        "fisher-of-the-product",
        ".addcmul_(g_w, exact, value=-1)",
        ".addcmul_(g_w, exact)",
        f"{LAYER_SUMS}::test_products_of_bf16_parts_change_them_by_less_than_a_part_in_1000",
    ),
    Mutant(
        "sample-stands-for-itself",
        "return every / sampled if sampled > 0",
        "return 1.0 if sampled > 0",
        f"{LAYER_SUMS}::test_squares_stand_for_all_tokens_by_their_energy_and_errors_by_their_number",
    ),
    # Errors that tokens have in common.
    Mutant(
        "common-errors-without-bound",
        "found_in_channel / in_channel[1], 0.0).clamp(0.0, 1.0)",
        "found_in_channel / in_channel[1], 0.0)",
        f"{COMMON_ERRORS}::test_errors_of_independent_tokens_add_nothing_on_the_average",
    ),
    Mutant(
        "common-errors-in-channel",
        "return share * (every - in_channel)",
        "return share * every",
        f"{COMMON_ERRORS}::test_it_is_the_sum_over_pairs_of_tokens_and_of_channels_in_the_product_form",
    ),
    Mutant(
        "common-errors-of-one-token",
        "        self._weights.diagonal().zero_()\n",
        "",
        f"{COMMON_ERRORS}::test_products_of_channels_and_products_of_tokens_give_the_same",
    ),
    # The probe.
    Mutant(
        "half-of-a-central-difference",
        "(p - m).div_(2 * epsilon)",
        "(p - m).div_(epsilon)",
        "tests/estimation/test_probe.py::test_the_derivatives_are_those_of_jvp_in_float64",
    ),
    Mutant(
        "mean-of-ranks-without-labels",
        "mean * count for mean, count in zip(means, labelled, strict=True)",
        "mean for mean, count in zip(means, labelled, strict=True)",
        f"{DIVERGENCE}::test_rows_are_the_sums_of_the_layers_under_the_optimizer_s_derivative",
    ),
    Mutant(
        "clipping-forgotten",
        "clip_factor * _root(squares[gemm].step),",
        "_root(squares[gemm].step),",
        f"{DIVERGENCE}::test_rows_are_the_sums_of_the_layers_under_the_optimizer_s_derivative",
    ),
    # Pooling over ranks.
    Mutant(
        "pooled-gradients-unweighted",
        "parts = [sample.x, sample.grad_output * weight]",
        "parts = [sample.x, sample.grad_output]",
        f"{POOLING}::test_each_layer_s_owner_has_the_tokens_of_all_ranks",
    ),
    Mutant(
        "shared-sequences-masked-from-their-start",
        ".tril(keys - queries)",
        ".tril()",
        f"{SHARED}::test_attention_and_its_gradients_are_those_of_one_process",
    ),
    Mutant(
        "shared-losses-unweighted",
        "labelled_tokens(self.kwargs, self.label_name) / self.labelled",
        "1.0",
        f"{SHARED}::test_the_mean_of_the_ranks_losses_is_that_over_all_labels",
    ),
    Mutant(
        "whole-sequences-taken-for-parts",
        "        if not in_context():",
        "        if False:",
        f"{CONTROLLER}::test_inputs_and_contexts_that_context_parallelism_cannot_cut_are_refused",
    ),
    Mutant(
        "pooled-energies-linear",
        "[energy * weight**2 for energy in",
        "[energy * weight for energy in",
        f"{POOLING}::test_each_layer_s_owner_has_the_tokens_of_all_ranks",
    ),
    Mutant(
        "pooled-amaxes-added",
        "tuple(x.new_tensor(column).amax(0) for column",
        "tuple(x.new_tensor(column).sum(0) for column",
        f"{POOLING}::test_largest_magnitudes_are_those_of_all_ranks_for_the_mean_over_all",
    ),
    # Optimizers' responses.
    Mutant(
        "adam-without-second-moment",
        "mean / divisor * (second_slope / (2 * unbiased2) / root)",
        "0 * mean",
        f"{RESPONSE}::test_update_and_products_are_those_of_the_real_optimizer",
    ),
    Mutant(
        "adam-bias",
        "slope = ((1 - beta1) / unbiased1 - mean",
        "slope = ((1 - beta1) - mean",
        f"{RESPONSE}::test_update_and_products_are_those_of_the_real_optimizer",
    ),
    Mutant(
        "adam-step-from-0",
        'return float(self.state.get("step", 0)) + 1',
        'return float(self.state.get("step", 0))',
        f"{RESPONSE}::test_vectors_are_answered_too_where_matrices_are_factored",
    ),
    Mutant(
        "nesterov-slope",
        "moved, slope = gradient + momentum * moved, 1.0 + momentum * taken",
        "moved, slope = gradient + momentum * moved, 1.0",
        f"{RESPONSE}::test_update_and_products_are_those_of_the_real_optimizer",
    ),
    Mutant(
        "maximize-forgotten",
        'return -gradient if self.group.get("maximize", False) else gradient',
        "return gradient",
        f"{RESPONSE}::test_vectors_are_answered_too_where_matrices_are_factored",
    ),
    Mutant(
        "lion-units",
        'return at.number("lr") * relative / (1 + relative.square()).sqrt(),',
        'return at.number("lr") * relative / (1 + relative.abs()),',
        f"{RESPONSE}::test_lion_s_smoothed_update_is_the_written_out_formula",
    ),
    Mutant(
        "bent-update-unclipped",
        "* meaningful / (clip_factor * norm)",
        "* meaningful / norm",
        "tests/estimation/test_optimizer_step.py::test_the_change_in_full_is_the_difference_of_two_updates_after_clipping",
    ),
    Mutant(
        "gradients-relative-to-weights",
        'if config.objective == "gradients":\n            found = [1.0]',
        "if False:\n            found = [1.0]",
        f"{DIVERGENCE}::test_the_grad_weight_part_is_exact",
    ),
    # Policies and the program.
    Mutant(
        "snip-square-forgotten",
        "(0.1, lambda row: row.weight_divergence**2)",
        "(0.1, lambda row: row.weight_divergence)",
        f"{POLICIES}::test_additive_costs_are_the_loss_divergence_and_a_tenth_of_the_weight_divergence_s_square",
    ),
    Mutant(
        "snip-total-of-gemms",
        "if row.format == name and row.gemm == LAYER)",
        "if row.format == name)",
        f"{POLICIES}::test_the_paper_s_costs_are_both_divergences_by_their_totals_in_fp4",
    ),
    Mutant(
        "paper-noise-of-weights",
        'forward = on_input * (errors["x"] + errors["w"])',
        'forward = on_input * errors["x"]',
        "tests/policies/test_snip_paper.py::test_the_table_is_that_of_loops_over_passes_by_autograd",
    ),
    Mutant(
        "layers-first-or-last",
        "return _block_order(setting, stage, lambda position: abs(position - 0.5))",
        "return _block_order(setting, stage, lambda position: -abs(position - 0.5))",
        f"{POLICIES}::test_layer_position_protects_the_first_and_last_blocks",
    ),
    Mutant(
        "fill-keeps-what-is-not-needed",
        "if missing + gains[unit] <= 0:",
        "if False:",
        f"{POLICIES}::test_every_stage_meets_every_target_and_exceeds_it_by_less_than_a_unit",
    ),
    Mutant(
        "program-without-minimum",
        '"minimum": least_sum(setting)}',
        '"minimum": 0.0}',
        f"{POLICIES}::test_every_stage_meets_every_target_and_exceeds_it_by_less_than_a_unit",
    ),
    Mutant(
        "share-of-8-bits",
        "share if FORMATS[name].counts_as_fp4 else 0.0 for name in formats",
        "share if FORMATS[name].is_quantized else 0.0 for name in formats",
        f"{POLICIES}::test_every_stage_meets_every_target_and_exceeds_it_by_less_than_a_unit",
    ),
    Mutant(
        "speed-up-as-a-share",
        "return 1 - 1 / config.target_linear_speedup",
        "return config.target_linear_speedup - 1",
        "tests/policies/test_many_options.py::test_every_stage_meets_either_target",
    ),
    # Shares and FLOPs.
    Mutant(
        "flops-of-multiplications",
        "gemm = 2.0 * layer.in_features * layer.out_features",
        "gemm = 1.0 * layer.in_features * layer.out_features",
        "tests/costs/test_measured_times.py::test_match_torch_s_flop_counter_layer_by_layer",
    ),
    Mutant(
        "tokens-of-experts-ignored",
        "gemm: value * tokens_of_gemm(tokens, layer, gemm) for gemm, value in row.items()",
        "gemm: value for gemm, value in row.items()",
        f"{PLAN}::test_tokens_turn_flops_into_those_that_run_and_come_back_from_the_file",
    ),
    Mutant(
        "share-of-gemms",
        "math.fsum(weight for name, weight in pairs if FORMATS[name].counts_as_fp4)",
        "math.fsum(1.0 for name, weight in pairs if FORMATS[name].counts_as_fp4)",
        f"{PLAN}::test_fp4_fractions_are_those_of_exact_rational_arithmetic",
    ),
    # Rounding by torch.
    Mutant(
        "ties-away-from-even",
        "rounded = steps.round_().copysign_(x)",
        "rounded = (steps.abs() + 0.5).floor_().copysign_(x)",
        f"{ROUNDING}::TestNearest::test_matches_torch_float8_on_every_value",
    ),
    Mutant(
        "random-rounding-biased",
        "steps += random - 0.5",
        "steps += random - 0.4",
        f"{ROUNDING}::TestStochastic::test_follows_the_rule_on_every_value",
    ),
    Mutant(
        "random-rounding-downwards",
        "steps += random - 0.5",
        "steps -= random",
        f"{ROUNDING}::TestStochastic::test_follows_the_rule_on_every_value",
    ),
    Mutant(
        "scale-of-the-next-power",
        "torch.where(field == 0, mantissa > _LEAST_POWER, mantissa > 0)",
        "torch.where(field == 0, mantissa > _LEAST_POWER, mantissa >= 0)",
        f"{BLOCK_FORMATS}::test_mx_formats_match_torchao_on_every_bfloat16_value",
    ),
    Mutant(
        "scale-below-normal",
        "target)).clamp_min(_SMALLEST_NORMAL)",
        "target))",
        f"{ROUNDING}::TestQuantize::test_matches_loops_over_tiles",
    ),
    Mutant(
        "scale-of-nan",
        "return torch.where(torch.isfinite(amax), scales, torch.nan)",
        "return scales",
        f"{ROUNDING}::TestQuantize::test_a_nan_or_an_infinity_poisons_exactly_its_tile",
    ),
    Mutant(
        "worst-of-two-targets",
        "is_better = errors < least",
        "is_better = errors > least",
        "tests/numerics/test_every_value.py::test_every_value_beside_a_larger_one_is_rounded_as_the_loop_says",
    ),
    Mutant(
        "rotation-without-signs",
        "return _hadamard(runs * runs.new_tensor(signs(size))).view(x.shape)",
        "return _hadamard(runs).view(x.shape)",
        "tests/numerics/test_rotation.py::test_is_the_product_with_scipy_s_matrices_in_whole_and_in_shorter_runs",
    ),
    Mutant(
        "ranks-draw-alike",
        "return (high << 32) | low, rank * runs * shape[1] & _MASK32",
        "return (high << 32) | low, 0",
        f"{ROUNDING}::TestQuantize::test_a_rank_rounds_with_its_own_part_of_the_random_numbers",
    ),
    # Rounding by Triton's kernels.
    Mutant(
        "kernel-sign-of-the-dither",
        "steps += tl.where(bits_of(x) < 0, -dither, dither)",
        "steps += dither",
        f"{ROUNDING_KERNELS}::test_the_kernel_rounds_every_operand_as_the_reference_does",
    ),
    Mutant(
        "kernel-ties",
        "is_even = ((spacing - least) & 0x800000) != 0",
        "is_even = ((spacing - least) & 0x800000) == 0",
        f"{ROUNDING_KERNELS}::test_it_does_in_formats_of_users",
    ),
    Mutant(
        "kernel-scale-of-the-next-power",
        "is_above = mantissa > tl.where(field == 0, 0x400000, 0)",
        "is_above = mantissa >= tl.where(field == 0, 0x400000, 0)",
        f"{ROUNDING_KERNELS}::test_the_kernel_rounds_every_operand_as_the_reference_does",
    ),
    Mutant(
        "kernel-scale-of-the-tensor",
        "scale = rounded * of_tensor",
        "scale = rounded",
        f"{ROUNDING_KERNELS}::test_the_kernel_rounds_every_operand_as_the_reference_does",
    ),
    Mutant(
        "kernel-square-of-a-sum",
        "own_both += (a + b) * (a + b)",
        "own_both += a * a + b * b",
        "tests/kernels/test_rounding_kernels.py::test_the_error_of_a_weight_meets_the_squares_of_two_gemms_and_of_both",
    ),
    Mutant(
        "encoding-random-offset",
        "(128.5 - 2.0**-9) * spacing",
        "128.5 * spacing",
        f"{ENCODING_KERNELS}::test_the_kernels_write_the_bytes_of_the_reference",
    ),
    Mutant(
        "encoding-exponent",
        "own = tl.minimum(tl.maximum(((bits + _CARRY) >> 23) - _TOP_FIELD",
        "own = tl.minimum(tl.maximum((bits >> 23) - _TOP_FIELD",
        f"{ENCODING_KERNELS}::test_they_do_for_one_layout_alone",
    ),
    Mutant(
        "encoding-least-power",
        "return tl.maximum(power, tl.load(parameters + _LEAST))",
        "return power",
        f"{ENCODING_KERNELS}::test_they_do_outside_the_range",
    ),
    # Schedule, clipping, resuming.
    Mutant(
        "last-refresh-left-out",
        "step + self._config.apply_delay > self.max_steps",
        "step + self._config.apply_delay >= self.max_steps",
        "tests/training/test_own_loops.py::test_a_plan_that_is_due_at_the_last_step_is_still_made",
    ),
    Mutant(
        "refresh-from-step-0",
        "return (step - last) % every == 0",
        "return step % every == 0",
        f"{CONTROLLER}::test_a_loop_of_ones_own_is_refreshed_on_schedule",
    ),
    Mutant(
        "clipping-squared",
        "return (after / before) ** 0.5 if before > 0 else 1.0",
        "return after / before if before > 0 else 1.0",
        f"{CONTROLLER}::test_the_divergences_are_told_what_clipping_multiplied_the_gradients_by",
    ),
    Mutant(
        "resumed-without-last-probe",
        "run.schedule.last_probe, run.schedule.postponed = saved.last_probe, saved.postponed",
        "run.schedule.postponed = saved.postponed",
        "tests/invariants/test_resume.py::test_resuming_after_any_step_gives_the_uninterrupted_run",
    ),
    Mutant(
        "resumed-without-pending-plan",
        "elif saved.pending is not None:",
        "elif False:",
        "tests/invariants/test_resume.py::test_resuming_after_any_step_gives_the_uninterrupted_run",
    ),
    # Delayed scales, replayed sums, ties.
    Mutant("delayed-infinity-cut-off", "return tl.fma(x, 0.0, x)", "return x", ENCODING_KERNELS),
    Mutant(
        "graphs-of-old-formats",
        "if self.view.packed not in (None, self.view.facts):",
        "if self.view.packed is self.view:",
        "tests/kernels/test_tensor_scaled_exponents.py",
    ),
    Mutant(
        "graphs-of-other-formats",
        "return self.follows, self.known",
        "return self.known",
        "tests/kernels/test_tensor_scaled_exponents.py",
    ),
    Mutant(
        "graphs-know-blocks",
        "view.are_in_blocks(gemms) and not captured)",
        "view.are_in_blocks(gemms))",
        "tests/kernels/test_tensor_scaled_exponents.py",
    ),
    Mutant(
        "gradients-left-to-graphs",
        "self._running().keep_gradients()",
        "pass",
        "tests/training/test_gradients.py::test_a_trainer_accumulates_gradients_that_graphs_overwrite",
    ),
    Mutant(
        "memory-of-graphs-freed",
        "_HOMES.append(homes[facts])",
        "_HOMES[:] = []",
        "tests/kernels/test_tensor_scaled_exponents.py",
    ),
    Mutant(
        "delayed-largest-not-recorded",
        "if COUNTS and row_spacing < 0.0:",
        "if COUNTS and row_spacing > 1.0:",
        f"{ENCODING_KERNELS}::test_one_launch_writes_them_where_the_exponent_and_encoded_formats_are_known",
    ),
    Mutant("replays-keep-their-first-inputs", "torch._foreach_copy_(captured.inputs, list(inputs))", "pass", REPLAYS),
    Mutant(
        "replays-take-scale-of-the-captured-layer",
        "sizes = sizes_of(sample, micro_batches, batch, pieces_of(sample.x.shape[0]))",
        "sizes = sizes_of(replace(sample, energies=(0.0, 0.0)), micro_batches, batch, pieces_of(sample.x.shape[0]))",
        REPLAYS,
    ),
    Mutant(
        "ties-count-recomputation",
        "if not in_backward():\n                recorder",
        "if True:\n                recorder",
        "tests/estimation/test_ties.py",
    ),
    Mutant(
        "masks-by-positions-before-ends",
        "packs = positions(ends)\n",
        "packs = positions(ends) if position_ids is None else position_ids\n",
        "tests/estimation/test_attention.py::test_a_probe_pass_sees_what_training_sees",
    ),
    Mutant(
        "parts-of-packs-keep-their-ends",
        "cut[name] = lengths.cumsum(0).to(value)",
        "cut[name] = value",
        "tests/estimation/test_attention.py::test_a_part_of_a_pack_ends_where_sequences_end",
    ),
    # Several processes.
    Mutant(
        "probes-run-own-experts",
        "vars(module)[_COUNT] = number",
        "pass",
        "tests/parallel/test_tensor_parallel.py::test_passes_run_all_experts_and_leave_them_spread",
    ),
    Mutant(
        "ranks-draw-alike-for-their-experts",
        "split = split_of(layer.holder[0])",
        "split = split_of(layer)",
        "tests/parallel/test_tensor_parallel.py",
    ),
)


def places(mutant: Mutant, source: Path = ROOT / "src") -> list[Path]:
    """Returns the files that hold a mutant's text, each as often as it occurs there."""
    files = sorted(source.rglob("*.py"))
    return [path for path in files for _ in range(path.read_text(encoding="utf-8").count(mutant.text))]


def run_tests(source: Path, tests: list[str]) -> tuple[int | None, str]:
    """Returns pytest's exit code, None after `SECONDS`, and what it printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        # A mutant may have the size and the time of the file that it replaces.
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "--show-capture=no", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout + done.stderr


def outcome(mutant: Mutant, source: Path) -> str:
    """Returns "killed", or why it was not; `source` is a copy of `src`, which is left as it was."""
    found = places(mutant, source)
    if len(found) != 1:
        return f"not applicable: its text occurs {len(found)} times"
    (path,) = found
    before = path.read_text(encoding="utf-8")
    path.write_text(before.replace(mutant.text, mutant.replacement), encoding="utf-8")
    try:
        code, printed = run_tests(source, mutant.tests.split())
    finally:
        path.write_text(before, encoding="utf-8")
    if code == 1:
        return "killed"
    if code is None:
        return f"undecided after {SECONDS} s"
    return "survived" if code == 0 else f"not applicable: pytest ended with {code}\n{printed[-2000:]}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants to try; default: all")
    parser.add_argument("--list", action="store_true", help="print the names and do nothing")
    asked = parser.parse_args(arguments)
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := [name for name in asked.names if name not in known]:
        parser.error(f"no mutant {unknown[0]!r}; --list prints all names")
    chosen = [known[name] for name in asked.names] or list(MUTANTS)
    if asked.list:
        print(*known, sep="\n")
        return 0
    began, failures = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for mutant in chosen:
            start = time.monotonic()
            found = outcome(mutant, source)
            failures += found != "killed"
            print(f"{found:<10} {mutant.name} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{len(chosen) - failures} of {len(chosen)} killed in {time.monotonic() - began:.0f} s")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
