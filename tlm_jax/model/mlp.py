"""The MLP of a block.

B batch, T time, D this layer's d_model, F this layer's d_ff.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from tlm_jax.capacity.shape import GATED_MLPS, LayerShape
from tlm_jax.kernels.gated_mlp import Activation, gated_mlp, plain_mlp
from tlm_jax.model.initial import Deviations
from tlm_jax.model.layers import parameter
from tlm_jax.model.settings import ModelSettings

_gelu = partial(jax.nn.gelu, approximate=True)

# By the names of `capacity.shape.MLPS`. GELU is its tanh approximation (Hendrycks & Gimpel 2016, arXiv 1606.08415), as
# in GPT-2 and Gemma; squared ReLU is that of So et al. 2021, arXiv 2109.08668.
ACTIVATIONS: dict[str, Activation] = {
    "swiglu": jax.nn.silu,
    "geglu": _gelu,
    "reglu": jax.nn.relu,
    "gelu": _gelu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
}


class MLP(nnx.Module):
    """The MLP of this layer's kind and d_ff; a plain one has no gate weight."""

    def __init__(self, key: jax.Array, shape: LayerShape, settings: ModelSettings, deviations: Deviations) -> None:
        D, F = shape.d_model, shape.d_ff
        into, out = deviations.into, deviations.mlp_out
        self.gated = shape.mlp in GATED_MLPS
        if self.gated:
            self.w_gate = parameter(key, "w_gate", (D, F), ("embed", "mlp"), into)
        self.w_up = parameter(key, "w_up", (D, F), ("embed", "mlp"), into)
        self.w_down = parameter(key, "w_down", (F, D), ("mlp", "embed"), out)
        self.shape, self.settings = shape, settings

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns [B, T, D]."""
        dtype = self.settings.dtype
        w_up, w_down = (w[...].astype(dtype) for w in (self.w_up, self.w_down))
        activation = ACTIVATIONS[self.shape.mlp]
        if self.gated:
            return gated_mlp(x_BTD, self.w_gate[...].astype(dtype), w_up, w_down, activation)
        return plain_mlp(x_BTD, w_up, w_down, activation)
