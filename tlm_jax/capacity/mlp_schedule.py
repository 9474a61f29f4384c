"""What a config says of MLP widths: one for each layer, or, where d_model varies, their ratios to it."""

from __future__ import annotations

import math
from functools import partial

from ml_collections import ConfigDict

from tlm_jax.capacity.schedules import (
    CURVES,
    Curve,
    check_ends,
    check_shares,
    grouped,
    run_lengths,
    sigmoid,
    tapered,
    uniform,
)
from tlm_jax.capacity.shape import is_integer
from tlm_jax.errors import UserError, raise_together


def width_key(config: ConfigDict) -> str:
    """The key of `config.profile` that has the mean width of MLPs: of the one of a layer, or of each of its experts."""
    return "expert_d_ff" if config.profile.num_experts else "d_ff"


def mlp_widths(config: ConfigDict) -> tuple[int, ...]:
    """The MLP width of each layer where all layers have one d_model; of layers of experts, the width of one.

    Raises:
      UserError: keys with which there are none.
    """
    p, key = config.profile, width_key(config)
    _check_plateaus(config)
    if p.schedule == "uniform":
        return uniform(p.num_layers, p[key], p.multiple_of, key)
    if p.schedule == "list":
        return _listed(config)
    if p.schedule == "three_group":
        return grouped(_group_ratios(config), p.num_layers, p[key], p.multiple_of, key)
    curve = _curve(config)
    return tapered(curve, p.num_layers, p[key], p.start_ratio, p.end_ratio, p.multiple_of, p.plateaus, key)


def mlp_ratios(config: ConfigDict) -> tuple[float, ...]:
    """How wide each layer's MLP is for its d_model, over the mean of the schedule.

    Raises:
      UserError: keys with which there are none; a list gives widths, not ratios.
    """
    p = config.profile
    _check_plateaus(config)
    if p.schedule == "uniform":
        return (1.0,) * p.num_layers
    if p.schedule == "list":
        raise UserError(
            "a list gives every MLP's width, so that no d_model is left to match",
            where="config.profile.schedule",
            mend="take a curve, uniform or three_group, or schedule=file for widths of all kinds",
        )
    if p.schedule == "three_group":
        ratios = list(_group_ratios(config))
        check_shares(ratios)
    else:
        check_ends(p.start_ratio, p.end_ratio)
        runs, curve = p.plateaus or p.num_layers, _curve(config)
        if not 1 < runs <= p.num_layers:
            what = f"{runs} widths over {p.num_layers} layers"
            raise UserError(what, where="config.profile.plateaus", mend="take 0, or from 2 to num_layers")
        ratios = [p.end_ratio + (p.start_ratio - p.end_ratio) * curve(run / (runs - 1)) for run in range(runs)]
    lengths = run_lengths(p.num_layers, len(ratios))
    return tuple(ratio for ratio, length in zip(ratios, lengths, strict=True) for _ in range(length))


def _check_plateaus(config: ConfigDict) -> None:
    p = config.profile
    if p.layers is not None and p.schedule != "list":
        raise UserError(
            f"schedule={p.schedule} makes the widths itself",
            where="config.profile.layers",
            mend="leave it at None, or set profile.schedule=list",
        )
    if not is_integer(p.plateaus) or p.plateaus < 0:
        raise UserError(f"must be 0 or a positive integer, not {p.plateaus!r}", where="config.profile.plateaus")


def _curve(config: ConfigDict) -> Curve:
    p = config.profile
    if p.schedule != "sigmoid":
        return CURVES[p.schedule]
    if not (math.isfinite(p.sigmoid_steepness) and p.sigmoid_steepness > 0):
        raise UserError(f"must be positive, not {p.sigmoid_steepness:g}", where="config.profile.sigmoid_steepness")
    return partial(sigmoid, steepness=p.sigmoid_steepness)


def _group_ratios(config: ConfigDict) -> tuple[float, ...]:
    """The ratios of schedule=three_group, which has three plateaus by itself."""
    p, ratios = config.profile, config.profile.group_ratios
    if len(ratios) != 3 or not all(isinstance(r, (int, float)) and not isinstance(r, bool) for r in ratios):
        raise UserError(
            f"schedule=three_group needs three numbers, not {ratios!r}",
            where="config.profile.group_ratios",
            mend="such as (1.5, 1, 0.5) for the early, middle and late layers",
        )
    if p.plateaus not in (0, 3):
        raise UserError(f"schedule=three_group makes 3 plateaus, not {p.plateaus}", where="config.profile.plateaus")
    return ratios


def plateau_problems(config: ConfigDict) -> list[UserError]:
    """Those of a schedule that gives every layer's width."""
    if config.profile.plateaus == 0:
        return []
    return [
        UserError(
            f"schedule={config.profile.schedule} gives every layer's width, so plateaus must be 0",
            where="config.profile.plateaus",
        )
    ]


def _listed(config: ConfigDict) -> tuple[int, ...]:
    """The widths of schedule=list, one for each of num_layers; the mean has no part in it."""
    key = width_key(config)
    p, where = config.profile, "config.profile.layers"
    if not isinstance(p.layers, (list, tuple)) or not all(is_integer(width) and width > 0 for width in p.layers):
        raise UserError(f"schedule=list needs the {key} of each layer, not {p.layers!r}", where=where)
    widths = tuple(p.layers)
    problems = plateau_problems(config)
    if len(widths) != p.num_layers:
        problems.append(
            UserError(
                f"{len(widths)} widths for num_layers={p.num_layers}",
                where=where,
                mend=f"set profile.num_layers={len(widths)}",
            )
        )
    odd = [index for index, width in enumerate(widths) if width % p.multiple_of]
    if odd:
        problems.append(
            UserError(
                f"layer {odd[0]} has {key}={widths[odd[0]]}, not a multiple of multiple_of={p.multiple_of}",
                where=where,
                mend=f"set profile.multiple_of={math.gcd(*widths)}",
            )
        )
    raise_together(problems)
    return widths
