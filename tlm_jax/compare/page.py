"""The report on a comparison: its table and what may be said, the seeds drawn, and each variant's mean over seeds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from tlm_jax.compare.plan import Run
from tlm_jax.compare.summary import UNITS, Summary, caution, cells, heading
from tlm_jax.report import elements, page
from tlm_jax.report.charts import Line, chart
from tlm_jax.report.profiles import profiles_section
from tlm_jax.report.runs import Record, load_run, number
from tlm_jax.report.runs import Run as Reported


def build_page(summary: Summary, complete: Sequence[Run]) -> str:
    """The comparison as one HTML document.

    Args:
      summary: the table.
      complete: the runs that are.

    Raises:
      UserError: a run's files are damaged, or matplotlib is not installed.
    """
    names = [row.variant.name for row in summary.rows]
    pooled = []
    for name in names:
        runs = [load_run(str(run.workdir)) for run in complete if run.variant.name == name]
        if runs:
            pooled.append(_pooled(name, runs))
    title = " · ".join(names)
    lead = f"{heading(summary)}."
    head = f'<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></header>\n'
    parts = [_verdicts(summary), _seeds(summary)]
    if pooled:
        note = elements.paragraph("From here on, each variant is the mean of its complete seeds.", "soft small")
        parts += [
            elements.section("While training", note, page.difference_chart(pooled)),
            page.loss_section(pooled),
            profiles_section(pooled),
            page.speed_section(pooled),
            page.configs_section(pooled),
        ]
    return page.document(title, head, *parts)


def _verdicts(summary: Summary) -> str:
    names = [row.variant.name for row in summary.rows]
    columns = [cells(summary, row) for row in summary.rows]
    rows = [(label, [column[label] for column in columns]) for label in columns[0] if label != "variant"]
    said = "".join(
        f"<p><b>{escape(row.variant.name)}</b>: {escape(summary.verdict(row))}.</p>" for row in summary.rows[1:]
    )
    if summary.budgets:
        budgets = f"<p>The budgets are <b>not equal</b>: {escape('; '.join(summary.budgets))}.</p>"
    else:
        budgets = elements.paragraph(
            "The budgets are equal: parameters, training FLOPs per token and training tokens are the same."
        )
    several = caution(summary)
    return elements.section(
        "Result", elements.table(names, rows), said, budgets, elements.paragraph(several, "soft") if several else ""
    )


def _seeds(summary: Summary) -> str:
    """The held-out metric of every run, so that the spread can be seen."""
    lines = []
    for index, row in enumerate(summary.rows):
        points = [(float(seed), value) for seed, value in row.values[summary.metric].items()]
        lines += [Line(index, points), Line(index, points, "dots")] if points else []
    if not lines:
        return elements.section("Seeds", elements.paragraph("No run is complete yet.", "soft"))
    label = "held-out loss" if summary.metric == "loss" else "held-out text"
    drawn = chart(
        lines, title=f"{label} by seed", x_label="seed", y_label=f"{label}, {UNITS[summary.metric]}", integer_x=True
    )
    caption = "One point a run. Where lines run side by side, the variants differ alike in every seed."
    names = [row.variant.name for row in summary.rows]
    return elements.section("Seeds", elements.legend(names), elements.figure(drawn, caption))


def _pooled(name: str, runs: Sequence[Reported]) -> Reported:
    """One run whose records are the means over `runs` at the steps that all of them logged."""
    by_step = [{record["step"]: record for record in run.records} for run in runs]
    shared = [step for step in by_step[0] if all(step in records for records in by_step)]
    records = [_mean([of_run[step] for of_run in by_step]) for step in shared]
    return dataclasses.replace(
        runs[0],
        name=name,
        config={**runs[0].config, "name": name},
        records=records,
        evaluation=None,
        samples=(),
        notes=(),
    )


def _mean(records: Sequence[Record]) -> dict[str, Any]:
    """The mean of each number that all have, inside `validation` too."""
    found: dict[str, Any] = {}
    for key in records[0]:
        values = [record.get(key) for record in records]
        if all(isinstance(value, dict) for value in values):
            found[key] = _mean([value for value in values if isinstance(value, dict)])
            continue
        numbers = [value for value in map(number, values) if value is not None]
        if len(numbers) == len(records):
            found[key] = statistics.fmean(numbers)
    return found | {"step": records[0]["step"]} if "step" in records[0] else found
