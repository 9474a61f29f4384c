"""Optimizers from optax, told which leaves are stacks of layers so that they act on each layer alone.

Decay and grouping go by parameter name, never by the number of axes: a stacked norm scale has two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict
from optax.contrib import MuonDimensionNumbers, scale_by_muon

from tlm_jax.config import default_config
from tlm_jax.errors import UserError, raise_together
from tlm_jax.model.layers import MATRICES
from tlm_jax.train.adafactor import adafactor
from tlm_jax.train.per_layer import Path, is_matrix, parameter_name
from tlm_jax.train.schedules import SCHEDULES, check_schedule, learning_rate_schedule

# Root mean square of a Muon update before the learning rate, as AdamW's (Liu et al. 2025, arXiv 2502.16982).
MUON_UPDATE_RMS = 0.2


def muon_dimensions(parameters: Any) -> Any:
    """`MuonDimensionNumbers` for each matrix, None elsewhere; a stack's layer axis is left as a batch axis."""

    def dimensions(path: Path, leaf: Any) -> MuonDimensionNumbers | None:
        if not is_matrix(path):
            return None
        summed, kept = MATRICES[str(path[-1].key)]
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


def _adamw(train: ConfigDict) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=train.beta1, b2=train.beta2, eps=train.epsilon)


def _muon(train: ConfigDict) -> optax.GradientTransformation:
    ratio = train.adam_learning_rate / train.learning_rate if train.adam_learning_rate else 1.0
    return optax.partition(
        {
            "matrix": optax.chain(
                scale_by_muon(beta=train.muon_momentum, weight_dimension_numbers=muon_dimensions),
                _scale_to_update_rms(MUON_UPDATE_RMS),
            ),
            "other": optax.chain(_adamw(train), optax.scale(ratio)),
        },
        lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: "matrix" if is_matrix(path) else "other", tree),
    )


def _lion(train: ConfigDict) -> optax.GradientTransformation:
    return optax.scale_by_lion(b1=train.lion_beta1, b2=train.lion_beta2)


class Optimizer(NamedTuple):
    """What turns gradients into steps of learning rate 1, and the keys of `config.train` that only some read."""

    build: Callable[[ConfigDict], optax.GradientTransformation]
    reads: tuple[str, ...]


_ADAM = ("beta1", "beta2", "epsilon")
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(_adamw, _ADAM),
    # Muon (Jordan et al. 2024) takes the hidden matrices, Adam what remains.
    "muon": Optimizer(_muon, (*_ADAM, "muon_momentum", "adam_learning_rate")),
    "lion": Optimizer(_lion, ("lion_beta1", "lion_beta2")),  # Chen et al. 2023, arXiv 2302.06675
    "adafactor": Optimizer(
        adafactor,
        (
            "adafactor_decay_exponent",
            "adafactor_clip",
            "adafactor_momentum",
            "adafactor_parameter_scale",
            "adafactor_min_factored",
        ),
    ),
}


def _unread(train: ConfigDict, choice: str, table: dict[str, Any]) -> list[UserError]:
    """The keys that differ from their default although the chosen row of a table does not read them."""
    chosen, defaults = train[choice], default_config().train
    if chosen not in table:
        return []
    problems = []
    for key in dict.fromkeys(key for row in table.values() for key in row.reads):
        if key not in table[chosen].reads and train[key] != defaults[key]:
            readers = " or ".join(name for name, row in table.items() if key in row.reads)
            mend = f"leave it at {defaults[key]}, or take the {choice} {readers}"
            problems.append(UserError(f"{chosen} does not read it", where=f"config.train.{key}", mend=mend))
    return problems


def check_optimizer(train: ConfigDict) -> list[UserError]:
    """The problems of `config.train`'s optimizer and learning-rate keys."""
    problems = []
    if train.optimizer not in OPTIMIZERS:
        problems.append(
            UserError(f"{train.optimizer!r} is not one of {', '.join(OPTIMIZERS)}", where="config.train.optimizer")
        )
    for key in ("beta1", "beta2", "muon_momentum", "lion_beta1", "lion_beta2", "adafactor_momentum", "ema_decay"):
        if not 0 <= train[key] < 1:
            problems.append(UserError(f"must be in [0, 1), not {train[key]}", where=f"config.train.{key}"))
    for key in ("adam_learning_rate", "weight_decay", "gradient_clip", "adafactor_clip"):
        if not (train[key] >= 0 and math.isfinite(train[key])):
            problems.append(UserError(f"must be at least 0, not {train[key]}", where=f"config.train.{key}"))
    for key in ("epsilon", "adafactor_decay_exponent", "adafactor_min_factored"):
        if not train[key] > 0:
            problems.append(UserError(f"must be above 0, not {train[key]}", where=f"config.train.{key}"))
    for text in train.weight_decay_exclude:
        if not isinstance(text, str):
            where, mend = "config.train.weight_decay_exclude", "give texts, such as ('norm', 'embedding')"
            problems.append(UserError(f"{text!r} is no part of a parameter's name", where=where, mend=mend))
    problems += check_schedule(train)
    return problems + _unread(train, "optimizer", OPTIMIZERS) + _unread(train, "schedule", SCHEDULES)


def decay_mask(parameters: Any, exclude: tuple[str, ...]) -> Any:
    """True for the leaves that decay: those whose name contains none of `exclude`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not any(text in parameter_name(path) for text in exclude), parameters
    )


def _in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same with every floating leaf of its state in float32, whatever the parameters and gradients are."""

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    return optax.GradientTransformation(
        lambda parameters: optimizer.init(cast(parameters)),
        lambda updates, state, parameters: optimizer.update(cast(updates), state, cast(parameters)),
    )


def build_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Global-norm clipping, the chosen optimizer, decoupled weight decay by name, the learning-rate schedule.

    Updates and moments are float32 whatever the parameters are. In its state, the leaves that belong to a parameter
    have a path that ends in the parameter's, and a leading axis of layers where the parameter has one.

    Raises:
      UserError: every problem of the keys, together.
    """
    train = config.train
    raise_together(check_optimizer(train))
    exclude = tuple(train.weight_decay_exclude)
    return _in_float32(
        optax.chain(
            optax.clip_by_global_norm(train.gradient_clip) if train.gradient_clip else optax.identity(),
            OPTIMIZERS[train.optimizer].build(train),
            optax.add_decayed_weights(train.weight_decay, lambda tree: decay_mask(tree, exclude)),
            optax.scale_by_learning_rate(learning_rate_schedule(config)),
        )
    )
