"""The parts of a block: parameters, RMSNorm, rotary embedding, attention, gated MLP.

B batch, T time, S cached time, D this layer's d_model, F this layer's d_ff, H query heads, G key/value heads,
K head_dim, V vocabulary.
"""

from __future__ import annotations

import math
import zlib
from functools import partial
from typing import TypedDict

import jax
import jax.numpy as jnp
from flax import nnx

from tlm_jax.capacity.shape import LayerShape
from tlm_jax.kernels.gated_mlp import gated_mlp
from tlm_jax.model import attention_kernels
from tlm_jax.model.settings import ModelSettings
from tlm_jax.parallel.rules import gather_whole, pin_batch

# The weights that act as matrices: the axes summed over, the axes that remain (a stack's layer axis not counted).
MATRICES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "wq": ((0,), (1, 2)),
    "wk": ((0,), (1, 2)),
    "wv": ((0,), (1, 2)),
    "wo": ((0, 1), (2,)),
    "w_gate": ((0,), (1,)),
    "w_up": ((0,), (1,)),
    "w_down": ((0,), (1,)),
}


class Slots(TypedDict):
    """Where the tokens of a call stand in a cache.

    `write_index` is the int32 scalar slot of the first of them, `segment_ids` [B, S] int32 those of all slots, this
    call's tokens included.
    """

    write_index: jax.Array
    segment_ids: jax.Array


class Positions(TypedDict):
    """Where the tokens of a batch stand.

    `positions` [B, T] int32 counts within a document, for the rotary embedding. `segment_ids` [B, T] int32 names
    documents, 0 for padding. `slots` is None without a cache.
    """

    positions: jax.Array
    segment_ids: jax.Array
    slots: Slots | None


LayerCache = dict[str, jax.Array]  # "k", "v": [B, G, S, K]


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
    total = sum((words >> shift) & 0xFF for shift in (0, 8, 16, 24))
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


