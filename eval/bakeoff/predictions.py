"""What theory predicts of number formats, beside what was measured: one Markdown page.

    python -m eval.bakeoff.predictions --recorded eval/results/format-noise.jsonl \
        --forks eval/results/forks-decay.jsonl --output eval/results/format-predictions.md

Started in the repository's folder. `--recorded` takes lines of `python -m eval.bakeoff.recorded_noise`, `--forks` lines
of `python -m eval.bakeoff.forks run`. docs/formats.md says how to read the tables.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.json_lines import read_lines
from snip_hf.numerics.formats import FORMATS, UNQUANTIZED, NumberFormat
from snip_hf.numerics.gemms import CONTRACTIONS, OPERANDS

from .float_scaling import added_loss_of
from .fork_lines import read_forks
from .format_noise import decibels, gaussian_noise, is_predicted, published_qsnr
from .prediction_ranks import Agreement, agreement, paired_differences
from .recorded_noise import SCHEMA_VERSION, relative_noise, rounds_all

Line = Mapping[str, Any]

# Of recipes/forks-formats.yaml: the model, and 700 steps of 8 sequences of 512 tokens.
PARAMETERS, TOKENS = 30e6, 700 * 8 * 512
_NORMAL_SHAPE = (1024, 1024)
# The six operands of the three GEMMs: "forward activation" and so on -> (operand, contracted dimension).
_USES = {f"{gemm} {name}": (name, dim) for gemm, operands in CONTRACTIONS.items() for name, dim in operands}


@dataclass(frozen=True)
class Prediction:
    """What is said of one format. Noise is relative, of a tensor's sum of squares."""

    format: NumberFormat
    theory: Mapping[str, float]
    """Operand -> noise on normal random numbers, integrated; {} where no theory speaks."""
    normal: Mapping[str, float]
    """Operand -> noise of this project's rounding on normal random numbers."""
    recorded: Mapping[str, float]
    """Use -> noise on recorded operands; {} without a recording."""
    crest: Mapping[str, float]
    """Use -> mean crest factor of recorded blocks; {} without a recording."""
    published: Mapping[str, float]
    """Use -> noise by the published formulas at that crest factor; {} where they do not speak."""
    law: float | None
    """Nats that the scaling law adds; None where it does not speak."""


# What is ranked against measured losses; more of it means more loss.
PREDICTORS = {
    "integral, normal numbers": lambda one: _mean(one.theory),
    "formulas of arXiv:2510.25602 at recorded crest factors": lambda one: _mean(one.published),
    "rounding measured on recorded operands": lambda one: _mean(one.recorded),
    "law of arXiv:2501.02423": lambda one: one.law,
}


def predict(format: NumberFormat, recorded: Line | None = None) -> Prediction:
    """Returns what theory and a recording say of a format that rounds all operands.

    Args:
        format: registered.
        recorded: its line of `recorded_noise`.
    """
    elements = _NORMAL_SHAPE[0] * _NORMAL_SHAPE[1]
    speaks = is_predicted(format)
    x = torch.randn(_NORMAL_SHAPE, generator=torch.Generator().manual_seed(0))
    noise, crest = (recorded["noise"], recorded["crest"]) if recorded else ({}, {})
    published = {use: published_qsnr(format, _USES[use][0], value) for use, value in crest.items()} if speaks else {}
    return Prediction(
        format,
        theory={name: gaussian_noise(format, name, elements) for name in OPERANDS} if speaks else {},
        normal={name: relative_noise(x, format, name, 1) for name in OPERANDS},
        recorded=noise,
        crest=crest,
        published={use: 10 ** (-value / 10) for use, value in published.items() if value is not None},
        law=added_loss_of(format, PARAMETERS, TOKENS),
    )


def read_recorded(path: Path) -> dict[str, Line]:
    """Returns format -> line.

    Raises:
        FileNotFoundError: a file that is not there.
        ValueError: a line of another schema version.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; expected the lines of `python -m eval.bakeoff.recorded_noise`."
        )
    found: dict[str, Line] = {}
    for line in read_lines(path):
        if line.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"{path}: the line of {line.get('format')!r} has schema_version {line.get('schema_version')!r}, "
                f"expected {SCHEMA_VERSION}. Record it anew."
            )
        found[line["format"]] = line
    return found


def page(recorded: Mapping[str, Line], forks: Iterable[Line]) -> str:
    """Returns the page: what is predicted, and for each setting of forks how well that ranks the measured losses."""
    formats = [format for format in FORMATS.values() if rounds_all(format)]
    predictions = {one.name: predict(one, recorded.get(one.name)) for one in formats}
    parts = [noise_table(list(predictions.values()))]
    if recorded:
        parts.append(_origin(next(iter(recorded.values()))))
    settings: dict[str, list[Line]] = {}
    for line in forks:
        settings.setdefault(line["setting"], []).append(line)
    return "\n\n".join([*parts, *(fork_tables(predictions, lines) for lines in settings.values())]) + "\n"


def noise_table(predictions: Sequence[Prediction]) -> str:
    """Returns the table of signal to noise ratios and of the law's loss."""
    heads = ["format", "elements", "block of activations / weights", "scale", "normal: integral", "normal: measured"]
    heads += ["normal, all operands: integral", "all operands: measured", "crest factor", "recorded: formula"]
    heads += ["recorded: measured", "recorded, all operands: formula", "all operands: measured", "law, nats"]
    rows = []
    for one in predictions:
        grid, first = one.format.grid, "forward activation"
        assert grid is not None
        figures = [_decibels(one.theory.get("activation")), _decibels(one.normal["activation"])]
        figures += [_decibels(_mean(one.theory)), _decibels(_mean(one.normal)), _text(one.crest.get(first), ".2f")]
        figures += [_decibels(one.published.get(first)), _decibels(one.recorded.get(first))]
        figures += [_decibels(_mean(one.published)), _decibels(_mean(one.recorded)), _text(one.law, ".1e")]
        blocks = " / ".join(_block(one.format, operand) for operand in ("activation", "weight"))
        rows.append([one.format.name, grid.name.upper(), blocks, one.format.scale.upper(), *figures])
    return "## Signal to noise, in decibels\n\n" + _table(heads, rows, left=4)


