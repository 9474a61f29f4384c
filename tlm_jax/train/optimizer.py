"""Optimizers from optax, told which leaves are stacks of layers so that they act on each layer alone.

Decay and grouping go by parameter name, never by the number of axes: a stacked norm scale has two.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from tlm_jax.errors import UserError, raise_together
from tlm_jax.model.layers import MATRICES

OPTIMIZERS = ("adamw", "muon")

# Root mean square of a Muon update before the learning rate, as AdamW's (Liu et al. 2025, arXiv 2502.16982).
MUON_UPDATE_RMS = 0.2


def check_optimizer(train: ConfigDict) -> list[UserError]:
    """The problems of `config.train`'s optimizer and learning-rate keys."""
    problems = []
    if train.optimizer not in OPTIMIZERS:
        problems.append(
            UserError(f"{train.optimizer!r} is not one of {', '.join(OPTIMIZERS)}", where="config.train.optimizer")
        )
    for key in ("beta1", "beta2", "muon_momentum"):
        if not 0 <= train[key] < 1:
            problems.append(UserError(f"must be in [0, 1), not {train[key]}", where=f"config.train.{key}"))
    for key in ("adam_learning_rate", "weight_decay", "gradient_clip", "final_learning_rate_ratio"):
        if not (train[key] >= 0 and math.isfinite(train[key])):
            problems.append(UserError(f"must be at least 0, not {train[key]}", where=f"config.train.{key}"))
    for key in ("epsilon", "learning_rate"):
        if not train[key] > 0:
            problems.append(UserError(f"must be above 0, not {train[key]}", where=f"config.train.{key}"))
    for text in train.weight_decay_exclude:
        if not isinstance(text, str):
            where, mend = "config.train.weight_decay_exclude", "give texts, such as ('norm', 'embedding')"
            problems.append(UserError(f"{text!r} is no part of a parameter's name", where=where, mend=mend))
    if train.adam_learning_rate and train.optimizer == "adamw":
        where, mend = "config.train.adam_learning_rate", "leave it at 0, or take muon"
        problems.append(UserError("adamw has one learning rate", where=where, mend=mend))
    if not 0 <= train.warmup_steps <= train.num_steps:
        problems.append(
            UserError(
                f"{train.warmup_steps} is not between 0 and train.num_steps = {train.num_steps}",
                where="config.train.warmup_steps",
            )
        )
    return problems


def learning_rate_schedule(train: ConfigDict) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine to `final_learning_rate_ratio` of it at the last step.

    The first step already moves: step n of N uses the curve at n + 1.
    """
    peak = train.learning_rate
    curve = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=peak,
        warmup_steps=train.warmup_steps,
        decay_steps=max(train.num_steps, train.warmup_steps + 1),
        end_value=peak * train.final_learning_rate_ratio,
    )
    return lambda count: curve(count + 1)


def _name(path: tuple[Any, ...]) -> str:
    return str(path[-1].key)


def parameter_name(path: tuple[Any, ...]) -> str:
    """A leaf's dotted name, such as `layers_0_to_3.attention.wq`."""
    return ".".join(str(part.key) for part in path)


def decay_mask(parameters: Any, exclude: tuple[str, ...]) -> Any:
    """True for the leaves that decay: those whose dotted name contains none of `exclude`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any(text in parameter_name(path) for text in exclude), parameters
    )


def muon_dimensions(parameters: Any) -> Any:
    """`MuonDimensionNumbers` for each matrix, None elsewhere; a stack's layer axis is left as a batch axis."""

    def dimensions(path: tuple[Any, ...], leaf: Any) -> MuonDimensionNumbers | None:
        if _name(path) not in MATRICES:
            return None
        summed, kept = MATRICES[_name(path)]
        stack = leaf.ndim - len(summed) - len(kept)
        return MuonDimensionNumbers(
            reduction_axis=tuple(stack + i for i in summed), output_axis=tuple(stack + i for i in kept)
        )

    return jax.tree_util.tree_map_with_path(dimensions, parameters)


def _scale_to_update_rms(rms: float) -> optax.GradientTransformation:
    """An orthogonal matrix's entries have root mean square 1 / sqrt(its longer side): bring that to `rms`."""

    def scale(updates: Any, parameters: Any) -> Any:
        del parameters

        def one(leaf: jax.Array, dimensions: MuonDimensionNumbers) -> jax.Array:
            sides = (
                math.prod(leaf.shape[axis] for axis in axes)
                for axes in (dimensions.reduction_axis, dimensions.output_axis)
            )
            return leaf * (rms * math.sqrt(max(sides)))

        return jax.tree.map(one, updates, muon_dimensions(updates))

    return optax.stateless(scale)


def build_optimizer(train: ConfigDict) -> optax.GradientTransformation:
    """Global-norm clipping, AdamW or Muon, decoupled weight decay by name, the learning-rate schedule.

    Muon (Jordan et al. 2024) takes the hidden matrices, Adam what remains, at `adam_learning_rate`; decay follows
    `learning_rate` for both. Moments are float32 whatever the parameters are.

    Raises:
      UserError: every problem of the keys, together.
    """
    raise_together(check_optimizer(train))
    adam = optax.scale_by_adam(b1=train.beta1, b2=train.beta2, eps=train.epsilon, mu_dtype=jnp.float32)
    if train.optimizer == "muon":
        ratio = train.adam_learning_rate / train.learning_rate if train.adam_learning_rate else 1.0
        precondition = optax.partition(
            {
                "matrix": optax.chain(
                    scale_by_muon(
                        beta=train.muon_momentum, mu_dtype=jnp.float32, weight_dimension_numbers=muon_dimensions
                    ),
                    _scale_to_update_rms(MUON_UPDATE_RMS),
                ),
                "other": optax.chain(adam, optax.scale(ratio)),
            },
            lambda tree: jax.tree_util.tree_map_with_path(
                lambda path, _: "matrix" if _name(path) in MATRICES else "other", tree
            ),
        )
    else:
        precondition = adam
    exclude = tuple(train.weight_decay_exclude)
    return optax.chain(
        optax.clip_by_global_norm(train.gradient_clip) if train.gradient_clip else optax.identity(),
        precondition,
        optax.add_decayed_weights(train.weight_decay, lambda tree: decay_mask(tree, exclude)),
        optax.scale_by_learning_rate(learning_rate_schedule(train)),
    )
