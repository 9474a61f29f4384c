"""MLP widths on top of widths that vary: each in proportion to its layer's d_model, and to a ratio that may taper.

The sum of the MLPs' weights is met exactly by moving widths in steps, fewest moves first. Layers of equal d_model and
ratio that are neighbours move together, so that they stay one run, unless the sum cannot be met so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

_MOST_SUMS = 2**22  # a thousand times what the widths of models need, and searched in a second


def proportional(widths: Sequence[int], ratio: Fraction, multiple_of: int) -> tuple[int, ...]:
    """`ratio` times each width, as the nearest multiple above 0; of two the even one."""
    return tuple(max(1, round(ratio * width / multiple_of)) * multiple_of for width in widths)


def matched(
    widths: Sequence[int],
    ratios: Sequence[float],
    weights: Sequence[int],
    total: int,
    multiple_of: int,
    exact: bool = True,
) -> tuple[int, ...] | None:
    """MLP widths in proportion to width · ratio whose weights are `total`.

    Args:
      widths: d_model of each layer.
      ratios: how wide each layer's MLP is for its d_model, up to a factor for all.
      weights: what a unit of each MLP's width weighs.
      total: what all must weigh.
      multiple_of: every MLP width is a multiple of this.
      exact: the total must be met; otherwise the nearest that these steps can make will do.

    Returns:
      The MLP width of each layer, or None if there are none in these steps.
    """
    lengths = [len(list(run)) for _, run in itertools.groupby(zip(widths, ratios, strict=True))]
    if exact and total % (multiple_of * math.gcd(*_of_runs(weights, lengths))):
        lengths = [1] * len(widths)
    costs = _of_runs(weights, lengths)  # of one step, in units of multiple_of
    unit = multiple_of * math.gcd(*costs)
    if exact and total % unit:
        return None
    first = list(itertools.accumulate(lengths[:-1], initial=0))
    ideal = np.array([widths[layer] * ratios[layer] for layer in first])
    steps = round(Fraction(total, unit)) * unit // multiple_of
    ideal *= steps / float(np.dot(ideal, costs))
    levels = [max(1, round(value)) for value in ideal]
    missing = steps - sum(cost * level for cost, level in zip(costs, levels, strict=True))
    sign = 1 if missing > 0 else -1
    for run in sorted(range(len(costs)), key=lambda run: sign * (levels[run] - ideal[run])):  # furthest behind first
        if costs[run] <= abs(missing) and levels[run] + sign > 0:
            levels[run] += sign
            missing -= sign * costs[run]
    wide = [cost for cost, level in zip(costs, levels, strict=True) if level > 2]  # of which steps can be taken
    moves = _fewest_moves(missing, wide if wide and missing % math.gcd(*wide) == 0 else costs)
    if moves is None and exact:
        return None
    for move in moves or ():
        sign = 1 if move > 0 else -1
        behind = [sign * (value - level) for value, level in zip(ideal, levels, strict=True)]
        levels[max((run for run, cost in enumerate(costs) if cost == abs(move)), key=behind.__getitem__)] += sign
    if min(levels) < 1:
        return None
    return tuple(level * multiple_of for level, length in zip(levels, lengths, strict=True) for _ in range(length))


def _of_runs(weights: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The sums over runs."""
    left = iter(weights)
    return [sum(itertools.islice(left, length)) for length in lengths]


def _fewest_moves(total: int, sizes: Sequence[int]) -> list[int] | None:
    """The shortest list of the sizes and their negatives that adds up to `total`, a multiple of their common divisor.

    Breadth-first from 0, over all sums that some order of a shortest list can pass through; None where they are more
    than `_MOST_SUMS`.
    """
    unit = math.gcd(*sizes)
    goal = total // unit
    steps = sorted({size // unit for size in sizes}, reverse=True)  # of equal paths, that of the largest
    middle = abs(goal) + steps[0]
    if 2 * middle + 1 > _MOST_SUMS:
        return None
    distance = np.full(2 * middle + 1, -1)
    frontier = np.zeros(2 * middle + 1, bool)
    frontier[middle] = True
    for level in itertools.count():
        distance[frontier] = level
        if distance[middle + goal] >= 0:
            break
        reached = np.zeros_like(frontier)
        for step in steps:
            reached[step:] |= frontier[:-step]
            reached[:-step] |= frontier[step:]
        frontier = reached & (distance < 0)
    moves, at = [], middle + goal
    while distance[at]:
        move = next(
            m for s in steps for m in (s, -s) if 0 <= at - m < len(distance) and distance[at - m] == distance[at] - 1
        )
        moves.append(move * unit)
        at -= move
    return moves
