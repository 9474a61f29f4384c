"""Learning-rate schedules: a linear warm-up, then one of the curves of a table.

n counts steps from 1, N is `num_steps`, W `warmup_steps`, D `decay_steps`, r `final_learning_rate_ratio`; the rate that
trains step n is the curve at n, so the first step already moves and the last one is at the end of the curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ml_collections import ConfigDict

from tlm_jax.errors import UserError

Curve = Callable[[jax.Array], jax.Array]  # of the step n >= W, float32, to the learning rate

# Fraction of the way through the decay, 0 to 1, to the fraction of the height that is left; the last by Hägele et al.
# 2024, arXiv 2405.18392. "exponential" falls by equal factors instead and is not of this form.
DECAYS: dict[str, Curve] = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: 0.5 * (1 + jnp.cos(jnp.pi * t)),
    "sqrt": lambda t: 1 - jnp.sqrt(t),
}
DECAY_SHAPES = (*DECAYS, "exponential")


class Schedule(NamedTuple):
    """A curve after the warm-up, and the keys of `config.train` that it reads besides those that all read."""

    curve: Callable[[ConfigDict], Curve]
    reads: tuple[str, ...]


def _cosine(config: ConfigDict) -> Curve:
    t = config.train
    curve = optax.cosine_decay_schedule(
        t.learning_rate, max(t.num_steps - t.warmup_steps, 1), t.final_learning_rate_ratio
    )
    return lambda n: curve(n - t.warmup_steps)


def _linear(config: ConfigDict) -> Curve:
    t = config.train
    peak, steps = t.learning_rate, max(t.num_steps - t.warmup_steps, 1)
    return lambda n: peak * (1 - (1 - t.final_learning_rate_ratio) * jnp.clip((n - t.warmup_steps) / steps, 0, 1))


def _constant(config: ConfigDict) -> Curve:
    return lambda n: jnp.full_like(n, config.train.learning_rate)


def _inverse_sqrt(config: ConfigDict) -> Curve:
    t = config.train
    return lambda n: t.learning_rate * jnp.sqrt(max(t.warmup_steps, 1) / n)


def _final_decay(train: ConfigDict) -> Curve:
    """1 up to step N - D, then down to r at step N along `decay_shape`."""
    steps, ratio = train.decay_steps, train.final_learning_rate_ratio

    def factor(n: jax.Array) -> jax.Array:
        t = jnp.clip((n - (train.num_steps - steps)) / max(steps, 1), 0, 1)
        return ratio**t if train.decay_shape == "exponential" else ratio + (1 - ratio) * DECAYS[train.decay_shape](t)

    return factor


def _wsd(config: ConfigDict) -> Curve:
    factor = _final_decay(config.train)
    return lambda n: config.train.learning_rate * factor(n)


def _power(config: ConfigDict) -> Curve:
    t, factor = config.train, _final_decay(config.train)
    tokens = t.global_batch_size * config.data.sequence_length
    last = t.num_steps - t.decay_steps
    scale = t.global_batch_size * t.power_amplitude

    def curve(n: jax.Array) -> jax.Array:
        law = scale * (jnp.minimum(n, last) * float(tokens)) ** t.power_exponent
        return jnp.minimum(t.learning_rate, law) * factor(n)

    return curve


SCHEDULES: dict[str, Schedule] = {
    # Half a cosine from the peak to r of it.
    "cosine": Schedule(_cosine, ("final_learning_rate_ratio",)),
    "linear": Schedule(_linear, ("final_learning_rate_ratio",)),
    "constant": Schedule(_constant, ()),
    # peak · sqrt(W / n).
    "inverse_sqrt": Schedule(_inverse_sqrt, ()),
    # The peak until step N - D, then down to r of it along decay_shape (Hu et al. 2024, arXiv 2404.06395).
    "wsd": Schedule(_wsd, ("final_learning_rate_ratio", "decay_steps", "decay_shape")),
    # min(peak, B · a · tokens^b), a batch being B sequences and the tokens those of n steps, until step N - D, then
    # down along decay_shape to r of what it was there (Shen et al. 2024, arXiv 2408.13359).
    "power": Schedule(
        _power, ("final_learning_rate_ratio", "decay_steps", "decay_shape", "power_amplitude", "power_exponent")
    ),
}


# The keys of `config.train` that say how the rate goes on; not those of its beginning, warm-up and peak.
COURSE = ("num_steps", "schedule", *dict.fromkeys(key for row in SCHEDULES.values() for key in row.reads))


def learning_rate_schedule(config: ConfigDict) -> optax.Schedule:
    """The learning rate by the number of steps taken before: n / W of the curve at W, then `config.train.schedule`."""
    warmup, curve = config.train.warmup_steps, SCHEDULES[config.train.schedule].curve(config)

    def rate(count: jax.typing.ArrayLike) -> jax.Array:
        n = jnp.asarray(count, jnp.float32) + 1
        return curve(jnp.maximum(n, warmup)) * jnp.minimum(n / max(warmup, 1), 1)

    return rate


def first_changed_rate(before: ConfigDict, after: ConfigDict, steps: int) -> int | None:
    """The first of the steps 1 to `steps` that two configs train with different learning rates; None: there is none."""
    counts = jnp.arange(steps)
    rates = [np.asarray(learning_rate_schedule(config)(counts)) for config in (before, after)]
    different = np.flatnonzero(rates[0] != rates[1])
    return int(different[0]) + 1 if len(different) else None


def check_schedule(train: ConfigDict) -> list[UserError]:
    """The problems of the schedule's keys, except keys that this schedule does not read."""
    problems = []

    def problem(key: str, what: str, mend: str = "") -> None:
        problems.append(UserError(what, where=f"config.train.{key}", mend=mend))

    for key, choices in (("schedule", tuple(SCHEDULES)), ("decay_shape", DECAY_SHAPES)):
        if train[key] not in choices:
            problem(key, f"{train[key]!r} is not one of {', '.join(choices)}")
    if not (train.learning_rate > 0 and math.isfinite(train.learning_rate)):
        problem("learning_rate", f"must be above 0, not {train.learning_rate}")
    if not (train.final_learning_rate_ratio >= 0 and math.isfinite(train.final_learning_rate_ratio)):
        problem("final_learning_rate_ratio", f"must be at least 0, not {train.final_learning_rate_ratio}")
    if not 0 <= train.warmup_steps <= train.num_steps:
        what = f"{train.warmup_steps} is not between 0 and train.num_steps = {train.num_steps}"
        problem("warmup_steps", what, "take fewer, such as a tenth of the steps, or raise train.num_steps")
    elif not 0 <= train.decay_steps <= train.num_steps - train.warmup_steps:
        most = train.num_steps - train.warmup_steps
        problem("decay_steps", f"{train.decay_steps} is not between 0 and the {most} after the warm-up", "take fewer")
    if train.schedule in ("wsd", "power") and train.decay_steps == 0:
        mend = "say how many of the last steps decay"
        mend += ", or take the schedule constant" if train.schedule == "wsd" else ""
        problem("decay_steps", f"{train.schedule} has no decay", mend)
    if train.decay_shape == "exponential" and not train.final_learning_rate_ratio:
        problem("final_learning_rate_ratio", "an exponential decay never ends at 0", "give a ratio above 0")
    if not (train.power_amplitude > 0 and math.isfinite(train.power_amplitude)):
        problem("power_amplitude", f"must be above 0, not {train.power_amplitude}")
    if not (train.power_exponent <= 0 and math.isfinite(train.power_exponent)):
        problem("power_exponent", f"must be at most 0, not {train.power_exponent}")
    return problems
