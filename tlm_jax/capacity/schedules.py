"""MLP widths by layer: uniform, curves that taper with depth, plateaus, groups; the budget is met exactly.

The rounding is that of Tapered Language Models (arXiv 2606.23670): each width goes to the nearest multiple, the first
and last layer are pinned, then interior widths move in steps of the multiple until the sum is num_layers · d_ff, and
the order is kept. The paper does not say which layers move first; here it is always the one that its rounding left
furthest from the curve, the earliest of equals. Ties of the rounding go away from the mean, which keeps a curve that
is antisymmetric about its mean antisymmetric, so that it needs no move at all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from tlm_jax.errors import UserError

Curve = Callable[[float], float]
_Path = tuple[Any, int]  # the path to the run before or None, and a level: paths share their beginnings


def linear(depth: float) -> float:
    """Eq. 4."""
    return 1.0 - depth


def cosine(depth: float) -> float:
    """Eq. 5."""
    return (1.0 + math.cos(math.pi * depth)) / 2.0


def sigmoid(depth: float, steepness: float = 10.0) -> float:
    """Eq. 6, 1 / (1 + exp(steepness · (depth - 1/2))); the paper's steepness is 10."""
    return (1.0 - math.tanh(steepness * (depth - 0.5) / 2.0)) / 2.0  # the same, and cannot overflow


# Each curve maps depth, 0 at the first layer and 1 at the last, to the share of the way from the last layer's width
# to the first's: never rising, antisymmetric about 1/2 at depth 1/2. At the ends it is 1 and 0, or near them, as the
# sigmoid: the end layers are pinned whatever the curve.
CURVES: dict[str, Curve] = {"linear": linear, "cosine": cosine, "sigmoid": sigmoid}

_TIE = 1e-9  # in steps; libraries differ in the last bit of a cosine


def uniform(num_layers: int, d_ff: int, multiple_of: int = 1, key: str = "d_ff") -> tuple[int, ...]:
    """The same width in every layer.

    Raises:
      UserError: `d_ff` is not a multiple of `multiple_of`.
    """
    if d_ff % multiple_of:
        raise UserError(
            f"{d_ff} is not a multiple of multiple_of={multiple_of}",
            where=f"config.profile.{key}",
            mend=f"the nearest {key} that works is {_nearest_multiple(d_ff, multiple_of)}",
        )
    return (d_ff,) * num_layers


def tapered(
    curve: Curve,
    num_layers: int,
    d_ff: int,
    start_ratio: float,
    end_ratio: float,
    multiple_of: int = 16,
    plateaus: int = 0,
    key: str = "d_ff",
) -> tuple[int, ...]:
    """Widths that follow `curve` from start_ratio · d_ff at the first layer to end_ratio · d_ff at the last.

    With `plateaus`, the layers form that many runs whose lengths differ by at most one, the longer ones placed
    symmetrically; run g has the curve's width at depth g / (plateaus - 1), so that the ends stay pinned. Where the
    lengths cannot be symmetric, the interior runs are first shifted by one common amount that restores the mean.

    Args:
      curve: one of `CURVES`.
      num_layers: number of layers, L.
      d_ff: the mean width.
      start_ratio: the first layer's width over the mean; above `end_ratio` the widths never rise, below never fall.
      end_ratio: the last layer's width over the mean.
      multiple_of: every width is a multiple of this.
      plateaus: number of runs of equal width; 0 lets each layer have its own.
      key: the config key of the mean, named in errors.

    Returns:
      L widths, each a multiple of `multiple_of`, with sum L · d_ff exactly.

    Raises:
      UserError: the ends or the sum cannot be met, with what works.
    """
    check_ends(start_ratio, end_ratio)
    start, end = Fraction(str(start_ratio)), Fraction(str(end_ratio))
    _check_multiples(num_layers, d_ff, start, end, multiple_of, key)
    groups = plateaus or num_layers
    if groups > num_layers:
        raise UserError(
            f"{plateaus} plateaus need as many layers, and num_layers={num_layers}", where="config.profile.plateaus"
        )
    if start < end:
        return tapered(curve, num_layers, d_ff, end_ratio, start_ratio, multiple_of, plateaus, key)[::-1]
    if groups == 1 and start != end:
        raise UserError(
            f"one width cannot be both {float(start):g} and {float(end):g} times d_ff",
            where="config.profile.plateaus" if plateaus else "config.profile.num_layers",
            mend="use schedule=uniform",
        )
    # From here on in steps of multiple_of, where every width is an integer.
    mean, lengths = Fraction(d_ff, multiple_of), run_lengths(num_layers, groups)
    first, last = int(start * mean), int(end * mean)
    levels = _levels(curve, lengths, mean, first, last)
    if levels is None:
        by_distance = sorted(range(2, num_layers + 1), key=lambda g: abs(g - groups))  # num_layers runs always can
        works = next(g for g in by_distance if _levels(curve, run_lengths(num_layers, g), mean, first, last))
        raise UserError(
            f"no widths of {plateaus} runs over {num_layers} layers have the mean {key}={d_ff} exactly",
            where="config.profile.plateaus",
            mend=f"the nearest number that works is {works}",
        )
    return tuple(level * multiple_of for level, length in zip(levels, lengths, strict=True) for _ in range(length))


