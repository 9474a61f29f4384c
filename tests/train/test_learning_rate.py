"""Learning-rate schedules against their closed forms, computed here in float64."""

from __future__ import annotations

import math

import pytest

from tlm_jax.config import default_config
from tlm_jax.train.schedules import DECAY_SHAPES, SCHEDULES, check_schedule, learning_rate_schedule

PEAK, N, W = 0.3, 1000, 50


def config_with(**train):
    config = default_config()
    config.train.update({"num_steps": N, "warmup_steps": W, "learning_rate": PEAK} | train)
    return config


def rate(n: int, **train) -> float:
    """The learning rate that trains step n, counted from 1."""
    return float(learning_rate_schedule(config_with(**train))(n - 1))


NEEDED = {"wsd": {"decay_steps": 200}, "power": {"decay_steps": 200}}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_warm_up_is_linear_and_its_first_step_moves(schedule):
    keys = {"schedule": schedule, **NEEDED.get(schedule, {})}
    top = rate(W, **keys)
    for n in (1, 7, 25, 49):
        assert rate(n, **keys) == pytest.approx(top * n / W, rel=1e-6)
    if schedule != "power":
        assert top == pytest.approx(PEAK, rel=1e-6)
    assert rate(1, **keys, warmup_steps=0) > 0


@pytest.mark.parametrize("n", [50, 51, 300, 525, 999, 1000])
def test_closed_forms(n):
    t = (n - W) / (N - W)
    wanted = {
        "cosine": PEAK * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * t))),
        "linear": PEAK * (1 - 0.8 * t),
    }
    for schedule, value in wanted.items():
        assert rate(n, schedule=schedule, final_learning_rate_ratio=0.2) == pytest.approx(value, rel=1e-5)
    assert rate(n, schedule="constant") == pytest.approx(PEAK, rel=1e-6)
    assert rate(n, schedule="inverse_sqrt") == pytest.approx(PEAK * math.sqrt(W / n), rel=1e-6)


@pytest.mark.parametrize("shape", DECAY_SHAPES)
@pytest.mark.parametrize("n", [50, 400, 800, 801, 850, 900, 999, 1000])
def test_wsd_is_flat_and_then_falls(shape, n):
    t = max(0.0, (n - 800) / 200)
    left = {
        "linear": 0.1 + 0.9 * (1 - t),
        "cosine": 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * t)),
        "sqrt": 0.1 + 0.9 * (1 - math.sqrt(t)),
        "exponential": 0.1**t,
    }
    found = rate(n, schedule="wsd", decay_steps=200, decay_shape=shape)
    assert found == pytest.approx(PEAK * left[shape], rel=1e-5)


@pytest.mark.parametrize("n", [50, 120, 500, 800, 900, 1000])
def test_power_follows_the_number_of_tokens(n):
    """Batch size times a times tokens to the b, never above the peak, and the last value held while it decays."""
    config = config_with(schedule="power", decay_steps=200, global_batch_size=64, final_learning_rate_ratio=0.0)
    config.data.sequence_length = 2048
    law = 64 * 4.0 * (min(n, 800) * 64 * 2048) ** -0.51
    wanted = min(PEAK, law) * (1 - max(0, n - 800) / 200)
    assert float(learning_rate_schedule(config)(n - 1)) == pytest.approx(wanted, rel=1e-5, abs=1e-9)


def test_power_is_cut_at_the_peak():
    keys = {"schedule": "power", "global_batch_size": 64, "learning_rate": 1e-4}
    assert rate(60, **keys, decay_steps=9) == pytest.approx(1e-4, rel=1e-6)


def test_power_ends_at_the_ratio_of_where_its_decay_begins():
    keys = {"schedule": "power", "global_batch_size": 64, "decay_steps": 200, "final_learning_rate_ratio": 0.2}
    assert rate(800, **keys) < PEAK / 2
    assert rate(N, **keys) == pytest.approx(0.2 * rate(800, **keys), rel=1e-6)


def test_after_the_last_step_the_curve_stays_at_its_end():
    for schedule in ("cosine", "linear", "wsd"):
        keys = {"schedule": schedule, **NEEDED.get(schedule, {})}
        assert rate(N + 50, **keys) == pytest.approx(rate(N, **keys), rel=1e-6)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"schedule": "cosin"}, "config.train.schedule: 'cosin' is not one of cosine, linear"),
        ({"schedule": "wsd"}, "config.train.decay_steps: wsd has no decay"),
        ({"schedule": "power"}, "config.train.decay_steps: power has no decay; say how many of the last steps decay"),
        ({"schedule": "wsd", "decay_steps": 951}, "951 is not between 0 and the 950 after the warm-up"),
        ({"schedule": "wsd", "decay_steps": 9, "decay_shape": "steep"}, "'steep' is not one of linear, cosine"),
        (
            {"schedule": "wsd", "decay_steps": 9, "decay_shape": "exponential", "final_learning_rate_ratio": 0.0},
            "an exponential decay never ends at 0",
        ),
        (
            {"schedule": "power", "decay_steps": 9, "power_exponent": 0.5},
            "config.train.power_exponent: must be at most 0, not 0.5",
        ),
        ({"learning_rate": math.inf}, "config.train.learning_rate: must be above 0, not inf"),
        ({"warmup_steps": 1001}, "1001 is not between 0 and train.num_steps = 1000; take fewer, such as"),
    ],
)
def test_what_cannot_be_is_told(values, told):
    (problem,) = check_schedule(config_with(**values).train)
    assert told in str(problem)
