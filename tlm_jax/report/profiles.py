"""The section of the page on profiles: widths drawn and as numbers, and budgets."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tlm_jax.capacity.budget import shown_labels
from tlm_jax.capacity.table import drawn_widths
from tlm_jax.report import elements
from tlm_jax.report.charts import Line, chart
from tlm_jax.report.runs import Run


def profiles_section(runs: Sequence[Run]) -> str:
    """The widths drawn, the budgets, and the widths as numbers."""
    names = [run.name for run in runs]
    shown = drawn_widths(*(run.profile.layers for run in runs))
    budgets = [run.budget for run in runs]
    rows = [(label, [f"{budget[key]:,}" for budget in budgets]) for key, label in shown_labels(*budgets).items()]
    lengths = dict.fromkeys(str(run.config["data.sequence_length"]) for run in runs)
    note = f"FLOPs count matmuls, two per multiply-add, at a sequence length of {' and '.join(lengths)}."
    return elements.section(
        "Profiles and budgets",
        elements.legend(names),
        *(_widths_drawn(runs, name) for name in shown),
        elements.table(names, rows),
        elements.paragraph(note, "soft small"),
        *(elements.fold(f"{name} of every layer", elements.table(names, _widths(runs, name))) for name in shown),
    )


def _widths_drawn(runs: Sequence[Run], name: str) -> str:
    """One of the widths of `drawn_widths` by layer."""
    lines = [
        Line(index, [(float(i), float(getattr(layer, name))) for i, layer in enumerate(run.profile.layers)], "steps")
        for index, run in enumerate(runs)
    ]
    drawn = chart(
        lines, title=f"{name} by layer", x_label="layer, from input to output", y_label=name, zero=True, integer_x=True
    )
    caption = "Width of the residual stream by layer." if name == "d_model" else "MLP width by layer."
    return elements.figure(drawn, caption)


def _widths(runs: Sequence[Run], name: str) -> list[tuple[str, list[str]]]:
    """The same as rows of a table."""
    columns = [[f"{getattr(layer, name):,}" for layer in run.profile.layers] for run in runs]
    rows = itertools.zip_longest(*columns, fillvalue="")
    return [(f"layer {index}", list(row)) for index, row in enumerate(rows)]
