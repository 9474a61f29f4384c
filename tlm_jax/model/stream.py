"""The residual stream where layers differ in width.

B batch, T time, D width that is read and written next.

By its meaning the stream is one buffer as wide as its widest reader, of which each layer reads and writes the first
d_model columns ("carry-forward", Variable-Width Transformers, arXiv 2606.18246). It is kept in pieces instead: what is
read next, and behind it the columns that narrower layers leave alone. So what a scan carries, what a block computes on
and what the backward pass keeps is as wide as the layer, and columns move only where the width changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from tlm_jax.model.layers import parameter
from tlm_jax.parallel.rules import pin_batch


class Stream(NamedTuple):
    """The columns that the next layer reads, and those beyond them, side by side in the order of their columns."""

    x_BTD: jax.Array
    parked: tuple[jax.Array, ...] = ()


def _cut(x_BTD: jax.Array, width: int) -> Sequence[jax.Array]:
    """The first `width` columns, and those after them. Its derivative joins them, where slices' would add two pads."""
    return jax.lax.split(x_BTD, (width, x_BTD.shape[-1] - width), axis=2)


class Projection(nnx.Module):
    """The learned map from one width to another that resize=projection has where the width changes."""

    def __init__(self, key: jax.Array, before: int, after: int, init_scale: float) -> None:
        self.w_resize = parameter(key, "w_resize", (before, after), ("embed", None), init_scale / math.sqrt(before))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns [B, T, after]."""
        return pin_batch(x_BTD @ self.w_resize[...].astype(x_BTD.dtype))


def zero_padded(stream: Stream, width: int) -> Stream:
    """The stream cut to `width` columns, or with zeros in those that it does not have."""
    return Stream(resized(Stream(stream.x_BTD), width).x_BTD)


def resized(stream: Stream, width: int) -> Stream:
    """The stream with its first `width` columns in front: those that have been parked as they were, unwritten ones 0.

    A stream of that width already is returned as it is, so that layers of one width cost nothing.
    """
    x_BTD, parked = stream
    if width == x_BTD.shape[-1]:
        return stream
    if width < x_BTD.shape[-1]:
        x_BTD, tail = _cut(x_BTD, width)
        return Stream(pin_batch(x_BTD), (pin_batch(tail), *parked))
    pieces, missing = [x_BTD], width - x_BTD.shape[-1]
    while missing and parked:
        piece, *rest = parked
        if piece.shape[-1] > missing:
            piece, tail = _cut(piece, missing)
            rest.insert(0, tail)
        pieces.append(piece)
        parked = tuple(rest)
        missing -= piece.shape[-1]
    x_BTD = jnp.concatenate(pieces, axis=-1) if len(pieces) > 1 else x_BTD
    x_BTD = jnp.pad(x_BTD, ((0, 0), (0, 0), (0, missing))) if missing else x_BTD
    return Stream(pin_batch(x_BTD), parked)
