"""Which variants and runs a comparison has."""

from pathlib import Path

import pytest

from tlm_jax.compare.plan import budget_differences, make_runs, make_variants, named_changes, split_commas
from tlm_jax.config import to_json
from tlm_jax.errors import UserError

CONFIG = """
from tlm_jax.config import default_config

def get_config():
    c = default_config()
    c.name, c.seed, c.data.seed = "small", 7, 40
    c.profile.num_layers, c.profile.d_model, c.profile.d_ff = 4, 32, 64
    c.profile.num_heads, c.profile.num_kv_heads = 4, 4
    c.model.vocab_size, c.data.sequence_length = 272, 32
    return c
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return str(path)


def test_commas_inside_brackets_do_not_split():
    assert split_commas("a,b") == ["a", "b"]
    assert split_commas("(1.5,1),[2,(3,4)],x") == ["(1.5,1)", "[2,(3,4)]", "x"]
    assert split_commas("") == [""]


def test_one_axis_is_named_by_its_values():
    assert named_changes(["profile.schedule=uniform,cosine"], []) == {
        "uniform": ("profile.schedule=uniform",),
        "cosine": ("profile.schedule=cosine",),
    }


def test_several_axes_are_a_grid_and_variants_follow():
    found = named_changes(
        ["profile.schedule=uniform,cosine", "train.warmup_steps=0,10"],
        ["reversed:profile.schedule=cosine,profile.start_ratio=0.5,profile.end_ratio=1.5", "as it is:"],
    )
    assert list(found) == [
        "schedule=uniform,warmup_steps=0",
        "schedule=uniform,warmup_steps=10",
        "schedule=cosine,warmup_steps=0",
        "schedule=cosine,warmup_steps=10",
        "reversed",
        "as it is",
    ]
    assert found["schedule=cosine,warmup_steps=10"] == ("profile.schedule=cosine", "train.warmup_steps=10")
    assert found["reversed"] == ("profile.schedule=cosine", "profile.start_ratio=0.5", "profile.end_ratio=1.5")
    assert found["as it is"] == ()


@pytest.mark.parametrize(
    ("vary", "variants", "says"),
    [
        ([], [], "at least two variants"),
        (["profile.d_ff=64"], [], "at least two variants"),
        (["profile.schedule"], [], "--vary: not a key and its values: 'profile.schedule'"),
        (["profile.schedule=uniform,"], [], "--vary: not a key and its values"),
        ([], ["a", "b:"], "--variant: not a name and its changes: 'a'"),
        ([], ["a:x", "b:"], "--variant: not a name and its changes: 'a:x'"),
        ([], [":seed=1", "b:"], "--variant: not a name"),
        (["profile.schedule=uniform,cosine"], ["cosine:"], "two variants are named 'cosine'"),
        (["profile.d_ff=64,64"], [], "two variants are named '64'"),
        ([], ["a b:", "a/b:"], "two variants are named"),
        (["seed=1,2"], [], "config.seed is set by the comparison"),
        (["data.seed=1,2"], [], "config.data.seed is set by the comparison"),
    ],
)
def test_what_cannot_be_read_is_told(vary, variants, says):
    with pytest.raises(UserError) as caught:
        named_changes(vary, variants)
    assert says in str(caught.value)


def test_seeds_are_shared_by_variants_and_differ_between_runs(config):
    variants = make_variants(config, [], named_changes(["profile.schedule=uniform,cosine"], []))
    runs = make_runs(config, [], variants, 3, Path("w"))
    assert [(run.variant.name, run.index) for run in runs] == [
        ("uniform", 0), ("cosine", 0), ("uniform", 1), ("cosine", 1), ("uniform", 2), ("cosine", 2),
    ]  # fmt: skip
    for run in runs:
        assert (run.config.seed, run.config.data.seed) == (7 + run.index, 40 + run.index)
        assert run.config.profile.schedule == run.variant.name
        assert run.workdir == Path("w") / run.variant.name / f"seed-{run.index}"
    # Within a seed nothing else differs.
    left, right = (run.config.copy_and_resolve_references() for run in runs[2:4])
    for each in (left, right):
        each.name, each.profile.schedule = "", ""
    assert to_json(left) == to_json(right)


def test_the_arguments_resolve_to_the_config(config):
    overrides = ["--config.train.num_steps=5"]
    variants = make_variants(config, overrides, named_changes([], ["a:train.warmup_steps=1", "b:"]))
    run = make_runs(config, overrides, variants, 2, Path("w"))[2]
    assert run.arguments == (
        f"--config={config}",
        "--workdir=w/a/seed-1",
        "--config.train.num_steps=5",
        "--config.train.warmup_steps=1",
        "--config.seed=8",
        "--config.data.seed=41",
        "--config.name=small a 1",
    )
    assert (run.config.train.num_steps, run.config.train.warmup_steps, run.config.name) == (5, 1, "small a 1")


def test_awkward_names_are_folders(config):
    variants = make_variants(config, [], {"../up": (), "a b/c": (), "…": ()})
    folders = [run.workdir.parts[1] for run in make_runs(config, [], variants, 1, Path("w"))]
    assert folders == ["_up", "a_b_c", "_"]


def test_all_problems_of_variants_are_told_together(config):
    changes = named_changes(["profile.schedule=uniform,cosin,cosine"], ["odd:profile.d_ff=60"])
    with pytest.raises(UserError) as caught:
        make_variants(config, [], changes)
    assert "variant cosin: config.profile.schedule: unknown schedule" in str(caught.value)
    assert "variant odd: config.profile.d_ff" in str(caught.value)
    with pytest.raises(UserError) as caught:
        make_variants(config, ["--config.sed=1"], changes)
    assert "variant" not in str(caught.value)


def test_a_sequence_without_tokens_has_no_budget(config):
    changes = named_changes(["data.sequence_length=0,32"], ["odd:profile.d_ff=60"])
    with pytest.raises(UserError) as caught:
        make_variants(config, [], changes)
    assert "variant 0: config.data.sequence_length: must be a positive integer, not 0" in str(caught.value)
    assert "variant odd: config.profile.d_ff" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("profile.d_ff=128", "parameters, same"),
        ("train.num_steps=999", "other has 255,744 training tokens, same 256,000"),
        ("data.sequence_length=64", "training FLOPs per token, same"),
    ],
)
def test_unequal_budgets_are_found(config, change, says):
    same, other = make_variants(config, [], {"same": ("profile.schedule=cosine",), "other": (change,)})
    assert says in "; ".join(budget_differences([same, other]))
    assert budget_differences([same, same]) == []
