"""The fused gated MLP: its specification in plain JAX.

B batch, T time, D this layer's d_model, F this layer's d_ff.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def gated_mlp(x_BTD: jax.Array, w_gate_DF: jax.Array, w_up_DF: jax.Array, w_down_FD: jax.Array) -> jax.Array:
    """SwiGLU: `(silu(x @ w_gate) * (x @ w_up)) @ w_down` (Shazeer 2020, arXiv 2002.05202).

    All arrays have one dtype; products accumulate as the backend does for that dtype. Returns [B, T, D], that dtype.
    """
    gate_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, w_gate_DF)
    up_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, w_up_DF)
    return jnp.einsum("BTF,FD->BTD", jax.nn.silu(gate_BTF) * up_BTF, w_down_FD)
