r"""What the lines of `estimate_fidelity.py` say: tables in Markdown, and which cases miss their targets.

python benchmarks/estimate_fidelity_report.py runs/estimate_fidelity.jsonl --output runs/estimate_fidelity.md
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from shared.agreement import Record
from shared.json_lines import read_lines
from shared.loss_estimators import LOSS_BASELINES
from shared.weight_estimators import WEIGHT_BASELINES

MEDIAN_ERROR, ERROR_90, SPEARMAN = 0.05, 0.20, 0.90
# Below this coefficient of variation of the truth no rank correlation is asked for.
LEAST_VARIATION = 0.25
# A sample of tokens may add this much to the median error.
SAMPLE_ADDS = 0.03
# The loss divergence's rank correlation may be below its ceiling by this much.
BELOW_CEILING = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, help="default: print")
    parser.add_argument("--estimator", default="adjoint", help="estimator of the weight divergence to report by case")
    parser.add_argument("--loss-estimator", default="token-fisher", help="the same for the loss divergence")
    parser.add_argument("--scope", choices=("one", "own", "all"), default="all", help="see agreement.weight_records")
    options = parser.parse_args()
    text = report(load(options.files), options.estimator, options.loss_estimator, options.scope)
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    else:
        print(text)


def load(files: Iterable[Path]) -> list[Record]:
    """Returns the records of all complete cases; a case in two files is taken from the last."""
    cases: dict[str, list[Record]] = {}
    for file in files:
        found: dict[str, list[Record]] = {}
        for record in read_lines(file):
            if record["kind"] != "raw":
                found.setdefault(record["case"], []).append(record)
        cases.update({name: case for name, case in found.items() if case[-1]["kind"] == "case"})
    return [record for case in cases.values() for record in case]


def report(records: Sequence[Record], estimator: str, loss_estimator: str, scope: str) -> str:
    """Returns the whole text."""
    weight = [record for record in records if record["kind"] == "weight" and record["scope"] == scope]
    trained = [record for record in weight if is_trained(record)]
    chosen = [record for record in weight if record["estimator"] == estimator]
    truth = {(r["case"], r["format"], r["row"]): r for r in records if r["kind"] == "weight-truth"}
    loss_scope = "all" if scope == "all" else "one"
    loss = [record for record in records if record["kind"] == "loss" and record["scope"] == loss_scope]
    loss_truth = {(r["case"], r["format"]): r for r in records if r["kind"] == "loss-truth"}
    in_training = [record for record in chosen if is_trained(record)]
    sections = {
        f"Weight divergence, whole layers, `{estimator}`": by_case(chosen, truth),
        f"Weight divergence, single GEMMs, `{estimator}`, in training: median (worst) over cases": by_row(
            in_training, truth
        ),
        "Estimators of the weight divergence, whole layers, in training: median (worst) over cases": by_estimator(
            trained
        ),
        "The same before the first step": by_estimator([record for record in weight if not is_trained(record)]),
        "What a sample of tokens adds in training: median error, median over cases": by_tokens(trained),
        f"Estimate / truth by kind of linear in training, `{estimator}`: median (range) over cases": by_kind(
            in_training
        ),
        "Loss divergence: truth, and Spearman of the estimators from one micro-batch": loss_by_case(loss, loss_truth),
        "Loss divergence by tokens: Spearman less its ceiling, median over cases": loss_by_tokens(loss, loss_truth),
        "Targets": misses(chosen, weight, truth, loss, loss_truth, loss_estimator),
        "Origin": origin([record for record in records if record["kind"] == "case"]),
    }
    return "\n".join(f"## {title}\n\n{body}\n" for title, body in sections.items())


def is_trained(record: Record) -> bool:
    return not record["case"].endswith(":0")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def spread(values: Iterable[float | None], worst: Callable[[list[float]], float], digits: int = 2) -> str:
    """Returns "median (worst)" of the values there are."""
    found = [value for value in values if value is not None]
    return f"{statistics.median(found):.{digits}f} ({worst(found):.{digits}f})" if found else ""


def interval(record: Record, name: str) -> str:
    low, high = record[f"{name}_90"]
    return f"{number(record[name])} [{number(low)}, {number(high)}]"


def part(reliability: Record | None) -> str:
    return number(reliability["spearman"] if reliability else None)


def by_case(chosen: Sequence[Record], truth: dict[Any, Record]) -> str:
    head = (
        "case",
        "format",
        "median error",
        "90%",
        "quartiles of estimate / truth",
        "Spearman [90%]",
        "Kendall [90%]",
        "CV of truth",
        "reliability: draws",
        "batches",
    )
    rows = []
    for record in (record for record in chosen if record["row"] == "layer"):
        of_truth = truth[record["case"], record["format"], "layer"]
        rows.append(
            (
                record["case"],
                record["format"],
                number(record["median_error"], 3),
                number(record["error_90"], 3),
                " ".join(number(ratio) for ratio in record["ratio_quartiles"]),
                interval(record, "spearman"),
                interval(record, "kendall"),
                number(of_truth["variation"]),
                part(of_truth["reliability_draws"]),
                part(of_truth["reliability_batches"]),
            )
        )
    return table(head, rows)


def by_row(chosen: Sequence[Record], truth: dict[Any, Record]) -> str:
    rows = []
    for row, fmt in dict.fromkeys((record["row"], record["format"]) for record in chosen):
        group = [record for record in chosen if (record["row"], record["format"]) == (row, fmt)]
        of_truth = [truth[record["case"], fmt, row] for record in group]
        rows.append(
            (
                row,
                fmt,
                str(len(group)),
                spread((record["median_error"] for record in group), max, 3),
                spread((record["error_90"] for record in group), max, 3),
                spread((record["spearman"] for record in group), min),
                spread((record["kendall"] for record in group), min),
                spread((record["variation"] for record in of_truth), min),
                spread(((record["reliability_draws"] or {}).get("spearman") for record in of_truth), min),
                spread(((record["reliability_batches"] or {}).get("spearman") for record in of_truth), min),
            )
        )
    head = (
        "row",
        "format",
        "cases",
        "median error",
        "90%",
        "Spearman",
        "Kendall",
        "CV",
        "reliability: draws",
        "batches",
    )
    return table(head, rows)


def by_estimator(weight: Sequence[Record]) -> str:
    rows = []
    for name in dict.fromkeys(record["estimator"] for record in weight):
        cells = [f"{name} (baseline)" if name in WEIGHT_BASELINES else name]
        for fmt in ("fp8", "fp4"):
            group = [r for r in weight if (r["estimator"], r["row"], r["format"]) == (name, "layer", fmt)]
            ratios = (r["ratio_quartiles"][1] for r in group if "ratio_quartiles" in r)
            cells += [
                spread((r.get("median_error") for r in group), max, 3),
                spread((r.get("error_90") for r in group), max, 3),
                spread(ratios, lambda values: max(values, key=lambda ratio: abs(ratio - 1))),
                spread((r["spearman"] for r in group), min),
                spread((r["kendall"] for r in group), min),
            ]
        rows.append(cells)
    figures = ("median error", "90%", "ratio", "Spearman", "Kendall")
    return table(("estimator", *(f"{fmt} {figure}" for fmt in ("FP8", "FP4") for figure in figures)), rows)


def by_tokens(weight: Sequence[Record]) -> str:
    names = ("adjoint", "adjoint-1024-tokens", "adjoint-512-tokens")
    rows = []
    for row, fmt in dict.fromkeys((record["row"], record["format"]) for record in weight):
        errors = {name: errors_of(weight, name, row, fmt) for name in names}
        added = [_added(errors["adjoint"], errors[name]) for name in names[1:]]
        cells = [number(statistics.median(errors[name].values()), 3) if errors[name] else "" for name in names]
        rows.append((row, fmt, *cells, *(spread(values, max, 3) for values in added)))
    return table(("row", "format", "all tokens", "1,024", "512", "1,024 adds (worst)", "512 adds (worst)"), rows)


def errors_of(weight: Sequence[Record], estimator: str, row: str, fmt: str) -> dict[str, float]:
    """Returns case -> median error."""
    key = (estimator, row, fmt)
    return {r["case"]: r["median_error"] for r in weight if (r["estimator"], r["row"], r["format"]) == key}


def _added(all_tokens: dict[str, float], sample: dict[str, float]) -> list[float]:
    return [sample[case] - error for case, error in all_tokens.items() if case in sample]


def by_kind(chosen: Sequence[Record]) -> str:
    found: dict[str, dict[str, list[float]]] = {}
    for record in (record for record in chosen if record["row"] == "layer"):
        for kind, ratio in record["ratio_of_kind"].items():
            found.setdefault(kind, {}).setdefault(record["format"], []).append(ratio)

    def cell(ratios: list[float]) -> str:
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""

    rows = ((kind, *(cell(ratios.get(fmt, [])) for fmt in ("fp8", "fp4"))) for kind, ratios in found.items())
    return table(("kind", "FP8", "FP4"), rows)


def loss_by_case(loss: Sequence[Record], truth: dict[Any, Record]) -> str:
    names = list(dict.fromkeys(record["estimator"] for record in loss))
    rows = []
    for (case, fmt), of_truth in truth.items():
        here = {(r["estimator"], r["tokens"]): r for r in loss if (r["case"], r["format"]) == (case, fmt)}
        most = max(tokens for _, tokens in here)
        rows.append(
            (
                case,
                fmt,
                f"{of_truth['median']:.1e}",
                f"{of_truth['median_standard_error']:.0e}",
                number(of_truth["variation"]),
                part(of_truth["reliability"]),
                *(number(here.get((name, most), {}).get("spearman")) for name in names),
            )
        )
    return table(("case", "format", "median rise", "its standard error", "CV", "reliability", *names), rows)


def loss_by_tokens(loss: Sequence[Record], truth: dict[Any, Record]) -> str:
    rows = []
    for name, tokens in dict.fromkeys((record["estimator"], record["tokens"]) for record in loss):
        cells = [name, str(tokens)]
        for fmt in ("fp8", "fp4"):
            group = [r for r in loss if (r["estimator"], r["tokens"], r["format"]) == (name, tokens, fmt)]
            cells += [
                spread((r["spearman"] for r in group), min),
                spread((below_ceiling(r, truth) for r in group), min),
                "" if name in LOSS_BASELINES else spread((r["median_ratio"] for r in group), max),
            ]
        rows.append(cells)
    figures = ("Spearman", "less ceiling", "median ratio")
    return table(("estimator", "tokens", *(f"{fmt} {figure}" for fmt in ("FP8", "FP4") for figure in figures)), rows)


def below_ceiling(record: Record, truth: dict[Any, Record]) -> float | None:
    """Returns Spearman less the truth's reliability, None where there is none."""
    ceiling = truth[record["case"], record["format"]]["reliability"]
    if record["spearman"] is None or not ceiling or ceiling["spearman"] is None:
        return None
    return float(record["spearman"] - ceiling["spearman"])


