"""Charts as inline SVG whose colours are the page's CSS variables, so that they follow its light or dark theme.

Matplotlib draws in placeholder colours that are then replaced. Each chart is drawn twice, wide and narrow, because
the text of a scaled SVG would be unreadable on a phone; the page's style shows the one that fits.
"""

from __future__ import annotations

import dataclasses
import html
import io
import itertools
import re
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tlm_jax.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_COLOURS = 6
_INK, _GRID = "#abcdf0", "#abcdf1"
_SIZES = {"wide": (7.6, 3.3), "narrow": (3.9, 3.0)}
_DASHES = ((), (6, 2), (2, 1.5), (7, 2, 1.5, 2), (4, 1.5), (1, 1))
_MAX_POINTS = 400

Points = Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Line:
    """One run's part of a chart.

    Attributes:
      run: index of the run, which fixes colour and dashes.
      points: (x, y), x rising.
      kind: "line"; "faint", a thin line behind the others; "dots"; or "steps", a level for each x.
    """

    run: int
    points: Points
    kind: str = "line"


def colour(run: int) -> str:
    """The CSS colour of a run."""
    return f"var(--run-{run % NUM_COLOURS + 1})"


def smoothed(points: Points) -> list[tuple[float, float]]:
    """A moving mean over about a fiftieth of the points, centred, so that it does not lag behind a falling loss.

    Towards the first point the window narrows on both sides; at the last it keeps its left half, so that the curve
    ends in a mean and not in one noisy value.
    """
    half = len(points) // 100
    sums = [0.0, *itertools.accumulate(y for _, y in points)]
    result = []
    for index, (x, _) in enumerate(points):
        reach = min(half, index)
        first, last = index - reach, min(index + reach, len(points) - 1)
        result.append((x, (sums[last + 1] - sums[first]) / (last + 1 - first)))
    return result


def thinned(points: Points) -> list[tuple[float, float]]:
    """At most a few hundred of the points, evenly chosen, the last one always."""
    stride = max(1, -(-len(points) // _MAX_POINTS))
    return [*points[:-1][::stride], *points[-1:]]


def loss_limits(curves: Sequence[Points], others: Sequence[Points]) -> tuple[float, float] | None:
    """A range of y that shows the last nine tenths of the curves, past their steep fall, and all points of `others`."""
    after = [y for curve in curves for _, y in curve[len(curve) // 10 :]]
    values = after + [y for points in others for _, y in points]
    if not values:
        return None
    pad = 0.04 * (max(values) - min(values)) or 0.1
    return min(values) - pad, max(values) + pad


def chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    limits: tuple[float, float] | None = None,
    zero: bool = False,
    integer_x: bool = False,
) -> str:
    """Draws `lines` and returns HTML: the wide and the narrow SVG.

    Args:
      title: what the chart shows, for those who cannot see it.
      x_label, y_label: under and above the axes.
      limits: range of y; by default all of it.
      zero: y starts at zero.
      integer_x: x counts things, so its ticks are integers.
    """

    def draw(axes: Axes) -> None:
        for line in lines:
            _draw_line(axes, line)
        if zero:
            axes.set_ylim(0, 1.06 * max(y for line in lines for _, y in line.points))
        if limits is not None:
            axes.set_ylim(*limits)
        axes.set_xlabel(x_label)
        axes.set_title(y_label, loc="left")

    return "".join(_render(draw, size, title, integer_x) for size in _SIZES)


def _draw_line(axes: Axes, line: Line) -> None:
    paint = _placeholder(line.run)
    if line.kind == "steps":
        levels = [y for _, y in line.points]
        edges = [x - 0.5 for x, _ in line.points] + [line.points[-1][0] + 0.5]
        axes.stairs(levels, edges, color=paint, linewidth=2.2, baseline=None, linestyle=_dashes(line.run))
        axes.stairs(levels, edges, color=paint, alpha=0.07, fill=True)
        return
    x, y = zip(*thinned(line.points), strict=True) if line.points else ((), ())
    if line.kind == "dots":
        axes.plot(x, y, color=paint, linestyle="none", marker="o", markersize=5)
    elif line.kind == "faint":
        axes.plot(x, y, color=paint, linewidth=0.8, alpha=0.22)
    else:
        axes.plot(x, y, color=paint, linewidth=2.0, linestyle=_dashes(line.run))


def _dashes(run: int) -> str | tuple[int, tuple[float, ...]]:
    pattern = _DASHES[run % len(_DASHES)]
    return (0, pattern) if pattern else "-"


def _placeholder(run: int) -> str:
    return f"#abcd0{run % NUM_COLOURS + 1}"


def _render(draw: Callable[[Axes], None], size: str, title: str, integer_x: bool) -> str:
    """One SVG of one size, made fit for inlining: no prologue, no metadata, no foreign names, themed colours."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, MaxNLocator
    except ImportError as error:
        raise UserError(
            "the report's charts need matplotlib", mend='install it with: pip install "tlm_jax[report]"'
        ) from error
    style: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "",  # the same chart twice is the same text
        "text.parse_math": False,
        "font.size": 10,
        "axes.titlesize": 10,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _GRID,
        "ytick.color": _GRID,
        "xtick.labelcolor": _INK,
        "ytick.labelcolor": _INK,
        "axes.edgecolor": _GRID,
        "grid.color": _GRID,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=_SIZES[size], layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.01)
        if integer_x:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=8 if size == "wide" else 6, integer=True))
        else:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=7 if size == "wide" else 4))
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inlined(buffer.getvalue(), size, title)


def _inlined(svg: str, size: str, title: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r"#abcd0(\d)", r"var(--run-\1)", svg)
    svg = svg.replace(_INK, "var(--soft)").replace(_GRID, "var(--rule)")
    svg = re.sub(r"font: ([\d.]+px) [^;\"]*", r"font: \1 var(--font)", svg)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg class="{size}" viewBox="\1" role="img">', svg, count=1)
    # Identifiers must be unique in the page, and most are not needed.
    used = set(re.findall(r'(?:href="#|url\(#)([\w-]+)', svg))
    prefix = f"c{zlib.crc32(f'{size} {title}'.encode()):x}-"
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}{m[1]}"' if m[1] in used else "", svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}", svg)
    head, rest = svg.split(">", 1)
    return re.sub(r">\s+<", "><", f"{head}><title>{html.escape(title)}</title>{rest}")
