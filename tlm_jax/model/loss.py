"""The vocabulary loss: chunked over tokens, masked, sharded, its gradients made in the forward pass.

N tokens of one device, C tokens of a chunk, D embedding width, V vocabulary, S batch shards, B batch, T time.

Softmax cross-entropy needs the logits of a token only while that token is looked at. So the tokens are cut into chunks
of at most C per device, and each chunk's logits, loss and gradients are finished before the next chunk's exist: the
memory is S·C·V, whatever the number of tokens, and no logits are computed twice.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tlm_jax.parallel.mesh import BATCH_AXES, batch_shards


def cross_entropy_sum(
    x_BTD: jax.Array, table_VD: jax.Array, targets_BT: jax.Array, mask_BT: jax.Array, chunk_tokens: int
) -> jax.Array:
    """Sum over unmasked tokens of the cross-entropy of `x @ table.T` against the targets, in nats.

    Args:
      x_BTD: final hidden states, in the compute dtype; B is a multiple of the mesh's batch shards.
      table_VD: output embedding, float32; used in x's dtype, its gradient stays float32.
      targets_BT: int32, below V.
      mask_BT: bool, True where the token counts.
      chunk_tokens: upper limit of the tokens per device whose logits exist at one time.

    Returns:
      float32 scalar. Logits and softmax are float32.
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

    return _chunked_sum(chunked(x_BTD), table_VD, chunked(targets_BT), chunked(mask_BT))


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


def _one_chunk(
    x_SCD: jax.Array, table_VD: jax.Array, targets_SC: jax.Array, mask_SC: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Loss sum of each shard [S], logits, their log-sum-exp, and where each target stands."""
    logits_SCV = jnp.einsum("SCD,VD->SCV", x_SCD, table_VD, preferred_element_type=jnp.float32)
    lse_SC = jax.nn.logsumexp(logits_SCV, axis=-1)
    # A comparison rather than a gather: it fuses, and stays local when the vocabulary is sharded.
    is_target_SCV = jax.lax.broadcasted_iota(jnp.int32, logits_SCV.shape, 2) == targets_SC[..., None]
    picked_SC = jnp.sum(jnp.where(is_target_SCV, logits_SCV, 0.0), axis=-1)
    return jnp.sum(jnp.where(mask_SC, lse_SC - picked_SC, 0.0), axis=-1), logits_SCV, lse_SC, is_target_SCV


@jax.custom_vjp
def _chunked_sum(x: jax.Array, table_VD: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    table_VD = _whole_rows(table_VD, x.dtype)

    def step(total_S: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        x_SCD, targets_SC, mask_SC = chunk
        return _pin(total_S + _one_chunk(x_SCD, table_VD, targets_SC, mask_SC)[0], 0), None

    return jnp.sum(jax.lax.scan(step, _pin(jnp.zeros(x.shape[1], jnp.float32), 0), (x, targets, mask))[0])


def _forward(
    x: jax.Array, table_VD: jax.Array, targets: jax.Array, mask: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    # Each shard sums its own loss and its own gradient of the table; they are added once, after the last chunk.
    S, (V, D) = x.shape[1], table_VD.shape
    table_VD = _whole_rows(table_VD, x.dtype)

    def step(
        carry: tuple[jax.Array, jax.Array], chunk: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        total_S, d_table_SVD = carry
        x_SCD, targets_SC, mask_SC = chunk
        loss_S, logits_SCV, lse_SC, is_target_SCV = _one_chunk(x_SCD, table_VD, targets_SC, mask_SC)
        error_SCV = jnp.exp(logits_SCV - lse_SC[..., None]) - is_target_SCV.astype(jnp.float32)
        error_SCV = jnp.where(mask_SC[..., None], error_SCV, 0.0).astype(x_SCD.dtype)
        d_x_SCD = jnp.einsum("SCV,VD->SCD", error_SCV, table_VD)
        d_table_SVD += jnp.einsum("SCV,SCD->SVD", error_SCV, x_SCD, preferred_element_type=jnp.float32)
        return (_pin(total_S + loss_S, 0), _pin(d_table_SVD, 0)), d_x_SCD

    start = (_pin(jnp.zeros(S, jnp.float32), 0), _pin(jnp.zeros((S, V, D), jnp.float32), 0))
    (total_S, d_table_SVD), d_x = jax.lax.scan(step, start, (x, targets, mask))
    return jnp.sum(total_S), (_pin(d_x, 1), jnp.sum(d_table_SVD, axis=0))


def _backward(residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    d_x, d_table_VD = residuals
    return (d_x * cotangent).astype(d_x.dtype), d_table_VD * cotangent, None, None


_chunked_sum.defvjp(_forward, _backward)
