"""Pieces of HTML. Every function takes plain text and escapes it, except where it says that it takes HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from tlm_jax.report.charts import colour

MISSING = "–"


def section(title: str, *parts: str) -> str:
    """A titled section of HTML `parts`; nothing if there are none."""
    inner = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{inner}</section>\n" if inner else ""


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def swatch(run: int) -> str:
    """A run's colour, as HTML."""
    return f'<span class="swatch" style="--colour: {colour(run)}"></span>'


def legend(names: Sequence[str]) -> str:
    """Which colour is which run."""
    if len(names) < 2:
        return ""
    items = "".join(f"<li>{swatch(run)}{escape(name)}</li>" for run, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>'


def figure(chart: str, caption: str) -> str:
    """A chart (HTML) with its caption, if there is one."""
    return f"<figure>{chart}{f'<figcaption>{escape(caption)}</figcaption>' if caption else ''}</figure>"


def table(names: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], kind: str = "") -> str:
    """A table with one column a run: rows of a label and plain-text cells, one for each name."""
    head = "".join(
        f'<th scope="col"><span style="--colour: {colour(run)}">{escape(name)}</span></th>'
        for run, name in enumerate(names)
    )
    cell = f'<td class="{kind}">' if kind else "<td>"
    body = "".join(
        f'<tr><th scope="row">{escape(label)}</th>{"".join(f"{cell}{escape(text)}</td>" for text in cells)}</tr>'
        for label, cells in rows
    )
    return f'<div class="scroll"><table><thead><tr><th></th>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def bars(values: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars, one for each (label, value, CSS colour)."""
    largest = max(value for _, value, _ in values)
    lines = "".join(
        f'<div class="label">{escape(label)}</div><div class="track" style="--colour: {paint}">'
        f'<div class="fill" style="width: {78 * value / largest:.1f}%"></div>{value:.3f}</div>'
        for label, value, paint in values
    )
    return f'<div class="bars">{lines}</div>'


def fold(title: str, inner: str) -> str:
    """HTML that opens when its title is clicked."""
    return f"<details><summary>{escape(title)}</summary>{inner}</details>"


def decimal(value: float | None, places: int = 4) -> str:
    """A number with a fixed number of decimals."""
    return MISSING if value is None else f"{value:,.{places}f}"


def count(value: float | None) -> str:
    """A whole number with separators."""
    return MISSING if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return MISSING if value is None else f"{100 * value:.1f}%"


def short(value: float | None, unit: str = "") -> str:
    """Three significant digits with an SI prefix: 5.57 M, 35.8 TFLOP."""
    if value is None:
        return MISSING
    for prefix in ("", "k", "M", "G", "T", "P", "E", "Z", "Y"):
        if abs(value) < 999.5 or prefix == "Y":
            break
        value /= 1000
    digits = f"{value:.0f}" if abs(value) >= 99.95 or value == int(value) else f"{value:.3g}"
    return f"{digits} {prefix}{unit}".rstrip()
