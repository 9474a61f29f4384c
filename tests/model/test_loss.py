"""The vocabulary loss against the naive one, and its memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlm_jax.model.loss import loss_sums
from tlm_jax.parallel.devices import to_global
from tlm_jax.parallel.mesh import make_mesh
from tlm_jax.parallel.rules import batch_sharding


def naive(x, table, targets, mask, soft_cap=0.0, z_loss=0.0):
    logits = jnp.einsum("BTD,VD->BTV", x, table)
    logits = soft_cap * jnp.tanh(logits / soft_cap) if soft_cap else logits
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    z = z_loss * jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) ** 2
    return jnp.sum(jnp.where(mask, z - picked, 0.0))


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
        jax.value_and_grad(lambda x, w, t, m: 1.0 * loss_sums(x, w, t, m, chunk).objective, argnums=(0, 1))
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


@pytest.mark.parametrize(("soft_cap", "z_loss"), [(2.0, 0.0), (0.0, 0.03), (2.0, 0.03)])
@pytest.mark.parametrize("mesh", [None, (2, 4)])
def test_soft_cap_and_z_loss(soft_cap, z_loss, mesh):
    batch, table = example()
    arguments = (batch["x"], table, batch["targets"], batch["mask"])
    want, gradients = jax.value_and_grad(naive, argnums=(0, 1))(*arguments, soft_cap, z_loss)
    plain = jax.grad(naive)(*arguments)
    assert np.abs(plain - gradients[0]).max() > 1e-2

    @jax.jit
    def function(x, w, t, m):
        def objective(x, w):
            sums = loss_sums(x, w, t, m, 7, soft_cap=soft_cap, z_loss=z_loss)
            return 0.5 * sums.objective, sums

        return jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(x, w)

    if mesh is None:
        (_, sums), got = function(*arguments)
    else:
        mesh = make_mesh({"data": mesh[0], "fsdp": mesh[1], "expert": 1, "tensor": 1})
        with jax.set_mesh(mesh):
            placed = to_global(batch, batch_sharding(mesh))
            (_, sums), got = function(placed["x"], table, placed["targets"], placed["mask"])
    np.testing.assert_allclose(sums.objective, want, rtol=1e-6)
    np.testing.assert_allclose(sums.cross_entropy, naive(*arguments, soft_cap), rtol=1e-6)
    np.testing.assert_allclose(sums.z_loss, want - naive(*arguments, soft_cap), rtol=1e-4, atol=1e-6)
    for a, b in zip(got, gradients, strict=True):
        np.testing.assert_allclose(a, 0.5 * b, rtol=2e-6, atol=2e-6)


def test_parts_of_the_loss_carry_no_gradient():
    batch, table = example()

    def part(x, name):
        return getattr(loss_sums(x, table, batch["targets"], batch["mask"], 10, z_loss=0.1), name)

    assert not np.any(jax.grad(part)(batch["x"], "cross_entropy"))
    assert not np.any(jax.grad(part)(batch["x"], "z_loss"))
    assert np.any(jax.grad(part)(batch["x"], "objective"))


def test_masked_tokens_do_not_count_whatever_they_hold():
    batch, table = example()
    targets = np.where(batch["mask"], batch["targets"], 0)
    x = np.where(batch["mask"][..., None], batch["x"], 1e4)
    a = loss_sums(batch["x"], table, batch["targets"], batch["mask"], 10).objective
    b = loss_sums(x, table, targets, batch["mask"], 10).objective
    assert a == b


def test_gradient_of_the_table_is_float32_under_bfloat16():
    batch, table = example()
    x = batch["x"].astype(jnp.bfloat16)
    gradient = jax.grad(lambda w: loss_sums(x, w, batch["targets"], batch["mask"], 10).objective)(table)
    assert gradient.dtype == jnp.float32


def temporary_bytes(tokens: int, vocabulary: int, chunk: int, **options: float) -> int:
    D = 64
    shapes = (
        jax.ShapeDtypeStruct((tokens // 256, 256, D), jnp.float32),
        jax.ShapeDtypeStruct((vocabulary, D), jnp.float32),
        jax.ShapeDtypeStruct((tokens // 256, 256), jnp.int32),
        jax.ShapeDtypeStruct((tokens // 256, 256), jnp.bool_),
    )
    step = jax.jit(
        jax.value_and_grad(lambda x, w, t, m: loss_sums(x, w, t, m, chunk, **options).objective, argnums=(0, 1))
    )
    analysis = step.lower(*shapes).compile().memory_analysis()
    # Inputs and their gradients grow with the tokens as they must; what is left over must not.
    return analysis.temp_size_in_bytes - 3 * tokens * D * 4


@pytest.mark.parametrize("options", [{}, {"soft_cap": 30.0, "z_loss": 1e-4}], ids=str)
def test_memory_follows_the_chunk_and_not_the_tokens(options):
    vocabulary = 16384
    small, large = (temporary_bytes(tokens, vocabulary, 256, **options) for tokens in (1024, 16384))
    assert large < 1.1 * small + 2**20
    # The naive loss would hold 16384 × 16384 logits: 1 GiB.
    assert large < 16384 * vocabulary * 4 / 8
    assert temporary_bytes(16384, vocabulary, 1024, **options) > 1.5 * large
