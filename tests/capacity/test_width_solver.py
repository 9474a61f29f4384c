"""Widths at a budget: exact where that is promised, in the shape's order, in multiples, for random sizes."""

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tlm_jax.capacity.from_config import MOST_LAYERS
from tlm_jax.capacity.mlp_widths import matched, proportional
from tlm_jax.capacity.width_solver import WidthBudget, by_layer, nearest, neighbours, rounded, widest
from tlm_jax.capacity.widths import PROGRESSIONS, SHAPES, TURNING, WidthShape, narrowness
from tlm_jax.errors import UserError

BUDGET = WidthBudget(num_layers=12, d_model=512, kv_share=Fraction(1), mlp_matrices=3, mlp_width=2048)


def shape_of(name, runs, ratio, d_model, turn_share=0.75, progression="geometric", length=1):
    lengths = (length,) * runs
    turn = min(max(round(turn_share * runs), 2), runs - 1) * length
    return WidthShape(lengths, narrowness(name, lengths, turn), ratio * d_model, progression)


@st.composite
def problems(draw):
    """A shape and a budget: any depth, ratios, shares of keys and values, MLPs and experts."""
    runs, length = draw(st.integers(3, 24)), draw(st.sampled_from([1, 1, 2, 3]))
    d_model = 64 * draw(st.integers(4, 32))
    experts = draw(st.sampled_from([0, 0, 4, 11]))
    budget = WidthBudget(
        num_layers=runs * length,
        d_model=d_model,
        kv_share=draw(st.sampled_from([Fraction(1), Fraction(1, 4)])),
        mlp_matrices=draw(st.sampled_from([2, 3])),
        mlp_width=d_model * draw(st.integers(1, 5)) * (experts or 1),
        num_experts=experts,
        count=draw(st.sampled_from(["effective", "raw"])),
    )
    ratio = draw(st.floats(0.2, 0.9))
    name, progression = draw(st.sampled_from(SHAPES)), draw(st.sampled_from(sorted(PROGRESSIONS)))
    return name, shape_of(name, runs, ratio, d_model, draw(st.floats(0.2, 0.8)), progression, length), budget


def in_order(shape, widths):
    """Whether no neighbours stand the other way round than the shape has them."""
    pairs = zip(itertools.pairwise(shape.narrowness), itertools.pairwise(widths), strict=True)
    return all((right - left) * (after - before) <= 0 for (left, right), (before, after) in pairs)


def weigh(widths, mlps, budget):
    """The weights in matrices, layer by layer and matrix by matrix."""
    total = 0
    for index, (d, f) in enumerate(zip(widths, mlps, strict=True)):
        kv = int(d * budget.kv_share)
        attention = d * d + 2 * d * kv + d * d
        mlp = budget.mlp_matrices * d * f * (budget.num_experts or 1)
        total += attention + mlp + d * budget.num_experts
        if budget.count == "effective":
            zeros = max(0, d - max([budget.d_model, *widths[:index]]))
            unread = max(0, d - max([budget.d_model, *widths[index + 1 :]]))
            total -= zeros * (d + 2 * kv) + unread * f * (budget.num_experts or 1)
    return total


@settings(max_examples=150, deadline=None)
@given(problems())
def test_before_rounding_the_weights_are_the_uniform_models(problem):
    name, shape, budget = problem
    wide = widest(shape, budget)
    widths = by_layer(shape, shape.widths(wide))
    assert wide > budget.d_model > shape.narrow == pytest.approx(min(widths))
    assert budget.weights(widths) == pytest.approx(budget.target, rel=1e-9)
    uniform = [budget.d_model] * budget.num_layers
    mlp = budget.mlp_width // (budget.num_experts or 1)
    assert weigh(uniform, [mlp] * budget.num_layers, budget) == budget.target
    if np.var(widths) and not budget.num_experts and budget.count == "raw":  # Jensen
        assert np.mean(widths) < budget.d_model


@settings(max_examples=150, deadline=None)
@given(problems(), st.sampled_from([16, 32, 64]), st.booleans())
def test_rounded_widths_keep_multiples_order_and_equal_ends(problem, multiple_of, round_widest):
    name, shape, budget = problem
    wide = widest(shape, budget)
    if shape.narrow * (round(wide) / wide if round_widest else 1) <= multiple_of / 2:
        with pytest.raises(UserError, match="bottleneck_ratio"):
            rounded(shape, wide, multiple_of, round_widest)
        return
    widths = rounded(shape, wide, multiple_of, round_widest)
    assert all(width % multiple_of == 0 for width in widths)
    assert in_order(shape, widths)
    if name in TURNING:
        assert widths[0] == widths[-1]


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([16, 32, 64, 128]))
def test_moving_on_brings_the_budget_nearer_and_stays_near_the_shape(problem, multiple_of):
    name, shape, budget = problem
    assume(shape.narrow > multiple_of)
    wide = widest(shape, budget)
    first = rounded(shape, wide, multiple_of)
    moved = nearest(shape, wide, first, multiple_of, budget)
    errors = [abs(budget.target - budget.weights(by_layer(shape, widths))) for widths in (first, moved)]
    assert errors[1] <= errors[0]
    assert in_order(shape, moved)
    assert all(width % multiple_of == 0 for width in moved)
    assert max(abs(shape.widths(wide) - moved)) <= multiple_of + 1
    near = shape.narrowness.index(1)
    assert moved[near] == first[near]
    if name in TURNING:
        assert moved[0] == moved[-1]
    for candidate in itertools.islice(neighbours(shape, wide, moved, multiple_of, budget), 30):
        assert in_order(shape, candidate)
        assert candidate[near] == first[near]


