"""Killed (SIGKILL) twenty times and resumed by the same command, a run ends as if it had never been."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killed_run import MOMENTS
from whole_run import arguments, assert_same_end, computed_records, environment, setup_for, tlm

from tlm_jax.checkpoint.layout import complete_steps
from tlm_jax.train.writers import read_records

HARNESS = Path(__file__).parent / "killed_run.py"
STEPS = ("--config.train.num_steps=160", "--config.train.global_batch_size=128")
# A save whenever the last one has ended, so that how far a life gets hangs little on how fast the machine is.
FREQUENT = ("--config.checkpoint.every_steps=8", "--config.checkpoint.every_seconds=1e-6")
# From outside: (stderr line to wait for, how many of them, at most so many seconds more). The first is printed before
# the step is compiled, and each of the others when a step's numbers are known.
OUTSIDE = [(" parameters in ", 1, 2.0)] * 3 + [("step ", 1, 0.3)] * 2 + [("step ", 9, 0.3)] * 4 + [("held out", 1, 0.1)]


def kill_from_outside(command: list[str], line_part: str, count: int, delay: float) -> int:
    """Waits for the `count`-th line with `line_part`, then for `delay` seconds, and kills; returns the exit code."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        for line in process.stderr:
            count -= line_part in line
            if not count:
                break
        time.sleep(delay)
        process.kill()
    return process.returncode


@pytest.mark.slow
def test_twenty_kills(store: Path, tmp_path: Path):
    reference, workdir = tmp_path / "reference", tmp_path / "killed"
    done = tlm(*arguments(store, reference, *STEPS, "--config.checkpoint.every_steps=1000"))
    assert done.returncode == 0, done.stderr

    argv = arguments(store, workdir, *STEPS, *FREQUENT)
    chance = random.Random(0)
    lives: list[tuple[str, int, float] | str] = [*OUTSIDE, *MOMENTS]
    chance.shuffle(lives)
    assert len(lives) == 20
    inside_commit = 0
    for life in lives:
        if isinstance(life, str):
            command = [sys.executable, str(HARNESS), str(workdir), life, *argv]
            code = subprocess.run(command, capture_output=True, check=False, timeout=300, env=environment()).returncode
        else:
            line_part, count, longest = life
            command = [sys.executable, "-m", "tlm_jax", *argv]
            code = kill_from_outside(command, line_part, count, chance.uniform(0, longest))
        assert code == -signal.SIGKILL, f"{life}: the run ended by itself, with {code}"
        checkpoints = workdir / "checkpoints"
        inside_commit += any(".orbax-checkpoint-tmp" in path.name for path in checkpoints.glob("*"))
        # What a checkpoint covers has been logged before it.
        logged = [record["step"] for record in read_records(workdir / "metrics.jsonl")]
        assert logged == list(range(1, len(logged) + 1))
        complete = complete_steps(checkpoints)
        print(f"{life}: killed after step {len(logged)}, complete checkpoints {complete}, {inside_commit} in a commit")
        assert len(logged) >= max(complete, default=0)
    assert inside_commit >= 3

    done = tlm(*argv)
    assert done.returncode == 0, done.stderr
    assert len(computed_records(workdir)) == 160
    assert_same_end(setup_for(store, *STEPS), workdir, reference)
    assert not [path.name for path in (workdir / "checkpoints").iterdir() if not path.name.isdecimal()]
