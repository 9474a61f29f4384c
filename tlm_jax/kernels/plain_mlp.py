"""The MLPs in plain JAX: the specification of the kernels, and what runs where there is none.

B batch, T time, N = B · T tokens, D this layer's d_model, F this layer's d_ff.

The products with d_ff columns are named for `jax.checkpoint` policies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name

Activation = Callable[[jax.Array], jax.Array]

GATE, UP = "mlp_gate", "mlp_up"


def plain_gated_mlp(
    x_BTD: jax.Array,
    w_gate_DF: jax.Array,
    w_up_DF: jax.Array,
    w_down_FD: jax.Array,
    activation: Activation = jax.nn.silu,
) -> jax.Array:
    """`(activation(x @ w_gate) * (x @ w_up)) @ w_down`, SwiGLU by default (Shazeer 2020, arXiv 2002.05202).

    All arrays have one dtype; products accumulate as the backend does for that dtype. Returns [B, T, D], that dtype.
    """
    # As matrices: with two contracted axes XLA's CPU backend takes 1.7 times as long for the weights' gradients.
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    gate_NF, up_NF = checkpoint_name(x_ND @ w_gate_DF, GATE), checkpoint_name(x_ND @ w_up_DF, UP)
    # The backward pass is traced outside the caller's context: its products' precision goes along as a value.
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return _gated_down(activation, precision, gate_NF, up_NF, w_down_FD).reshape(x_BTD.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated_down(
    activation: Activation, precision: str | None, gate_NF: jax.Array, up_NF: jax.Array, w_down_FD: jax.Array
) -> jax.Array:
    """`(activation(gate) * up) @ w_down` [N, D], of which the backward pass keeps gate and up and not what is between.

    Left to itself, differentiation keeps up to four more arrays [N, F], and writing them costs more than making them.
    """
    return _gated_down_forward(activation, precision, gate_NF, up_NF, w_down_FD)[0]


def _gated_down_forward(
    activation: Activation, precision: str | None, gate_NF: jax.Array, up_NF: jax.Array, w_down_FD: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    with jax.default_matmul_precision(precision):
        return (activation(gate_NF) * up_NF) @ w_down_FD, (gate_NF, up_NF, w_down_FD)


def _gated_down_backward(
    activation: Activation,
    precision: str | None,
    residuals: tuple[jax.Array, jax.Array, jax.Array],
    d_y_ND: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    gate_NF, up_NF, w_down_FD = residuals
    h_NF, pull_back = jax.vjp(lambda gate_NF, up_NF: activation(gate_NF) * up_NF, gate_NF, up_NF)
    with jax.default_matmul_precision(precision):
        return *pull_back(d_y_ND @ w_down_FD.T), h_NF.T @ d_y_ND


_gated_down.defvjp(_gated_down_forward, _gated_down_backward)


def plain_mlp(x_BTD: jax.Array, w_up_DF: jax.Array, w_down_FD: jax.Array, activation: Activation) -> jax.Array:
    """`activation(x @ w_up) @ w_down`; dtypes and shapes as in `plain_gated_mlp`."""
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    return (activation(checkpoint_name(x_ND @ w_up_DF, UP)) @ w_down_FD).reshape(x_BTD.shape)