@settings(max_examples=100, deadline=None)
@given(problems(), st.sampled_from([16, 64]), st.lists(st.floats(0.5, 1.5), min_size=4, max_size=4))
def test_tapered_mlps_weigh_exactly_what_even_ones_do(problem, multiple_of, values):
    name, shape, budget = problem
    assume(shape.narrow > 64)
    experts = budget.num_experts or 1
    widths = by_layer(shape, rounded(shape, widest(shape, budget), 32))
    even = proportional(widths, Fraction(budget.mlp_width, experts * budget.d_model), multiple_of)
    assume(min(even) >= 6 * multiple_of)  # a ratio of 1/2 to 3/2 then leaves some of each
    weights = [experts * weight for weight in budget.per_mlp_width(widths)]
    total = sum(weight * width for weight, width in zip(weights, even, strict=True))
    ratios = [values[4 * layer // len(widths)] for layer in range(len(widths))]
    tapered = matched(widths, ratios, weights, total, multiple_of)
    assert all(width % multiple_of == 0 for width in tapered)
    assert weigh(widths, tapered, budget) == weigh(widths, even, budget)
    # Equal neighbours stay equal, so that they are still one run, where the sum can be met so.
    lengths = [len(list(run)) for _, run in itertools.groupby(zip(widths, ratios, strict=True))]
    starts = list(itertools.accumulate(lengths, initial=0))
    unit = math.gcd(*(sum(weights[start:end]) for start, end in itertools.pairwise(starts)))
    if total % (multiple_of * unit) == 0:
        assert all(len(set(tapered[start:end])) == 1 for start, end in itertools.pairwise(starts))


def test_mlps_stay_near_their_share():
    shape = shape_of("x", 12, 0.3, 512)
    widths = by_layer(shape, rounded(shape, widest(shape, BUDGET), 32))
    weights = BUDGET.per_mlp_width(widths)
    ratios = np.linspace(1.5, 0.5, 12).tolist()
    tapered = matched(widths, ratios, weights, BUDGET.target - BUDGET.beside_mlp(widths), 16)
    ideal = np.array(widths) * ratios
    scale = np.dot(weights, tapered) / np.dot(weights, ideal)
    assert max(abs(tapered - scale * ideal)) <= 2 * 16


def test_what_the_steps_cannot_make_is_none_or_the_nearest():
    assert matched([64, 64], [1.0, 2.0], [192, 192], 192 * 64 + 1, 16) is None
    assert matched([64, 64], [1.0, 2.0], [192, 192], 192 * 16 * 9 + 1000, 16, exact=False) == (48, 96)
    assert matched([64, 64], [1.0, 2.0], [192, 192], 192 * 16 * 9, 16) == (48, 96)


def test_a_run_is_split_where_whole_runs_cannot_meet_the_sum():
    weights, ratios = [192, 192, 96, 96], [1.0] * 4
    even, odd = 16 * (192 * 16 + 96 * 8), 16 * (192 * 16 + 96 * 9)
    assert matched([64, 64, 32, 32], ratios, weights, even, 16) == (128, 128, 64, 64)
    found = matched([64, 64, 32, 32], ratios, weights, odd, 16)
    assert np.dot(weights, found) == odd
    assert sum(before != after for before, after in itertools.pairwise(found)) == 2


def test_widths_beyond_all_models_are_not_searched():
    weights = [3 * 2**30 + 1, 3 * 2**30 + 2, 3 * 2**30 + 4]
    total = 16 * (5 * sum(weights) + weights[0])
    assert matched([2**30] * 3, [1.0, 1.1, 1.2], weights, total, 16) is None
    assert matched([2**30] * 3, [1.0, 1.1, 1.2], weights, total, 16, exact=False) is not None


def test_matching_raw_parameters_leaves_no_end_correction():
    shape = shape_of("x", 12, 0.3, 512)
    raw = dataclasses.replace(BUDGET, count="raw")
    assert widest(shape, raw) < widest(shape, BUDGET)
    squares = sum(by_layer(shape, shape.widths(widest(shape, raw)) ** 2))
    assert squares == pytest.approx(12 * 512**2)


def test_no_shape_is_wider_everywhere():
    with pytest.raises(UserError, match="narrowest layer cannot be 1"):
        widest(shape_of("x", 12, 1.5, 512), BUDGET)


def test_the_deepest_profile_is_solved_too():
    shape = shape_of("x", MOST_LAYERS, 0.3, 512)
    budget = dataclasses.replace(BUDGET, num_layers=MOST_LAYERS)
    wide = widest(shape, budget)
    widths = by_layer(shape, nearest(shape, wide, rounded(shape, wide, 32), 32, budget))
    weights, total = budget.per_mlp_width(widths), budget.target - budget.beside_mlp(widths)
    mlps = matched(widths, [1.0] * MOST_LAYERS, weights, total, 16, exact=False)
    assert np.dot(weights, mlps) == pytest.approx(total, rel=1e-7)
