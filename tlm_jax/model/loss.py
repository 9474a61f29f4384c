"""The vocabulary loss: chunked over tokens, masked, sharded, its gradients made in the forward pass; soft-cap, z-loss.

N tokens of one device, C tokens of a chunk, D embedding width, V vocabulary, S batch shards, B batch, T time.

Softmax cross-entropy needs the logits of a token only while that token is looked at. So the tokens are cut into chunks
of at most C per device, and each chunk's logits, loss and gradients are finished before the next chunk's exist: the
memory is S·C·V, whatever the number of tokens, and no logits are computed twice.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tlm_jax.model.layers import soft_capped
from tlm_jax.parallel.mesh import BATCH_AXES, batch_shards


class LossSums(NamedTuple):
    """Sums over unmasked tokens in nats, float32 scalars. Only `objective` can be differentiated."""

    objective: jax.Array  # what training minimises: cross_entropy + z_loss
    cross_entropy: jax.Array
    z_loss: jax.Array


def loss_sums(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    mask_BT: jax.Array,
    chunk_tokens: int,
    *,
    soft_cap: float = 0.0,
    z_loss: float = 0.0,
) -> LossSums:
    """Cross-entropy of `x @ table.T` against the targets, and the z-loss, summed over unmasked tokens.

    The z-loss of a token is `z_loss · logsumexp(logits)²`, which keeps the logits from drifting (PaLM,
    arXiv 2204.02311, section 5).

    Args:
      x_BTD: final hidden states, in the compute dtype; B is a multiple of the mesh's batch shards.
      table_VD: output embedding, float32; used in x's dtype, its gradient stays float32.
      targets_BT: int32, below V.
      mask_BT: bool, True where the token counts.
      chunk_tokens: upper limit of the tokens per device whose logits exist at one time.
      soft_cap: logits become `soft_cap · tanh(logits / soft_cap)` before anything else; 0 for none.
      z_loss: coefficient of the z-loss.

    Logits and softmax are float32.
    """
    shards = batch_shards()
    B, T, D = x_BTD.shape
    tokens = B * T // shards
    count = -(-tokens // chunk_tokens)
    size = -(-tokens // count)
    pad = count * size - tokens

    def chunked(a: jax.Array) -> jax.Array:
        """[B, T, …] to [chunks, S, C, …]; a device keeps the tokens it has."""
        a = a.reshape(shards, tokens, *a.shape[2:])
        a = jnp.pad(a, ((0, 0), (0, pad)) + ((0, 0),) * (a.ndim - 2))
        return _pin(a.reshape(shards, count, size, *a.shape[2:]).swapaxes(0, 1), 1)

    sums = _chunked_sums(soft_cap, z_loss, chunked(x_BTD), table_VD, chunked(targets_BT), chunked(mask_BT))
    return LossSums(sums.objective, *map(jax.lax.stop_gradient, sums[1:]))


def _pin(a: jax.Array, axis: int) -> jax.Array:
    """Pins the axis of shards to the batch axes; the vocabulary may be cut as the compiler likes."""
    if jax.sharding.get_abstract_mesh().empty:
        return a
    free = P.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(a, P(*[free] * axis, BATCH_AXES, *[free] * (a.ndim - axis - 1)))


def _whole_rows(table_VD: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The table in `dtype` with whole rows on each device, brought there once for all chunks."""
    table_VD = table_VD.astype(dtype)
    if jax.sharding.get_abstract_mesh().empty:
        return table_VD
    return jax.lax.with_sharding_constraint(table_VD, P(P.UNCONSTRAINED, None))


class _Chunk(NamedTuple):
    sums_2S: jax.Array  # of each shard: cross-entropy, z-loss
    logits_SCV: jax.Array  # capped
    lse_SC: jax.Array  # their log-sum-exp
    is_target_SCV: jax.Array


