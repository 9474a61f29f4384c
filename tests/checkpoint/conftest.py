"""A manager with plain settings, and a workdir with two checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_state import METADATA, make_mesh, make_state

from tlm_jax.checkpoint.manager import CheckpointManager


@pytest.fixture
def manager_at() -> Callable[..., CheckpointManager]:
    """A manager whose policy saves nothing unless asked; keyword arguments override."""

    def make(directory: Path, **settings: Any) -> CheckpointManager:
        defaults = {"every_steps": 0, "every_seconds": 0.0, "keep_last": 2, "timeout_seconds": 60.0}
        return CheckpointManager(directory, metadata=METADATA, **defaults | settings)

    return make


@pytest.fixture
def saved(tmp_path: Path, manager_at: Callable[..., CheckpointManager]) -> Path:
    """A workdir with checkpoints of steps 1 and 2, saved on a mesh of 2 x 4 devices."""
    with manager_at(tmp_path / "checkpoints") as manager:
        for step in (1, 2):
            assert manager.save(step, make_state(make_mesh(2, 4), step), {"next_window": 8 * step}, force=True)
    return tmp_path
