"""Which checkpoints are the best, and which ones stay."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tlm_jax.checkpoint import layout
from tlm_jax.config import from_json
from tlm_jax.errors import UserError

# What of a validation is stored with a checkpoint, and can be the measure of the best: the lowest.
METRICS = ("validation/loss", "validation/perplexity", "validation/bits_per_byte")


class Value(NamedTuple):
    """A checkpoint's metric.

    Attributes:
      number: None: not measured, not finite, or it cannot be read.
      kind: what it was measured on, as text; only values of one kind can be compared.
    """

    number: float | None
    kind: str


def kind(measured_on: Mapping[str, Any]) -> str:
    """`Value.kind` of what a checkpoint says under `layout.MEASURED_ON`."""
    return json.dumps(measured_on, sort_keys=True)


def value_of(description: Mapping[str, Any], metric: str) -> Value:
    """The metric of a checkpoint, out of its metadata item."""
    return Value(description.get(layout.METRICS, {}).get(metric), kind(description.get(layout.MEASURED_ON, {})))


def comparable(values: Mapping[int, Value]) -> dict[int, float]:
    """The numbers of all steps that were measured on the same as the newest that was measured."""
    measured = {step: value.number for step, value in values.items() if value.number is not None}
    return {step: number for step, number in measured.items() if values[step].kind == values[max(measured)].kind}


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
    values: Mapping[int, Value] | None = None,
    keep_best: int = 0,
) -> list[int]:
    """The steps that need not stay.

    Args:
      steps: all complete ones, ascending.
      keep_last: how many of the newest stay, at least 1.
      keep: others that stay.
      values: the metric of each step, where it has one.
      keep_best: how many of the best by it stay, of each kind of value.
    """
    values = values or {}
    stay = {*steps[-keep_last:], *keep}
    for one in {value.kind for value in values.values()}:
        stay |= {*best({step: value.number for step, value in values.items() if value.kind == one}, keep_best)}
    return [step for step in steps if step not in stay]


def metric_values(directory: Path, metric: str) -> dict[int, Value]:
    """The metric of each complete checkpoint in `directory`."""
    values = {}
    for step in layout.complete_steps(directory):
        try:
            values[step] = value_of(layout.read_json(layout.step_directory(directory, step), layout.METADATA), metric)
        except UserError:
            values[step] = Value(None, kind({}))
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

    Only those count that were measured on what the newest measured one was: the same weights and windows.

    Raises:
      UserError: no complete checkpoint has been measured.
    """
    metric = best_metric(directory)
    steps = best(comparable(metric_values(directory, metric)), 1)
    if steps:
        return steps[0]
    raise UserError(
        f"no checkpoint has a finite {metric}",
        where=str(directory),
        mend="one is stored where a save and a validation meet, as with checkpoint.keep_best; give a step instead",
    )


def weights_to_read(path: Path, step: int | str | None, asked: str | None) -> str:
    """Which of the weights in the step directory `path` to read, one of `layout.WEIGHTS`.

    Args:
      path: what was found for `step`.
      step: as `find_checkpoint` takes it.
      asked: what the user says. By default those trained, and of the best those by whose validation it is the best.

    Raises:
      UserError: the metadata cannot be read.
    """
    if asked or step != layout.BEST:
        return asked or layout.PARAMS
    description = layout.read_json(path, layout.METADATA)
    if layout.WEIGHTS_ONLY in description.get("extra", {}):  # whichever they are, they are all that is there
        return layout.PARAMS
    return str(description.get(layout.MEASURED_ON, {}).get("weights", layout.PARAMS))
