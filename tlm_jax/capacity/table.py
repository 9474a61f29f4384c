"""Profiles as text: a table by layer with the widths drawn, the totals, and two profiles side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tlm_jax.capacity.shape import LayerShape

BAR_WIDTH = 32
_COLUMNS = ("d_model", "d_ff", "num_heads", "num_kv_heads", "head_dim")
# Shown only where a layer has another value than this.
_OPTIONS = {
    "num_experts": 0,
    "experts_per_token": 0,
    "expert_d_ff": 0,
    "padded_experts": 0,
    "mlp": "swiglu",
    "window": 0,
    "qk_norm": False,
}


def drawn_widths(*models: Sequence[LayerShape]) -> tuple[str, ...]:
    """The widths worth drawing: d_model where it varies within or between models, and that of MLPs or of experts."""
    layers = [layer for model in models for layer in model]
    mlp = "expert_d_ff" if all(layer.num_experts for layer in layers) else "d_ff"
    return ("d_model", mlp) if len({layer.d_model for layer in layers}) > 1 else (mlp,)


def width_words(layers: Sequence[LayerShape], to: str = "→") -> str:
    """The widths worth drawing by where they begin, turn and end: `d_model 208 → 32 → 208, d_ff 848 → 128 → 816`."""
    told = []
    for name in drawn_widths(layers):
        widths = [getattr(layer, name) for layer in layers]
        first, last = widths[0], widths[-1]
        extremes = min(widths), max(widths)
        turns = [width for width in extremes if not min(first, last) <= width <= max(first, last)]
        points = [first, *turns, last] if len(set(widths)) > 1 else [first]
        told.append(f"{name} {f' {to} '.join(map(str, points))}")
    return ", ".join(told)


def _columns(layers: Sequence[LayerShape]) -> tuple[str, ...]:
    shown = (name for name, usual in _OPTIONS.items() if any(getattr(layer, name) != usual for layer in layers))
    return (*_COLUMNS, *shown)


def bar(value: int, largest: int, width: int = BAR_WIDTH) -> str:
    """`value` drawn as a bar, `width` characters for `largest`; halves are drawn too."""
    halves = round(2 * width * value / largest)
    return "█" * (halves // 2) + "▌" * (halves % 2)


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> str:
    """Rows as aligned columns, numbers to the right; the columns in `left` to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def layer_table(layers: Sequence[LayerShape]) -> str:
    """One line a layer: its sizes, its parameters and its widths drawn."""
    columns, drawn = _columns(layers), drawn_widths(layers)
    largest = [max(getattr(layer, name) for layer in layers) for name in drawn]
    rows = [["layer", *columns, "parameters", *(f"{name} drawn" for name in drawn)]]
    for index, layer in enumerate(layers):
        sizes = [str(getattr(layer, column)) for column in columns]
        bars = [
            bar(getattr(layer, name), most, BAR_WIDTH // len(drawn)) for name, most in zip(drawn, largest, strict=True)
        ]
        rows.append([str(index), *sizes, f"{layer.parameters:,}", *bars])
    return aligned(rows, left=range(len(rows[0]) - len(drawn), len(rows[0])))


def comparison_table(a: Sequence[LayerShape], b: Sequence[LayerShape]) -> str:
    """One line a layer of two models: a width, the difference, both drawn, and any other size that differs.

    The width is d_model where the two differ in it, else that of MLPs or experts.
    """
    pairs = list(zip(a, b, strict=False))
    width = drawn_widths(a, b)[-1]
    if any(x.d_model != y.d_model for x, y in pairs):
        width = "d_model"
    others = [
        name
        for name in _columns((*a, *b))
        if name != width and any(getattr(x, name) != getattr(y, name) for x, y in pairs)
    ]
    columns = [width, *others]
    largest = max(getattr(layer, width) for layer in (*a, *b))
    header = [f"{side} {name}" for name in columns for side in ("A", "B")]
    rows = [["layer", *header, "B - A", "A drawn", "B drawn"]]
    for index in range(max(len(a), len(b))):
        x, y = (side[index] if index < len(side) else None for side in (a, b))
        sizes = [str(getattr(layer, name)) if layer else "-" for name in columns for layer in (x, y)]
        difference = f"{getattr(y, width) - getattr(x, width):+,}" if x and y else ""
        bars = [bar(getattr(layer, width), largest, BAR_WIDTH // 2) if layer else "" for layer in (x, y)]
        rows.append([str(index), *sizes, difference, *bars])
    return aligned(rows, left=(len(rows[0]) - 2, len(rows[0]) - 1))


def totals_table(labels: Mapping[str, str], *budgets: Mapping[str, int]) -> str:
    """The totals named by `labels` (key to text) of one budget, or of two with their difference."""
    rows = [["", "A", "B", "B - A"]] if len(budgets) == 2 else []
    for key, label in labels.items():
        values = [budget[key] for budget in budgets]
        row = [label, *(f"{value:,}" for value in values)]
        if len(values) == 2:
            row.append(f"{values[1] - values[0]:+,}" if values[1] != values[0] else "equal")
        rows.append(row)
    return aligned(rows, left=(0,))
