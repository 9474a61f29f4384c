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

from tlm_jax.config import unread_keys
from tlm_jax.errors import UserError, raise_together
from tlm_jax.train.adafactor import adafactor
from tlm_jax.train.groups import add_weight_decay, check_groups, scale_by_group
from tlm_jax.train.muon import DTYPES as MUON_DTYPES
from tlm_jax.train.muon import muon
from tlm_jax.train.per_layer import is_matrix
from tlm_jax.train.schedules import SCHEDULES, check_schedule, learning_rate_schedule


def _adamw(train: ConfigDict) -> optax.GradientTransformation:
    return optax.scale_by_adam(b1=train.beta1, b2=train.beta2, eps=train.epsilon)


def _muon(train: ConfigDict) -> optax.GradientTransformation:
    ratio = train.adam_learning_rate / train.learning_rate if train.adam_learning_rate else 1.0
    return optax.partition(
        {"matrix": muon(train), "other": optax.chain(_adamw(train), optax.scale(ratio))},
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
    "muon": Optimizer(_muon, (*_ADAM, "muon_momentum", "muon_dtype", "adam_learning_rate")),
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
        if not 0 < train[key] < math.inf:
            problems.append(UserError(f"must be above 0, not {train[key]}", where=f"config.train.{key}"))
    if train.muon_dtype not in ("auto", *MUON_DTYPES):
        what = f"{train.muon_dtype!r} is not one of auto, {', '.join(MUON_DTYPES)}"
        problems.append(UserError(what, where="config.train.muon_dtype"))
    problems += check_groups(train)
    problems += check_schedule(train)
    problems += unread_keys(train, "train", "optimizer", {name: row.reads for name, row in OPTIMIZERS.items()})
    return problems + unread_keys(train, "train", "schedule", {name: row.reads for name, row in SCHEDULES.items()})


def _in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same with every floating leaf of its state in float32, whatever the parameters and gradients are."""

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    return optax.GradientTransformation(
        lambda parameters: optimizer.init(cast(parameters)),
        lambda updates, state, parameters: optimizer.update(cast(updates), state, cast(parameters)),
    )


def build_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """Global-norm clipping, the chosen optimizer, decoupled weight decay and multipliers by name, the schedule.

    Updates and moments are float32 whatever the parameters are. In its state, the leaves that belong to a parameter
    have a path that ends in the parameter's, and a leading axis of layers where the parameter has one.

    Raises:
      UserError: every problem of the keys, together.
    """
    train = config.train
    raise_together(check_optimizer(train))
    return _in_float32(
        optax.chain(
            optax.clip_by_global_norm(train.gradient_clip) if train.gradient_clip else optax.identity(),
            OPTIMIZERS[train.optimizer].build(train),
            add_weight_decay(train),
            scale_by_group(train),
            optax.scale_by_learning_rate(learning_rate_schedule(config)),
        )
    )
