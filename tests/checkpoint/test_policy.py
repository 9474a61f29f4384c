"""When a checkpoint is made, and which ones stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

from tlm_jax.checkpoint import manager as manager_module
from tlm_jax.checkpoint.manager import CheckpointManager
from tlm_jax.errors import UserError

STATE = {"params": {"w": jnp.ones(4)}, "step": jnp.int32(0)}


class Clock:
    """Time that passes only when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(manager_module, "time", clock)
    return clock


def test_permanent_by_step_and_temporary_by_time(tmp_path: Path, manager_at: Callable[..., CheckpointManager], clock):
    saved = []
    with manager_at(tmp_path, every_steps=10, every_seconds=6.0, keep_last=2) as manager:
        for step in range(41):
            clock.now += 2.0
            if manager.save(step, STATE, {}):
                saved.append(step)
                manager.wait()
        assert saved == [2, 5, 8, 10, 13, 16, 19, 20, 23, 26, 29, 30, 33, 36, 39, 40]
        assert manager.steps() == [10, 20, 30, 39, 40]


def test_time_counts_from_the_last_save_of_any_kind(
    tmp_path: Path, manager_at: Callable[..., CheckpointManager], clock: Clock
):
    with manager_at(tmp_path, every_seconds=10.0) as manager:
        clock.now += 9.0
        assert not manager.due_by_time()
        assert manager.save(1, STATE, {}, force=True)
        manager.wait()
        clock.now += 9.0
        assert not manager.due_by_time()
        clock.now += 1.0
        assert manager.due_by_time()


def test_permanent_ones_stay_when_the_interval_changes(tmp_path: Path, manager_at: Callable[..., CheckpointManager]):
    with manager_at(tmp_path, every_steps=2, keep_last=1) as manager:
        for step in range(1, 6):
            manager.save(step, STATE, {}, force=True)
    assert manager.steps() == [2, 4, 5]
    with manager_at(tmp_path, every_steps=1000, keep_last=1) as manager:
        manager.save(7, STATE, {}, force=True)
    assert manager.steps() == [2, 4, 7]


def test_saves_nothing_unasked(tmp_path: Path, manager_at: Callable[..., CheckpointManager]):
    with manager_at(tmp_path) as manager:
        assert not any(manager.save(step, STATE, {}) for step in range(5))
        assert manager.latest_step() is None


def test_the_same_step_is_saved_once(tmp_path: Path, manager_at: Callable[..., CheckpointManager]):
    with manager_at(tmp_path) as manager:
        assert manager.save(3, STATE, {"next_window": 1}, force=True)
        assert not manager.save(3, STATE, {"next_window": 2}, force=True)
        manager.wait()
        assert not manager.save(3, STATE, {"next_window": 3}, force=True)
        _, data_state, _ = manager.restore(STATE)
    assert data_state == {"next_window": 1}


def test_what_was_left_behind_is_removed_and_the_rest_is_not(
    tmp_path: Path, manager_at: Callable[..., CheckpointManager]
):
    with manager_at(tmp_path) as manager:
        manager.save(3, STATE, {}, force=True)
    for name in ("4.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp-17", "2.removed", "notes", "6"):
        (tmp_path / name / "params").mkdir(parents=True)
    assert manager.steps() == [3]
    with manager_at(tmp_path) as manager:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "6", "notes"]
        assert manager.save(6, STATE, {}, force=True), "a half copy does not stand in the way"
    assert manager.steps() == [3, 6]


def test_settings_out_of_range_are_told_together(tmp_path: Path, manager_at: Callable[..., CheckpointManager]):
    with pytest.raises(UserError, match=r"3 problems.*config\.checkpoint\.every_steps.*every_seconds.*keep_last"):
        manager_at(tmp_path, every_steps=-1, every_seconds=-1.0, keep_last=0)
