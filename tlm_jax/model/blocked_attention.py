"""Causal self-attention for CPUs, in blocks of queries, its backward pass computing the weights again.

B batch, G key/value heads, N = B · G, R query heads of a key/value head, T time, S keys that a block sees, M queries of
a block, P = R · M, K head_dim.

What a CPU pays for in attention is memory: touching B·H·T·T logits costs more than making them. A block sees the keys
up to its end only, from its first query's window on, so that almost half of the square, or all but a band, is never
computed; and no logits or weights are kept for the backward pass (Dao et al. 2022, arXiv 2205.14135, without the
tiles).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from tlm_jax.model.layers import soft_capped
from tlm_jax.model.remat import CONTEXT

MASK_VALUE = float(np.finfo(np.float32).min) / 2

# Few queries make small products, many compute masked logits; each block is compiled on its own, so they are few.
BLOCK, MOST_BLOCKS = 128, 8

Residuals = tuple[jax.Array, jax.Array, jax.Array, "jax.Array | None", jax.Array, jax.Array]


class _Options(NamedTuple):
    window: int
    soft_cap: float


class _Block(NamedTuple):
    queries: slice
    keys: slice


def _blocks(T: int, window: int) -> Iterator[_Block]:
    size = max(BLOCK, -(-T // MOST_BLOCKS))
    for start in range(0, T, size):
        end = min(start + size, T)
        yield _Block(slice(start, end), slice(max(0, start - window + 1) if window else 0, end))


def _logits(
    q_NRTK: jax.Array, k_NTK: jax.Array, segment_ids_BT: jax.Array | None, block: _Block, options: _Options
) -> jax.Array:
    """float32 logits [N, R, M, S] of a block, capped and masked."""
    q_NRMK, k_NSK = q_NRTK[:, :, block.queries], k_NTK[:, block.keys]
    (N, R, M, K), S = q_NRMK.shape, k_NSK.shape[1]
    logits_NPS = jnp.einsum("NPK,NSK->NPS", q_NRMK.reshape(N, R * M, K), k_NSK, preferred_element_type=jnp.float32)
    logits_NPS = soft_capped(logits_NPS, options.soft_cap)
    behind_MS = jnp.arange(block.queries.start, block.queries.stop)[:, None] - jnp.arange(
        block.keys.start, block.keys.stop
    )
    mask_BMS = (behind_MS >= 0)[None]
    if options.window:
        mask_BMS = mask_BMS & (behind_MS < options.window)
    if segment_ids_BT is not None:
        mask_BMS = mask_BMS & (segment_ids_BT[:, block.queries, None] == segment_ids_BT[:, None, block.keys])
    B = mask_BMS.shape[0]
    logits = jnp.where(mask_BMS[:, None, None], logits_NPS.reshape(B, N // B, R, M, S), MASK_VALUE)
    return logits.reshape(N, R, M, S)


def _grouped(q_BHTK: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries [N, R, T, K], keys and values [N, T, K]: XLA's CPU backend is slower with more batch axes."""
    (B, H, T, K), G = q_BHTK.shape, k_BGTK.shape[1]
    return q_BHTK.reshape(B * G, H // G, T, K), k_BGTK.reshape(B * G, T, K), v_BGTK.reshape(B * G, T, K)


def blocked(
    q_BHTK: jax.Array,
    k_BGTK: jax.Array,
    v_BGTK: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> jax.Array:
    """CPU: by blocks of queries; arguments and result as `attention_kernels.Kernel.function`.

    Logits and softmax are float32. Its derivative is in reverse mode, which may then be differentiated in any mode.
    """
    return _blocked(_Options(window, soft_cap), q_BHTK, k_BGTK, v_BGTK, segment_ids_BT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocked(
    options: _Options, q_BHTK: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array, segment_ids_BT: jax.Array | None
) -> jax.Array:
    return _forward(options, q_BHTK, k_BGTK, v_BGTK, segment_ids_BT)[0]


def _forward(
    options: _Options, q_BHTK: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array, segment_ids_BT: jax.Array | None
) -> tuple[jax.Array, Residuals]:
    q_NRTK, k_NTK, v_NTK = _grouped(q_BHTK, k_BGTK, v_BGTK)
    N, R, T, K = q_NRTK.shape
    outputs, sums = [], []
    for block in _blocks(T, options.window):
        logits_NRMS = _logits(q_NRTK, k_NTK, segment_ids_BT, block, options)
        most_NRM1 = jnp.max(logits_NRMS, axis=-1, keepdims=True)
        weights_NRMS = jnp.exp(logits_NRMS - most_NRM1)
        sum_NRM1 = jnp.sum(weights_NRMS, axis=-1, keepdims=True)
        weights_NPS = weights_NRMS.astype(v_NTK.dtype).reshape(N, -1, logits_NRMS.shape[-1])
        y_NPK = jnp.einsum("NPS,NSK->NPK", weights_NPS, v_NTK[:, block.keys], preferred_element_type=jnp.float32)
        outputs.append((y_NPK.reshape(N, R, -1, K) / sum_NRM1).astype(v_NTK.dtype))
        sums.append(most_NRM1 + jnp.log(sum_NRM1))
    y_BHTK = checkpoint_name(jnp.concatenate(outputs, axis=2).reshape(q_BHTK.shape), CONTEXT)
    lse_NRT1 = checkpoint_name(jnp.concatenate(sums, axis=2), CONTEXT)
    return y_BHTK, (q_BHTK, k_BGTK, v_BGTK, segment_ids_BT, y_BHTK, lse_NRT1)


def _backward(
    options: _Options, residuals: Residuals, d_y_BHTK: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q_BHTK, k_BGTK, v_BGTK, segment_ids_BT, y_BHTK, lse_NRT1 = residuals
    q_NRTK, k_NTK, v_NTK = _grouped(q_BHTK, k_BGTK, v_BGTK)
    N, R, T, K = q_NRTK.shape
    dtype = q_NRTK.dtype
    d_y_NRTK = d_y_BHTK.reshape(q_NRTK.shape)
    # The softmax's backward pass subtracts sum(weights · d_weights) = sum(y · d_y).
    mean_NRT1 = jnp.sum((y_BHTK.astype(jnp.float32) * d_y_BHTK).reshape(N, R, T, K), axis=-1, keepdims=True)
    d_q = []
    d_k_NTK = d_v_NTK = jnp.zeros(k_NTK.shape, jnp.float32)
    for block in _blocks(T, options.window):
        at, keys = block
        q_NPK, d_y_NPK = (x[:, :, at].reshape(N, -1, K) for x in (q_NRTK, d_y_NRTK))
        logits_NRMS = _logits(q_NRTK, k_NTK, segment_ids_BT, block, options)
        weights_NPS = jnp.exp(logits_NRMS - lse_NRT1[:, :, at]).reshape(N, -1, logits_NRMS.shape[-1])
        d_weights_NPS = jnp.einsum("NPK,NSK->NPS", d_y_NPK, v_NTK[:, keys], preferred_element_type=jnp.float32)
        d_logits_NPS = weights_NPS * (d_weights_NPS - mean_NRT1[:, :, at].reshape(N, -1, 1))
        if options.soft_cap:  # the slope of the cap; masked logits are far below it, and have no weight
            capped_NRMS = jnp.maximum(logits_NRMS, -options.soft_cap) / options.soft_cap
            d_logits_NPS *= 1 - jnp.square(capped_NRMS).reshape(d_logits_NPS.shape)
        d_logits_NPS = d_logits_NPS.astype(dtype)
        d_q.append(jnp.einsum("NPS,NSK->NPK", d_logits_NPS, k_NTK[:, keys]).reshape(N, R, -1, K))
        d_k, d_v = (
            jnp.einsum("NPS,NPK->NSK", a, b, preferred_element_type=jnp.float32)
            for a, b in ((d_logits_NPS, q_NPK), (weights_NPS.astype(dtype), d_y_NPK))
        )
        d_k_NTK, d_v_NTK = d_k_NTK.at[:, keys].add(d_k), d_v_NTK.at[:, keys].add(d_v)
    return (
        jnp.concatenate(d_q, axis=2).reshape(q_BHTK.shape),
        d_k_NTK.astype(dtype).reshape(k_BGTK.shape),
        d_v_NTK.astype(dtype).reshape(v_BGTK.shape),
        None,
    )


_blocked.defvjp(_forward, _backward)
