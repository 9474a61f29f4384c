"""The MLP of a block.

B batch, T time, D this layer's d_model, F this layer's d_ff.
"""

from __future__ import annotations

import math

import jax
from flax import nnx

from tlm_jax.capacity.shape import LayerShape
from tlm_jax.kernels.gated_mlp import gated_mlp
from tlm_jax.model.layers import parameter
from tlm_jax.model.settings import ModelSettings


class GatedMLP(nnx.Module):
    """SwiGLU MLP of this layer's d_ff."""

    def __init__(self, key: jax.Array, shape: LayerShape, settings: ModelSettings, depth: int) -> None:
        D, F = shape.d_model, shape.d_ff
        into = settings.init_scale / math.sqrt(D)
        out = settings.init_scale / math.sqrt(F) / math.sqrt(2 * depth)
        self.w_gate = parameter(key, "w_gate", (D, F), ("embed", "mlp"), into)
        self.w_up = parameter(key, "w_up", (D, F), ("embed", "mlp"), into)
        self.w_down = parameter(key, "w_down", (F, D), ("mlp", "embed"), out)
        self.settings = settings

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns [B, T, D]."""
        dtype = self.settings.dtype
        weights = (w[...].astype(dtype) for w in (self.w_gate, self.w_up, self.w_down))
        return gated_mlp(x_BTD, *weights)