def grouped(
    ratios: Sequence[float], num_layers: int, d_ff: int, multiple_of: int = 16, key: str = "d_ff"
) -> tuple[int, ...]:
    """One width for each of a few consecutive groups of layers, in any order: the paper's three-group control.

    The groups are as equal in length as they can be, the longer ones placed symmetrically.

    Args:
      ratios: each group's width over the mean, first group first.
      num_layers: number of layers, L.
      d_ff: the mean width.
      multiple_of: every width is a multiple of this.
      key: the config key of the mean, named in errors.

    Returns:
      L widths, each a multiple of `multiple_of`, with sum L · d_ff exactly.

    Raises:
      UserError: the ratios, weighted by their layers, do not average 1, or a width is no multiple; with what works.
    """
    where = "config.profile.group_ratios"
    check_shares(ratios)
    shares, groups = [Fraction(str(ratio)) for ratio in ratios], len(ratios)
    if groups > num_layers:
        raise UserError(f"{groups} groups need as many layers, and num_layers={num_layers}", where=where)
    lengths = run_lengths(num_layers, groups)
    mean = sum(n * share for n, share in zip(lengths, shares, strict=True)) / num_layers
    if mean != 1:
        texts = ", ".join(str(n) for n in lengths)
        works = _nearest_multiple(num_layers, groups)
        raise UserError(
            f"the ratios average {float(mean):g} over groups of {texts} layers, so the mean width would not be d_ff",
            where=where,
            mend=f"the nearest num_layers that works is {works}" if sum(shares) == groups else "make them average 1",
        )
    step = math.lcm(*(_step_of(share, multiple_of) for share in shares))
    if d_ff % step:
        widths = ", ".join(f"{float(share):g} × {d_ff} = {float(share * d_ff):g}" for share in shares)
        raise UserError(
            f"the widths of the groups, {widths}, must be multiples of multiple_of={multiple_of}",
            where=f"config.profile.{key}",
            mend=f"the nearest {key} that works is {_nearest_multiple(d_ff, step)}",
        )
    return tuple(int(share * d_ff) for share, length in zip(shares, lengths, strict=True) for _ in range(length))


def _step_of(ratio: Fraction, multiple_of: int) -> int:
    """The smallest positive integer whose product with `ratio` is a multiple of `multiple_of`."""
    return ratio.denominator * multiple_of // math.gcd(ratio.numerator, ratio.denominator * multiple_of)


def _nearest_multiple(value: int, step: int) -> int:
    return max(1, math.floor(Fraction(value, step) + Fraction(1, 2))) * step


def check_ends(start_ratio: float, end_ratio: float) -> None:
    """Raises a `UserError` unless both are positive and average 1, without which the mean width would not be d_ff."""
    for name, ratio in (("start_ratio", start_ratio), ("end_ratio", end_ratio)):
        if not (math.isfinite(ratio) and ratio > 0):
            raise UserError(f"must be positive, not {ratio:g}", where=f"config.profile.{name}")
    start, end = Fraction(str(start_ratio)), Fraction(str(end_ratio))
    if start + end != 2:
        raise UserError(
            f"start_ratio={float(start):g} and end_ratio={float(end):g} average {float((start + end) / 2):g}, so the "
            "mean width would not be d_ff",
            where="config.profile.end_ratio",
            mend=f"use end_ratio={float(2 - start):g}" if start < 2 else "use a start_ratio below 2",
        )


def check_shares(group_ratios: Sequence[float]) -> None:
    """Raises a `UserError` unless all are positive."""
    for ratio in group_ratios:
        if not (math.isfinite(ratio) and ratio > 0):
            raise UserError(f"must be positive, not {ratio:g}", where="config.profile.group_ratios")


