"""Two processes of two devices each train as one process does, stop together, and resume in place."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
from several import await_step, finish, start
from whole_run import arguments, computed_records, tlm

from tlm_jax.errors import EXIT_COMPLETE, EXIT_RESUMABLE
from tlm_jax.train.writers import read_records

STEPS = 12


@pytest.mark.slow
def test_two_processes_train_stop_and_resume_as_one(store: Path, tmp_path: Path):
    alone = tlm(*arguments(store, tmp_path / "alone"))
    assert alone.returncode == EXIT_COMPLETE, alone.stderr

    workdir = tmp_path / "together"
    processes = start(store, workdir, "--config.mesh.data=2", "--config.mesh.fsdp=2")
    await_step(processes, workdir, 1)
    processes[1].send_signal(signal.SIGTERM)  # only one of them hears it
    assert "another host's signal" in finish(processes, EXIT_RESUMABLE)[0]
    stopped_at = read_records(workdir / "metrics.jsonl")[-1]["step"]
    assert stopped_at < STEPS

    finish(start(store, workdir, "--config.mesh.data=2", "--config.mesh.fsdp=2"), EXIT_COMPLETE)
    left, right = computed_records(workdir), computed_records(tmp_path / "alone")
    np.testing.assert_allclose([r["loss"] for r in left], [r["loss"] for r in right], atol=1e-5)
    assert left[-1]["validation"]["tokens"] == right[-1]["validation"]["tokens"]
    assert left[-1]["validation"]["loss"] == pytest.approx(right[-1]["validation"]["loss"], abs=1e-5)


@pytest.mark.slow
def test_two_processes_save_after_a_validation(store: Path, tmp_path: Path):
    """The checksums of a save are many programs, and all wait for the other process."""
    two = ("--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.checkpoint.every_steps=2")
    short = ("--config.train.num_steps=4", "--config.train.warmup_steps=2", "--config.validation.every_steps=0")
    finish(start(store, tmp_path / "run", *two, *short), EXIT_COMPLETE)
    assert {path.name for path in (tmp_path / "run/checkpoints").iterdir()} >= {"2", "4"}
