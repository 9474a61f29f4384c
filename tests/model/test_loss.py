"""The vocabulary loss against the naive one, and its memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlm_jax.model.loss import cross_entropy_sum
from tlm_jax.parallel.devices import to_global
from tlm_jax.parallel.mesh import make_mesh
from tlm_jax.parallel.rules import batch_sharding


def naive(x, table, targets, mask):
    logits = jnp.einsum("BTD,VD->BTV", x, table)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(mask, picked, 0.0))


def example(B=8, T=12, D=16, V=50):
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(B, T, D)).astype(np.float32),
        "targets": rng.integers(0, V, (B, T)).astype(np.int32),
        "mask": rng.random((B, T)) < 0.6,
    }, rng.normal(size=(V, D)).astype(np.float32)


@pytest.mark.parametrize("chunk", [1, 7, 24, 1000])
@pytest.mark.parametrize("mesh", [None, (1, 8), (2, 4)])
def test_value_and_gradients(chunk, mesh):
    batch, table = example()
    want = jax.value_and_grad(naive, argnums=(0, 1))(batch["x"], table, batch["targets"], batch["mask"])
    function = jax.jit(
        jax.value_and_grad(lambda x, w, t, m: 1.0 * cross_entropy_sum(x, w, t, m, chunk), argnums=(0, 1))
    )
    if mesh is None:
        got = function(batch["x"], table, batch["targets"], batch["mask"])
    else:
        mesh = make_mesh({"data": mesh[0], "fsdp": mesh[1], "expert": 1, "tensor": 1})
        with jax.set_mesh(mesh):
            placed = to_global(batch, batch_sharding(mesh))
            got = function(placed["x"], table, placed["targets"], placed["mask"])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for a, b in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_masked_tokens_do_not_count_whatever_they_hold():
    batch, table = example()
    targets = np.where(batch["mask"], batch["targets"], 0)
    x = np.where(batch["mask"][..., None], batch["x"], 1e4)
    a = cross_entropy_sum(batch["x"], table, batch["targets"], batch["mask"], 10)
    b = cross_entropy_sum(x, table, targets, batch["mask"], 10)
    assert a == b


def test_gradient_of_the_table_is_float32_under_bfloat16():
    batch, table = example()
    x = batch["x"].astype(jnp.bfloat16)
    gradient = jax.grad(lambda w: cross_entropy_sum(x, w, batch["targets"], batch["mask"], 10))(table)
    assert gradient.dtype == jnp.float32


def temporary_bytes(tokens: int, vocabulary: int, chunk: int) -> int:
    D = 64
    shapes = (
        jax.ShapeDtypeStruct((tokens // 256, 256, D), jnp.float32),
        jax.ShapeDtypeStruct((vocabulary, D), jnp.float32),
        jax.ShapeDtypeStruct((tokens // 256, 256), jnp.int32),
        jax.ShapeDtypeStruct((tokens // 256, 256), jnp.bool_),
    )
    step = jax.jit(jax.value_and_grad(lambda x, w, t, m: cross_entropy_sum(x, w, t, m, chunk), argnums=(0, 1)))
    analysis = step.lower(*shapes).compile().memory_analysis()
    # Inputs and their gradients grow with the tokens as they must; what is left over must not.
    return analysis.temp_size_in_bytes - 3 * tokens * D * 4


def test_memory_follows_the_chunk_and_not_the_tokens():
    vocabulary = 16384
    small, large = temporary_bytes(1024, vocabulary, 256), temporary_bytes(16384, vocabulary, 256)
    assert large < 1.1 * small + 2**20
    # The naive loss would hold 16384 × 16384 logits: 1 GiB.
    assert large < 16384 * vocabulary * 4 / 8
    assert temporary_bytes(16384, vocabulary, 1024) > 1.5 * large
