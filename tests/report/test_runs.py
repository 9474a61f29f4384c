"""Reading work directories, whole and damaged, and what is concluded from them."""

import json
import math

import pytest

pytest.importorskip("matplotlib")

from synthetic_runs import make_run

from tlm_jax.errors import UserError
from tlm_jax.report.charts import smoothed, thinned
from tlm_jax.report.comparison import difference, differing_keys, seed_spread
from tlm_jax.report.elements import short
from tlm_jax.report.runs import load_run, load_runs


def test_a_whole_run_has_no_notes(tmp_path):
    run = load_run(str(make_run(tmp_path, "cosine", steps=40)))
    assert run.notes == []
    assert [record["step"] for record in run.records] == list(range(1, 41))
    assert run.budget["parameters"] == 5_573_888
    assert run.last("tokens") == 40 * 2048
    assert len(run.series("tokens_per_second")) == 4
    assert run.final[0]["loss"] == pytest.approx(3.3)
    assert run.final[1] == "evaluation"
    assert len(run.samples) == 2


def test_without_an_evaluation_the_last_validation_counts(tmp_path):
    run = load_run(str(make_run(tmp_path, "cosine", steps=40, evaluation=False)))
    assert list(run.notes) == ["There is no evaluation.json.", "There is no samples.json."]
    assert run.final == (run.records[-1]["validation"], "last validation")


@pytest.mark.parametrize("name", ["config.json", "profile.json", "metrics.jsonl"])
def test_a_file_that_is_missing_is_named(name, tmp_path):
    path = make_run(tmp_path, "cosine", steps=10)
    (path / name).unlink()
    with pytest.raises(UserError, match=f"{name}: missing; give a work directory"):
        load_run(str(path))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.json", "{", "config.json: not JSON"),
        ("config.json", "[" * 100_000, "config.json: not JSON: nested too deeply"),
        ("config.json", "[]", "config.json: not a config"),
        ("config.json", "{}", "data.sequence_length"),
        ("profile.json", "{}", "profile.json: not a profile"),
        ("profile.json", "[" * 100_000, "profile.json: not JSON: nested too deeply"),
        ("profile.json", "\x00", "profile.json: not JSON"),
    ],
)
def test_a_damaged_config_or_profile_is_an_error(name, text, says, tmp_path):
    path = make_run(tmp_path, "cosine", steps=10)
    (path / name).write_text(text)
    with pytest.raises(UserError, match=says):
        load_run(str(path))


def test_bytes_that_are_no_text_are_an_error(tmp_path):
    path = make_run(tmp_path, "cosine", steps=10)
    (path / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"metrics.jsonl: cannot be read"):
        load_run(str(path))


def test_lines_cut_damaged_or_repeated_are_noted_and_the_rest_is_kept(tmp_path):
    path = make_run(tmp_path, "cosine", steps=10) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:9], lines[9][:30]]))
    run = load_run(str(path.parent))
    assert list(run.notes) == ["The last line of metrics.jsonl is incomplete; it is left out."]
    assert len(run.records) == 9
    path.write_text("\n".join([lines[0], "[1]", '{"loss": 3}', *lines[3:], lines[3].replace('"loss": ', '"loss": 9')]))
    run = load_run(str(path.parent))
    assert "Left out of metrics.jsonl: 2 damaged lines, the first of them line 2." in run.notes
    assert "Left out of metrics.jsonl: 1 record of a step that comes again later." in run.notes
    assert [record["step"] for record in run.records] == [1, 4, 5, 6, 7, 8, 9, 10]
    assert run.records[1]["loss"] > 90
    path.write_text("")
    assert "metrics.jsonl has no steps yet." in load_run(str(path.parent)).notes


def test_damaged_extras_are_noted(tmp_path):
    path = make_run(tmp_path, "cosine", steps=10)
    (path / "evaluation.json").write_text('{"loss": null}')
    (path / "samples.json").write_text('[{"prompt": "It"}, {"completion": "x"}]')
    run = load_run(str(path))
    assert list(run.notes) == [
        "evaluation.json has no loss; it is left out.",
        "Left out of samples.json: 1 entry without a completion.",
    ]
    assert (run.evaluation, len(run.samples)) == (None, 1)
    (path / "evaluation.json").write_text("[")
    assert "evaluation.json is damaged; it is left out." in load_run(str(path)).notes


def test_names_are_made_unique(tmp_path):
    first = make_run(tmp_path / "a", "same", steps=5)
    second = make_run(tmp_path / "b", "same", steps=5)
    third = make_run(tmp_path / "c", "other", steps=5)
    assert [run.name for run in load_runs([str(p) for p in (first, second, third, third)])] == [
        "same (same)",
        "same (same) #2",
        "other (other)",
        "other (other) #2",
    ]
    assert load_runs([str(first)])[0].name == "same"


