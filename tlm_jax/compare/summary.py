"""What a comparison found: means, spreads, paired differences with their intervals, and what they let one say.

The spread is the sample standard deviation over seeds. A difference is taken seed by seed against the first variant;
its interval is mean ± t · s / √n, with s the sample standard deviation of the n differences and t the quantile of
Student's distribution with n - 1 degrees of freedom. An interval that contains 0 says that no difference was seen.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tlm_jax.capacity.budget import EQUAL, TRAIN_TOKENS, shown_labels
from tlm_jax.capacity.table import aligned
from tlm_jax.compare.plan import Variant, budget_differences
from tlm_jax.counts import counted
from tlm_jax.report.runs import number

_WIDTH = 120  # characters, of a budget table
UNITS = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
Results = Mapping[str, Mapping[int, Mapping[str, Any]]]  # variant's name -> seed's number -> evaluation.json


@dataclasses.dataclass(frozen=True)
class Difference:
    """A variant less the first one, paired by seed.

    Attributes:
      values: of each seed that both have.
      mean: of them.
      interval: low and high; None with fewer than two seeds.
    """

    values: tuple[float, ...]
    mean: float
    interval: tuple[float, float] | None


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float], confidence: float) -> Difference | None:
    """`theirs` less `ours` over the seeds that both have; None without any.

    Args:
      ours: the first variant's value by seed.
      theirs: the other's.
      confidence: of the interval, such as 0.95.
    """
    values = tuple(theirs[seed] - ours[seed] for seed in sorted(ours.keys() & theirs.keys()))
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Difference(values, mean, None)
    from scipy.stats import t as students_t

    quantile = float(students_t.ppf((1 + confidence) / 2, len(values) - 1))
    half = quantile * statistics.stdev(values) / math.sqrt(len(values))
    return Difference(values, mean, (mean - half, mean + half))


@dataclasses.dataclass(frozen=True)
class Row:
    """What one variant came to.

    Attributes:
      variant: which.
      values: key of `UNITS` to seed's number to value.
      difference: to the first variant, in the metric of the comparison; None for the first one itself, or where no
        seed is complete in both.
    """

    variant: Variant
    values: Mapping[str, Mapping[int, float]]
    difference: Difference | None

    def mean(self, metric: str) -> float | None:
        """Over seeds."""
        values = list(self.values[metric].values())
        return statistics.fmean(values) if values else None

    def spread(self, metric: str) -> float | None:
        """The sample standard deviation over seeds; None with fewer than two."""
        values = list(self.values[metric].values())
        return statistics.stdev(values) if len(values) > 1 else None


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of a comparison.

    Attributes:
      rows: one a variant.
      seeds: how many each was to have.
      metric: key of `UNITS` in which differences are taken: the loss, or bits per byte where tokens differ.
      confidence: of the intervals.
      budgets: how the budgets differ; empty when they are equal.
      incomparable: why no difference can be taken, if none can.
    """

    rows: Sequence[Row]
    seeds: int
    metric: str
    confidence: float
    budgets: Sequence[str]
    incomparable: str = ""

    def verdict(self, row: Row) -> str:
        """What the numbers let one say about `row` and the first variant: never a winner inside the spread."""
        first, found = self.rows[0], row.difference
        if self.incomparable:
            return f"no difference taken: {self.incomparable}"
        if found is None:
            return "no seed is complete in both"
        count = len(found.values)
        unequal = "at unequal budgets, " if self.budgets else ""
        if found.interval is None:
            return f"{unequal}one seed: without a spread, no difference can be told from chance"
        low, high = found.interval
        if low <= 0 <= high:
            return f"{unequal}no difference seen with {count} seeds"
        way = "lower" if found.mean < 0 else "higher"
        spreads = [each.spread(self.metric) or 0.0 for each in (first, row)]
        inside = ", less than seeds differ by themselves: seen in pairs only" if abs(found.mean) < max(spreads) else ""
        return (
            f"{unequal}{way} than {first.variant.name} by {abs(found.mean):.4f} {UNITS[self.metric]} "
            f"with {count} seeds{inside}"
        )


def summarise(variants: Sequence[Variant], results: Results, seeds: int, confidence: float) -> Summary:
    """Computes the table of a comparison from the evaluations that exist.

    Args:
      variants: in order, the first being the one that the others are compared with.
      results: evaluations by variant and seed.
      seeds: how many each is to have.
      confidence: of the intervals.
    """
    every = [measured for by_seed in results.values() for measured in by_seed.values()]
    same = {key: len({measured.get(key) or None for measured in every}) <= 1 for key in ("tokens", "bytes")}
    metric = "loss" if same["tokens"] else "bits_per_byte"
    incomparable = "" if same["bytes"] else "the held-out texts are not the same"
    if metric == "bits_per_byte" and any(number(measured.get(metric)) is None for measured in every):
        incomparable = "the tokens are not the same, and a run has no bits per byte"
    found = [_values(results.get(variant.name, {})) for variant in variants]
    rows = [Row(variants[0], found[0], None)]
    for variant, values in zip(variants[1:], found[1:], strict=True):
        pairs = None if incomparable else paired_difference(found[0][metric], values[metric], confidence)
        rows.append(Row(variant, values, pairs))
    return Summary(rows, seeds, metric, confidence, budget_differences(variants), incomparable)


