"""The statistics of a comparison and the words for them."""

import csv
import io
import json
import math

import pytest

from tlm_jax.capacity import profile_from_config
from tlm_jax.compare.plan import Variant
from tlm_jax.compare.summary import as_csv, as_json, as_text, budget_table, paired_difference, summarise
from tlm_jax.config import apply_overrides, default_config

# Two-sided 95 % quantiles of Student's t for so many values, from published tables.
T95 = {2: 12.706, 3: 4.303, 5: 2.776, 10: 2.262}


def variant(name, *changes):
    config = default_config()
    config.profile.update({"num_layers": 4, "d_model": 32, "d_ff": 64, "num_heads": 4, "num_kv_heads": 4})
    apply_overrides(config, [f"--config.{change}" for change in changes])
    return Variant(name, changes, config, profile_from_config(config))


def measured(loss, tokens=100, num_bytes=400):
    return {"loss": loss, "bits_per_byte": loss / math.log(2) / 4, "tokens": tokens, "bytes": num_bytes}


def results_of(losses):
    return {name: {i: measured(loss) for i, loss in enumerate(values)} for name, values in losses.items()}


def summary_of(losses, confidence=0.95, variants=None, seeds=3):
    return summarise(variants or [variant(name) for name in losses], results_of(losses), seeds, confidence)


def verdicts(summary):
    return [summary.verdict(row) for row in summary.rows[1:]]


@pytest.mark.parametrize("count", T95)
def test_the_interval_is_that_of_the_t_table(count):
    values = [((i * 7919) % 13 - 6) / 100 for i in range(count)]
    found = paired_difference(dict.fromkeys(range(count), 3.0), {i: 3.0 + v for i, v in enumerate(values)}, 0.95)
    mean = sum(values) / count
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (count - 1))
    half = T95[count] * deviation / math.sqrt(count)
    assert found.values == pytest.approx(values)
    assert found.mean == pytest.approx(mean)
    assert found.interval == pytest.approx((mean - half, mean + half), rel=1e-3)


def test_only_seeds_that_both_have_are_paired():
    found = paired_difference({0: 1.0, 1: 2.0, 2: 3.0}, {1: 2.5, 2: 3.1, 3: 9.0}, 0.95)
    assert found.values == pytest.approx((0.5, 0.1))
    assert paired_difference({0: 1.0}, {1: 1.0}, 0.95) is None
    assert paired_difference({0: 1.0}, {0: 1.5}, 0.95).interval is None


def test_pairing_removes_what_seeds_share():
    row = summary_of({"a": [3.0, 3.5, 4.0], "b": [2.99, 3.49, 3.99]}).rows[1]
    assert row.spread("loss") == pytest.approx(0.5)
    assert row.difference.mean == pytest.approx(-0.01)
    assert row.difference.interval == pytest.approx((-0.01, -0.01))


def test_inside_the_spread_nothing_wins():
    found = summary_of({"a": [3.0, 3.1, 3.2], "b": [2.9, 3.15, 3.1]})
    low, high = found.rows[1].difference.interval
    assert low < 0 < high
    assert verdicts(found) == ["no difference seen with 3 seeds"]
    text = as_text(found)
    assert "b: no difference seen with 3 seeds\n" in text
    for word in ("lower", "higher", "better", "wins", "winner", "best"):
        assert word not in text


def test_an_interval_that_ends_at_zero_contains_it():
    assert verdicts(summary_of({"a": [3.0, 3.5], "b": [3.0, 3.5]}, seeds=2)) == ["no difference seen with 2 seeds"]


def test_one_seed_allows_no_conclusion():
    found = summary_of({"a": [3.0], "b": [2.0]}, seeds=1)
    assert verdicts(found) == ["one seed: without a spread, no difference can be told from chance"]
    assert "lower" not in as_text(found)
    assert "-1.0000\n" in as_text(found)


def test_outside_the_interval_the_difference_and_its_direction_are_told():
    found = summary_of({"a": [3.0, 3.01, 3.02], "b": [2.8, 2.815, 2.82], "c": [3.3, 3.31, 3.325]})
    assert verdicts(found) == [
        "lower than a by 0.1983 nats per token with 3 seeds",
        "higher than a by 0.3017 nats per token with 3 seeds",
    ]


def test_a_difference_seen_only_in_pairs_says_so():
    assert verdicts(summary_of({"a": [3.0, 3.5, 4.0], "b": [2.99, 3.492, 3.99]})) == [
        "lower than a by 0.0093 nats per token with 3 seeds, less than seeds differ by themselves: seen in pairs only"
    ]


def test_a_wider_confidence_can_take_a_difference_away():
    losses = {"a": [3.0, 3.1, 3.2], "b": [2.9, 3.02, 3.11]}
    assert "lower" in verdicts(summary_of(losses))[0]
    found = summary_of(losses, confidence=0.999)
    assert verdicts(found) == ["no difference seen with 3 seeds"]
    assert "99.9% t interval" in as_text(found)


