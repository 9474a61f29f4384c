"""Widths whose weights add up to a uniform model's: parameter matching as in Variable-Width Transformers, appendix A.

Matched are the weights in matrices, embeddings and norms aside; of layers with experts, those of all experts. The paper
searches the ratio of neighbours and solves a quadratic for the widest layer; with the narrowest width given, the widest
is the only unknown, the weights rise with it, and bisection finds the same solution for every shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import ArrayLike

from tlm_jax.capacity.widths import WidthShape, out_of_reach
from tlm_jax.errors import UserError

COUNTS = ("effective", "raw")
_TRIED = 20  # moves of one width that are tried alone, and each with as many others


@dataclass(frozen=True)
class WidthBudget:
    """What layers of a width weigh, and the uniform model whose weights they must add up to.

    Attributes:
      num_layers: depth, L.
      d_model: width of the uniform model and of the embedding.
      kv_share: key and value heads over query heads; query heads together are as wide as the layer.
      mlp_matrices: matrices of an MLP.
      mlp_width: width of a layer's MLP in the uniform model, of its experts all together.
      num_experts: rows of the router; 0 for a dense MLP.
      count: "effective" leaves out the weights without effect of `widths.out_of_reach`, "raw" counts all.
    """

    num_layers: int
    d_model: int
    kv_share: Fraction
    mlp_matrices: int
    mlp_width: int
    num_experts: int = 0
    count: str = "effective"

    @property
    def target(self) -> int:
        """Weights in the matrices of the uniform model."""
        attention = 2 * (1 + self.kv_share) * self.d_model**2
        mlp = (self.mlp_matrices * self.mlp_width + self.num_experts) * self.d_model
        return int(self.num_layers * (attention + mlp))

    def beside_mlp(self, widths: Sequence[int]) -> int:
        """Weights of attention and routers in layers of these widths."""
        fresh = self.out_of_reach(widths)[0].tolist()  # whose products may be beyond 64 bits
        total = sum(2 * (1 + self.kv_share) * w * w + self.num_experts * w for w in widths)
        return int(total - (1 + 2 * self.kv_share) * sum(w * zeros for w, zeros in zip(widths, fresh, strict=True)))

    def per_mlp_width(self, widths: Sequence[int]) -> list[int]:
        """Weights that a layer gains with each unit of its MLP's width."""
        unread = self.out_of_reach(widths)[1].tolist()
        return [self.mlp_matrices * width - lost for width, lost in zip(widths, unread, strict=True)]

    def out_of_reach(self, widths: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """As `widths.out_of_reach`; nothing is where all weights count."""
        fresh, unread = out_of_reach(widths, self.d_model)
        return (fresh, unread) if self.count == "effective" else (0 * fresh, 0 * unread)

    def weights(self, widths: ArrayLike) -> float:
        """Weights of layers of these widths, their MLPs as wide for each as the uniform model's are for d_model."""
        share, ratio = float(self.kv_share), self.mlp_width / self.d_model
        w = np.asarray(widths, np.float64)
        fresh, unread = self.out_of_reach(w)
        whole = (2 * (1 + share) + self.mlp_matrices * ratio) * w * w + self.num_experts * w
        return float((whole - (1 + 2 * share) * w * fresh - ratio * w * unread).sum())


def by_layer(shape: WidthShape, widths: Sequence[int]) -> tuple[int, ...]:
    """The widths of runs, once for each of their layers."""
    return tuple(width for width, length in zip(widths, shape.lengths, strict=True) for _ in range(length))


def widest(shape: WidthShape, budget: WidthBudget) -> float:
    """The widest width with which the shape, before rounding, weighs what the uniform model does.

    Raises:
      UserError: the narrowest is wider than the uniform model, so that no widest is.
    """
    low, high = shape.narrow, 2.0 * budget.d_model
    if low == budget.d_model:
        return low

    def weighs_less(wide: float) -> bool:
        return budget.weights(np.repeat(shape.widths(wide), shape.lengths)) < budget.target

    if not weighs_less(low):
        raise UserError(
            f"the narrowest layer cannot be {low / budget.d_model:g} times d_model",
            where="config.profile.bottleneck_ratio",
            mend="take 1 or less, such as 0.3",
        )
    while weighs_less(high):
        high *= 2
    while low < (middle := (low + high) / 2) < high:  # until no float lies between
        low, high = (middle, high) if weighs_less(middle) else (low, middle)
    return low


def rounded(shape: WidthShape, wide: float, multiple_of: int, round_widest: bool = True) -> tuple[int, ...]:
    """The shape's widths as multiples, one for each run: the nearest, of two the even one.

    Args:
      shape: the widths before rounding.
      wide: the widest of them.
      multiple_of: of which the results are multiples.
      round_widest: round the widest to an integer first and scale all with it, as the authors' code does.

    Raises:
      UserError: the narrowest would be 0.
    """
    scale = round(wide) / wide if round_widest else 1.0
    levels = np.rint(shape.widths(wide) * scale / multiple_of).astype(int)
    if levels.min() < 1:
        raise UserError(
            f"the narrowest layer, {shape.narrow:g}, is nearer to 0 than to {multiple_of}",
            where="config.profile.bottleneck_ratio",
            mend="take a larger one, or a smaller width_multiple_of",
        )
    return tuple(int(level) * multiple_of for level in levels)


def nearest(
    shape: WidthShape, wide: float, widths: tuple[int, ...], multiple_of: int, budget: WidthBudget
) -> tuple[int, ...]:
    """Rounded widths, moved on by steps of the multiple while that brings their weights nearer to the budget.

    The narrowest width stays, the widest ones move together, the order of the shape is kept, and no width ends further
    than a step from the shape. Of the moves that help, the one is made whose width rounding has left furthest behind.
    """
    ideal = shape.widths(wide)
    missing = _missing(shape, widths, budget)
    while True:
        for moved in _moved_once(shape, ideal, widths, multiple_of, farthest=multiple_of):
            left = _missing(shape, moved, budget)
            if abs(left) < abs(missing):
                widths, missing = moved, left
                break
        else:
            return widths


def neighbours(
    shape: WidthShape, wide: float, widths: tuple[int, ...], multiple_of: int, budget: WidthBudget
) -> Iterator[tuple[int, ...]]:
    """`widths` and then some that are one or two moves away, nearest to the budget first."""
    ideal = shape.widths(wide)

    def near(start: tuple[int, ...]) -> list[tuple[int, ...]]:
        return list(itertools.islice(_moved_once(shape, ideal, start, multiple_of), _TRIED))

    def error(moved: tuple[int, ...]) -> float:
        return abs(_missing(shape, moved, budget))

    yield widths
    once = sorted(near(widths), key=error)
    yield from once
    yield from sorted({moved for start in once for moved in near(start)}, key=error)


def _missing(shape: WidthShape, widths: Sequence[int], budget: WidthBudget) -> float:
    return budget.target - budget.weights(np.repeat(widths, shape.lengths))


def _moved_once(
    shape: WidthShape, ideal: np.ndarray, widths: Sequence[int], multiple_of: int, farthest: float = math.inf
) -> Iterator[tuple[int, ...]]:
    """The widths with one of them a step on, the widest together and the narrowest never, furthest behind first.

    None goes further than `farthest` from `ideal`.
    """
    free = [[run for run, near in enumerate(shape.narrowness) if near == 0]]
    free += [[run] for run, near in enumerate(shape.narrowness) if 0 < near < 1]
    moves = [(runs, step) for runs in free for step in (multiple_of, -multiple_of)]
    moves.sort(key=lambda move: (widths[move[0][0]] - ideal[move[0][0]]) * move[1])
    for runs, step in moves:
        far = max(abs(widths[run] + step - ideal[run]) for run in runs)
        if far <= farthest and widths[runs[0]] + step > 0 and shape.keeps_order(widths, runs, step):
            yield tuple(width + step if run in runs else width for run, width in enumerate(widths))
