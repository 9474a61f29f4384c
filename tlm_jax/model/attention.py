"""Self-attention with rotary embedding and a key/value cache.

B batch, T time, S cached time, C slots of this layer's cache, D this layer's d_model, H query heads, G key/value heads,
K head_dim. N is the axes B, G of a cache, on CPU one axis of B · G.
"""

from __future__ import annotations

from typing import TypedDict

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from tlm_jax.capacity.profile import Profile
from tlm_jax.capacity.shape import LayerShape
from tlm_jax.model import attention_kernels, remat
from tlm_jax.model.initial import Deviations
from tlm_jax.model.layers import RMSNorm, parameter
from tlm_jax.model.settings import ATTENTION_SCALES, ModelSettings
from tlm_jax.parallel.rules import first_rows


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


# "k", "v": [N, C, K], C = S, or the window where that is smaller: the token at index i stands in slot i modulo C.
LayerCache = dict[str, jax.Array]


def rotate(x_BHTK: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    """Rotary embedding, the first half of K paired with the second (Su et al. 2021, arXiv 2104.09864)."""
    half = x_BHTK.shape[-1] // 2
    frequency_C = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_B1TC = positions_BT.astype(jnp.float32)[:, None, :, None] * frequency_C
    cos, sin = jnp.cos(angle_B1TC), jnp.sin(angle_B1TC)
    first, second = jnp.split(x_BHTK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BHTK.dtype)


def empty_cache(
    shape: LayerShape, settings: ModelSettings, batch: int, length: int, stack: tuple[int, ...] = ()
) -> LayerCache:
    """A layer's cache of `length` tokens in the compute dtype; with the leading axes `stack` for several layers'.

    On CPU its rows and heads are one axis: XLA would reshape two of them to one, or drop one of length 1, and copy the
    whole cache for it in each step.
    """
    G = shape.num_kv_heads
    axes_N = (batch * G,) if settings.platform == "cpu" else (batch, G)
    whole = (*stack, *axes_N, shape.context(length), shape.head_dim)
    return {"k": jnp.zeros(whole, settings.dtype), "v": jnp.zeros(whole, settings.dtype)}


def _write(cache_NCK: jax.Array, new_BGTK: jax.Array, index: jax.Array) -> jax.Array:
    """The cache with T tokens in it, the first of which is the sequence's token `index`; the oldest make room."""
    *axes_N, C, K = cache_NCK.shape
    T = new_BGTK.shape[2]
    new_NTK = new_BGTK.astype(cache_NCK.dtype).reshape(*axes_N, T, K)
    if T <= C:  # one token, or a prompt into an empty cache: neither goes beyond the last slot
        return jax.lax.dynamic_update_slice_in_dim(cache_NCK, new_NTK, index % C, axis=-2)
    return jnp.roll(new_NTK[..., T - C :, :], index + T, axis=-2)


def _slot_segments(slots: Slots, C: int) -> jax.Array:
    """The segment ids [B, C] of a layer's slots once the token at `write_index` is in; 0 for those still empty."""
    index, S = slots["write_index"], slots["segment_ids"].shape[1]
    if S == C:
        return slots["segment_ids"]
    token_C = index - (index - jnp.arange(C)) % C
    return jnp.where(token_C >= 0, slots["segment_ids"][:, token_C], 0)


def attention_features(shape: LayerShape, settings: ModelSettings, with_segments: bool, length: int) -> set[str]:
    """What a layer needs of an attention kernel at a sequence length, in the words of `attention_kernels.KERNELS`."""
    needed = {
        "segments": with_segments,
        "gqa": shape.num_heads != shape.num_kv_heads,
        "float32": settings.dtype == jnp.float32,
        "window": shape.context(length) < length,
        "soft_cap": settings.attention_soft_cap > 0,
        "odd_head_dim": shape.head_dim % 8 > 0,
    }
    return {feature for feature, is_needed in needed.items() if is_needed}


def check_kernels(profile: Profile, settings: ModelSettings, with_segments: bool, length: int) -> None:
    """Finds out before anything is allocated whether every layer has an attention kernel at a sequence length.

    Raises:
      UserError: one has none.
    """
    for features in {frozenset(attention_features(s, settings, with_segments, length)) for s in set(profile.layers)}:
        attention_kernels.choose(settings.platform, features, length, settings.attention)


class Attention(nnx.Module):
    """Causal grouped-query self-attention with rotary embedding (Ainslie et al. 2023, arXiv 2305.13245).

    With QK-norm, every query and key is an RMSNorm's output before it is rotated, the scale shared by the heads
    (Dehghani et al. 2023, arXiv 2302.05442; here as in Qwen3, arXiv 2505.09388). With a window, a token attends to
    itself and the `window - 1` tokens before it (Beltagy et al. 2020, arXiv 2004.05150).
    """

    def __init__(self, key: jax.Array, shape: LayerShape, settings: ModelSettings, deviations: Deviations) -> None:
        D, H, G, K = shape.d_model, shape.num_heads, shape.num_kv_heads, shape.head_dim
        into, out = deviations.into, deviations.attention_out
        self.wq = parameter(key, "wq", (D, H, K), ("embed", "heads", None), into)
        self.wk = parameter(key, "wk", (D, G, K), ("embed", "kv_heads", None), into)
        self.wv = parameter(key, "wv", (D, G, K), ("embed", "kv_heads", None), into)
        self.wo = parameter(key, "wo", (H, K, D), ("heads", None, "embed"), out)
        if shape.qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(key, K, settings.norm_epsilon) for _ in range(2))
        self.shape, self.settings = shape, settings

    def __call__(
        self, x_BTD: jax.Array, at: Positions, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attends within each document; with a cache, also to its slots, and returns it with this call's slots set.

        x may have fewer columns than the weights have rows, the first ones: the others would be 0.
        """
        dtype = self.settings.dtype
        q_BHTK, k_BGTK, v_BGTK = (
            checkpoint_name(self._to_heads(x_BTD, first_rows(w[...].astype(dtype), x_BTD.shape[-1])), name)
            for w, name in ((self.wq, remat.QUERY), (self.wk, remat.KEY), (self.wv, remat.VALUE))
        )
        if self.shape.qk_norm:
            q_BHTK, k_BGTK = self.q_norm(q_BHTK), self.k_norm(k_BGTK)
        scale = self.shape.head_dim ** ATTENTION_SCALES[self.settings.attention_scale]
        q_BHTK = rotate(q_BHTK, at["positions"], self.settings.rope_theta) * scale
        k_BGTK = rotate(k_BGTK, at["positions"], self.settings.rope_theta)
        slots = at["slots"]
        assert (cache is None) == (slots is None)
        if cache is not None and slots is not None:
            index = slots["write_index"]
            cache = {"k": _write(cache["k"], k_BGTK, index), "v": _write(cache["v"], v_BGTK, index)}
        T, soft_cap = x_BTD.shape[1], self.settings.attention_soft_cap
        if cache is not None and slots is not None and T == 1:
            # Slots after this one still carry segment 0, so the comparison is also the causal mask; and whatever is in
            # the slots is inside the window.
            mask_B1C = at["segment_ids"][:, :, None] == _slot_segments(slots, cache["k"].shape[-2])[:, None, :]
            y_BHTK = attention_kernels.one_token_attention(q_BHTK, cache["k"], cache["v"], mask_B1C, soft_cap)
        else:
            # More than one token fills an empty cache: they see only each other, as in training.
            with_segments = self.settings.document_mask or cache is not None
            segments = at["segment_ids"] if with_segments else None
            features = attention_features(self.shape, self.settings, with_segments, T)
            kernel = attention_kernels.choose(self.settings.platform, features, T, self.settings.attention)
            window = self.shape.window if "window" in features else 0
            y_BHTK = kernel.function(q_BHTK, k_BGTK, v_BGTK, segments, window=window, soft_cap=soft_cap)
        return checkpoint_name(self._from_heads(y_BHTK, self.wo[...].astype(dtype)), remat.ATTENTION_OUT), cache

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
