"""Two processes of two devices each train as one process does, stop together, and resume in place."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from whole_run import arguments, computed_records, environment, tlm

from tlm_jax.errors import EXIT_COMPLETE, EXIT_RESUMABLE
from tlm_jax.train.writers import read_records

STEPS = 12


def start(store: Path, workdir: Path, *overrides: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    processes = []
    for index in range(2):
        variables = environment() | {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(index),
            "JAX_NUM_CPU_DEVICES": "2",
            "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
            # A process that finds its program in the cache would wait for one that does not, longer than gloo allows.
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }
        del variables["NPROC"]  # what the tests have; the command must do without
        command = [sys.executable, "-m", "tlm_jax", *arguments(store, workdir, "--distributed", *overrides)]
        processes.append(subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True))
    return processes


def finish(processes: list[subprocess.Popen[str]], code: int) -> list[str]:
    """Waits for the processes, all of which must end with `code`; what they told, without the compiler's warnings."""
    try:
        told = [process.communicate(timeout=300)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code] * 2, "\n".join(text[-2000:] for text in told)
    return told


@pytest.mark.slow
def test_two_processes_train_stop_and_resume_as_one(store: Path, tmp_path: Path):
    alone = tlm(*arguments(store, tmp_path / "alone"))
    assert alone.returncode == EXIT_COMPLETE, alone.stderr

    workdir = tmp_path / "together"
    processes = start(store, workdir, "--config.mesh.data=2", "--config.mesh.fsdp=2")
    deadline = time.monotonic() + 240
    while not read_records(workdir / "metrics.jsonl") and time.monotonic() < deadline:
        assert all(process.poll() is None for process in processes), finish(processes, EXIT_RESUMABLE)
        time.sleep(0.05)
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