def _values(by_seed: Mapping[int, Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """The finite numbers of a variant's evaluations, by metric and seed; a loss may be NaN, bits per byte unknown."""
    found: dict[str, dict[int, float]] = {}
    for metric in UNITS:
        numbers = {seed: number(by_seed[seed].get(metric)) for seed in sorted(by_seed)}
        found[metric] = {seed: value for seed, value in numbers.items() if value is not None}
    return found


def budget_table(variants: Sequence[Variant]) -> str:
    """The budgets of all variants: once what is equal in all, the rest side by side, in tables of at most `_WIDTH`."""
    labels = {TRAIN_TOKENS: EQUAL[TRAIN_TOKENS], **shown_labels(*(variant.budget for variant in variants))}
    budgets = {variant.name: variant.budget for variant in variants}
    first = budgets[variants[0].name]
    equal = [key for key in labels if all(budget[key] == first[key] for budget in budgets.values())]
    tables = []
    if equal:
        tables.append(aligned([["", "every variant"], *([labels[key], f"{first[key]:,}"] for key in equal)], left=(0,)))
    different = [label for key, label in labels.items() if key not in equal]
    columns = [[n, *(f"{b[key]:,}" for key in labels if key not in equal)] for n, b in budgets.items()]
    while different and columns:
        count = 1
        while count < len(columns) and len(_side_by_side(different, columns[: count + 1]).splitlines()[1]) <= _WIDTH:
            count += 1
        tables.append(_side_by_side(different, columns[:count]))
        columns = columns[count:]
    return "\n\n".join(tables)


def _side_by_side(labels: Sequence[str], columns: Sequence[Sequence[str]]) -> str:
    """Labels and the columns of a table, each with its heading first."""
    return aligned(list(zip(["", *labels], *columns, strict=True)), left=(0,))


def heading(summary: Summary) -> str:
    """One line on how the table is to be read."""
    return (
        f"{counted(len(summary.rows), 'variant')} × {counted(summary.seeds, 'seed')}: mean ± sample "
        f"standard deviation; difference to {summary.rows[0].variant.name} in {UNITS[summary.metric]}, paired by seed, "
        f"with its {summary.confidence * 100:g}% t interval"
    )


def cells(summary: Summary, row: Row) -> dict[str, str]:
    """A row of the table as text, by column."""
    found = row.difference
    interval = f" [{found.interval[0]:+.4f}, {found.interval[1]:+.4f}]" if found and found.interval else ""
    complete = len(row.values["loss"])
    return {
        "variant": row.variant.name,
        "seeds": f"{complete}" if complete == summary.seeds else f"{complete} of {summary.seeds}",
        "bits per byte": _with_spread(row, "bits_per_byte"),
        "loss": _with_spread(row, "loss"),
        "difference": "" if row is summary.rows[0] else f"{found.mean:+.4f}{interval}" if found else "–",
    }


def _with_spread(row: Row, metric: str) -> str:
    mean, spread = row.mean(metric), row.spread(metric)
    if mean is None:
        return "–"
    return f"{mean:.4f}" if spread is None else f"{mean:.4f} ± {spread:.4f}"


def caution(summary: Summary) -> str:
    """What several intervals mean together; nothing for one."""
    count = len(summary.rows) - 1
    if count < 2 or summary.seeds < 2:
        return ""
    chance = 1 - summary.confidence**count
    return (
        f"{count} intervals: if no variant differed, one of them would still exclude 0 in about {chance:.0%} of cases."
    )


def as_text(summary: Summary) -> str:
    """The table, what can be said, and the budgets."""
    rows = [cells(summary, row) for row in summary.rows]
    table = aligned([list(rows[0]), *(list(row.values()) for row in rows)], left=(0,))
    said = [f"{row.variant.name}: {summary.verdict(row)}" for row in summary.rows[1:]]
    several = caution(summary)
    unequal = f"WARNING: the budgets are not equal: {'; '.join(summary.budgets)}" if summary.budgets else ""
    blocks = [
        unequal,
        heading(summary),
        table,
        "\n".join([*said, several] if several else said),
        budget_table([row.variant for row in summary.rows]),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def as_json(summary: Summary, results: Results) -> str:
    """Everything, for machines."""
    rows = []
    for row in summary.rows:
        found = row.difference
        rows.append(
            {
                "name": row.variant.name,
                "changes": list(row.variant.changes),
                "budget": row.variant.budget,
                "runs": {str(seed): dict(each) for seed, each in sorted(results.get(row.variant.name, {}).items())},
                "mean": {metric: row.mean(metric) for metric in UNITS},
                "standard_deviation": {metric: row.spread(metric) for metric in UNITS},
                "difference": None if found is None else dataclasses.asdict(found),
                "verdict": None if row is summary.rows[0] else summary.verdict(row),
            }
        )
    head = {"metric": summary.metric, "seeds": summary.seeds, "confidence": summary.confidence}
    return json.dumps({**head, "budget_differences": list(summary.budgets), "variants": rows}, indent=1) + "\n"


def as_csv(summary: Summary) -> str:
    """One line a variant, numbers unrounded."""
    rows: list[dict[str, Any]] = []
    for row in summary.rows:
        found = row.difference
        low, high = (found.interval if found else None) or (None, None)
        values: dict[str, Any] = {"variant": row.variant.name, "seeds": len(row.values["loss"])}
        for metric in UNITS:
            values |= {f"{metric}_mean": row.mean(metric), f"{metric}_standard_deviation": row.spread(metric)}
        values |= {"difference_metric": summary.metric, "difference": found.mean if found else None}
        values |= {"interval_low": low, "interval_high": high}
        values |= {key: row.variant.budget[key] for key in EQUAL}
        rows.append(values)
    file = io.StringIO()
    writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()
