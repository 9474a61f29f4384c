"""From config keys to a profile, and every way in which they can be wrong."""

import dataclasses
import json

import pytest

from tlm_jax.capacity import LayerShape, profile_from_config
from tlm_jax.capacity.budget import as_json, budget
from tlm_jax.config import apply_overrides, default_config
from tlm_jax.errors import UserError

SMALL = {
    "profile.num_layers": 6,
    "profile.d_model": 256,
    "profile.d_ff": 640,
    "profile.num_heads": 4,
    "profile.num_kv_heads": 2,
    "model.vocab_size": 4096,
}


def config_of(**changes):
    """A small config with `changes`, double underscores for dots."""
    keys = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    return apply_overrides(default_config(), [f"--config.{key}={value}" for key, value in keys.items()])


def widths_of(**changes):
    return [layer.d_ff for layer in profile_from_config(config_of(**changes)).layers]


def test_uniform_and_cosine():
    profile = profile_from_config(config_of())
    assert profile.layers == (LayerShape(256, 640, 4, 2, 64),) * 6
    assert (profile.vocab_size, profile.d_embedding, profile.tied_embeddings) == (4096, 256, True)
    assert widths_of(profile__schedule="cosine") == [960, 896, 736, 544, 384, 320]
    reversed_taper = widths_of(profile__schedule="cosine", profile__start_ratio=0.5, profile__end_ratio=1.5)
    assert reversed_taper == [320, 384, 544, 736, 896, 960]
    assert widths_of(profile__schedule="cosine", profile__plateaus=3) == [960, 960, 640, 640, 320, 320]


def test_the_other_curves_and_the_three_groups():
    assert widths_of(profile__schedule="linear") == [960, 832, 704, 576, 448, 320]
    assert widths_of(profile__schedule="linear", profile__plateaus=3) == [960, 960, 640, 640, 320, 320]
    assert widths_of(profile__schedule="sigmoid") == [960, 928, 784, 496, 352, 320]
    # Steepness so small that only the pinned ends are far from the mean, and so great that there is one step.
    assert widths_of(profile__schedule="sigmoid", profile__sigmoid_steepness=1e-3) == [960, *[640] * 4, 320]
    assert widths_of(profile__schedule="sigmoid", profile__sigmoid_steepness=1e3) == [960] * 3 + [320] * 3
    assert widths_of(profile__schedule="three_group") == [960, 960, 640, 640, 320, 320]
    late = {"profile__schedule": "three_group", "profile__group_ratios": (0.5, 1, 1.5), "profile__plateaus": 3}
    assert widths_of(**late) == [320, 320, 640, 640, 960, 960]


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "sigmoid", "three_group"])
def test_tapered_and_uniform_have_equal_parameters_and_flops_and_differ_in_d_ff_only(schedule, untied):
    changes = {"model__tied_embeddings": not untied}
    tapered, uniform = (profile_from_config(config_of(profile__schedule=s, **changes)) for s in (schedule, "uniform"))
    assert budget(tapered, 256) == budget(uniform, 256)
    assert tapered.layers != uniform.layers
    assert [dataclasses.replace(layer, d_ff=640) for layer in tapered.layers] == list(uniform.layers)


def test_head_dim_is_free_when_given():
    assert profile_from_config(config_of(profile__head_dim=48)).layers[0].head_dim == 48


def test_windows_take_turns_over_the_layers_and_equal_neighbours_stay_together():
    profile = profile_from_config(config_of(profile__windows=(64, 64, 0), profile__qk_norm=True, profile__mlp="geglu"))
    assert [layer.window for layer in profile.layers] == [64, 64, 0, 64, 64, 0]
    assert {(layer.mlp, layer.qk_norm) for layer in profile.layers} == {("geglu", True)}
    assert [length for _, length, _ in profile.runs()] == [2, 1, 2, 1]


def test_list():
    # d_ff is the mean of a schedule's curve; a list stands for itself.
    assert widths_of(profile__schedule="list", profile__layers=[656] + [320] * 5) == [656] + [320] * 5
    assert widths_of(profile__schedule="list", profile__layers=[1280, 640, 640, 640, 320, 320]) == [
        1280,
        640,
        640,
        640,
        320,
        320,
    ]


