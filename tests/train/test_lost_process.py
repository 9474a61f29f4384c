"""Processes of a run are killed or hang: the others end in time, other numbers of processes go on, nothing is lost.

TLM_KILLS is the number of random kills, 1 where it is not set:

    TLM_KILLS=20 python -m pytest tests/train/test_lost_process.py
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from several import await_step, finish, start
from whole_run import computed_records, setup_for

from tlm_jax.checkpoint.layout import DATA, complete_steps, read_json, step_directory
from tlm_jax.errors import EXIT_BAD_INPUT, EXIT_COMPLETE, EXIT_RESUMABLE
from tlm_jax.train import loop

KILLS = int(os.environ.get("TLM_KILLS", "1"))
STEPS = 30 + 10 * KILLS
LONG = (f"--config.train.num_steps={STEPS}", "--config.checkpoint.every_steps=6", "--config.validation.every_steps=0")
MESH = ("--config.mesh.data=2", "--config.mesh.fsdp=2")
HANG_SECONDS = 8


def lose(
    processes: list[subprocess.Popen[str]], victim: int, number: signal.Signals, longest: float
) -> tuple[list[str], float]:
    """Sends the signal to one process; the others must end with 75.

    Returns what each of them told, then what the lost one had told, and after how many seconds they had ended.
    """
    lost, began = processes.pop(victim), time.monotonic()
    lost.send_signal(number)
    try:
        told = finish(processes, EXIT_RESUMABLE, seconds=longest)
        seconds = time.monotonic() - began
    finally:
        lost.kill()
        last_words = lost.communicate()[1]
    return [*told, last_words], seconds


@pytest.mark.slow
def test_lost_processes_end_the_others_and_lose_nothing(store: Path, tmp_path: Path):
    workdir, chance, newest = tmp_path / "run", random.Random(0), 0
    checkpoints = workdir / "checkpoints"

    four = start(store, workdir, *LONG, *MESH, processes=4, devices=1)
    await_step(four, workdir, 8)
    for told in lose(four, 2, signal.SIGKILL, 30)[0][:-1]:
        assert re.search(r"tlm train: process \d of 4: another process is gone", told), told[-2000:]
    newest = complete_steps(checkpoints)[-1]
    assert newest >= 6

    two = start(store, workdir, *LONG, *MESH, f"--config.train.hang_seconds={HANG_SECONDS}")
    await_step(two, workdir, newest + 4)
    (told, _), seconds = lose(two, 1, signal.SIGSTOP, 60)
    assert HANG_SECONDS / 2 < seconds < 2 * HANG_SECONDS
    assert f"resuming at step {newest}\n" in told
    assert re.search(r"tlm train: process 0 of 2: waited \d+ s for the end of step \d+: another process", told)
    assert "recorder.py" in told  # in the stack of the main thread

    for _ in range(KILLS):
        assert complete_steps(checkpoints)[-1] >= newest
        newest = complete_steps(checkpoints)[-1]
        two = start(store, workdir, *LONG, *MESH, "--config.train.hang_seconds=20")
        await_step(two, workdir, newest + chance.randint(1, 9))
        time.sleep(chance.uniform(0, 0.5))
        told, seconds = lose(two, chance.randrange(2), signal.SIGKILL, 60)
        assert f"resuming at step {newest}\n" in "".join(told)
        print(f"resumed at step {newest}, the other process ended after {seconds:.1f} s")

    assert complete_steps(checkpoints)[-1] >= newest
    assert loop.train(setup_for(store, *LONG), workdir, "") == EXIT_COMPLETE
    reference = tmp_path / "reference"
    assert loop.train(setup_for(store, *LONG), reference, "") == EXIT_COMPLETE
    left, right = computed_records(workdir), computed_records(reference)
    assert len(left) == STEPS
    np.testing.assert_allclose([r["loss"] for r in left], [r["loss"] for r in right], atol=1e-5)
    data = [read_json(step_directory(run / "checkpoints", STEPS), DATA) for run in (workdir, reference)]
    assert data[0] == data[1]


@pytest.mark.slow
def test_a_process_that_fails_tells_why_and_the_other_does_not_wait(store: Path, tmp_path: Path):
    """The first process alone writes events, and cannot."""
    (tmp_path / "tensorboard").touch()
    failing, other = start(store, tmp_path, *MESH, "--config.log.tensorboard=True")
    try:
        reason, told = failing.communicate(timeout=120)[1], other.communicate(timeout=60)[1]
    finally:
        failing.kill()
        other.kill()
    assert failing.returncode == EXIT_BAD_INPUT, reason[-2000:]
    assert f"tlm train: error: {tmp_path / 'tensorboard'}: cannot be written" in reason
    assert other.returncode == EXIT_RESUMABLE, told[-2000:]
    assert "tlm train: process 1 of 2: another process is gone" in told
