"""Widths by layer: the paper's lists and sums, and properties that hold for every schedule."""

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given, settings

from tlm_jax.capacity.schedules import CURVES, _nudge_mixed, grouped, sigmoid, tapered, uniform
from tlm_jax.errors import UserError

COSINE = CURVES["cosine"]

# Eq. 4, 5 and 6 and the rounding of arXiv 2606.23670, computed independently of this code.
PAPER = {
    ("linear", 12, 1024): "1536 1440 1344 1264 1168 1072 976 880 784 704 608 512",
    ("sigmoid", 12, 1024): "1536 1520 1488 1440 1328 1136 912 720 608 560 528 512",
    ("cosine", 12, 1024): "1536 1520 1456 1360 1232 1104 944 816 688 592 528 512",
    ("cosine", 12, 2048): "3072 3024 2912 2720 2480 2192 1904 1616 1376 1184 1072 1024",
    (
        "cosine",
        24,
        4096,
    ): "6144 6128 6064 5968 5840 5680 5488 5280 5040 4784 4512 4240 3952 3680 3408 3152 2912 2704 2512 2352 "
    "2224 2128 2064 2048",
    (
        "cosine",
        24,
        2816,
    ): "4224 4208 4176 4112 4016 3904 3776 3632 3456 3280 3104 2912 2720 2528 2352 2176 2000 1856 1728 1616 "
    "1520 1456 1424 1408",
    (
        "cosine",
        32,
        4096,
    ): "6144 6128 6096 6048 5984 5888 5776 5648 5504 5344 5184 4992 4800 4608 4400 4192 4000 3792 3584 3392 "
    "3200 3008 2848 2688 2544 2416 2304 2208 2144 2096 2064 2048",
}
PAPER_SUMS = {(12, 1024): 12288, (12, 2048): 24576, (24, 4096): 98304, (24, 2816): 67584, (32, 4096): 131072}


@pytest.mark.parametrize(("curve", "num_layers", "d_ff"), PAPER)
def test_widths_are_those_of_the_paper(curve, num_layers, d_ff):
    widths = tapered(CURVES[curve], num_layers, d_ff, 1.5, 0.5, 16)
    assert widths == tuple(int(width) for width in PAPER[curve, num_layers, d_ff].split())
    assert sum(widths) == PAPER_SUMS[num_layers, d_ff] == num_layers * d_ff


@pytest.mark.parametrize(("num_layers", "d_ff"), PAPER_SUMS)
def test_uniform_has_the_same_sum(num_layers, d_ff):
    widths = uniform(num_layers, d_ff, 16)
    assert widths == (d_ff,) * num_layers
    assert sum(widths) == PAPER_SUMS[num_layers, d_ff]


# Widths over b at 1.5 -> 0.5, as the paper writes them.
CLOSED_FORMS = {
    "linear": lambda x: 1.5 - x,
    "cosine": lambda x: 1 + 0.5 * math.cos(math.pi * x),
    "sigmoid": lambda x: 0.5 + 1 / (1 + math.exp(10 * (x - 0.5))),
}


@pytest.mark.parametrize("num_layers", [2, 3, 12, 31])
@pytest.mark.parametrize("curve", CURVES)
def test_before_rounding_the_mean_is_d_ff_and_the_closed_form_holds(curve, num_layers):
    depths = [layer / (num_layers - 1) for layer in range(num_layers)]
    ideal = [0.5 + CURVES[curve](depth) for depth in depths]
    assert ideal == pytest.approx([CLOSED_FORMS[curve](depth) for depth in depths], abs=1e-12)
    assert sum(ideal) / num_layers == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("curve", CURVES)
def test_curves_fall_antisymmetrically(curve):
    values = [CURVES[curve](step / 64) for step in range(65)]
    assert values == sorted(values, reverse=True)
    assert [1 - value for value in reversed(values)] == pytest.approx(values, abs=1e-12)
    if curve != "sigmoid":
        assert (values[0], values[-1]) == (1.0, 0.0)


def test_the_sigmoid_before_pinning_ends_where_the_paper_does():
    assert (round(0.5 + sigmoid(0.0), 4), round(0.5 + sigmoid(1.0), 4)) == (1.4933, 0.5067)
    assert sigmoid(0.5, 3.0) == 0.5
    assert sigmoid(0.25, 3.0) == pytest.approx(1 / (1 + math.exp(-0.75)))
    assert (sigmoid(0.0, 1e6), sigmoid(1.0, 1e6)) == (1.0, 0.0)