def test_missing_seeds_are_counted():
    found = summary_of({"a": [3.0, 3.1], "b": [2.9]}, variants=[variant("a"), variant("b"), variant("c")])
    assert verdicts(found)[1] == "no seed is complete in both"
    lines = as_text(found).splitlines()
    assert next(line for line in lines if line.startswith("a ")).split()[1:4] == ["2", "of", "3"]
    assert next(line for line in lines if line.startswith("c ")).split()[1:4] == ["0", "of", "3"]


def test_unequal_budgets_are_loud():
    found = summary_of({"a": [3.0, 3.0], "b": [2.0, 2.01]}, variants=[variant("a"), variant("b", "profile.d_ff=128")])
    text = as_text(found)
    assert text.startswith("WARNING: the budgets are not equal: b has ")
    assert "b: at unequal budgets, lower than a" in text
    assert json.loads(as_json(found, {}))["budget_differences"]


def test_other_tokens_are_compared_by_bits_per_byte_and_other_text_not_at_all():
    variants = [variant("a"), variant("b")]
    results = {"a": {0: measured(3.0), 1: measured(3.1)}, "b": {0: measured(3.0, 200), 1: measured(3.1, 200)}}
    found = summarise(variants, results, 2, 0.95)
    assert found.metric == "bits_per_byte"
    assert "in bits per byte, paired" in as_text(found)
    results["b"] = {0: measured(2.0, 100, 500), 1: measured(2.1, 100, 500)}
    found = summarise(variants, results, 2, 0.95)
    assert found.rows[1].difference is None
    assert verdicts(found) == ["no difference taken: the held-out texts are not the same"]


def test_bits_per_byte_may_be_unknown_and_a_loss_not_finite():
    variants, unknown = [variant("a"), variant("b")], {"bits_per_byte": None, "bytes": 0}
    results = {
        "a": {0: measured(3.0) | unknown, 1: measured(3.1) | unknown},
        "b": {0: measured(2.9) | unknown, 1: measured(float("nan")) | unknown},
    }
    found = summarise(variants, results, 2, 0.95)
    assert found.rows[1].difference.values == pytest.approx((-0.1,))
    assert next(line for line in as_text(found).splitlines() if line.startswith("b ")).split()[:5] == [
        "b", "1", "of", "2", "–",
    ]  # fmt: skip
    results["b"][0]["tokens"] = 50
    assert verdicts(summarise(variants, results, 2, 0.95)) == [
        "no difference taken: the tokens are not the same, and a run has no bits per byte"
    ]


def test_several_intervals_come_with_a_caution():
    text = as_text(summary_of({"a": [3.0, 3.1], "b": [3.0, 3.2], "c": [3.1, 3.1]}))
    assert "2 intervals: if no variant differed, one of them would still exclude 0 in about 10% of cases." in text
    assert "intervals:" not in as_text(summary_of({"a": [3.0, 3.1], "b": [3.0, 3.2]}))


def test_json_and_csv_hold_the_numbers():
    losses = {"a": [3.0, 3.1, 3.3], "b": [2.9, 3.15, 3.1]}
    found = summary_of(losses)
    whole = json.loads(as_json(found, results_of(losses)))
    a, b = whole["variants"]
    assert (whole["metric"], whole["seeds"], whole["confidence"]) == ("loss", 3, 0.95)
    assert a["mean"]["loss"] == pytest.approx(sum(losses["a"]) / 3)
    assert a["standard_deviation"]["loss"] == pytest.approx(0.1527525)
    assert (a["difference"], a["verdict"]) == (None, None)
    assert b["difference"]["values"] == pytest.approx([-0.1, 0.05, -0.2])
    assert b["runs"]["1"]["loss"] == 3.15
    assert b["budget"]["parameters"] == found.rows[1].variant.profile.parameters
    lines = list(csv.DictReader(io.StringIO(as_csv(found))))
    assert [line["variant"] for line in lines] == ["a", "b"]
    assert lines[0]["difference"] == ""
    assert float(lines[1]["difference"]) == b["difference"]["mean"]
    assert float(lines[1]["interval_low"]) == b["difference"]["interval"][0]
    assert float(lines[1]["loss_standard_deviation"]) == b["standard_deviation"]["loss"]


def test_budgets_fit_on_a_screen():
    """What is equal is told once; many variants stand in several tables."""
    equal = budget_table([variant(f"start_ratio={n},end_ratio={n}") for n in range(9)])
    assert max(map(len, equal.splitlines())) < 80
    assert equal.count("training tokens") == 1
    different = [variant(f"three_group with d_ff={64 * n}", f"profile.d_ff={64 * n}") for n in range(1, 10)]
    table = budget_table(different)
    assert max(map(len, table.splitlines())) <= 120
    assert table.count("training tokens") == 1, "the tokens are equal in all"
    for each in different:
        assert table.count(each.name) == 1
        assert f"{each.budget['parameters']:,}" in table
