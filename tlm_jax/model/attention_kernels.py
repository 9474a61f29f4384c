"""Which attention kernel serves which platform and features: one table, `KERNELS`, and the choice from it.

B batch, T query time, S key time, H query heads, G key/value heads, R = H / G, K head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from tlm_jax.errors import UserError
from tlm_jax.model.blocked_attention import MASK_VALUE, blocked
from tlm_jax.model.layers import soft_capped
from tlm_jax.model.remat import CONTEXT
from tlm_jax.parallel.mesh import BATCH_AXES

Attention = Callable[..., jax.Array]  # as `Kernel.function`


def one_token_attention(
    q_BH1K: jax.Array, k_NSK: jax.Array, v_NSK: jax.Array, mask_B1S: jax.Array, soft_cap: float = 0.0
) -> jax.Array:
    """Attention of a single query a row, for decoding; keys and values in the shape of a cache.

    Logits and softmax are float32. Returns [B, H, 1, K] in the values' dtype.

    Args:
      q_BH1K: queries, already scaled.
      k_NSK, v_NSK: N is the axes B, G or one axis B · G. They are used as they are: XLA's CPU backend fuses a reshape
        with the writing of this step's slot, and copies the whole cache for it.
    """
    (B, H, _, K), S = q_BH1K.shape, k_NSK.shape[-2]
    q_NRK = q_BH1K.reshape(*k_NSK.shape[:-2], -1, K)
    logits_NRS = jnp.einsum("...RK,...SK->...RS", q_NRK, k_NSK, preferred_element_type=jnp.float32)
    logits_BHS = soft_capped(logits_NRS.reshape(B, H, S), soft_cap)
    weights_BHS = jax.nn.softmax(jnp.where(mask_B1S, logits_BHS, MASK_VALUE), axis=-1).astype(v_NSK.dtype)
    return jnp.einsum("...RS,...SK->...RK", weights_BHS.reshape(logits_NRS.shape), v_NSK).reshape(q_BH1K.shape)


def reference(
    q_BHTK: jax.Array,
    k_BGSK: jax.Array,
    v_BGSK: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> jax.Array:
    """CPU: by definition, logits and softmax in float32; materialises [B, H, T, S]. Differentiable in any mode."""
    (B, H, T, K), (_, G, S, _) = q_BHTK.shape, k_BGSK.shape
    mask_BTS = jnp.tril(jnp.ones((T, T), bool))[None]
    if window:
        mask_BTS = mask_BTS & ~jnp.tril(mask_BTS, -window)
    if segment_ids_BT is not None:
        mask_BTS = mask_BTS & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])
    # One batch axis N = B·G and one row axis M = R·T: XLA's CPU backend is slower with more of them.
    q_NMK, k_NSK, v_NSK = q_BHTK.reshape(B * G, -1, K), k_BGSK.reshape(B * G, S, K), v_BGSK.reshape(B * G, S, K)
    logits_NMS = jnp.einsum("NMK,NSK->NMS", q_NMK, k_NSK, preferred_element_type=jnp.float32)
    logits_BHTS = soft_capped(logits_NMS.reshape(B, H, T, S), soft_cap)
    weights_BHTS = jax.nn.softmax(jnp.where(mask_BTS[:, None], logits_BHTS, MASK_VALUE), axis=-1).astype(v_BGSK.dtype)
    y_NMK = jnp.einsum("NMS,NSK->NMK", weights_BHTS.reshape(logits_NMS.shape), v_NSK)
    return checkpoint_name(y_NMK.reshape(q_BHTK.shape), CONTEXT)


def splash(
    q_BHTK: jax.Array,
    k_BGSK: jax.Array,
    v_BGSK: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    interpret: bool = False,
) -> jax.Array:
    """TPU: blocks of the causal triangle or of the window's band only, documents masked inside the kernel."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T = q_BHTK.shape[2]
    block = next(size for size in (512, 256, 128) if T % size == 0)
    sizes = kernels.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )

    def local(q_HTK: jax.Array, k_GSK: jax.Array, v_GSK: jax.Array, segments_T: jax.Array | None) -> jax.Array:
        of_head = masks.LocalMask((T, T), (window - 1, 0), offset=0) if window else masks.CausalMask((T, T))
        kernel = kernels.make_splash_mha(
            mask=masks.MultiHeadMask([of_head] * q_HTK.shape[0]),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=sizes,
            attn_logits_soft_cap=soft_cap or None,
            residual_checkpoint_name=CONTEXT,
            interpret=interpret,
        )
        segments = None if segments_T is None else kernels.SegmentIds(q=segments_T, kv=segments_T)
        return kernel(q_HTK, k_GSK, v_GSK, segment_ids=segments)

    return _on_each_device(jax.vmap(local, in_axes=(0, 0, 0, None if segment_ids_BT is None else 0)))(
        q_BHTK, k_BGSK, v_BGSK, segment_ids_BT
    )


