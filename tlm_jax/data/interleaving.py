"""Taking turns in fixed proportions, by arithmetic: which source the n-th item comes from, and its how-manieth.

Shares are whole numbers W_c over a period P = sum of W_c. One period is laid out by the quota method: at turn n, of the
sources c whose x_c items so far are less than n W_c / P, the one with the largest W_c / (x_c + 1) is served. It keeps
every source within one item of its exact share after any number of turns (Balinski and Young, "The quota method of
apportionment", American Mathematical Monthly 82, 1975). Periods repeat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from tlm_jax.errors import UserError

MAX_PERIOD = 100_000


class Interleaving:
    """An endless sequence of sources, of which any place is found in constant time.

    Attributes:
      shares: of each source, exact, of sum 1.

    Args:
      weights: of the sources, positive; only their ratios count. A float is taken as the decimal it is written as.

    Raises:
      UserError: a weight is not a positive finite number, or the ratios need a period above `MAX_PERIOD`.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [_exact(weight) for weight in weights]
        self.shares = [weight / sum(exact, Fraction()) for weight in exact]
        self._period = math.lcm(*(share.denominator for share in self.shares))
        if self._period > MAX_PERIOD:
            listed = ", ".join(map(str, weights))
            what = f"the weights {listed} repeat only after {self._period:,} windows, more than {MAX_PERIOD:,}"
            raise UserError(what, mend="use fewer digits, such as 7 and 3, or 0.35 and 0.65")
        self._whole = [int(share * self._period) for share in self.shares]
        self._source = _one_period(self._whole, self._period)
        # Of each turn, how many turns of the period its source has had before.
        self._rank = np.zeros(self._period, np.int64)
        for source, whole in enumerate(self._whole):
            self._rank[self._source == source] = np.arange(whole)

    def locate(self, index: int) -> tuple[int, int]:
        """Returns the source of item `index`, and how many items of that source come before."""
        periods, turn = divmod(index, self._period)
        source = int(self._source[turn])
        return source, periods * self._whole[source] + int(self._rank[turn])

    def counts(self, number: int) -> list[int]:
        """Returns how many of the first `number` items each source gives."""
        periods, turns = divmod(number, self._period)
        begun = np.bincount(self._source[:turns], minlength=len(self._whole))
        return [periods * whole + int(more) for whole, more in zip(self._whole, begun, strict=True)]


def _exact(weight: float) -> Fraction:
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight) or weight <= 0:
        raise UserError(f"a weight must be a positive number, not {weight!r}")
    return Fraction(str(weight))


def _one_period(whole: Sequence[int], period: int) -> np.ndarray:
    """The sources of one period's turns, int32 [period]."""
    taken = [0] * len(whole)
    order = np.zeros(period, np.int32)
    for turn in range(period):
        entitled = [c for c, share in enumerate(whole) if taken[c] * period < (turn + 1) * share]
        # Two unequal ratios of numbers below the largest period differ by far more than a float's rounding.
        source = max(entitled, key=lambda c: whole[c] / (taken[c] + 1))
        order[turn] = source
        taken[source] += 1
    return order