def test_cosine_and_linear_are_never_further_apart_than_the_paper_lets_them():
    apart = max(abs(COSINE(step / 10_000) - CURVES["linear"](step / 10_000)) for step in range(10_001))
    assert 0.1052 < apart <= 0.1053
    pairs = zip(*(map(int, PAPER[curve, 12, 1024].split()) for curve in ("cosine", "linear")), strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 0.1053 * 1024 + 16


@st.composite
def tapers(draw):
    """Arguments of `tapered` whose ends are multiples of the multiple, so that they can be pinned."""
    multiple_of = draw(st.sampled_from([1, 8, 16, 64, 128]))
    high = draw(st.integers(1, 200))
    low = draw(st.integers(1, high))
    num_layers = draw(st.integers(2, 40))
    assume((high + low) * multiple_of % 2 == 0)
    assume(num_layers * (high + low) % 2 == 0)
    d_ff = (high + low) * multiple_of // 2
    start, end = high * multiple_of / d_ff, low * multiple_of / d_ff
    assume(start == float(f"{start:.6f}") and start + end == 2.0)
    if draw(st.booleans()):
        start, end = end, start
    return num_layers, d_ff, start, end, multiple_of


@st.composite
def round_ratio_tapers(draw):
    """Arguments with the ratios that people write, and a d_ff that fits them."""
    start = draw(st.sampled_from([1.5, 1.25, 1.375, 1.625, 1.75, 0.5, 0.25, 1.0]))
    multiple_of = draw(st.sampled_from([1, 8, 16, 64, 128]))
    return draw(st.integers(2, 48)), 8 * multiple_of * draw(st.integers(1, 64)), start, 2 - start, multiple_of


def check(widths, num_layers, d_ff, start, end, multiple_of):
    assert len(widths) == num_layers
    assert sum(widths) == num_layers * d_ff
    assert widths[0] == pytest.approx(start * d_ff)
    assert widths[-1] == pytest.approx(end * d_ff)
    assert all(width % multiple_of == 0 for width in widths)
    assert list(widths) == sorted(widths, reverse=start >= end)


@settings(max_examples=300, deadline=None)
@given(round_ratio_tapers() | tapers(), st.sampled_from(list(CURVES.values())))
def test_any_taper_meets_budget_ends_multiple_and_order(arguments, curve):
    num_layers, d_ff, start, end, multiple_of = arguments
    widths = tapered(curve, *arguments)
    check(widths, *arguments)
    assert tapered(curve, num_layers, d_ff, end, start, multiple_of) == widths[::-1]
    # No width between the pinned ends is further from its curve than the rounding and one step.
    ideal = [d_ff * (end + (start - end) * curve(layer / (num_layers - 1))) for layer in range(num_layers)]
    inner = list(zip(widths, ideal, strict=True))[1:-1]
    assert max((abs(width - value) for width, value in inner), default=0) <= 1.5 * multiple_of + 1e-6


@settings(max_examples=300, deadline=None)
@given(round_ratio_tapers(), st.integers(2, 48), st.sampled_from(list(CURVES.values())))
def test_plateaus_meet_budget_ends_and_number_of_runs_or_name_a_number_that_works(arguments, plateaus, curve):
    num_layers = arguments[0]
    assume(plateaus <= num_layers)
    try:
        widths = tapered(curve, *arguments, plateaus)
    except UserError as error:
        nearest, widths = int(error.mend.split()[-1]), ()
    if not widths:
        assert num_layers % 2 == 1
        assert plateaus % 2 == 0, "runs that are alike from both ends always meet the budget"
        check(tapered(curve, *arguments, nearest), *arguments)
        return
    check(widths, *arguments)
    assert len(set(widths)) <= plateaus


def test_plateaus_of_the_paper_model():
    assert tapered(COSINE, 12, 2048, 1.5, 0.5, 16, 4) == (3072,) * 3 + (2560,) * 3 + (1536,) * 3 + (1024,) * 3
    # As equal in length as they can be, and alike from both ends.
    assert tapered(COSINE, 8, 1024, 1.5, 0.5, 16, 3) == (1536,) * 3 + (1024,) * 2 + (512,) * 3


def test_runs_of_unequal_length_are_alike_from_both_ends():
    widths = tapered(COSINE, 10, 1024, 1.5, 0.5, 16, 4)
    assert widths == (1536,) * 2 + (1280,) * 3 + (768,) * 3 + (512,) * 2


def test_as_many_plateaus_as_layers_is_the_taper_itself():
    assert tapered(COSINE, 24, 4096, 1.5, 0.5, 16, 24) == tapered(COSINE, 24, 4096, 1.5, 0.5, 16)


@pytest.mark.parametrize("curve", CURVES.values())
@pytest.mark.parametrize(("num_layers", "plateaus", "d_ff"), [(7, 4, 640), (9, 4, 384), (11, 4, 256), (13, 4, 320)])
def test_where_runs_cannot_be_alike_the_widths_are_the_nearest_by_brute_force(num_layers, plateaus, d_ff, curve):
    widths = tapered(curve, num_layers, d_ff, 1.5, 0.5, 16, plateaus)
    lengths = [len(list(run)) for _, run in itertools.groupby(widths)]
    assert max(lengths) - min(lengths) == 1
    ideal = [d_ff * (0.5 + curve(run / (plateaus - 1))) for run in range(plateaus)]
    ideal[0], ideal[-1] = 1.5 * d_ff, 0.5 * d_ff  # pinned

    def distance(levels):
        return sum(n * (level - value) ** 2 for n, level, value in zip(lengths, levels, ideal, strict=True))

    possible = (
        levels
        for interior in itertools.product(range(d_ff // 2, d_ff * 3 // 2 + 1, 16), repeat=plateaus - 2)
        if sorted(levels := (widths[0], *interior, widths[-1]), reverse=True) == list(levels)
        and sum(n * level for n, level in zip(lengths, levels, strict=True)) == num_layers * d_ff
    )
    assert tuple(run for run, _ in itertools.groupby(widths)) == min(possible, key=distance)


@pytest.mark.parametrize(
    ("levels", "ideal", "lengths", "missing"),
    [
        ((5, 5, 4, 3, 0, 0), (5, 4.5, 4, 2.5, 0.5, 0), (1, 2, 2, 2, 1, 1), -1),
        ((5, 4, 3, 3, 2, 1), (5, 4, 3, 3.25, 1.5, 1), (1, 1, 1, 2, 1, 1), 1),
        ((6, 4, 3, 1, 0, 0), (6, 4.5, 2.5, 1, -0.5, 0), (1, 2, 2, 1, 1, 1), -1),
    ],
)
def test_of_equally_near_widths_the_first_in_order_are_taken(levels, ideal, lengths, missing):
    possible = []
    for interior in itertools.product(range(levels[-1], levels[0] + 1), repeat=len(levels) - 2):
        moved = [levels[0], *interior, levels[-1]]
        added = sum(n * (new - old) for n, new, old in zip(lengths, moved, levels, strict=True))
        if added == missing and moved == sorted(moved, reverse=True):
            possible.append((sum(n * (m - v) ** 2 for n, m, v in zip(lengths, moved, ideal, strict=True)), moved))
    nearest = sorted(possible)
    assert nearest[0][0] == nearest[1][0]
    assert _nudge_mixed(levels, ideal, lengths, missing) == nearest[0][1]


def test_hundreds_of_plateaus():
    arguments = 400, 4096, 1.5, 0.5, 16
    check(tapered(COSINE, *arguments, 399), *arguments)


def test_ties_of_the_rounding_need_no_move():
    # At a third of the depth the cosine is exactly 1.25 · 32 = 40, halfway between 32 and 48.
    assert tapered(COSINE, 4, 32, 1.5, 0.5, 16) == (48, 48, 16, 16)


def test_the_largest_residual_moves_first():
    ideal = {0.0: 240.0, 1 / 3: 197.0, 2 / 3: 118.0, 1.0: 80.0}

    def curve(depth):
        return (ideal[depth] - 80) / 160

    # Rounded to 240, 192, 112, 80, one step short of 640; the residuals are 5 and 6.
    assert tapered(curve, 4, 160, 1.5, 0.5, 16) == (240, 192, 128, 80)
    ideal[1 / 3] = 198.5
    assert tapered(curve, 4, 160, 1.5, 0.5, 16) == (240, 208, 112, 80)


@pytest.mark.parametrize(
    ("arguments", "where", "says"),
    [
        ((12, 1000, 1.5, 0.5, 16), "config.profile.d_ff", "the nearest d_ff that works is 992"),
        ((12, 1024, 1.375, 0.625, 16), None, ""),
        ((12, 1040, 1.375, 0.625, 16), "config.profile.d_ff", "the nearest d_ff that works is 1024"),
        ((4, 40, 1.2, 0.8, 16), None, ""),
        ((3, 40, 1.2, 0.8, 16), "config.profile.d_ff", "the nearest d_ff that works is 80"),
        ((3, 24, 1.0, 1.0, 16), "config.profile.d_ff", "the nearest d_ff that works is 32"),
        ((12, 1024, 1.5, 0.7, 16), "config.profile.end_ratio", "use end_ratio=0.5"),
        ((12, 1024, 2.5, 0.7, 16), "config.profile.end_ratio", "start_ratio below 2"),
        ((12, 1024, 2.0, 0.0, 16), "config.profile.end_ratio", "must be positive"),
        ((12, 1024, float("inf"), 0.5, 16), "config.profile.start_ratio", "must be positive"),
        ((1, 1024, 1.5, 0.5, 16), "config.profile.num_layers", "use schedule=uniform"),
        ((12, 1024, 1.5, 0.5, 16, 1), "config.profile.plateaus", "use schedule=uniform"),
        ((12, 1024, 1.5, 0.5, 16, 13), "config.profile.plateaus", "num_layers=12"),
        ((7, 640, 1.5, 0.5, 16, 2), "config.profile.plateaus", "the nearest number that works is 3"),
    ],
)
def test_what_cannot_be_met_says_what_can(arguments, where, says):
    if where is None:
        check(tapered(COSINE, *arguments), *arguments)
        return
    with pytest.raises(UserError, match=says) as caught:
        tapered(COSINE, *arguments)
    assert caught.value.where == where


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 40), st.integers(1, 5000), st.sampled_from([1.5, 1.375, 1.3, 0.9]), st.sampled_from([8, 16, 128]))
def test_the_d_ff_named_works_and_none_is_nearer(num_layers, d_ff, start, multiple_of):
    end = float(f"{2 - start:g}")
    try:
        tapered(COSINE, num_layers, d_ff, start, end, multiple_of)
    except UserError as error:
        named = int(error.mend.split()[-1])
        tapered(COSINE, num_layers, named, start, end, multiple_of)
        for nearer in range(max(1, d_ff - abs(d_ff - named) + 1), min(d_ff + abs(d_ff - named), d_ff + 200)):
            with pytest.raises(UserError, match="nearest d_ff"):
                tapered(COSINE, num_layers, nearer, start, end, multiple_of)


def test_one_and_two_layers():
    assert tapered(COSINE, 1, 1024, 1.0, 1.0) == (1024,)
    assert tapered(COSINE, 2, 1024, 1.5, 0.5) == (1536, 512)
    assert tapered(COSINE, 2, 1024, 0.5, 1.5) == (512, 1536)
    assert uniform(1, 1024, 16) == (1024,)


def test_groups_have_the_widths_asked_for_and_the_budget():
    assert grouped((1.5, 1.0, 0.5), 12, 1024) == (1536,) * 4 + (1024,) * 4 + (512,) * 4
    assert grouped((0.75, 1.5, 0.75), 24, 2048) == (1536,) * 8 + (3072,) * 8 + (1536,) * 8
    assert grouped((0.5, 1.0, 1.5), 32, 4096) == (2048,) * 11 + (4096,) * 10 + (6144,) * 11
    assert grouped((1.25, 0.75), 2, 64) == (80, 48)


@pytest.mark.parametrize(
    ("arguments", "where", "says"),
    [
        (((0.75, 1.5, 0.75), 32, 4096), "group_ratios", "0.984375 .* 11, 10, 11 layers.* num_layers that works is 33"),
        (((1.5, 1.0, 0.75), 12, 1024), "group_ratios", "average 1.08333 .*make them average 1"),
        (((1.5, 1.0, 0.5), 2, 1024), "group_ratios", "3 groups need as many layers, and num_layers=2"),
        (((1.5, 2.0, -0.5), 12, 1024), "group_ratios", "must be positive, not -0.5"),
        (((1.5, 1.0, float("nan")), 12, 1024), "group_ratios", "must be positive"),
        (((1.5, 1.0, 0.5), 12, 1000), "d_ff", "1.5 × 1000 = 1500, .*the nearest d_ff that works is 992"),
    ],
)
def test_groups_that_cannot_be_say_what_can(arguments, where, says):
    with pytest.raises(UserError, match=says) as caught:
        grouped(*arguments)
    assert caught.value.where == f"config.profile.{where}"


def test_uniform_names_the_nearest_multiple():
    with pytest.raises(UserError, match="the nearest d_ff that works is 1008"):
        uniform(12, 1003, 16)
    with pytest.raises(UserError, match="the nearest d_ff that works is 16"):
        uniform(12, 3, 16)
