"""Standard deviations of initial weights."""

from __future__ import annotations

import math
from typing import NamedTuple

from tlm_jax.capacity.profile import Profile
from tlm_jax.capacity.shape import LayerShape
from tlm_jax.model.settings import ModelSettings


class Deviations(NamedTuple):
    """Of a layer's matrices: those that read the residual stream, wo, and w_down."""

    into: float
    attention_out: float
    mlp_out: float


def deviations(shape: LayerShape, settings: ModelSettings, profile: Profile) -> Deviations:
    """Of one layer: 1 / sqrt(inputs summed over), or with `init_deviation` one number for all matrices of a width.

    That number is for layers as wide as the embedding; others take it times (d_embedding / d_model)^init_width_power
    (Variable-Width Transformers, arXiv 2606.18246: 0.1 / sqrt(8) and the power 1/2). With `init_depth_scaling`, what
    is added to the residual stream is divided by sqrt(2 · layers), as in GPT-2.
    """
    if settings.init_deviation:
        adapted = (profile.d_embedding / shape.d_model) ** settings.init_width_power
        of_inputs = [settings.init_deviation * adapted] * 3
    else:
        inputs = (shape.d_model, shape.num_heads * shape.head_dim, shape.d_ff)
        of_inputs = [1 / math.sqrt(count) for count in inputs]
    depth = math.sqrt(2 * len(profile.layers)) if settings.init_depth_scaling else 1.0
    into, attention_out, mlp_out = (settings.init_scale * deviation for deviation in of_inputs)
    return Deviations(into, attention_out / depth, mlp_out / depth)


def embedding_deviation(settings: ModelSettings, profile: Profile) -> float:
    """Of the token embedding and of an untied output projection."""
    return settings.init_scale * (settings.embedding_init_deviation or 1 / math.sqrt(profile.d_embedding))