def fork_tables(predictions: Mapping[str, Prediction], lines: Sequence[Line]) -> str:
    """Returns two tables for one setting of forks: losses beside predictions, and how well the ranks agree."""
    measured = paired_differences(lines, "held_out_plan")
    known = {name: predictions[name] for name in measured if name in predictions}
    means = {name: sum(measured[name].values()) / len(measured[name]) for name in known}
    slope = proportion({name: _mean(one.recorded) for name, one in known.items()}, means)
    of_bf16 = [line["loss"]["held_out_plan"] for line in lines if line["contender"] == UNQUANTIZED.name]
    base = sum(of_bf16) / len(of_bf16)
    rows = []
    for name, one in (known | dict(predictions)).items():
        noises = [_mean(one.theory), _mean(one.published), _mean(one.recorded)]
        fitted = None if slope is None or noises[-1] is None else slope * noises[-1]
        law = None if one.law is None else 100 * one.law / base
        figures = [_text(means.get(name), "+.3f"), _text(fitted, "+.3f"), *map(_decibels, noises), _text(law, ".4f")]
        rows.append([name, str(len(measured.get(name, ()))), *figures])
    heads = ["format", "forks", "measured, %", "in proportion to recorded noise, %", "integral, dB", "formula, dB"]
    heads += ["recorded, dB", "law, %"]
    ranks = [[name, *_agreement_cells(agreement(_values(known, name), measured))] for name in PREDICTORS]
    rank_heads = ["predictor", "formats", "Spearman (95%)", "Kendall (95%)", "p"]
    title = f"## Forks of {lines[0]['steps']} steps, commit {lines[0]['commit']}"
    return "\n\n".join([title, _table(heads, rows, left=1), _table(rank_heads, ranks, left=1)])


def proportion(noise: Mapping[str, float | None], loss: Mapping[str, float]) -> float | None:
    """Returns the slope of the line through the origin that fits losses best; None without noise."""
    pairs = [(value, loss[name]) for name, value in noise.items() if value is not None]
    return sum(x * y for x, y in pairs) / sum(x * x for x, _ in pairs) if pairs else None


def _values(predictions: Mapping[str, Prediction], predictor: str) -> dict[str, float]:
    found = {name: PREDICTORS[predictor](one) for name, one in predictions.items()}
    return {name: value for name, value in found.items() if value is not None}


def _agreement_cells(one: Agreement) -> list[str]:
    if one.spearman is None or one.kendall is None or one.p is None:
        return [str(one.formats), "-", "-", "-"]
    cells = [f"{value:+.2f} ({low:+.2f} to {high:+.2f})" for value, low, high in (one.spearman, one.kendall)]
    return [str(one.formats), *cells, f"{one.p:.3f}"]


def _origin(line: Line) -> str:
    return (
        f"Recorded operands: {line['linears']} linears, seed {line['seed']}, after {line['steps']} steps "
        f"(held-out loss {line['held_out_loss']:.3f}), commit {line['commit']}, {line['machine']}: `{line['command']}`."
    )


def _mean(values: Mapping[str, float]) -> float | None:
    return sum(values.values()) / len(values) if values else None


def _decibels(noise: float | None) -> str:
    return "-" if noise is None else f"{decibels(noise):.2f}"


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _block(of: NumberFormat, operand: str) -> str:
    block = of.operand(operand).block
    return "tensor" if block is None else f"{block[0]}x{block[1]}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int) -> str:
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0, or 1 if a file is missing or wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.bakeoff.predictions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recorded", type=Path, metavar="FILE", help="lines of recorded_noise")
    parser.add_argument("--forks", type=Path, nargs="+", default=[], metavar="FILE", help="lines of forks")
    parser.add_argument("--output", type=Path, metavar="FILE", help="Markdown")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    try:
        recorded = read_recorded(options.recorded) if options.recorded else {}
        text = page(recorded, read_forks(options.forks))
    except (FileNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = f"`{shlex.join(['python', '-m', 'eval.bakeoff.predictions', *given])}`\n\n{text}"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