def misses(
    chosen: Sequence[Record],
    weight: Sequence[Record],
    truth: dict[Any, Record],
    loss: Sequence[Record],
    loss_truth: dict[Any, Record],
    loss_estimator: str,
) -> str:
    """Returns a list of what misses its target, whole layers only."""
    lines = []
    layers = [record for record in chosen if record["row"] == "layer"]
    for r in layers:
        varies = truth[r["case"], r["format"], "layer"]["variation"] >= LEAST_VARIATION
        found = [
            f"{name} {value:.3f}"
            for name, value, is_missed in (
                ("median error", r["median_error"], r["median_error"] > MEDIAN_ERROR),
                ("90%", r["error_90"], r["error_90"] > ERROR_90),
                ("Spearman", r["spearman"], varies and (r["spearman"] or 0.0) < SPEARMAN),
            )
            if is_missed
        ]
        if found:
            lines.append(f"- weight divergence, {r['case']}, {r['format']}: {', '.join(found)}")
    for fmt in ("fp8", "fp4"):
        errors = errors_of(weight, "adjoint", "layer", fmt)
        for case, error in errors_of(weight, "adjoint-1024-tokens", "layer", fmt).items():
            if error - errors[case] > SAMPLE_ADDS:
                lines.append(f"- 1,024 tokens, {case}, {fmt}: median error {error:.3f}, all tokens {errors[case]:.3f}")
    finest: dict[tuple[str, str], Record] = {}
    for r in loss:
        key = (r["case"], r["format"])
        if r["estimator"] == loss_estimator and r["tokens"] >= finest.get(key, r)["tokens"]:
            finest[key] = r
    for (case, fmt), r in finest.items():
        below = below_ceiling(r, loss_truth)
        if below is not None and below < -BELOW_CEILING:
            lines.append(
                f"- loss divergence, {case}, {fmt}: Spearman {r['spearman']:.2f}, {-below:.2f} below its ceiling"
            )
    total = f"{len(layers)} weight and {len(finest)} loss figures; {len(lines)} misses."
    return "\n".join([total, "", *lines])


def origin(records: Sequence[Record]) -> str:
    names = ("loss", "tokens", "batches", "draws", "held_out", "blocks", "seed", "commit", "machine", "torch")
    rows = [
        (
            record["case"],
            *(number(record[name][0], 3) if name == "loss" else str(record[name]) for name in names),
            str(round(sum(record["seconds"].values()))),
        )
        for record in records
    ]
    commands = "\n".join(f"    {command}" for command in dict.fromkeys(record["command"] for record in records))
    return f"{commands}\n\n{table(('case', *names, 'seconds'), rows)}"


if __name__ == "__main__":
    main()
