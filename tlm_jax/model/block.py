"""One layer: attention, then the MLP, each behind a norm and around the residual.

B batch, T time, D this layer's d_model.
"""

from __future__ import annotations

import jax
from flax import nnx

from tlm_jax.capacity.shape import LayerShape
from tlm_jax.model.attention import Attention, LayerCache, Positions
from tlm_jax.model.initial import Deviations
from tlm_jax.model.layers import RMSNorm, multiplied
from tlm_jax.model.mlp import MLP
from tlm_jax.model.settings import ModelSettings
from tlm_jax.parallel.rules import pin_batch


class Block(nnx.Module):
    """A pre-norm block: x + m * attention(norm(x)), then x + m * mlp(norm(x)), m being `residual_multiplier`.

    Its weights come from `fold_in(key, layer)` alone. The last `unwritten` columns of its input are 0, since no layer
    before it is so wide: attention leaves them out.
    """

    def __init__(
        self,
        key: jax.Array,
        layer: jax.Array | int,
        shape: LayerShape,
        settings: ModelSettings,
        deviations: Deviations,
        unwritten: int = 0,
    ) -> None:
        key = jax.random.fold_in(key, layer)
        self.attention_norm = RMSNorm(key, shape.d_model, settings.norm_epsilon)
        self.attention = Attention(key, shape, settings, deviations)
        self.mlp_norm = RMSNorm(key, shape.d_model, settings.norm_epsilon)
        self.mlp = MLP(key, shape, settings, deviations)
        self.residual_multiplier, self.written = settings.residual_multiplier, shape.d_model - unwritten

    def __call__(
        self, x_BTD: jax.Array, at: Positions, cache: LayerCache | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Returns the block's output [B, T, D] and the cache, updated when one is given."""
        normal_BTD = self.attention_norm(x_BTD)[..., : self.written]
        y_BTD, cache = self.attention(pin_batch(normal_BTD), at, cache)
        x_BTD = pin_batch(x_BTD + multiplied(y_BTD, self.residual_multiplier))
        y_BTD = self.mlp(pin_batch(self.mlp_norm(x_BTD)))
        return pin_batch(x_BTD + multiplied(y_BTD, self.residual_multiplier)), cache
