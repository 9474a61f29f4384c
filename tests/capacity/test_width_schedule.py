"""Keys of d_model's schedule: what they make, at which budget, and every way in which they can be wrong."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tlm_jax.capacity import Profile, profile_from_config
from tlm_jax.capacity.budget import budget
from tlm_jax.capacity.widths import RESIZES
from tlm_jax.config import apply_overrides, default_config
from tlm_jax.errors import UserError

SMALL = {
    "num_layers": 12,
    "d_model": 256,
    "d_ff": 1024,
    "num_heads": 8,
    "num_kv_heads": 8,
    "width_schedule": "x",
}
HARDWARE = {"fixed_head_dim": 64, "width_multiple_of": 64, "multiple_of": 64, "width_budget": "exact"}
EXPERTS = {"num_experts": 6, "experts_per_token": 2, "expert_d_ff": 128}


def config_of(**changes):
    keys = SMALL | changes
    if keys.get("num_experts"):
        keys = {key: value for key, value in keys.items() if key != "d_ff"}
    config = apply_overrides(default_config(), [f"--config.profile.{key}={value}" for key, value in keys.items()])
    config.model.vocab_size = 512
    return config


def profile(**changes):
    return profile_from_config(config_of(**changes))


def widths(**changes):
    return [layer.d_model for layer in profile(**changes).layers]


def matrices(profile, effective=True):
    """Parameters but embeddings and norms."""
    norms = sum(layer.parameters - layer.matmul_parameters for layer in profile.layers)
    norms += max(profile.layers[-1].d_model, profile.d_embedding)
    tables = (1 if profile.tied_embeddings else 2) * profile.vocab_size * profile.d_embedding
    return (profile.effective_parameters if effective else profile.parameters) - norms - tables


def test_the_four_shapes():
    for shape, narrowest, rising in (("x", 9, None), ("diamond", 1, None), ("v", 1, True), ("lambda", 12, False)):
        found = widths(width_schedule=shape)
        assert found.index(min(found)) == narrowest - 1
        assert all(width % 32 == 0 for width in found)
        if rising is not None:
            assert found == sorted(found, reverse=not rising)
    diamond = widths(width_schedule="diamond")
    assert diamond.index(max(diamond)) == 9 - 1
    assert diamond[0] == diamond[-1] == min(diamond)


def test_an_arithmetic_progression_has_one_difference_a_side():
    found = widths(width_progression="arithmetic", width_multiple_of=16, bottleneck_depth=0.5)
    steps = [after - before for before, after in itertools.pairwise(found)]
    assert max(steps[:5]) - min(steps[:5]) <= 16
    assert max(steps[5:]) - min(steps[5:]) <= 16


def test_position_and_ratio_are_those_asked_for():
    found = widths(bottleneck_depth=0.25, bottleneck_ratio=0.5)
    assert found.index(min(found)) == 3 - 1
    assert min(found) == 128


def test_plateaus_make_runs_to_scan():
    x = profile(width_plateaus=4)
    assert [length for _, length, _ in x.runs()] == [3, 3, 3, 3]
    assert [shape.d_model for _, _, shape in x.runs()][2] == 64
    assert len(profile(width_plateaus=4, width_budget="exact").runs()) == 4
    tapered = profile(width_plateaus=4, schedule="cosine", plateaus=4)
    assert len(tapered.runs()) == 4
    ratios = [shape.d_ff / shape.d_model for _, _, shape in tapered.runs()]
    assert ratios == sorted(ratios, reverse=True)


def test_heads_follow_the_width_or_have_a_share_of_it():
    paper = profile().layers
    assert all((layer.num_heads, layer.head_dim * 8) == (8, layer.d_model) for layer in paper)
    fixed = profile(**HARDWARE, num_kv_heads=8).layers
    assert all((layer.head_dim, layer.num_heads * 64) == (64, layer.d_model) for layer in fixed)
    grouped = profile(**HARDWARE | {"width_multiple_of": 256}, num_heads=8, num_kv_heads=2, d_model=1024).layers
    assert all(layer.num_heads == 4 * layer.num_kv_heads == layer.d_model // 64 for layer in grouped)


def test_one_override_makes_the_uniform_twin_of_all():
    plain = {key: value for key, value in SMALL.items() if key != "width_schedule"}
    twin = profile(width_schedule="uniform", **HARDWARE | {"multiple_of": 16}, width_plateaus=4, bottleneck_depth=0.5)
    assert twin == profile_from_config(config_of(**plain, width_schedule="uniform"))
    assert {layer.d_model for layer in twin.layers} == {256}
    assert {layer.head_dim for layer in twin.layers} == {32}


@pytest.mark.parametrize("experts", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "sigmoid", "three_group"])
def test_a_taper_on_top_costs_exactly_what_the_shape_alone_costs(schedule, experts):
    plain, tapered = profile(**experts), profile(schedule=schedule, **experts)
    assert [layer.d_model for layer in plain.layers] == [layer.d_model for layer in tapered.layers]
    mlp = "expert_d_ff" if experts else "d_ff"
    ratios = [[getattr(layer, mlp) / layer.d_model for layer in found.layers] for found in (plain, tapered)]
    assert ratios[1][0] > 1.2 * ratios[0][0]
    assert ratios[1][-1] < 0.8 * ratios[0][-1]
    same = [key for key, value in budget(plain, 256).items() if value == budget(tapered, 256)[key]]
    assert set(same) == set(budget(plain, 256)) - {"d_ff_sum", "parameters", "non_embedding_parameters"}


@settings(max_examples=60, deadline=None)
@given(
    num_layers=st.integers(6, 40),
    d_model=st.sampled_from([512, 640, 768, 960, 1024]),
    shape=st.sampled_from(["x", "diamond", "v", "lambda"]),
    ratio=st.floats(0.25, 0.8),
    progression=st.sampled_from(["geometric", "arithmetic"]),
    schedule=st.sampled_from(["uniform", "cosine", "linear"]),
    hardware=st.booleans(),
    count=st.sampled_from(["effective", "raw"]),
)
def test_exact_budgets_are_exact(num_layers, d_model, shape, ratio, progression, schedule, hardware, count):
    keys = {"num_layers": num_layers, "d_model": d_model, "d_ff": 4 * d_model, "num_heads": 16, "num_kv_heads": 16}
    keys |= HARDWARE | {"fixed_head_dim": 128, "width_multiple_of": 128} if hardware else {"width_budget": "exact"}
    chosen = {"width_schedule": shape, "bottleneck_ratio": ratio, "width_progression": progression}
    found = profile(**keys, **chosen, width_count=count, schedule=schedule)
    uniform = profile(**keys, width_schedule="uniform")
    assert matrices(found, count == "effective") == matrices(uniform)
    step = 128 if hardware else 32
    assert all(layer.d_model % step == 0 for layer in found.layers)
    assert all(layer.d_ff % (64 if hardware else 16) == 0 for layer in found.layers)
    assert Profile.from_json(found.to_json()) == found
    # What follows from the counts: FLOPs of matrices are equal, those of attention and the cache smaller or as large.
    products = [p.forward_flops_per_token(2, causal=False) for p in (found, uniform)]
    attention = [8 * sum(layer.num_heads * layer.head_dim for layer in p.layers) for p in (found, uniform)]
    if count == "effective":
        assert products[0] - attention[0] == products[1] - attention[1]


def test_experts_at_the_exact_budget_or_the_nearest():
    paper = EXPERTS | {"multiple_of": 1}
    assert matrices(profile(**paper, width_budget="exact")) == matrices(profile(**paper, width_schedule="uniform"))
    coarse = EXPERTS | {"multiple_of": 64, "width_budget": "nearest"}
    found, twin = profile(**coarse), profile(**coarse, width_schedule="uniform")
    assert matrices(found) == pytest.approx(matrices(twin), rel=1e-3)
    assert matrices(found) != matrices(twin)
    with pytest.raises(UserError, match=r"multiple_of: no expert_d_ff in multiples of 64 .*16, or width_budget=near"):
        profile(**coarse | {"width_budget": "exact"})


def test_experts_of_one_width_follow_the_schedules_too():
    uniform = profile(**EXPERTS, width_schedule="uniform", padded_experts=2)
    assert {(layer.num_experts, layer.d_ff, layer.expert_d_ff) for layer in uniform.layers} == {(6, 0, 128)}
    assert uniform.padded_parameters == 12 * 2 * 3 * 256 * 128
    tapered = profile(**EXPERTS, width_schedule="uniform", padded_experts=2, schedule="cosine")
    assert [layer.expert_d_ff for layer in tapered.layers][::11] == [192, 64]
    assert budget(tapered, 64) == budget(uniform, 64)
    with pytest.raises(UserError, match=r"config.profile.expert_d_ff: 130 .*nearest expert_d_ff that works is 128"):
        profile(**EXPERTS | {"expert_d_ff": 130}, width_schedule="uniform")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"width_schedule": "y"},
            "width_schedule: 'y' is none; the nearest is .*; there are uniform, x, diamond, v",
        ),
        ({"width_progression": "geometrical"}, "width_progression: .*the nearest is geometric; there are"),
        ({"width_budget": "exactly"}, "width_budget: .*the nearest is exact; there are rounded, nearest, exact"),
        ({"width_count": "real"}, "width_count: .*there are effective, raw"),
        ({"resize": "padding"}, "resize: .*the nearest is zero_padding; there are carry_forward, zero_padding, proj"),
        ({"bottleneck_ratio": 0.0}, "bottleneck_ratio: must be above 0 and at most 1, not 0; the paper's is 0.3"),
        ({"bottleneck_ratio": 1.5}, "bottleneck_ratio: must be above 0 and at most 1, not 1.5"),
        ({"bottleneck_ratio": math.nan}, "bottleneck_ratio: must be above 0"),
        ({"bottleneck_ratio": 0.01}, "bottleneck_ratio: the narrowest layer, 2.56, is nearer to 0 than to 32; take a"),
        ({"bottleneck_depth": 0.0}, "bottleneck_depth: 0 of 12 layers is layer 0, .*; from 0.167 to 0.917 works"),
        ({"bottleneck_depth": math.inf}, "bottleneck_depth: inf of 12 layers"),
        ({"width_schedule": "v", "bottleneck_depth": 0.5}, "bottleneck_depth: v does not read it; .*x or diamond"),
        ({"width_multiple_of": 0}, "width_multiple_of: must be a positive integer, not 0"),
        ({"width_multiple_of": 24}, "width_multiple_of: .* 24 are not whole num_heads=8 heads of .*works is 32"),
        ({"fixed_head_dim": 128}, "width_multiple_of: .* 32 are not whole 1 heads of fixed_head_dim=128; .* is 128"),
        ({"fixed_head_dim": 63}, "fixed_head_dim: must be even for rotary embeddings, not 63"),
        ({"fixed_head_dim": -2}, "fixed_head_dim: must be a positive integer, not -2"),
        ({"fixed_head_dim": 64, "num_kv_heads": 2, "width_multiple_of": 64}, "whole 4 heads .* works is 256"),
        ({"head_dim": 32}, "head_dim: must be 0 where d_model varies; set fixed_head_dim"),
        ({"width_plateaus": -1}, "width_plateaus: must be 0 or a positive integer"),
        ({"width_plateaus": 13}, "width_plateaus: 13 runs need as many layers, and num_layers=12"),
        ({"width_plateaus": 1}, "width_plateaus: one width does not vary; use width_schedule=uniform"),
        ({"width_plateaus": 2}, "width_plateaus: of 2 runs the last has the turning layer 9"),
        ({"num_layers": 1, "width_schedule": "v"}, "num_layers: one width does not vary"),
        ({"num_layers": 2}, "bottleneck_depth: .*take 3 layers or more, or the shapes v or lambda"),
        ({"schedule": "list", "layers": [64] * 12}, "schedule: a list gives every MLP's width"),
        ({"schedule": "cosine", "plateaus": 13}, "plateaus: 13 widths over 12 layers; take 0, or from 2"),
        ({"schedule": "cosine", "end_ratio": 0.75}, "end_ratio: .*use end_ratio=0.5"),
        ({"schedule": "three_group", "group_ratios": (1, -1, 3)}, "group_ratios: must be positive, not -1"),
        (EXPERTS | {"experts_per_token": 7}, "experts_per_token: 7 of num_experts=6; from 1 to 6 work"),
        (EXPERTS | {"expert_d_ff": 0}, "expert_d_ff: must be a positive integer, not 0"),
        ({"expert_d_ff": 64}, "expert_d_ff: must be 0 without experts, not 64; set num_experts"),
        ({"padded_experts": 2}, "padded_experts: must be 0 without experts"),
    ],
)
def test_bad_values_are_named_with_their_mend(changes, says):
    with pytest.raises(UserError, match=says) as caught:
        profile(**changes)
    assert str(caught.value).startswith("config.profile.")
    assert "\n" not in str(caught.value)


def test_the_way_to_change_the_width_changes_no_width_and_costs_what_its_matrices_do():
    carried, padded, projected = (profile(resize=resize) for resize in RESIZES)
    assert carried.layers == padded.layers == projected.layers
    assert carried.parameters == padded.parameters > padded.effective_parameters
    widths = [256, *(layer.d_model for layer in carried.layers)]
    weights = sum(a * b for a, b in itertools.pairwise(widths) if a != b)
    assert projected.parameters - carried.parameters == weights
    flops = [p.forward_flops_per_token(64) for p in (carried, padded, projected)]
    idle = [p.parameters - p.effective_parameters for p in (carried, padded, projected)]
    assert flops[0] - flops[1] == 2 * (idle[1] - idle[0])
    assert flops[2] - flops[0] == 2 * (weights + idle[0] - idle[2])
    assert profile(resize="projection", width_schedule="uniform").resize == "carry_forward"


def test_experts_do_not_read_d_ff():
    config = config_of(**EXPERTS)
    config.profile.d_ff = 512
    with pytest.raises(UserError, match=r"^config.profile.d_ff: layers of experts do not read it, .*leave it 2048, or"):
        profile_from_config(config)


def test_a_file_of_varying_widths_is_taken_as_it_is(tmp_path):
    path = tmp_path / "x.json"
    made = profile(**EXPERTS, padded_experts=2)
    path.write_text(made.to_json())
    config = apply_overrides(default_config(), ["--config.profile.schedule=file", f"--config.profile.layers={path}"])
    config.model.vocab_size = 512
    assert profile_from_config(config) == made
    config.profile.width_schedule, config.profile.d_model, config.profile.num_experts = "x", 512, 4
    with pytest.raises(UserError) as caught:
        profile_from_config(config)
    for says in (
        "width_schedule: a file gives every layer's d_model; leave it uniform",
        f"d_model: 512 here, 256 in {path}",
        f"num_experts: 4 here, 6 in {path}",
    ):
        assert f"config.profile.{says}" in str(caught.value)
