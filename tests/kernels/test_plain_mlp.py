"""The gated MLP's own backward pass: its gradients and what it keeps."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlm_jax.kernels.plain_mlp import plain_gated_mlp as gated_mlp

N, D, F = 64, 16, 48


def differentiated(x, w_gate, w_up, w_down, activation):
    """The definition, differentiated by JAX."""
    return (activation(x @ w_gate) * (x @ w_up)) @ w_down


def arguments(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in ((N, D), (D, F), (D, F), (F, D))]


@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.relu, partial(jax.nn.gelu, approximate=True)])
def test_gradients_are_the_definitions(activation):
    weight = np.random.default_rng(1).normal(size=(N, D)).astype(np.float32)

    def gradients(function):
        return jax.jit(jax.grad(lambda *a: jnp.sum(function(*a, activation) * weight), (0, 1, 2, 3)))(*arguments())

    for got, want in zip(gradients(gated_mlp), gradients(differentiated), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_gradients_have_the_arguments_dtypes():
    gradients = jax.grad(lambda *a: jnp.sum(gated_mlp(*a).astype(jnp.float32)), (0, 1, 2, 3))(*arguments(jnp.bfloat16))
    assert all(gradient.dtype == jnp.bfloat16 for gradient in gradients)


def test_every_product_of_the_backward_pass_has_the_callers_precision():
    def loss(*a):
        with jax.default_matmul_precision("highest"):
            return jnp.sum(gated_mlp(*a))

    text = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*arguments()).as_text()
    products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 8  # gate and up; six of the backward pass
    assert all("HIGHEST" in line for line in products)


def test_curvature_is_the_definitions():
    def product(function):
        """The Hessian by w_up times a direction."""
        x, w_gate, w_up, w_down = arguments()

        def loss(w_up):
            return jnp.sum(function(x, w_gate, w_up, w_down, jax.nn.silu) ** 2)

        return jax.jit(lambda v: jax.jvp(jax.grad(loss), (w_up,), (v,))[1])(jnp.ones_like(w_up))

    got, want = product(gated_mlp), product(differentiated)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


def test_it_keeps_gate_and_up_only():
    def temporary_bytes(function):
        def layers(x, weights):
            return jnp.sum(jax.lax.scan(lambda x, w: (function(x, *w, jax.nn.silu), None), x, weights)[0])

        x, *weights = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments())
        stacks = tuple(jax.ShapeDtypeStruct((32, *w.shape), w.dtype) for w in weights)
        compiled = jax.jit(jax.grad(layers)).lower(x, stacks).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    kept = 4 * N * (2 * F + D)  # gate, up and the layer's input
    assert temporary_bytes(gated_mlp) < 1.2 * 32 * kept
    assert temporary_bytes(differentiated) > 1.5 * temporary_bytes(gated_mlp)