def pallas_gpu(
    q_BHTK: jax.Array,
    k_BGSK: jax.Array,
    v_BGSK: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    interpret: bool = False,
) -> jax.Array:
    """GPU: the Triton kernel that takes segment ids."""
    from jax.experimental.pallas.ops.gpu import attention as gpu

    assert not window  # the table offers this row only without
    assert not soft_cap

    def local(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        # The kernel wants as many key heads as query heads.
        k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return gpu.mha(q, k, v, segments, sm_scale=1.0, causal=True, interpret=interpret).swapaxes(1, 2)

    return checkpoint_name(_on_each_device(local)(q_BHTK, k_BGSK, v_BGSK, segment_ids_BT), CONTEXT)


def cudnn(
    q_BHTK: jax.Array,
    k_BGSK: jax.Array,
    v_BGSK: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> jax.Array:
    """GPU: cuDNN's, without documents."""
    assert segment_ids_BT is None  # the table offers this row only without them
    assert not soft_cap
    q, k, v = (x.swapaxes(1, 2) for x in (q_BHTK, k_BGSK, v_BGSK))
    # A window here is what is seen beside the token itself.
    context_BTHK = jax.nn.dot_product_attention(
        q,
        k,
        v,
        scale=1.0,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation="cudnn",
    )
    return checkpoint_name(context_BTHK.swapaxes(1, 2), CONTEXT)


def _on_each_device(local: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Runs a Pallas call on each device's batch and heads: the partitioner cannot look inside it."""
    if jax.sharding.get_abstract_mesh().empty:
        return local
    heads, segments = P(BATCH_AXES, "tensor"), P(BATCH_AXES)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        if segment_ids is None:
            mapped = jax.shard_map(
                lambda q, k, v: local(q, k, v, None), in_specs=(heads,) * 3, out_specs=heads, check_vma=False
            )
            return mapped(q, k, v)
        mapped = jax.shard_map(local, in_specs=(heads, heads, heads, segments), out_specs=heads, check_vma=False)
        return mapped(q, k, v, segment_ids)

    return call


@dataclass(frozen=True)
class Kernel:
    """A row of the table: causal self-attention by one implementation.

    `function(q_BHTK scaled, k_BGSK, v_BGSK, segment_ids_BT or None, window=, soft_cap=)` returns [B, H, T, K], named
    `remat.CONTEXT`. A window below T leaves a query itself and the `window - 1` keys before it, 0 all before it; a
    soft-cap of 0 is none.
    """

    name: str
    platforms: frozenset[str]
    features: frozenset[str]  # of `ALL_FEATURES`
    block: int  # the sequence length is a multiple of it
    quadratic: bool  # materialises T × T
    function: Attention


# An odd head_dim is one that is no multiple of 8, as narrow layers may have.
ALL_FEATURES = frozenset({"segments", "gqa", "float32", "window", "soft_cap", "odd_head_dim"})

KERNELS = (
    Kernel("splash", frozenset({"tpu"}), ALL_FEATURES, 128, False, splash),
    Kernel("cudnn", frozenset({"gpu"}), frozenset({"gqa", "window"}), 1, False, cudnn),
    # jax 0.12 deprecates this kernel without another that takes segment ids.
    Kernel(
        "pallas", frozenset({"gpu"}), frozenset({"segments", "gqa", "float32", "odd_head_dim"}), 128, False, pallas_gpu
    ),
    Kernel("blocked", frozenset({"cpu"}), ALL_FEATURES, 1, True, blocked),
    Kernel("reference", frozenset({"cpu"}), ALL_FEATURES, 1, True, reference),
)


def choose(platform: str, features: Iterable[str], sequence_length: int, requested: str = "auto") -> Kernel:
    """Picks the first row of the table that serves the platform, the features and the length.

    Raises:
      UserError: no row does, or the requested one does not; says what each row of the platform lacks.
    """
    features = frozenset(features)
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    rows = [row for row in KERNELS if requested in ("auto", row.name)]
    lacks = []
    for row in rows:
        if platform not in row.platforms:
            missing = f"does not run on {platform}"
        elif features - row.features:
            missing = f"has no {' or '.join(sorted(features - row.features))}"
        elif sequence_length % row.block:
            missing = f"takes sequence lengths that are multiples of {row.block}, not {sequence_length}"
        else:
            return row
        lacks.append(f"{row.name} {missing}")
    if not rows:
        names = ", ".join(row.name for row in KERNELS)
        raise UserError(f"{requested!r} is not one of auto, {names}", where="config.model.attention")
    raise UserError("no attention kernel serves this model: " + "; ".join(lacks), where="config.model.attention")
