"""What a config says of d_model: the layers of a model whose width varies, at the budget of its uniform twin."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from ml_collections import ConfigDict

from tlm_jax.capacity.mlp_schedule import width_key
from tlm_jax.capacity.mlp_widths import matched, proportional
from tlm_jax.capacity.schedules import run_lengths
from tlm_jax.capacity.shape import GATED_MLPS, integer_problems, is_integer
from tlm_jax.capacity.width_solver import COUNTS, WidthBudget, by_layer, nearest, neighbours, rounded, widest
from tlm_jax.capacity.widths import (
    PROGRESSIONS,
    RESIZES,
    SHAPES,
    STRAIGHT,
    TURNING,
    WidthShape,
    narrowness,
    turning_layer,
)
from tlm_jax.config import default_config, unread_keys
from tlm_jax.errors import UserError

WIDTH_SCHEDULES = ("uniform", *SHAPES)
WIDTH_BUDGETS = ("rounded", "nearest", "exact")
_CHOICES = {
    "width_schedule": WIDTH_SCHEDULES,
    "width_progression": tuple(PROGRESSIONS),
    "width_budget": WIDTH_BUDGETS,
    "width_count": COUNTS,
    "resize": RESIZES,
}
# As with `schedule`, uniform reads none of these keys and lets all stand.
_SIZES = ("bottleneck_ratio", "bottleneck_depth", "width_multiple_of", "width_plateaus", "fixed_head_dim")
_READS = {**dict.fromkeys(TURNING, ("bottleneck_depth",)), **dict.fromkeys(STRAIGHT, ())}


def width_problems(config: ConfigDict) -> list[UserError]:
    """What is wrong with the keys of d_model's schedule, each by itself."""
    p = config.profile
    if p.width_schedule == "uniform":
        return []
    problems = unread_keys(p, "profile", "width_schedule", _READS)
    for key, choices in _CHOICES.items():
        if p[key] not in choices:
            near = difflib.get_close_matches(str(p[key]), choices, n=1, cutoff=0.0)[0]
            mend = f"the nearest is {near}; there are {', '.join(choices)}"
            problems.append(UserError(f"{p[key]!r} is none", where=f"config.profile.{key}", mend=mend))
    if not 0 < p.bottleneck_ratio <= 1:
        what = f"must be above 0 and at most 1, not {p.bottleneck_ratio:g}"
        problems.append(UserError(what, where="config.profile.bottleneck_ratio", mend="the paper's is 0.3"))
    if not is_integer(p.width_plateaus) or p.width_plateaus < 0:
        what = f"must be 0 or a positive integer, not {p.width_plateaus!r}"
        problems.append(UserError(what, where="config.profile.width_plateaus"))
    if p.head_dim != 0:
        what, mend = "must be 0 where d_model varies", "set fixed_head_dim for heads of one size"
        problems.append(UserError(what, where="config.profile.head_dim", mend=mend))
    return problems + _multiple_problems(config)


def _multiple_problems(config: ConfigDict) -> list[UserError]:
    """Widths must be made of whole heads, of an even size, and key-value heads of whole groups of query heads."""
    p = config.profile
    problems = integer_problems({"width_multiple_of": p.width_multiple_of}, "config.profile")
    if p.fixed_head_dim != 0:
        problems += integer_problems({"fixed_head_dim": p.fixed_head_dim}, "config.profile")
        if not problems and p.fixed_head_dim % 2:
            what = f"must be even for rotary embeddings, not {p.fixed_head_dim}"
            problems.append(UserError(what, where="config.profile.fixed_head_dim"))
    counted = {name: p[name] for name in ("num_heads", "num_kv_heads")}
    if problems or integer_problems(counted, "") or p.num_heads % p.num_kv_heads:  # the last two are told elsewhere
        return problems
    group = p.num_heads // p.num_kv_heads
    if p.fixed_head_dim:
        needed, made_of = p.fixed_head_dim * group, f"{group} heads of fixed_head_dim={p.fixed_head_dim}"
    else:
        needed, made_of = 2 * p.num_heads, f"num_heads={p.num_heads} heads of an even size"
    if p.width_multiple_of % needed == 0:
        return []
    works = max(1, round(p.width_multiple_of / needed)) * needed
    return [
        UserError(
            f"widths in multiples of {p.width_multiple_of} are not whole {made_of}",
            where="config.profile.width_multiple_of",
            mend=f"the nearest that works is {works}",
        )
    ]


def disagreements(config: ConfigDict) -> list[UserError]:
    """Keys of d_model's schedule that are set although a file gives the widths."""
    p, defaults = config.profile, default_config().profile
    return [
        UserError("a file gives every layer's d_model", where=f"config.profile.{key}", mend=f"leave it {defaults[key]}")
        for key in (*_CHOICES, *_SIZES)
        if p[key] != defaults[key]
    ]