def test_file_takes_both_forms_of_json(tmp_path):
    tapered = profile_from_config(config_of(profile__schedule="cosine", model__tied_embeddings=False))
    for text in (tapered.to_json(), json.dumps(as_json(tapered, 256))):
        (tmp_path / "p.json").write_text(text)
        again = config_of(profile__schedule="file", profile__layers=tmp_path / "p.json", model__tied_embeddings=False)
        assert profile_from_config(again) == tapered


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"profile__schedule": "cosin"}, "config.profile.schedule: unknown schedule 'cosin'; the nearest is cosine"),
        ({"profile__num_layers": 0}, "config.profile.num_layers: must be a positive integer, not 0"),
        ({"profile__d_model": -8}, "config.profile.d_model: must be a positive integer, not -8"),
        ({"profile__multiple_of": 0}, "config.profile.multiple_of: must be a positive integer"),
        ({"model__vocab_size": 0}, "config.model.vocab_size: must be a positive integer"),
        ({"profile__num_layers": 10_000_000}, "config.profile.num_layers: must be at most 10000, not 10000000"),
        ({"profile__d_model": 10**18}, "config.profile.d_model: must be below 2\\^31, not 1000"),
        ({"profile__d_model": 10**30}, "config.profile.d_model is beyond what 64 bits can hold"),
        ({"profile__d_model": 1_000_000_007}, "not an even head_dim; set head_dim"),
        (
            {"profile__d_model": 100_000_000, "profile__num_heads": 7, "profile__num_kv_heads": 7},
            "the nearest that works is 8, or set head_dim",
        ),
        ({"profile__num_heads": 6}, "config.profile.num_heads: .*the nearest that works is 4, or set head_dim"),
        ({"profile__num_kv_heads": 3}, "config.profile.num_kv_heads: 3 does not divide num_heads=4.* is 2"),
        ({"profile__head_dim": 63}, "config.profile.head_dim: must be even"),
        ({"profile__num_heads": 256, "profile__num_kv_heads": 256}, "not an even head_dim; the nearest .* is 128"),
        ({"profile__d_ff": 1000, "profile__schedule": "cosine"}, "config.profile.d_ff: .* works is 992"),
        ({"profile__d_ff": 1000}, "config.profile.d_ff: .* is 1008"),
        (
            {"profile__schedule": "sigmoid", "profile__sigmoid_steepness": 0.0},
            "config.profile.sigmoid_steepness: must be positive, not 0",
        ),
        (
            {"profile__schedule": "three_group", "profile__group_ratios": (1.5, 0.5)},
            "config.profile.group_ratios: schedule=three_group needs three numbers",
        ),
        (
            {"profile__schedule": "three_group", "profile__plateaus": 2},
            "config.profile.plateaus: schedule=three_group makes 3 plateaus, not 2",
        ),
        ({"profile__windows": ()}, r"config.profile.windows: takes 0 or positive integers, not \(\)"),
        ({"profile__windows": (64, -1)}, "config.profile.windows: takes 0 or positive integers"),
        ({"profile__mlp": "glu"}, "config.profile.mlp: unknown MLP 'glu'; one of swiglu, geglu"),
        ({"profile__plateaus": -1}, "config.profile.plateaus: must be 0 or a positive integer"),
        ({"profile__layers": [640] * 6}, "config.profile.layers: schedule=uniform makes the widths itself"),
        ({"profile__schedule": "list"}, "config.profile.layers: schedule=list needs the d_ff of each layer, not None"),
        ({"profile__schedule": "list", "profile__layers": [640, 0]}, "schedule=list needs"),
        ({"profile__schedule": "list", "profile__layers": [640] * 5}, "5 widths .*set profile.num_layers=5"),
        ({"profile__schedule": "list", "profile__layers": [632, 648] * 3}, "layer 0 .*set profile.multiple_of=8"),
        (
            {"profile__schedule": "list", "profile__layers": [640] * 6, "profile__plateaus": 2},
            "config.profile.plateaus: schedule=list",
        ),
        (
            {"profile__schedule": "cosine", "profile__sigmoid_steepness": 5.0},
            "config.profile.sigmoid_steepness: cosine does not read it; leave it at 10.0, or take the schedule sigmoid",
        ),
        ({"profile__schedule": "sigmoid", "profile__group_ratios": (0.75, 1.5, 0.75)}, "sigmoid does not read it"),
        ({"profile__schedule": "three_group", "profile__start_ratio": 1.25}, "three_group does not read it"),
        (
            {"profile__schedule": "list", "profile__layers": [640] * 6, "profile__end_ratio": 0.75},
            "config.profile.end_ratio: list does not read it",
        ),
        ({"profile__windows": (64,) * 6 + (0,)}, "config.profile.windows: 7 values for num_layers=6"),
        ({"profile__schedule": "file"}, "schedule=file needs the path"),
        ({"profile__schedule": "file", "profile__layers": "no.json"}, "config.profile.layers: cannot read no.json"),
    ],
)
def test_bad_values_are_named_with_their_mend(changes, says):
    with pytest.raises(UserError, match=says) as caught:
        profile_from_config(config_of(**changes))
    assert "problems" not in str(caught.value)


