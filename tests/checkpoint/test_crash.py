"""After kill -9 at any moment of a save, the newest complete checkpoint is in force and nothing half-written counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HARNESS = Path(__file__).parent / "crash_harness.py"


def run_harness(directory: Path, *arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, HARNESS, directory, *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_killed_before_every_file_system_event_of_a_save(tmp_path: Path):
    killed = run_harness(tmp_path / "checkpoints", "every-event")
    renames = [entry["arguments"] for entry in killed if entry["event"] == "os.rename"]
    assert any(".orbax-checkpoint-tmp" in source and to.isdecimal() for source, to in renames), "no kill at the commit"
    assert any(source.isdecimal() and to.endswith(".removed") for source, to in renames), "no kill at a deletion"
    assert len(killed) > 30
    assert any(entry["event"] == "os.rmdir" for entry in killed), "no kill in the middle of a deletion"


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path):
    rounds = run_harness(tmp_path / "checkpoints", "random", "12")
    assert len(rounds) == 12
    assert sum(bool(entry["unfinished"]) for entry in rounds) >= 3, "hardly any kill came in the middle of a save"


def test_killed_before_every_file_system_event_of_a_prune(tmp_path: Path):
    killed = run_harness(tmp_path / "checkpoints", "prune")
    assert sum(entry["event"] == "os.rename" for entry in killed) == 2, "no kill at each of two removals"
    assert sum(entry["event"] == "os.rmdir" for entry in killed) > 10, "no kill in the middle of a removal"


@pytest.mark.slow
def test_killed_at_file_system_events_of_an_export(tmp_path: Path):
    killed = run_harness(tmp_path / "checkpoints", "export")
    assert sum(".orbax-checkpoint-tmp" in str(entry["arguments"]) for entry in killed) > 3, "hardly a kill in the save"