def _check_multiples(num_layers: int, d_ff: int, start: Fraction, end: Fraction, multiple_of: int, key: str) -> None:
    """Raises a `UserError` unless both ends are multiples of `multiple_of` and the widths can have the mean `d_ff`."""
    needed = (_step_of(start, multiple_of), _step_of(end, multiple_of))
    step = math.lcm(*needed, multiple_of // math.gcd(num_layers, multiple_of))
    if d_ff % step:
        ends = " and ".join(f"{float(ratio):g} × {d_ff} = {float(ratio * d_ff):g}" for ratio in (start, end))
        raise UserError(
            f"the widths of the first and last layer, {ends}, and the sum of all, {num_layers} × {d_ff}, must be "
            f"multiples of multiple_of={multiple_of}",
            where=f"config.profile.{key}",
            mend=f"the nearest {key} that works is {_nearest_multiple(d_ff, step)}",
        )


def run_lengths(num_layers: int, groups: int) -> list[int]:
    """Lengths of `groups` runs, equal to within one, the same read from either end where that is possible."""
    edges = []
    for group in range(groups + 1):
        edge = Fraction(group * num_layers, groups)
        # Halves go towards the nearer end, so that both halves of the model split alike.
        edges.append(math.ceil(edge - Fraction(1, 2)) if 2 * group <= groups else math.floor(edge + Fraction(1, 2)))
    return [after - before for before, after in itertools.pairwise(edges)]


def _levels(curve: Curve, lengths: Sequence[int], mean: Fraction, first: int, last: int) -> list[int] | None:
    """Widths of the runs in steps, from `first` down to `last`, whose sum over layers is exact; None if none are."""
    if len(lengths) == 1:
        return [first]
    total = int(mean * sum(lengths))
    depths = [group / (len(lengths) - 1) for group in range(1, len(lengths) - 1)]
    ideal = [float(first), *(last + (first - last) * curve(depth) for depth in depths), float(last)]
    if list(lengths) != list(lengths)[::-1]:
        ideal = _shifted(ideal, lengths, total, first, last)
    levels = [first, *(_round(value, float(mean)) for value in ideal[1:-1]), last]
    missing = total - sum(n * level for n, level in zip(lengths, levels, strict=True))
    interior = set(lengths[1:-1])
    if len(interior) <= 1:
        return _nudge_equal(levels, ideal, missing, interior.pop() if interior else 1)
    return _nudge_mixed(levels, ideal, lengths, missing)


def _round(value: float, mean: float) -> int:
    """The nearest integer; a tie goes away from `mean`."""
    below = math.floor(value + _TIE)
    rest = value - below
    up = rest > 0.5 + _TIE or (abs(rest - 0.5) <= _TIE and value > mean)
    return below + 1 if up else below


def _shifted(ideal: Sequence[float], lengths: Sequence[int], total: int, first: int, last: int) -> list[float]:
    """Moves the interior of `ideal` by one amount, kept between the ends, so that its sum over layers is `total`.

    That is the least-squares change under the sum.
    """

    def moved(shift: float) -> list[float]:
        return [ideal[0], *(min(max(value + shift, last), first) for value in ideal[1:-1]), ideal[-1]]

    low, high = float(last - first), float(first - last)
    for _ in range(100):
        middle = (low + high) / 2
        if sum(n * value for n, value in zip(lengths, moved(middle), strict=True)) < total:
            low = middle
        else:
            high = middle
    return moved((low + high) / 2)


def _nudge_equal(levels: list[int], ideal: Sequence[float], missing: int, length: int) -> list[int] | None:
    """Moves interior levels one step at a time, largest residual first, when all interior runs have one length."""
    if missing % length:
        return None
    levels, step = list(levels), 1 if missing > 0 else -1
    for _ in range(abs(missing) // length):
        movable = [
            index
            for index in range(1, len(levels) - 1)
            if levels[index - 1] >= levels[index] + step >= levels[index + 1]
        ]
        if not movable:
            return None
        levels[max(movable, key=lambda index: step * (ideal[index] - levels[index]))] += step
    return levels


def _nudge_mixed(
    levels: Sequence[int], ideal: Sequence[float], lengths: Sequence[int], missing: int
) -> list[int] | None:
    """The least-squares change of the interior levels that adds `missing`, when the runs differ in length.

    Dynamic programming over the runs; the state is (sum still missing, this run's level). Each level may move by up
    to `reach` steps, which grows until a solution is found or the ends bound it. Of equal costs the path that is first
    in lexicographic order is taken: states are kept in the order of their paths, which generation preserves.
    """
    first, last = levels[0], levels[-1]
    reach = 1
    while True:
        best: dict[tuple[int, int], tuple[float, _Path]] = {(missing, first): (0.0, (None, first))}
        for level, value, length in zip(levels[1:-1], ideal[1:-1], lengths[1:-1], strict=True):
            following: dict[tuple[int, int], tuple[float, _Path]] = {}
            for (rest, before), (cost, path) in best.items():
                for moved in range(max(level - reach, last), min(level + reach, before) + 1):
                    state = (rest - length * (moved - level), moved)
                    moved_cost = cost + length * (moved - value) ** 2
                    if state in following:
                        if moved_cost >= following[state][0]:
                            continue
                        del following[state]  # its place is that of the new path
                    following[state] = moved_cost, (path, moved)
            best = following
        exact = [found for (rest, _), found in best.items() if rest == 0]
        if exact:
            return [*_unwound(min(exact, key=lambda found: found[0])[1]), last]
        if reach >= first - last:
            return None
        reach *= 2


def _unwound(path: _Path | None) -> list[int]:
    levels = []
    while path is not None:
        path, level = path
        levels.append(level)
    return levels[::-1]