def heads(config: ConfigDict, d_model: int) -> tuple[int, int, int]:
    """num_heads, num_kv_heads and head_dim of a layer."""
    p = config.profile
    if p.width_schedule == "uniform" or not p.fixed_head_dim:
        return p.num_heads, p.num_kv_heads, p.head_dim or d_model // p.num_heads
    num_heads = d_model // p.fixed_head_dim
    return num_heads, num_heads * p.num_kv_heads // p.num_heads, p.fixed_head_dim


def width_shape(config: ConfigDict) -> WidthShape:
    """The shape that the keys describe.

    Raises:
      UserError: the depth or the number of runs does not allow it.
    """
    p = config.profile
    runs = p.width_plateaus or p.num_layers
    if runs > p.num_layers:
        what = f"{runs} runs need as many layers, and num_layers={p.num_layers}"
        raise UserError(what, where="config.profile.width_plateaus")
    if runs < 2:
        where = "config.profile.width_plateaus" if p.width_plateaus else "config.profile.num_layers"
        raise UserError("one width does not vary", where=where, mend="use width_schedule=uniform")
    lengths = tuple(run_lengths(p.num_layers, runs))
    turn = turning_layer(p.num_layers, p.bottleneck_depth) if p.width_schedule in TURNING else 0
    near = narrowness(p.width_schedule, lengths, turn)
    return WidthShape(lengths, near, p.bottleneck_ratio * p.d_model, p.width_progression)


def width_budget(config: ConfigDict) -> WidthBudget:
    """The weights to be matched."""
    p = config.profile
    return WidthBudget(
        num_layers=p.num_layers,
        d_model=p.d_model,
        kv_share=Fraction(p.num_kv_heads, p.num_heads),
        mlp_matrices=3 if p.mlp in GATED_MLPS else 2,
        mlp_width=p[width_key(config)] * (p.num_experts or 1),
        num_experts=p.num_experts,
        count=p.width_count,
    )


def varying(config: ConfigDict, ratios: Sequence[float]) -> list[tuple[int, int]]:
    """d_model and MLP width, of an expert where there are experts, of each layer.

    The widths do not depend on the ratios, so that an MLP taper moves weights between MLPs and nothing else. MLPs are
    in proportion to d_model and ratio. With width_budget=rounded and equal ratios they are rounded and that is all;
    tapered, they weigh exactly what those weigh. With width_budget=exact, all matrices together weigh exactly what the
    uniform twin's do, by the count of width_count; with nearest, as nearly as steps of multiple_of allow.

    Args:
      config: checked by `width_problems`.
      ratios: of each layer, its MLP's width for its d_model over the mean.

    Raises:
      UserError: there are no such widths, with what works.
    """
    p, shape, budget = config.profile, width_shape(config), width_budget(config)
    wide, step, experts = widest(shape, budget), p.width_multiple_of, p.num_experts or 1
    levels = rounded(shape, wide, step, p.round_widest)
    if p.width_budget != "rounded":
        levels = nearest(shape, wide, levels, step, budget)
        near = neighbours(shape, wide, levels, step, budget)
        return _at_budget(config, budget, ratios, (by_layer(shape, candidate) for candidate in near))
    widths = by_layer(shape, levels)
    mlps = proportional(widths, Fraction(p[width_key(config)], p.d_model), p.multiple_of)
    if len(set(ratios)) > 1:
        per_width = [experts * weight for weight in budget.per_mlp_width(widths)]
        total = sum(weight * width for weight, width in zip(per_width, mlps, strict=True))
        found = matched(widths, ratios, per_width, total, p.multiple_of)
        if found is None:
            raise _no_widths(config)
        mlps = found
    return list(zip(widths, mlps, strict=True))


def _at_budget(
    config: ConfigDict, budget: WidthBudget, ratios: Sequence[float], candidates: Iterable[tuple[int, ...]]
) -> list[tuple[int, int]]:
    """The first of the candidates, widths near the budget, with MLP widths that make up what is missing."""
    p, exact = config.profile, config.profile.width_budget == "exact"
    for widths in candidates:
        per_width = [(p.num_experts or 1) * weight for weight in budget.per_mlp_width(widths)]
        mlps = matched(widths, ratios, per_width, budget.target - budget.beside_mlp(widths), p.multiple_of, exact)
        if mlps is not None:
            return list(zip(widths, mlps, strict=True))
    raise _no_widths(config)


def _no_widths(config: ConfigDict) -> UserError:
    p = config.profile
    smaller = math.gcd(p.multiple_of, 16) if p.multiple_of > 16 else max(1, p.multiple_of // 2)
    return UserError(
        f"no {width_key(config)} in multiples of {p.multiple_of} meet the budget exactly",
        where="config.profile.multiple_of",
        mend=f"take a smaller one, such as {smaller}, or width_budget=nearest",
    )