def test_null_infinite_and_huge_values_are_missing(tmp_path):
    path = make_run(tmp_path, "cosine", steps=3)
    records = [{"step": i, "loss": loss} for i, loss in enumerate((None, math.inf, 2.0, math.nan, 10**400), 1)]
    (path / "metrics.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    assert [(record["step"], loss) for record, loss in load_run(str(path)).series("loss")] == [(3, 2.0)]


def test_twins_have_equal_budgets_and_a_plain_difference(tmp_path):
    runs = load_runs(
        [str(make_run(tmp_path, "cosine")), str(make_run(tmp_path, "uniform", schedule="uniform", final_loss=3.25))]
    )
    found = difference(*runs)
    assert list(found.budgets) == []
    assert found.loss == pytest.approx(0.05)
    assert found.bits_per_byte == pytest.approx(0.05 / math.log(2) / 3.4)
    assert differing_keys(runs) == ["name", "profile.schedule"]


def test_unequal_budgets_are_listed(tmp_path):
    runs = load_runs([str(make_run(tmp_path, "a")), str(make_run(tmp_path, "b", steps=400, profile__d_ff=768))])
    found = " ".join(difference(*runs).budgets)
    assert "parameters (5,573,888 and 6,163,712)" in found
    assert "training tokens (1,024,000 and 819,200)" in found
    assert "KV cache" not in found


def test_a_budget_is_that_of_training_for_report_and_compare_alike(tmp_path):
    """Two KV heads of 48 less are 64 d_ff more: fewer keys and values are cached, and training costs the same."""
    make_run(tmp_path, "a", profile__head_dim=48)
    make_run(tmp_path, "b", profile__head_dim=48, profile__num_kv_heads=2, profile__d_ff=704)
    runs = load_runs([str(tmp_path / "a"), str(tmp_path / "b")])
    assert runs[0].budget["kv_cache_bytes"] == 2 * runs[1].budget["kv_cache_bytes"]
    assert list(difference(*runs).budgets) == []


def test_what_was_not_measured_alike_is_not_compared(tmp_path):
    evaluated = make_run(tmp_path, "a", steps=20)
    validated = make_run(tmp_path, "b", steps=20, evaluation=False)
    other_text = make_run(tmp_path, "c", steps=20)
    values = json.loads((other_text / "evaluation.json").read_text())
    (other_text / "evaluation.json").write_text(json.dumps(values | {"bytes": 7}))
    average = make_run(tmp_path, "e", steps=20)
    (average / "evaluation.json").write_text(json.dumps(values | {"weights": "ema"}))
    nothing = make_run(tmp_path, "d", steps=1, evaluation=False)
    (nothing / "metrics.jsonl").write_text("")
    first = load_run(str(evaluated))
    for path, reason in (
        (validated, "only its last validation"),
        (other_text, "differ in bytes"),
        (average, "one was measured with its weights, the other with their moving average"),
        (nothing, "no held"),
    ):
        found = difference(first, load_run(str(path)))
        assert found.loss is None
        assert reason in found.reason


def test_seed_spread_is_between_runs_that_differ_in_seeds_only(tmp_path):
    paths = [
        make_run(tmp_path, "a", steps=10, seed=0, final_loss=3.20),
        make_run(tmp_path, "b", steps=10, seed=1, final_loss=3.24),
        make_run(tmp_path, "c", steps=10, schedule="uniform", final_loss=3.90),
    ]
    runs = load_runs([str(path) for path in paths])
    assert seed_spread(runs) == pytest.approx(0.04)
    values = json.loads((paths[1] / "evaluation.json").read_text())
    (paths[1] / "evaluation.json").write_text(json.dumps(values | {"weights": "ema"}))
    assert seed_spread(load_runs([str(path) for path in paths])) is None
    assert seed_spread(runs[1:]) is None


def test_smoothing_is_a_centred_mean():
    flat = [(float(x), 5.0 + (-1) ** x) for x in range(1000)]
    assert max(abs(y - 5) for _, y in smoothed(flat)[20:]) < 0.1
    falling = [(float(x), -float(x)) for x in range(1000)]
    assert [y for _, y in smoothed(falling)[:900]] == pytest.approx([y for _, y in falling[:900]])
    assert smoothed(falling[:3]) == falling[:3]
    assert smoothed([]) == []


def test_thinning_keeps_the_ends():
    points = [(float(x), 0.0) for x in range(12345)]
    thin = thinned(points)
    assert len(thin) <= 401
    assert (thin[0], thin[-1]) == (points[0], points[-1])
    assert thinned(points[:7]) == points[:7]


@pytest.mark.parametrize(
    ("value", "text"),
    [(5573888, "5.57 M"), (0, "0"), (640, "640"), (999_600, "1 M"), (36.6e12, "36.6 TB"), (None, "–")],
)
def test_short_numbers(value, text):
    assert short(value, "B" if text.endswith("B") else "") == text