def rotate(x_BHTK: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding, the first half of K paired with the second (Su et al. 2021, arXiv 2104.09864)."""
    half = x_BHTK.shape[-1] // 2
    frequency_C = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_B1TC = positions_BT.astype(jnp.float32)[:, None, :, None] * frequency_C
    cos, sin = jnp.cos(angle_B1TC), jnp.sin(angle_B1TC)
    first, second = jnp.split(x_BHTK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BHTK.dtype)


def attention_features(shape: LayerShape, settings: ModelSettings, with_segments: bool) -> set[str]:
    """What a layer needs of an attention kernel, in the words of `attention_kernels.KERNELS`."""
    needed = {
        "segments": with_segments,
        "gqa": shape.num_heads != shape.num_kv_heads,
        "float32": settings.dtype == jnp.float32,
    }
    return {feature for feature, is_needed in needed.items() if is_needed}


class Attention(nnx.Module):
    """Causal grouped-query self-attention with rotary embedding (Ainslie et al. 2023, arXiv 2305.13245)."""

    def __init__(self, key: jax.Array, shape: LayerShape, settings: ModelSettings, depth: int) -> None:
        D, H, G, K = shape.d_model, shape.num_heads, shape.num_kv_heads, shape.head_dim
        into = settings.init_scale / math.sqrt(D)
        out = settings.init_scale / math.sqrt(H * K) / math.sqrt(2 * depth)
        self.wq = parameter(key, "wq", (D, H, K), ("embed", "heads", None), into)
        self.wk = parameter(key, "wk", (D, G, K), ("embed", "kv_heads", None), into)
        self.wv = parameter(key, "wv", (D, G, K), ("embed", "kv_heads", None), into)
        self.wo = parameter(key, "wo", (H, K, D), ("heads", None, "embed"), out)
        self.shape, self.settings = shape, settings

    def __call__(
        self, x_BTD: jax.Array, at: Positions, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attends within each document; with a cache, also to its slots, and returns it with this call's slots set."""
        dtype = self.settings.dtype
        q_BHTK, k_BGTK, v_BGTK = (self._to_heads(x_BTD, w[...].astype(dtype)) for w in (self.wq, self.wk, self.wv))
        q_BHTK = rotate(q_BHTK, at["positions"], self.settings.rope_theta) * self.shape.head_dim**-0.5
        k_BGTK = rotate(k_BGTK, at["positions"], self.settings.rope_theta)
        slots = at["slots"]
        assert (cache is None) == (slots is None)
        if cache is not None and slots is not None:
            start = (0, 0, slots["write_index"], 0)
            cache = {
                "k": jax.lax.dynamic_update_slice(cache["k"], k_BGTK.astype(cache["k"].dtype), start),
                "v": jax.lax.dynamic_update_slice(cache["v"], v_BGTK.astype(cache["v"].dtype), start),
            }
        T = x_BTD.shape[1]
        if cache is not None and slots is not None and T == 1:
            # Slots after this one still carry segment 0, so the comparison is also the causal mask.
            mask_B1S = at["segment_ids"][:, :, None] == slots["segment_ids"][:, None, :]
            y_BHTK = attention_kernels.masked_attention(q_BHTK, cache["k"], cache["v"], mask_B1S)
        else:
            # More than one token fills an empty cache: they see only each other, as in training.
            with_segments = self.settings.document_mask or cache is not None
            segments = at["segment_ids"] if with_segments else None
            features = attention_features(self.shape, self.settings, with_segments)
            kernel = attention_kernels.choose(self.settings.platform, features, T, self.settings.attention)
            y_BHTK = kernel.function(q_BHTK, k_BGTK, v_BGTK, segments)
        return self._from_heads(y_BHTK, self.wo[...].astype(dtype)), cache

    # TPUs do best with the einsum that makes heads-major activations at once, CPUs with plain matrices.

    def _to_heads(self, x_BTD: jax.Array, w_DHK: jax.Array) -> jax.Array:
        if self.settings.platform != "cpu":
            return jnp.einsum("BTD,DHK->BHTK", x_BTD, w_DHK)
        (B, T, D), (_, H, K) = x_BTD.shape, w_DHK.shape
        return (x_BTD.reshape(B * T, D) @ w_DHK.reshape(D, H * K)).reshape(B, T, H, K).swapaxes(1, 2)

    def _from_heads(self, y_BHTK: jax.Array, w_HKD: jax.Array) -> jax.Array:
        if self.settings.platform != "cpu":
            return jnp.einsum("BHTK,HKD->BTD", y_BHTK, w_HKD)
        (B, H, T, K), D = y_BHTK.shape, w_HKD.shape[-1]
        return (y_BHTK.swapaxes(1, 2).reshape(B * T, H * K) @ w_HKD.reshape(H * K, D)).reshape(B, T, D)


class GatedMLP(nnx.Module):
    """SwiGLU MLP of this layer's d_ff."""

    def __init__(self, key: jax.Array, shape: LayerShape, settings: ModelSettings, depth: int) -> None:
        D, F = shape.d_model, shape.d_ff
        into = settings.init_scale / math.sqrt(D)
        out = settings.init_scale / math.sqrt(F) / math.sqrt(2 * depth)
        self.w_gate = parameter(key, "w_gate", (D, F), ("embed", "mlp"), into)
        self.w_up = parameter(key, "w_up", (D, F), ("embed", "mlp"), into)
        self.w_down = parameter(key, "w_down", (F, D), ("mlp", "embed"), out)
        self.settings = settings

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns [B, T, D]."""
        dtype = self.settings.dtype
        weights = (w[...].astype(dtype) for w in (self.w_gate, self.w_up, self.w_down))
        return gated_mlp(x_BTD, *weights)


class Block(nnx.Module):
    """A pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)).

    Its weights come from `fold_in(key, layer)` alone; output projections are scaled down by sqrt(2 * depth).
    """

    def __init__(
        self, key: jax.Array, layer: jax.Array | int, shape: LayerShape, settings: ModelSettings, depth: int
    ) -> None:
        key = jax.random.fold_in(key, layer)
        self.attention_norm = RMSNorm(key, shape.d_model, settings.norm_epsilon)
        self.attention = Attention(key, shape, settings, depth)
        self.mlp_norm = RMSNorm(key, shape.d_model, settings.norm_epsilon)
        self.mlp = GatedMLP(key, shape, settings, depth)

    def __call__(
        self, x_BTD: jax.Array, at: Positions, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Returns the block's output [B, T, D] and the cache, updated when one is given."""
        y_BTD, cache = self.attention(pin_batch(self.attention_norm(x_BTD)), at, cache)
        x_BTD = pin_batch(x_BTD + y_BTD)
        x_BTD = pin_batch(x_BTD + self.mlp(pin_batch(self.mlp_norm(x_BTD))))
        return x_BTD, cache
