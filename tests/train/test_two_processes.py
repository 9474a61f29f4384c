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
        }
        command = [sys.executable, "-m", "tlm_jax", *arguments(store, workdir, "--distributed", *overrides)]
        processes.append(subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True))
    return processes


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    try:
        return [(process.wait(timeout=300), process.stderr.read() if process.stderr else "") for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.slow
def test_two_processes_train_stop_and_resume_as_one(store: Path, tmp_path: Path):
    alone = tlm(*arguments(store, tmp_path / "alone"))
    assert alone.returncode == EXIT_COMPLETE, alone.stderr

    workdir = tmp_path / "together"
    processes = start(store, workdir, "--config.mesh.data=2", "--config.mesh.fsdp=2")
    deadline = time.monotonic() + 240
    while not read_records(workdir / "metrics.jsonl") and time.monotonic() < deadline:
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGTERM)  # only one of them hears it
    ended = finish(processes)
    assert [code for code, _ in ended] == [EXIT_RESUMABLE] * 2, ended
    assert "another host's signal" in ended[0][1]
    stopped_at = read_records(workdir / "metrics.jsonl")[-1]["step"]
    assert stopped_at < STEPS

    ended = finish(start(store, workdir, "--config.mesh.data=2", "--config.mesh.fsdp=2"))
    assert [code for code, _ in ended] == [EXIT_COMPLETE] * 2, ended
    left, right = computed_records(workdir), computed_records(tmp_path / "alone")
    np.testing.assert_allclose([r["loss"] for r in left], [r["loss"] for r in right], atol=1e-5)
    assert left[-1]["validation"]["tokens"] == right[-1]["validation"]["tokens"]
    assert left[-1]["validation"]["loss"] == pytest.approx(right[-1]["validation"]["loss"], abs=1e-5)
