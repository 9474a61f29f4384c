"""The profile that a config describes."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from tlm_jax.capacity.mlp_schedule import mlp_ratios, mlp_widths, plateau_problems, width_key
from tlm_jax.capacity.profile import Profile
from tlm_jax.capacity.schedules import CURVES
from tlm_jax.capacity.shape import EXPERT_FIELDS, LayerShape, divisors, integer_problems, is_integer, shape_problems
from tlm_jax.capacity.width_schedule import disagreements, heads, varying, width_problems
from tlm_jax.capacity.widths import RESIZES
from tlm_jax.config import default_config, unread_keys
from tlm_jax.errors import UserError, raise_together

MOST_LAYERS = 10_000  # beyond any model, and few enough for a profile in half a second

_ENDS = ("start_ratio", "end_ratio")
# Schedule -> the keys it reads of those that only some read. `uniform` stands apart: it reads none and lets all stand,
# so that the twin of any tapered config is one override away.
_READS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(CURVES, _ENDS),
    "sigmoid": (*_ENDS, "sigmoid_steepness"),
    "three_group": ("group_ratios",),
    "list": (),
    "file": (),
}
SCHEDULES = ("uniform", *_READS)
_FROM_FILE = ("num_heads", "num_kv_heads", "head_dim", "mlp", "qk_norm", *EXPERT_FIELDS)  # fields of every layer


def profile_from_config(config: ConfigDict) -> Profile:
    """Makes the profile of `config.profile` and `config.model`.

    The schedules: `uniform`; a curve of `schedules.CURVES`; `three_group`, one width for each third of the depth by
    `profile.group_ratios`; `list`, where `profile.layers` has the d_ff of each layer and must agree with num_layers and
    multiple_of; `file`, where `profile.layers` is the path of a profile's JSON, with which the sizes, windows, MLP and
    QK-norm of `config.profile` must agree where they are not at their default. d_ff has no part in the last two. A key
    that only other schedules read must be at its default, except under `uniform`.

    d_model is that of `profile.width_schedule`: where it varies, `schedule` gives the MLPs' ratios to it.

    Raises:
      UserError: everything that is wrong with the keys read, together.
    """
    schedule = config.profile.schedule
    if schedule not in SCHEDULES:
        near = difflib.get_close_matches(str(schedule), SCHEDULES, n=1, cutoff=0.0)[0]
        schedule_problem = UserError(
            f"unknown schedule {schedule!r}",
            where="config.profile.schedule",
            mend=f"the nearest is {near}; there are {', '.join(SCHEDULES)}",
        )
        raise_together([schedule_problem, *_size_problems(config)])
    problems = unread_keys(config.profile, "profile", "schedule", _READS)
    if schedule == "file":
        return _from_file(config, problems)
    problems += _size_problems(config) + width_problems(config)
    layers: list[tuple[int, int]] = []  # d_model and MLP width
    if not (problems if config.profile.width_schedule != "uniform" else _budget_problems(config)):
        try:
            layers = _layers(config)
        except UserError as problem:
            problems.append(problem)
    raise_together(problems)
    p = config.profile
    shapes = tuple(
        LayerShape(
            d_model=d_model,
            d_ff=0 if p.num_experts else width,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_experts=p.num_experts,
            experts_per_token=p.experts_per_token,
            expert_d_ff=width if p.num_experts else 0,
            padded_experts=p.padded_experts,
            mlp=p.mlp,
            window=p.windows[index % len(p.windows)],
            qk_norm=p.qk_norm,
        )
        for index, (d_model, width) in enumerate(layers)
        for num_heads, num_kv_heads, head_dim in [heads(config, d_model)]
    )
    resize = p.resize if p.width_schedule != "uniform" else RESIZES[0]
    return Profile(shapes, config.model.vocab_size, p.d_model, config.model.tied_embeddings, resize)


def _layers(config: ConfigDict) -> list[tuple[int, int]]:
    """d_model and the MLP's width, of an expert where there are experts, of each layer."""
    p = config.profile
    if p.width_schedule == "uniform":
        return [(p.d_model, width) for width in mlp_widths(config)]
    return varying(config, mlp_ratios(config))


def sequence_length(config: ConfigDict) -> int:
    """`data.sequence_length`, at which a profile's FLOPs are counted.

    Raises:
      UserError: it is no positive integer.
    """
    raise_together(_positive(config, "data.sequence_length"))
    return int(config.data.sequence_length)


def _positive(config: ConfigDict, *names: str) -> list[UserError]:
    return integer_problems({name: config[name] for name in names}, "config")


