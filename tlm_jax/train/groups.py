"""Groups of parameters by name, each with its own learning-rate multiplier and weight decay."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import optax
from ml_collections import ConfigDict

from tlm_jax.errors import UserError
from tlm_jax.train.per_layer import Path, parameter_name, stateless_by_leaf

_KEY = "config.train.groups"
_NUMBERS = ("learning_rate_multiplier", "weight_decay")


def _of(train: ConfigDict, name: str) -> dict[str, Any]:
    """What the parameter's group says; empty without one."""
    return next((group for group in train.groups if re.search(group["match"], name)), {})


def add_weight_decay(train: ConfigDict) -> optax.GradientTransformation:
    """Adds to each update its parameter times its weight decay: its group's, or `weight_decay` unless excluded."""

    def decay(path: Path, update: jax.Array, parameter: jax.Array) -> jax.Array:
        name = parameter_name(path)
        excluded = any(text in name for text in train.weight_decay_exclude)
        rate = _of(train, name).get("weight_decay", 0.0 if excluded else train.weight_decay)
        return update + rate * parameter if rate else update

    return stateless_by_leaf(decay)


def scale_by_group(train: ConfigDict) -> optax.GradientTransformation:
    """Multiplies each update by its group's learning-rate multiplier."""

    def scale(path: Path, update: jax.Array, parameter: jax.Array) -> jax.Array:
        del parameter
        return update * _of(train, parameter_name(path)).get("learning_rate_multiplier", 1.0)

    return stateless_by_leaf(scale) if train.groups else optax.identity()


def check_groups(train: ConfigDict) -> list[UserError]:
    """The problems of the groups' form, and of `weight_decay_exclude`'s."""
    problems = [
        UserError(
            f"{text!r} is no part of a parameter's name",
            where="config.train.weight_decay_exclude",
            mend="give texts, such as ('norm', 'embedding')",
        )
        for text in train.weight_decay_exclude
        if not isinstance(text, str)
    ]
    for group in train.groups:
        if not isinstance(group, dict) or not isinstance(group.get("match"), str) or not group.keys() & set(_NUMBERS):
            mend = 'give dicts such as {"match": "embedding", "learning_rate_multiplier": 2.0, "weight_decay": 0.0}'
            problems.append(UserError(f"{group!r} is no group", where=_KEY, mend=mend))
            continue
        for key, value in group.items():
            if key == "match":
                try:
                    re.compile(value)
                except (re.error, OverflowError, RecursionError) as error:
                    problems.append(UserError(f"{value!r} is no regular expression: {error}", where=_KEY))
            elif key not in _NUMBERS:
                mend = f"there are match, {', '.join(_NUMBERS)}"
                problems.append(UserError(f"unknown key {key!r} in {group!r}", where=_KEY, mend=mend))
            elif type(value) not in (int, float) or not (value >= 0 and math.isfinite(value)):
                problems.append(UserError(f"{key} must be a number of at least 0, not {value!r}", where=_KEY))
    return problems


def check_names(train: ConfigDict, names: list[str]) -> list[UserError]:
    """The problems of well-formed groups with the parameters that exist: nothing matched, or something twice."""
    problems, there_are = [], f"the parameters are {', '.join(names)}"
    for group in train.groups:
        if not any(re.search(group["match"], name) for name in names):
            problems.append(UserError(f"{group['match']!r} matches no parameter", where=_KEY, mend=there_are))
    for name in names:
        matching = [repr(group["match"]) for group in train.groups if re.search(group["match"], name)]
        if len(matching) > 1:
            problems.append(UserError(f"{' and '.join(matching)} both match {name}", where=_KEY, mend=there_are))
    for text in train.weight_decay_exclude:
        if not any(text in name for name in names):
            where = "config.train.weight_decay_exclude"
            problems.append(UserError(f"{text!r} is in the name of no parameter", where=where, mend=there_are))
    return problems
