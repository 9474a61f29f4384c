"""The best checkpoints by a validation metric stay, and are found again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

from tlm_jax.checkpoint import manager as manager_module
from tlm_jax.checkpoint import retention
from tlm_jax.checkpoint.layout import step_argument
from tlm_jax.checkpoint.manager import CheckpointManager
from tlm_jax.checkpoint.restore import find_checkpoint
from tlm_jax.errors import UserError

STATE = {"params": {"w": jnp.ones(4)}, "step": jnp.int32(0)}
Manager = Callable[..., CheckpointManager]


def measured(loss: float) -> dict[str, float | None]:
    return retention.storable({"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": -loss})


def save_all(manager: CheckpointManager, losses: dict[int, float]) -> None:
    for step, loss in losses.items():
        manager.save(step, STATE, {}, force=True, metrics=measured(loss))
        manager.wait()


@pytest.mark.parametrize(
    ("values", "ranked"),
    [
        ({1: 3.0, 2: 1.0, 3: 2.0}, [2, 3, 1]),
        ({1: 2.0, 2: 1.0, 3: 1.0, 4: 1.0}, [2, 3, 4, 1]),
        ({1: None, 2: 5.0, 3: None}, [2]),
        ({1: None}, []),
        ({}, []),
    ],
)
def test_lowest_first_then_earliest_and_never_without_a_value(values: dict[int, float | None], ranked: list[int]):
    assert retention.best(values, 9) == ranked
    assert retention.best(values, 2) == ranked[:2]


def test_only_a_lower_value_displaces_one_of_the_best():
    full = {1: 2.0, 2: 1.0, 3: None}
    assert retention.is_among_best(1.5, full, 2)
    assert not retention.is_among_best(2.0, full, 2), "a tie"
    assert not retention.is_among_best(None, {}, 2)
    assert retention.is_among_best(9.0, {1: None}, 1), "the first that is measured at all"
    assert not retention.is_among_best(0.0, full, 0)


def test_not_finite_is_no_value():
    assert set(measured(math.nan).values()) == {None}
    assert measured(2.0)["validation/bits_per_byte"] == -2.0


def test_best_temporary_and_permanent_ones_stay_together(tmp_path: Path, manager_at: Manager):
    losses = {3: 5.0, 4: 1.0, 5: 3.0, 7: 2.0, 8: math.nan, 10: 9.0, 11: 2.0, 12: 4.0, 13: 4.0}
    with manager_at(tmp_path, every_steps=10, keep_last=2, keep_best=2) as manager:
        save_all(manager, losses)
        # 4 and 7 are the best (11 ties with 7 and is later), 10 is permanent, 12 and 13 are the newest.
        assert manager.steps() == [4, 7, 10, 12, 13]
    with manager_at(tmp_path, keep_last=1, keep_best=1) as manager:
        save_all(manager, {14: 0.5})
        assert manager.steps() == [10, 14], "the best is the newest now"


def test_another_metric_may_be_the_measure(tmp_path: Path, manager_at: Manager):
    with manager_at(tmp_path, keep_last=1, keep_best=1, best_metric="validation/bits_per_byte") as manager:
        save_all(manager, {1: 1.0, 2: 7.0, 3: 2.0, 4: 1.0})
        assert manager.steps() == [2, 4]


def test_a_save_is_due_when_a_validation_is_among_the_best(tmp_path: Path, manager_at: Manager):
    with manager_at(tmp_path, keep_last=1, keep_best=2) as manager:
        assert manager.due_by_metric(measured(8.0))
        save_all(manager, {1: 8.0, 2: 7.0})
        assert not manager.due_by_metric(measured(8.0))
        assert not manager.due_by_metric(measured(math.nan))
        assert not manager.due_by_metric({})
        assert manager.due_by_metric(measured(7.5))
    with manager_at(tmp_path, keep_last=1, keep_best=2) as resumed:
        assert not resumed.due_by_metric(measured(8.0)), "a resumed run has forgotten its best"
        assert resumed.due_by_metric(measured(7.5))
    with manager_at(tmp_path) as manager:
        assert not manager.due_by_metric(measured(0.0)), "keep_best is 0"


def test_the_stored_checkpoints_are_read_once_and_only_for_a_validation(
    tmp_path: Path, manager_at: Manager, monkeypatch: pytest.MonkeyPatch
):
    reads, agreements = [], []
    read = retention.metric_values
    monkeypatch.setattr(retention, "metric_values", lambda *args: reads.append(args) or read(*args))
    monkeypatch.setattr(manager_module, "from_first_process", lambda value: agreements.append(value) or value)
    with manager_at(tmp_path, keep_last=1, keep_best=2) as manager:
        for _ in range(5):
            assert not manager.due_by_metric({})
            assert not manager.due_by_metric(measured(math.nan))
        assert reads == agreements == []
        assert manager.due_by_metric(measured(5.0))
        assert len(reads) == len(agreements) == 1
        save_all(manager, {1: 5.0, 2: 3.0, 3: 9.0, 4: 4.0})
        assert manager.steps() == [2, 4]
        assert not manager.due_by_metric(measured(4.5))
        assert manager.due_by_metric(measured(3.5))
        assert len(reads) == 1


def test_a_save_on_its_way_counts(tmp_path: Path, manager_at: Manager, monkeypatch: pytest.MonkeyPatch):
    with manager_at(tmp_path, keep_last=1, keep_best=1) as manager:
        manager.save(1, STATE, {}, force=True, metrics=measured(3.0))
        monkeypatch.setattr("tlm_jax.checkpoint.layout.complete_steps", lambda _: [])
        assert not manager.due_by_metric(measured(4.0))
        assert manager.due_by_metric(measured(2.0))
        monkeypatch.undo()


def test_only_what_was_measured_on_the_same_is_compared(tmp_path: Path, manager_at: Manager):
    directory, ema = tmp_path / "checkpoints", {"weights": "ema", "num_windows": 0}
    with manager_at(directory, keep_last=1, keep_best=1, measured_on={"weights": "params"}) as manager:
        save_all(manager, {1: 1.0, 2: 0.5, 3: 2.0})
    assert find_checkpoint(tmp_path, "best").name == "2"
    with manager_at(directory, keep_last=1, keep_best=1, measured_on=ema) as manager:
        assert manager.due_by_metric(measured(9.0)), "the first of its kind"
        save_all(manager, {4: 9.0, 5: 7.0, 6: 8.0})
        assert not manager.due_by_metric(measured(7.5))
        manager.save(7, STATE, {}, force=True)
        manager.wait()
        assert manager.steps() == [2, 5, 7], "the best of each kind, and the newest"
    assert find_checkpoint(tmp_path, "best").name == "5", "of the kind that was measured last"
    with manager_at(directory, keep_last=1, keep_best=1, measured_on=ema) as resumed:
        assert not resumed.due_by_metric(measured(7.5))
        assert resumed.due_by_metric(measured(6.5))


def test_the_weights_of_the_best_are_those_that_were_measured(tmp_path: Path, manager_at: Manager):
    with manager_at(tmp_path, measured_on={"weights": "ema"}) as manager:
        save_all(manager, {1: 1.0})
    path = tmp_path / "1"
    assert retention.weights_to_read(path, "best", None) == "ema"
    assert retention.weights_to_read(path, "best", "params") == "params"
    assert retention.weights_to_read(path, None, None) == retention.weights_to_read(path, 1, None) == "params"


def test_best_in_the_place_of_a_step(tmp_path: Path, manager_at: Manager):
    with manager_at(tmp_path / "checkpoints", keep_last=9) as manager:
        save_all(manager, {1: 2.0, 2: math.nan})
        manager.save(3, STATE, {}, force=True)
    assert find_checkpoint(tmp_path, "best").name == "1"
    assert find_checkpoint(tmp_path).name == "3"
    # What was written by hand, or by a version that measured nothing, has no value.
    file = tmp_path / "checkpoints" / "1" / "metadata" / "data.json"
    values = json.loads(file.read_text())
    del values["metrics"]
    del values["digests"]
    file.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"checkpoints: no checkpoint has a finite validation/loss; .*keep_best"):
        find_checkpoint(tmp_path, "best")


def test_the_word_for_a_step():
    assert step_argument("12") == 12
    assert step_argument("best") == "best"
    for text in ("", "-1", "worst", "1.0"):
        with pytest.raises(Exception, match="neither a step nor 'best'"):
            step_argument(text)


def test_settings_out_of_range(tmp_path: Path, manager_at: Manager):
    with pytest.raises(UserError, match=r"2 problems.*best_metric: 'accuracy'.*validation/loss, .*keep_best: -1"):
        manager_at(tmp_path, best_metric="accuracy", keep_best=-1)
    with pytest.raises(UserError, match=r"timeout_seconds: 1e\+300 is out of range; it takes more than 0, at most"):
        manager_at(tmp_path, timeout_seconds=1e300)
