"""Which checkpoints are the best, and which ones stay."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from tlm_jax.checkpoint import layout
from tlm_jax.config import from_json
from tlm_jax.errors import UserError

# What of a validation is stored with a checkpoint, and can be the measure of the best: the lowest.
METRICS = ("validation/loss", "validation/perplexity", "validation/bits_per_byte")


def storable(validation: Mapping[str, float | int | None]) -> dict[str, float | None]:
    """A validation's numbers by their names in `METRICS`.

    None: not known, or not finite, which JSON cannot say; never the best.
    """
    values = {name: validation[name.removeprefix("validation/")] for name in METRICS}
    return {n: None if value is None or not math.isfinite(value) else float(value) for n, value in values.items()}


def best(values: Mapping[int, float | None], count: int) -> list[int]:
    """The steps of the `count` lowest values, the lowest first; of equals the earlier; never one without a value."""
    measured = [(value, step) for step, value in values.items() if value is not None]
    return [step for _, step in sorted(measured)[:count]]


def is_among_best(value: float | None, others: Mapping[int, float | None], count: int) -> bool:
    """Whether a new value belongs to the `count` lowest; one that equals the worst of them does not."""
    if value is None or not count:
        return False
    measured = sorted(other for other in others.values() if other is not None)
    return len(measured) < count or value < measured[count - 1]


def superfluous(
    steps: Sequence[int],
    *,
    keep_last: int,
    keep: Collection[int] = (),
    values: Mapping[int, float | None] | None = None,
    keep_best: int = 0,
) -> list[int]:
    """The steps that need not stay.

    Args:
      steps: all complete ones, ascending.
      keep_last: how many of the newest stay, at least 1.
      keep: others that stay.
      values: the metric of each step, where it has one.
      keep_best: how many of the best by it stay.
    """
    stay = {*steps[-keep_last:], *keep, *best(values or {}, keep_best)}
    return [step for step in steps if step not in stay]


def metric_values(directory: Path, metric: str) -> dict[int, float | None]:
    """The metric of each complete checkpoint in `directory`; None: not measured, not finite, or it cannot be read."""
    values = {}
    for step in layout.complete_steps(directory):
        try:
            description = layout.read_json(layout.step_directory(directory, step), layout.METADATA)
            values[step] = description.get(layout.METRICS, {}).get(metric)
        except UserError:
            values[step] = None
    return values


def best_metric(directory: Path) -> str:
    """The metric that tells the best checkpoint in `directory`: what the newest one that can be read was made with."""
    for step in reversed(layout.complete_steps(directory)):
        path = layout.step_directory(directory, step)
        try:
            saved = layout.read_step_metadata(path).config
        except UserError:
            continue
        return str(from_json(saved, where=f"{path}: config").checkpoint.best_metric)
    return METRICS[0]


def best_step(directory: Path) -> int:
    """The step with the lowest `best_metric`, of equals the earliest.

    Raises:
      UserError: no complete checkpoint has been measured.
    """
    metric = best_metric(directory)
    steps = best(metric_values(directory, metric), 1)
    if steps:
        return steps[0]
    raise UserError(
        f"no checkpoint has a finite {metric}",
        where=str(directory),
        mend="one is stored where a save and a validation meet, as with checkpoint.keep_best; give a step instead",
    )
