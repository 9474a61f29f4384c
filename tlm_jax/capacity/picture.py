"""The widths of profiles as an image file; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tlm_jax.capacity.profile import Profile
from tlm_jax.errors import UserError
from tlm_jax.files import reason

SUFFIXES = (".png", ".svg", ".pdf")


def draw(profiles: Mapping[str, Profile], path: str) -> None:
    """Draws d_ff by layer of each named profile into `path`, of the kind its suffix says.

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
    figure = Figure(figsize=(7.0, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, profile in profiles.items():
        widths = [layer.d_ff for layer in profile.layers]
        axes.stairs(widths, [index - 0.5 for index in range(len(widths) + 1)], label=name, linewidth=2, baseline=None)
    axes.set_xlabel("layer")
    axes.set_ylabel("d_ff")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason(error)}", where="--plot") from error