def _budget_problems(config: ConfigDict) -> list[UserError]:
    """Keys without which no width can be computed."""
    problems = _positive(config, "profile.num_layers", f"profile.{width_key(config)}", "profile.multiple_of")
    depth = config.profile.num_layers
    if not problems and depth > MOST_LAYERS:
        problems.append(UserError(f"must be at most {MOST_LAYERS}, not {depth}", where="config.profile.num_layers"))
    return problems


def _size_problems(config: ConfigDict) -> list[UserError]:
    """What is wrong with the sizes, whatever the schedule."""
    p = config.profile
    named = ("d_model", "num_heads", "num_kv_heads", "mlp", "qk_norm", *EXPERT_FIELDS)
    fields: dict[str, Any] = {name: p[name] for name in named if name != width_key(config)}
    problems = []
    usual = default_config().profile.d_ff
    if p.num_experts and p.d_ff != usual:
        what, mend = f"layers of experts do not read it, and it is {p.d_ff}", f"leave it {usual}, or set expert_d_ff"
        problems.append(UserError(what, where="config.profile.d_ff", mend=mend))
    if not p.windows or not all(is_integer(window) and window >= 0 for window in p.windows):
        problems.append(
            UserError(
                f"takes 0 or positive integers, not {p.windows!r}",
                where="config.profile.windows",
                mend="such as (0,) for the whole context in every layer, or (1024, 0) for a window in every other one",
            )
        )
    elif is_integer(p.num_layers) and 0 < p.num_layers < len(p.windows):
        what = f"{len(p.windows)} values for num_layers={p.num_layers}"
        problems.append(UserError(what, where="config.profile.windows", mend="the values take turns over the layers"))
    positive = not _positive(config, "profile.d_model", "profile.num_heads")
    if p.head_dim != 0:
        fields["head_dim"] = p.head_dim
    elif positive and p.d_model % (2 * p.num_heads):
        fits = divisors(p.d_model // 2) if p.d_model % 2 == 0 else []
        near = f"the nearest that works is {min(fits, key=lambda heads: abs(heads - p.num_heads))}, or " if fits else ""
        problems.append(
            UserError(
                f"d_model={p.d_model} over {p.num_heads} heads is not an even head_dim",
                where="config.profile.num_heads",
                mend=f"{near}set head_dim",
            )
        )
    return (
        _budget_problems(config)
        + shape_problems(fields, "config.profile")
        + problems
        + _positive(config, "model.vocab_size")
    )


def _from_file(config: ConfigDict, problems: list[UserError]) -> Profile:
    """The profile of schedule=file, with which the vocabulary of `config.model` and all sizes given must agree.

    Args:
      config: the config.
      problems: found so far.
    """
    path = config.profile.layers
    try:
        if not isinstance(path, str) or not path:
            what = f"schedule=file needs the path of a profile's JSON, not {path!r}"
            raise UserError(what, where="config.profile.layers")
        profile = Profile.from_json(Path(path).read_text(encoding="utf-8"), where=path)
    except UserError as problem:
        problems.append(problem)
    except (OSError, UnicodeDecodeError) as error:
        problems.append(UserError(f"cannot read {path}: {error}", where="config.profile.layers"))
    else:
        problems += plateau_problems(config) + _disagreements(config, profile, path)
    raise_together(problems)
    return profile


def _disagreements(config: ConfigDict, profile: Profile, path: str) -> list[UserError]:
    """What the config says otherwise than the profile's file; a key of `config.profile` at its default says nothing."""
    p, defaults = config.profile, default_config().profile
    problems = disagreements(config)
    problems += [
        UserError(f"{ours} here, {theirs} in {path}", where=f"config.model.{name}", mend="make them the same")
        for name in ("vocab_size", "tied_embeddings")
        for ours, theirs in [(config.model[name], getattr(profile, name))]
        if ours != theirs
    ]

    def check(name: str, found: Collection[Any], agrees: bool) -> None:
        if p[name] != defaults[name] and not agrees:
            shown = ", ".join(str(value) for value in found)
            mend = f"make them the same, or leave it at {defaults[name]!r}"
            problems.append(UserError(f"{p[name]} here, {shown} in {path}", where=f"config.profile.{name}", mend=mend))

    check("d_model", [profile.d_embedding], p.d_model == profile.d_embedding)
    check("num_layers", [len(profile.layers)], p.num_layers == len(profile.layers))
    for name in _FROM_FILE:
        found = dict.fromkeys(getattr(layer, name) for layer in profile.layers)
        check(name, found, list(found) == [p[name]])
    windows = [layer.window for layer in profile.layers]
    turns = [window for window, _ in zip(itertools.cycle(p.windows), windows, strict=False)]
    check("windows", [tuple(windows)], turns == windows and len(p.windows) <= len(windows))
    widths = dict.fromkeys(layer.d_ff for layer in profile.layers)
    check("multiple_of", widths, p.multiple_of > 0 and not any(width % p.multiple_of for width in widths))
    return problems
