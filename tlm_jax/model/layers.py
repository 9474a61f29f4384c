"""What the parts of a block share: parameters, RMSNorm, soft-caps, the token embedding.

B batch, T time, D this layer's d_model, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from tlm_jax.parallel.rules import gather_whole

# The weights that act as matrices: the axes summed over, the axes that remain (a stack's layer axis not counted).
MATRICES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "wq": ((0,), (1, 2)),
    "wk": ((0,), (1, 2)),
    "wv": ((0,), (1, 2)),
    "wo": ((0, 1), (2,)),
    "w_gate": ((0,), (1,)),
    "w_up": ((0,), (1,)),
    "w_down": ((0,), (1,)),
    "w_resize": ((0,), (1,)),
}


# A sum of four independent uniform bytes: its mean and its standard deviation.
BYTES_MEAN, BYTES_DEVIATION = 4 * 255 / 2, math.sqrt(4 * (256**2 - 1) / 12)


def parameter(
    key: jax.Array, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], deviation: float
) -> nnx.Param:
    """A random float32 parameter of mean 0 and the given standard deviation, drawn from `key` and `name` alone.

    So two models share the weights whose layer, name and shape they share, however they are stacked or sharded. A value
    is the sum of the four bytes of one random word, which is near normal (excess kurtosis -0.3, none beyond 3.46
    deviations), scaled in one rounding: the same bits on every mesh, platform and compiler, which the inverse of the
    normal distribution is not. `axes` are its logical axis names. A deviation of 0 gives ones (norm scales).
    """
    if deviation == 0:
        return nnx.Param(jnp.ones(shape, jnp.float32), logical_axes=axes)
    words = jax.random.bits(jax.random.fold_in(key, zlib.crc32(name.encode())), shape, jnp.uint32)
    total = jnp.zeros(shape, jnp.uint32)
    for shift in (0, 8, 16, 24):
        total += (words >> shift) & 0xFF
    centred = total.astype(jnp.int32).astype(jnp.float32) - BYTES_MEAN
    return nnx.Param(centred * (deviation / BYTES_DEVIATION), logical_axes=axes)


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a learned scale, computed in float32 (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, key: jax.Array, width: int, epsilon: float) -> None:
        self.scale = parameter(key, "scale", (width,), (None,), 0.0)
        self.epsilon = epsilon

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Normalises the last axis; returns x's dtype."""
        x32_BTD = x_BTD.astype(jnp.float32)
        inverse_BT1 = jax.lax.rsqrt(jnp.mean(jnp.square(x32_BTD), axis=-1, keepdims=True) + self.epsilon)
        return (x32_BTD * inverse_BT1 * self.scale[...]).astype(x_BTD.dtype)


def multiplied(x: jax.Array, multiplier: float) -> jax.Array:
    """`multiplier * x`, one of the constants of muP (Yang et al. 2022, arXiv 2203.03466); 1 leaves no trace."""
    return x if multiplier == 1 else multiplier * x


def soft_capped(logits: jax.Array, cap: float) -> jax.Array:
    """`cap * tanh(logits / cap)`, inside (-cap, cap) (Gemma 2, arXiv 2408.00118, section 2); 0 changes nothing."""
    return cap * jnp.tanh(logits / cap) if cap else logits


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def embed(table_VD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Rows of a float32 table in `dtype` [B, T, D]; the table's gradient accumulates in float32.

    The table crosses devices in `dtype`. A scatter in bfloat16 would stop counting at 256 equal tokens.
    """
    return gather_whole(table_VD.astype(dtype))[tokens_BT]


def _embed_forward(
    table_VD: jax.Array, tokens_BT: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return embed(table_VD, tokens_BT, dtype), (tokens_BT, table_VD.shape[0])


def _embed_backward(dtype: jnp.dtype, residuals: tuple[jax.Array, int], d_x_BTD: jax.Array) -> tuple[jax.Array, None]:
    del dtype
    tokens_BT, V = residuals
    d_table_VD = jnp.zeros((V, d_x_BTD.shape[-1]), jnp.float32).at[tokens_BT].add(d_x_BTD.astype(jnp.float32))
    # Each device scatters its own tokens, and the tables are added: cut along D at once, all tokens would travel.
    return gather_whole(d_table_VD), None


embed.defvjp(_embed_forward, _embed_backward)
