"""The MLP of a block.

B batch, T time, D this layer's d_model, F this layer's d_ff.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from tlm_jax.capacity.shape import GATED_MLPS, LayerShape
from tlm_jax.kernels.gated_mlp import Placement, gated_mlp, implementation_for
from tlm_jax.kernels.plain_mlp import Activation, plain_mlp
from tlm_jax.model.initial import Deviations
from tlm_jax.model.layers import parameter
from tlm_jax.model.settings import ModelSettings
from tlm_jax.parallel.mesh import batch_shards
from tlm_jax.parallel.rules import mlp_axes

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
            return self._gated(x_BTD, self.w_gate[...].astype(dtype), w_up, w_down, activation)
        return plain_mlp(x_BTD, w_up, w_down, activation)

    def _gated(self, x_BTD: jax.Array, *arguments: Any) -> jax.Array:
        (D, F), settings = (self.shape.d_model, self.shape.d_ff), self.settings
        tokens_axes, d_ff_axis, d_ff_shards = mlp_axes(x_BTD.shape[0], F)
        tokens = x_BTD.size // D // (batch_shards() if tokens_axes else 1)
        chosen = implementation_for(
            settings.platform,
            settings.mlp_kernel,
            tokens,
            D,
            F // d_ff_shards,
            settings.dtype.itemsize,
            settings.tpu_generation,
        )
        return gated_mlp(
            x_BTD,
            *arguments,
            implementation=chosen,
            keeps=settings.mlp_keeps == "products",
            placement=Placement(tokens_axes, d_ff_axis),
            generation=settings.tpu_generation,
            interpret=settings.platform == "cpu",
        )
