"""The widths of profiles as an image file; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tlm_jax.capacity.profile import Profile
from tlm_jax.capacity.table import drawn_widths
from tlm_jax.errors import UserError
from tlm_jax.files import reason

SUFFIXES = (".png", ".svg", ".pdf")


def draw(profiles: Mapping[str, Profile], path: str) -> None:
    """Draws the widths by layer of each named profile into `path`, of the kind its suffix says.

    Raises:
      UserError: matplotlib is not installed, the suffix is none of `SUFFIXES`, or the file cannot be written.
    """
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UserError(f"cannot draw into {path!r}", where="--plot", mend=f"end the name in {', '.join(SUFFIXES)}")
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise UserError(
            "drawing needs matplotlib", where="--plot", mend='install it with: pip install "tlm_jax[report]"'
        ) from error
    drawn = drawn_widths(*(profile.layers for profile in profiles.values()))
    figure = Figure(figsize=(7.0, 3.6 * len(drawn)), layout="constrained")
    for axes, width in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn, strict=True):
        for name, profile in profiles.items():
            widths = [getattr(layer, width) for layer in profile.layers]
            edges = [index - 0.5 for index in range(len(widths) + 1)]
            axes.stairs(widths, edges, label=name, linewidth=2, baseline=None)
        axes.set_xlabel("layer")
        axes.set_ylabel(width)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason(error)}", where="--plot") from error
