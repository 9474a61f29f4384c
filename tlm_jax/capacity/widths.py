"""Widths of the residual stream by layer: the shapes ×, diamond, V and Λ, plateaus, and which weights they leave idle.

The × is that of Variable-Width Transformers (arXiv 2606.18246): wide ends, and the narrowest layer, the bottleneck, at
three quarters of the depth. The paper compares it with the diamond, V and Λ but does not write them out; here each is
the same curve between a narrowest and a widest width, so that one ratio describes them all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from tlm_jax.errors import UserError


def _geometric(narrow: float, wide: float, narrowness: np.ndarray) -> np.ndarray:
    """Neighbours have one ratio on each side of the turn: the paper's a- and a+."""
    return wide * (narrow / wide) ** narrowness


def _arithmetic(narrow: float, wide: float, narrowness: np.ndarray) -> np.ndarray:
    return wide + (narrow - wide) * narrowness


PROGRESSIONS: dict[str, Callable[[float, float, np.ndarray], np.ndarray]] = {
    "geometric": _geometric,
    "arithmetic": _arithmetic,
}
TURNING = ("x", "diamond")  # narrowest, widest at the turning layer
STRAIGHT = ("v", "lambda")  # narrowest first, narrowest last: the letters seen with the input below
SHAPES = (*TURNING, *STRAIGHT)

# What a layer finds in coordinates that the one before it does not have: what the newest layer that has them left
# there; zeros; or all its coordinates are a learned linear map of all of the layer before.
RESIZES = ("carry_forward", "zero_padding", "projection")


@dataclass(frozen=True)
class WidthShape:
    """A family of widths by layer, of which the narrowest is given and the widest is what a budget fixes.

    Attributes:
      lengths: layers of each run of equal width, first to last; their sum is the depth.
      narrowness: of each run, 0 for the widest width and 1 for the narrowest.
      narrow: the narrowest width.
      progression: one of `PROGRESSIONS`.
    """

    lengths: tuple[int, ...]
    narrowness: tuple[float, ...]
    narrow: float
    progression: str

    def widths(self, wide: float) -> np.ndarray:
        """The width of each run, float64 [runs], where the widest is `wide`."""
        return PROGRESSIONS[self.progression](self.narrow, wide, np.array(self.narrowness))

    def keeps_order(self, widths: Sequence[int], moved: Sequence[int], step: int) -> bool:
        """Whether the runs `moved`, each wider by `step`, still stand to their neighbours as the shape has them."""
        near = self.narrowness
        pairs = ((run, other) for run in moved for other in (run - 1, run + 1) if 0 <= other < len(near))
        return all(
            (near[other] - near[run]) * (widths[other] - widths[run] - step) <= 0
            for run, other in pairs
            if other not in moved
        )


def turning_layer(num_layers: int, depth: float) -> int:
    """The turning layer, counted from 1 as in the paper: the one nearest to depth · L, the earlier of two.

    Raises:
      UserError: it would not lie between the first and the last layer.
    """
    layer = math.ceil(depth * num_layers - 0.5) if math.isfinite(depth * num_layers) else 0
    if not 1 < layer < num_layers:
        raise UserError(
            f"{depth:g} of {num_layers} layers is layer {layer}, not one between the first and the last",
            where="config.profile.bottleneck_depth",
            mend=f"from {2 / num_layers:.3g} to {1 - 1 / num_layers:.3g} works"
            if num_layers > 2
            else "take 3 layers or more, or the shapes v or lambda",
        )
    return layer


def narrowness(shape: str, lengths: Sequence[int], turn: int) -> tuple[float, ...]:
    """How near each run is to the narrowest width, 0 … 1, by its place among the runs.

    Args:
      shape: one of `SHAPES`.
      lengths: layers of each run.
      turn: the turning layer of × and diamond, counted from 1; its run is the turning one.

    Raises:
      UserError: the turning layer falls into the first or last run.
    """
    last = len(lengths) - 1
    if shape in STRAIGHT:
        rising = tuple(run / last for run in range(last + 1))
        return rising if shape == "lambda" else rising[::-1]
    at = next(run for run, end in enumerate(itertools.accumulate(lengths)) if turn <= end)
    if not 0 < at < last:
        raise UserError(
            f"of {last + 1} runs the {'first' if at == 0 else 'last'} has the turning layer {turn}",
            where="config.profile.width_plateaus",
            mend=f"take more, up to num_layers={sum(lengths)}, or 0",
        )
    near = tuple(run / at if run <= at else (last - run) / (last - at) for run in range(last + 1))
    return near if shape == "x" else tuple(1 - value for value in near)


def out_of_reach(widths: ArrayLike, d_embedding: int, resize: str = "carry_forward") -> tuple[np.ndarray, np.ndarray]:
    """Coordinates of each layer that come to it as zeros, and those that nothing reads after it.

    A layer reads and writes the first `width` coordinates of one stream, into which the embedding is put and of whose
    first `d_embedding` coordinates the vocabulary projection reads. So zeros are those beyond the embedding and every
    earlier layer, unread those beyond the projection and every later layer. Of a × these are d_1 - d and d_L - d.

    With zero padding, only the neighbours count. Projections leave neither, but behind the last layer.

    Args:
      widths: d_model of each layer, integers or, of a shape not yet rounded, floats; the results are of the same dtype.
      d_embedding: coordinates of the embedding and of the projection.
      resize: one of `RESIZES`.
    """
    ordered = np.asarray(widths)
    if resize == "carry_forward":
        return _beyond(ordered, d_embedding), _beyond(ordered[::-1], d_embedding)[::-1]
    before, after = (np.roll(ordered, shift) for shift in (1, -1))
    before[0] = after[-1] = d_embedding
    fresh, unread = np.maximum(ordered - before, 0), np.maximum(ordered - after, 0)
    if resize == "projection":
        fresh[:], unread[:-1] = 0, 0
    return fresh, unread


def _beyond(widths: np.ndarray, reached: int) -> np.ndarray:
    """By how much each width exceeds `reached` and all widths before it."""
    so_far = np.maximum(np.maximum.accumulate(widths), reached)
    return np.diff(so_far, prepend=so_far.dtype.type(reached))
