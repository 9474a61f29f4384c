"""What can and cannot be said about the difference between runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from tlm_jax.capacity.budget import EQUAL, unequal
from tlm_jax.report.runs import Run, number

SEEDS = ("name", "seed", "data.seed")  # keys that differ between repetitions of one experiment


@dataclasses.dataclass(frozen=True)
class Difference:
    """A run less the first run.

    Attributes:
      budgets: what of the budget differs, as text; empty when the two are equal.
      source: where the held-out numbers come from.
      loss: difference of held-out loss, nats per token; None where the two cannot be compared.
      bits_per_byte: likewise.
      reason: why there is no difference, if there is none.
    """

    budgets: Sequence[str]
    source: str = ""
    loss: float | None = None
    bits_per_byte: float | None = None
    reason: str = ""


def difference(first: Run, run: Run) -> Difference:
    """Compares `run` with `first`: budgets, and held-out numbers where both were measured on the same text."""
    budgets = [
        f"{EQUAL[key]} ({_shown(first.budget[key])} and {_shown(run.budget[key])})"
        for key in unequal(first.budget, run.budget)
    ]
    (ours, our_source), (theirs, their_source) = first.final, run.final
    if ours is None or theirs is None:
        return Difference(budgets, reason="one of the runs has no held-out numbers yet")
    if our_source != their_source:
        return Difference(budgets, reason="one has an evaluation and the other only its last validation")
    if first.final_weights != run.final_weights:
        return Difference(budgets, reason="one was measured with its weights, the other with their moving average")
    for key in ("tokens", "bytes"):
        if (ours.get(key) or None) != (theirs.get(key) or None):  # bytes not known were told as 0 once
            return Difference(budgets, reason=f"their held-out texts differ in {key}")
    losses, bits = (
        (number(a.get(key)), number(b.get(key))) for key in ("loss", "bits_per_byte") for a, b in [(ours, theirs)]
    )
    return Difference(
        budgets,
        our_source,
        None if None in losses else losses[1] - losses[0],  # type: ignore[operator]
        None if None in bits else bits[1] - bits[0],  # type: ignore[operator]
    )


def _shown(count: int | None) -> str:
    return "none" if count is None else f"{count:,}"


def seed_spread(runs: Sequence[Run]) -> float | None:
    """The largest difference of final held-out loss between runs that differ only in their seeds; None without any."""
    groups: dict[str, list[float]] = {}
    for run in runs:
        measured, _ = run.final
        loss = number(measured.get("loss")) if measured is not None else None
        if loss is not None:
            same = {key: value for key, value in run.config.items() if key not in SEEDS}
            groups.setdefault(json.dumps([same, run.final_weights], sort_keys=True), []).append(loss)
    spreads = [max(losses) - min(losses) for losses in groups.values() if len(losses) > 1]
    return max(spreads, default=None)


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Config keys whose values are not the same in all runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [key for key in keys if any(run.config.get(key) != runs[0].config.get(key) for run in runs)]