def _one_chunk(
    soft_cap: float, z_loss: float, x_SCD: jax.Array, table_VD: jax.Array, targets_SC: jax.Array, mask_SC: jax.Array
) -> _Chunk:
    logits_SCV = jnp.einsum("SCD,VD->SCV", x_SCD, table_VD, preferred_element_type=jnp.float32)
    logits_SCV = soft_capped(logits_SCV, soft_cap)
    lse_SC = jax.nn.logsumexp(logits_SCV, axis=-1)
    # A comparison rather than a gather: it fuses, and stays local when the vocabulary is sharded.
    is_target_SCV = jax.lax.broadcasted_iota(jnp.int32, logits_SCV.shape, 2) == targets_SC[..., None]
    picked_SC = jnp.sum(jnp.where(is_target_SCV, logits_SCV, 0.0), axis=-1)
    losses_2SC = jnp.stack([lse_SC - picked_SC, z_loss * jnp.square(lse_SC)])
    return _Chunk(jnp.sum(jnp.where(mask_SC, losses_2SC, 0.0), axis=-1), logits_SCV, lse_SC, is_target_SCV)


def _over_shards(sums_2S: jax.Array) -> LossSums:
    cross_entropy, z_loss = jnp.sum(sums_2S, axis=1)
    return LossSums(cross_entropy + z_loss, cross_entropy, z_loss)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_sums(
    soft_cap: float, z_loss: float, x: jax.Array, table_VD: jax.Array, targets: jax.Array, mask: jax.Array
) -> LossSums:
    table_VD = _whole_rows(table_VD, x.dtype)

    def step(sums_2S: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x_SCD, targets_SC, mask_SC = chunk
        return _pin(sums_2S + _one_chunk(soft_cap, z_loss, x_SCD, table_VD, targets_SC, mask_SC).sums_2S, 1), None

    zero_2S = _pin(jnp.zeros((2, x.shape[1]), jnp.float32), 1)
    return _over_shards(jax.lax.scan(step, zero_2S, (x, targets, mask))[0])


def _forward(
    soft_cap: float, z_loss: float, x: jax.Array, table_VD: jax.Array, targets: jax.Array, mask: jax.Array
) -> tuple[LossSums, tuple[jax.Array, jax.Array]]:
    # Each shard sums its own loss and its own gradient of the table; they are added once, after the last chunk.
    S, (V, D) = x.shape[1], table_VD.shape
    table_VD = _whole_rows(table_VD, x.dtype)

    def step(
        carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        sums_2S, d_table_SVD = carry
        x_SCD, targets_SC, mask_SC = chunk
        new_2S, logits_SCV, lse_SC, is_target_SCV = _one_chunk(soft_cap, z_loss, x_SCD, table_VD, targets_SC, mask_SC)
        softmax_SCV = jnp.exp(logits_SCV - lse_SC[..., None])
        if z_loss:
            softmax_SCV *= 1 + 2 * z_loss * lse_SC[..., None]
        error_SCV = softmax_SCV - is_target_SCV.astype(jnp.float32)
        if soft_cap:
            error_SCV *= 1 - jnp.square(logits_SCV / soft_cap)
        error_SCV = jnp.where(mask_SC[..., None], error_SCV, 0.0).astype(x_SCD.dtype)
        d_x_SCD = jnp.einsum("SCV,VD->SCD", error_SCV, table_VD)
        d_table_SVD += jnp.einsum("SCV,SCD->SVD", error_SCV, x_SCD, preferred_element_type=jnp.float32)
        return (_pin(sums_2S + new_2S, 1), _pin(d_table_SVD, 0)), d_x_SCD

    start = (_pin(jnp.zeros((2, S), jnp.float32), 1), _pin(jnp.zeros((S, V, D), jnp.float32), 0))
    (sums_2S, d_table_SVD), d_x = jax.lax.scan(step, start, (x, targets, mask))
    return _over_shards(sums_2S), (_pin(d_x, 1), jnp.sum(d_table_SVD, axis=0))


def _backward(
    soft_cap: float, z_loss: float, residuals: tuple[jax.Array, jax.Array], cotangents: LossSums
) -> tuple[jax.Array, jax.Array, None, None]:
    del soft_cap, z_loss
    d_x, d_table_VD = residuals
    cotangent = cotangents.objective  # `loss_sums` stops the others
    return (d_x * cotangent).astype(d_x.dtype), d_table_VD * cotangent, None, None


_chunked_sums.defvjp(_forward, _backward)