def test_uniform_lets_the_keys_of_other_schedules_stand():
    """So one override makes the twin of any tapered config."""
    keys = {
        "start_ratio": 1.25,
        "end_ratio": 0.75,
        "sigmoid_steepness": 5.0,
        "group_ratios": (2, 0.5, 0.5),
        "plateaus": 3,
    }
    assert widths_of(**{f"profile__{key}": value for key, value in keys.items()}) == [640] * 6


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"qk_norm": True}, r"config.profile.qk_norm: True here, False in .*p.json; .* or leave it at False"),
        ({"windows": (8, 0)}, r"config.profile.windows: \(8, 0\) here, \(0, 0, 0, 0, 0, 0\) in "),
        ({"mlp": "gelu"}, "config.profile.mlp: gelu here, swiglu in "),
        ({"num_layers": 8}, "config.profile.num_layers: 8 here, 6 in "),
        ({"num_heads": 8}, "config.profile.num_heads: 8 here, 4 in "),
        ({"head_dim": 32}, "config.profile.head_dim: 32 here, 64 in "),
        ({"multiple_of": 256}, "config.profile.multiple_of: 256 here, 960, 896, "),
        ({"multiple_of": 0}, "config.profile.multiple_of: 0 here"),
        ({"start_ratio": 1.25}, "config.profile.start_ratio: file does not read it"),
        ({"plateaus": 2}, "config.profile.plateaus: schedule=file"),
    ],
)
def test_what_a_file_says_otherwise_is_an_error(tmp_path, changes, says):
    path = tmp_path / "p.json"
    path.write_text(profile_from_config(config_of(profile__schedule="cosine")).to_json())
    given = {f"profile__{key}": value for key, value in changes.items()}
    with pytest.raises(UserError, match=says) as caught:
        profile_from_config(config_of(profile__schedule="file", profile__layers=path, **given))
    assert "problems" not in str(caught.value)


def test_a_file_says_what_the_config_leaves_at_its_default(tmp_path):
    path = tmp_path / "p.json"
    made = profile_from_config(config_of(profile__windows=(8, 0), profile__qk_norm=True, profile__mlp="gelu"))
    path.write_text(made.to_json())
    for keys in (
        {},
        {"windows": (8, 0), "qk_norm": True, "mlp": "gelu", "head_dim": 64, "multiple_of": 32, "d_ff": 64},
    ):
        given = {f"profile__{key}": value for key, value in keys.items()}
        assert profile_from_config(config_of(profile__schedule="file", profile__layers=path, **given)) == made
    alone = apply_overrides(default_config(), ["--config.profile.schedule=file", f"--config.profile.layers={path}"])
    alone.model.vocab_size = 4096
    assert profile_from_config(alone) == made


def test_all_problems_are_told_together():
    bad = config_of(profile__num_kv_heads=3, profile__d_ff=1000, profile__schedule="cosine", model__vocab_size=-1)
    with pytest.raises(UserError, match=r"^3 problems") as caught:
        profile_from_config(bad)
    for key in ("profile.num_kv_heads", "profile.d_ff", "model.vocab_size"):
        assert f"config.{key}:" in str(caught.value)
    with pytest.raises(UserError, match=r"^2 problems.*schedule.*num_layers"):
        profile_from_config(config_of(profile__schedule="x", profile__num_layers=-1))


def test_a_file_of_another_vocabulary_is_an_error(tmp_path):
    path = tmp_path / "p.json"
    path.write_text(profile_from_config(config_of()).to_json())
    other = config_of(
        profile__schedule="file", profile__layers=path, model__vocab_size=512, model__tied_embeddings=False
    )
    with pytest.raises(UserError, match=r"2 problems.*config.model.vocab_size: 512 here, 4096 in .*tied_embeddings"):
        profile_from_config(other)
