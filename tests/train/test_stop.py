"""Stopped by a signal at any step and resumed, a run ends as if it had never been stopped, bit for bit."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from whole_run import arguments, assert_same_end, computed_records, environment, saved_state, setup_for, tlm

from tlm_jax.checkpoint.layout import complete_steps
from tlm_jax.errors import EXIT_COMPLETE, EXIT_RESUMABLE
from tlm_jax.train import loop

STEPS = 12


@pytest.fixture(scope="module")
def reference(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of this process's eight devices that was never stopped."""
    workdir = tmp_path_factory.mktemp("reference")
    assert loop.train(setup_for(store), workdir, "") == EXIT_COMPLETE
    return workdir


@pytest.fixture
def signal_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None, signal.Signals], None]:
    """`signal_at(step, number)`: this process gets the signal while it waits for the step's batch."""
    steps = loop._steps

    def choose(chosen: int | None, number: signal.Signals) -> None:
        def with_signal(*arguments: Any) -> Iterator[tuple[int, Any]]:
            for step, batch in steps(*arguments):
                if step == chosen:
                    os.kill(os.getpid(), number)
                yield step, batch

        monkeypatch.setattr(loop, "_steps", with_signal)

    return choose


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "stops"), [(0, (1, 2, 3, 5, 11)), (1, (4,)), (4, (7,))], ids=["no worker", "1 worker", "4 workers"]
)
def test_stopped_and_resumed_equals_never_stopped(
    store: Path,
    reference: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    signal_at: Callable[[int | None, signal.Signals], None],
    num_workers: int,
    stops: tuple[int, ...],
):
    """The stops lie before, at and after checkpoints (every 3 steps) and validations (every 5)."""
    setup = setup_for(store, f"--config.data.num_workers={num_workers}")
    for i, step in enumerate(stops):
        number = (signal.SIGTERM, signal.SIGINT)[i % 2]
        signal_at(step, number)
        assert loop.train(setup, tmp_path, "the same command") == EXIT_RESUMABLE
        told = capsys.readouterr().err
        assert told.endswith(f"stopped on {number.name} at step {step}; resume with:\n  the same command\n")
        assert complete_steps(tmp_path / "checkpoints")[-1] == step
        assert len(computed_records(tmp_path)) == step
        assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    signal_at(None, signal.SIGTERM)
    assert loop.train(setup, tmp_path, "") == EXIT_COMPLETE
    assert_same_end(setup, tmp_path, reference, stops)


@pytest.mark.slow
def test_factored_moments_and_the_moving_average_resume(
    store: Path, tmp_path: Path, signal_at: Callable[[int | None, signal.Signals], None]
):
    keys = ("optimizer=adafactor", "adam_learning_rate=0", "adafactor_min_factored=16", "adafactor_momentum=0.9")
    keys += ("ema_decay=0.9", "schedule=wsd", "decay_steps=5")
    setup = setup_for(store, *(f"--config.train.{key}" for key in keys), "--config.validation.weights=ema")
    signal_at(None, signal.SIGTERM)
    assert loop.train(setup, tmp_path / "reference", "") == EXIT_COMPLETE
    signal_at(7, signal.SIGTERM)
    assert loop.train(setup, tmp_path / "stopped", "") == EXIT_RESUMABLE
    signal_at(None, signal.SIGTERM)
    assert loop.train(setup, tmp_path / "stopped", "") == EXIT_COMPLETE
    state, _ = saved_state(setup, tmp_path / "stopped")
    assert {name.split("'")[1] for name in state} == {"params", "optimizer", "ema", "step", "skipped", "skipped_row"}
    assert_same_end(setup, tmp_path / "stopped", tmp_path / "reference", (7,))


@pytest.mark.slow
def test_a_signal_during_the_last_step_does_not_take_completion_away(
    store: Path, reference: Path, tmp_path: Path, signal_at: Callable[[int | None, signal.Signals], None]
):
    setup = setup_for(store)
    signal_at(STEPS, signal.SIGTERM)
    assert loop.train(setup, tmp_path, "") == EXIT_COMPLETE
    assert_same_end(setup, tmp_path, reference)


def run_and_signal(command: list[str], line_part: str, number: signal.Signals) -> tuple[int, str]:
    """Sends the signal when a line with `line_part` comes on stderr; returns the exit code and all of stderr."""
    lines = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(line)
            if line_part in line:
                process.send_signal(number)
    return process.returncode, "".join(lines)


@pytest.mark.slow
def test_the_command_prints_what_resumes_it(store: Path, tmp_path: Path):
    """Through the shell: an awkward directory name survives, and the printed command completes the run."""
    long, workdir, reference = "--config.train.num_steps=400", tmp_path / "a run's", tmp_path / "reference"
    argv = [*arguments(store, workdir, long), "--config.checkpoint.every_steps=1000"]
    code, told = run_and_signal([sys.executable, "-m", "tlm_jax", *argv], "step   2/400", signal.SIGINT)
    assert code == EXIT_RESUMABLE, told
    stopped = re.search(r"stopped on SIGINT at step (\d+); resume with:\n  (tlm .*)\n\Z", told)
    assert stopped, told
    assert shlex.split(stopped[2]) == ["tlm", *argv]
    assert complete_steps(workdir / "checkpoints") == [int(stopped[1])]

    done = tlm(*shlex.split(stopped[2])[1:])
    assert done.returncode == EXIT_COMPLETE, done.stderr
    assert f"resuming at step {stopped[1]}\n" in done.stderr
    assert tlm(*arguments(store, reference, long)).returncode == EXIT_COMPLETE
    assert_same_end(setup_for(store, long), workdir, reference, (int(stopped[1]),))

    before = {path: path.stat().st_mtime_ns for path in (workdir / "checkpoints").rglob("*")}
    again = tlm(*argv)
    assert again.returncode == EXIT_COMPLETE
    assert again.stderr == f"complete: {workdir} is at step 400 of 400\n"
    assert {path: path.stat().st_mtime_ns for path in (workdir / "checkpoints").rglob("*")} == before


# The save that follows the first signal never ends.
STUCK = """
import sys, time
from tlm_jax.checkpoint.manager import CheckpointManager
from tlm_jax.cli import main
def wait(self):
    if self._in_flight:
        print("waiting for the disk", file=sys.stderr, flush=True)
        time.sleep(600)
CheckpointManager.wait = wait
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(store: Path, tmp_path: Path, number: signal.Signals):
    argv = [*arguments(store, tmp_path), "--config.checkpoint.every_steps=1000", "--config.train.num_steps=100000"]
    command = [sys.executable, "-c", STUCK, *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("step      3"):
                process.send_signal(number)
            if "waiting for the disk" in line:
                break
        process.send_signal(number)
        try:
            rest = process.communicate(timeout=240)[1]
        finally:
            process.kill()
    assert process.returncode == -number
    assert rest == ""
    assert complete_steps(tmp_path / "checkpoints") in ([], [4], [5])  # whatever the save came to, no half of it
