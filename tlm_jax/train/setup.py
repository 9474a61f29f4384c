"""Everything a run is made of, built from its config: all problems found first, arrays later."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from tlm_jax.capacity.from_config import profile_from_config
from tlm_jax.capacity.profile import Profile
from tlm_jax.checkpoint.layout import EMA, WEIGHTS
from tlm_jax.checkpoint.manager import check_checkpoint_keys
from tlm_jax.counts import counted
from tlm_jax.data.mixture import Mixture, open_data
from tlm_jax.data.store import TokenStore
from tlm_jax.errors import UserError, raise_together
from tlm_jax.model.attention import check_kernels
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.model.settings import settings_from_config
from tlm_jax.parallel.devices import all_devices
from tlm_jax.parallel.mesh import BATCH_AXES, make_mesh
from tlm_jax.train.data_check import data_problems
from tlm_jax.train.groups import check_names
from tlm_jax.train.optimizer import build_optimizer
from tlm_jax.train.per_layer import parameter_names
from tlm_jax.train.schedules import learning_rate_schedule
from tlm_jax.train.state import State, abstract_state
from tlm_jax.train.step import TrainStep, make_train_step

T = TypeVar("T")
_MOST_WORKERS = 1024


@dataclass(frozen=True)
class StepSetup:
    """What a training step is made of, on devices that need not be there."""

    config: ConfigDict
    profile: Profile
    mesh: Mesh
    model: FunctionalDecoder
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    abstract: State


@dataclass(frozen=True)
class Setup(StepSetup):
    """A run before its first array."""

    store: TokenStore | Mixture


def _try(problems: list[UserError], build: Callable[[], T]) -> T | None:
    try:
        return build()
    except UserError as problem:
        problems.append(problem)
        return None


def _check_counts(config: ConfigDict) -> list[UserError]:
    problems = []
    minimum = {
        "train.num_steps": 1,
        "train.global_batch_size": 1,
        "train.gradient_accumulation": 1,
        "train.max_nonfinite_steps": 1,
        "train.hang_seconds": 0,
        "train.spike_deviations": 0,
        "train.spike_window": 8,
        "train.z_loss": 0,
        "data.sequence_length": 1,
        "data.num_workers": 0,
        "validation.every_steps": 0,
        "validation.num_windows": 0,
        "validation.batch_size": 0,
        "log.every_steps": 1,
        "log.norms_every_steps": 0,
        "log.profile_at_step": 0,
        "log.peak_flops": 0,
    }
    for key, least in minimum.items():
        room, name = key.split(".")
        value = config[room][name]
        if isinstance(value, int) and value >= 2**31:  # counters and shapes are int32
            problems.append(UserError(f"must be below 2^31, not {value}", where=f"config.{key}"))
        elif not least <= value < math.inf:
            problems.append(UserError(f"must be at least {least}, not {value}", where=f"config.{key}"))
    if _MOST_WORKERS < config.data.num_workers < 2**31:
        what = f"must be at most {_MOST_WORKERS}, not {config.data.num_workers}"
        mend = "take no more than the host has CPUs"
        problems.append(UserError(what, where="config.data.num_workers", mend=mend))
    if config.checkpoint.keep_best > 0 and not config.validation.every_steps:
        where, mend = "config.checkpoint.keep_best", "set config.validation.every_steps"
        problems.append(UserError("a run that is validated only at its end has no best", where=where, mend=mend))
    if config.train.nonfinite not in ("skip", "hunt"):
        where = "config.train.nonfinite"
        problems.append(UserError(f"{config.train.nonfinite!r} is not one of skip, hunt", where=where))
    if not 0 <= config.seed < 2**32:
        problems.append(UserError(f"must be from 0 to 2^32 - 1, not {config.seed}", where="config.seed"))
    return problems


def _check_weights(config: ConfigDict) -> list[UserError]:
    chosen, where = config.validation.weights, "config.validation.weights"
    if chosen not in WEIGHTS:
        return [UserError(f"{chosen!r} is not one of {', '.join(WEIGHTS)}", where=where)]
    if chosen == EMA and not config.train.ema_decay:
        return [UserError("no moving average is kept", where=where, mend="set config.train.ema_decay, such as 0.999")]
    return []


def validation_batch_size(config: ConfigDict) -> int:
    """`validation.batch_size`, or the training batch where it is 0."""
    return config.validation.batch_size or config.train.global_batch_size


def _check_batches(config: ConfigDict, mesh: Mesh) -> list[UserError]:
    shards = 1
    for axis in BATCH_AXES:
        shards *= mesh.shape[axis]
    problems = []
    pieces = math.lcm(shards, jax.process_count()) * config.train.gradient_accumulation
    if config.train.global_batch_size % pieces:
        problems.append(
            UserError(
                f"{config.train.global_batch_size} does not divide into {counted(shards, 'batch shard')} × "
                f"{counted(config.train.gradient_accumulation, 'micro-batch', 'micro-batches')} on "
                f"{counted(jax.process_count(), 'host')}",
                where="config.train.global_batch_size",
                mend=f"use a multiple of {pieces}",
            )
        )
    if validation_batch_size(config) % shards:
        problems.append(
            UserError(
                f"{validation_batch_size(config)} does not divide into {counted(shards, 'batch shard')}",
                where="config.validation.batch_size",
                mend=f"use a multiple of {shards}",
            )
        )
    return problems


def _near(value: int, size: int) -> str:
    return ", ".join(str(n) for n in (value // size * size, -(-value // size) * size) if n)


def _check_divisibility(config: ConfigDict, profile: Profile, mesh: Mesh) -> list[UserError]:
    """What an axis size asked for cannot cut: the first layer at fault, and the nearest widths that work."""
    problems = []
    if mesh.shape["expert"] > 1:
        problems.append(UserError("no layer has experts: the axis would only repeat work", where="config.mesh.expert"))
    size = mesh.shape["tensor"]
    wanted = [("vocab_size", profile.vocab_size)]
    for index, layer in enumerate(profile.layers):
        wanted += [(f"layer {index}'s {key}", getattr(layer, key)) for key in ("num_heads", "num_kv_heads", "d_ff")]
    wrong = next(((name, value) for name, value in wanted if value % size), None)
    if wrong:
        name, value = wrong
        where, mend = "config.mesh.tensor", f"near: {_near(value, size)}"
        problems.append(UserError(f"{name} = {value} does not divide by {size}", where=where, mend=mend))
    size = mesh.shape["fsdp"]
    for index, layer in enumerate(profile.layers):
        if layer.d_model % size and any(n % size for n in (layer.d_ff, layer.num_heads, layer.num_kv_heads)):
            problems.append(
                UserError(
                    f"layer {index}'s d_model = {layer.d_model} does not divide by {size}, nor do all its other widths",
                    where="config.mesh.fsdp",
                    mend=f"lower fsdp and raise data, or take a d_model near: {_near(layer.d_model, size)}",
                )
            )
            break
    return problems


def _make(
    config: ConfigDict, devices: Sequence[jax.Device] | None = None, *, with_data: bool
) -> tuple[StepSetup, TokenStore | Mixture | None]:
    problems = _check_counts(config) + _check_weights(config) + check_checkpoint_keys(**config.checkpoint)
    profile = _try(problems, lambda: profile_from_config(config))
    devices = devices or all_devices()  # without one there is nothing more to find out
    settings = _try(problems, lambda: settings_from_config(config, devices[0].platform, devices[0].device_kind))
    optimizer = _try(problems, lambda: build_optimizer(config))
    mesh = _try(problems, lambda: make_mesh(config.mesh, devices))
    store = _try(problems, lambda: open_data(config.data.store, config.data.mixture)) if with_data else None
    if store is not None:
        problems += data_problems(config, store)
    if mesh is not None and not problems:
        problems += _check_batches(config, mesh)
        if profile is not None:
            problems += _check_divisibility(config, profile, mesh)
    if profile is not None and settings is not None:
        _try(problems, lambda: check_kernels(profile, settings, settings.document_mask, config.data.sequence_length))
        model = _try(problems, lambda: FunctionalDecoder(profile, settings))
        if optimizer is not None and model is not None:
            problems += check_names(config.train, parameter_names(model.abstract_parameters))
    raise_together(problems)
    assert profile is not None
    assert model is not None
    assert optimizer is not None
    assert mesh is not None
    with jax.set_mesh(mesh):
        window = config.train.spike_window if config.train.spike_deviations else 0
        abstract = abstract_state(model, optimizer, mesh, ema=config.train.ema_decay > 0, spike_window=window)
    setup = StepSetup(config, profile, mesh, model, optimizer, learning_rate_schedule(config), abstract)
    return setup, store


def check_config(config: ConfigDict) -> None:
    """Checks all of a config that needs no data; no array is allocated.

    Raises:
      UserError: all problems of the config and of the devices at hand, told together.
    """
    _make(config, with_data=False)


def build_step(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> StepSetup:
    """Builds what a training step is made of; no array is allocated.

    Args:
      config: the run's.
      devices: those of the mesh, which need not be there (`parallel.topologies`); by default all that are.

    Raises:
      UserError: all problems of the config and of the devices, told together.
    """
    return _make(config, devices, with_data=False)[0]


def build(config: ConfigDict) -> Setup:
    """Builds a run's parts; no array is allocated.

    Raises:
      UserError: all problems of the config, of the store it names, and of the devices at hand, told together.
    """
    parts, store = _make(config, with_data=True)
    assert store is not None
    return Setup(**vars(parts), store=store)


def jitted_train_step(setup: StepSetup) -> TrainStep:
    """The step of a run; see `make_train_step`."""
    config = setup.config
    return make_train_step(
        setup.model,
        setup.optimizer,
        setup.learning_rate,
        config.train.gradient_accumulation,
        setup.abstract,
        config.train.z_loss,
        config.train.ema_decay,
        config.train.spike_deviations,
    )
