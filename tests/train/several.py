"""Several processes of one run, on one machine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path

from whole_run import arguments, environment

from tlm_jax.train.writers import read_records


def variables_of(*, processes: int, devices: int) -> list[dict[str, str]]:
    """The environment of each process, by which they find each other."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    shared = environment() | {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
        # A process that finds its program in the cache would wait for one that does not, longer than gloo allows.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    del shared["NPROC"]  # what the tests have; the command must do without
    return [shared | {"JAX_PROCESS_ID": str(index)} for index in range(processes)]


def start(
    store: Path, workdir: Path, *overrides: str, processes: int = 2, devices: int = 2
) -> list[subprocess.Popen[str]]:
    """Starts `processes` with so many `devices` each."""
    command = [sys.executable, "-m", "tlm_jax", *arguments(store, workdir, "--distributed", *overrides)]
    return [
        subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
        for variables in variables_of(processes=processes, devices=devices)
    ]


def finish(processes: list[subprocess.Popen[str]], code: int, seconds: float = 300) -> list[str]:
    """Waits for the processes, all of which must end with `code`; what they told, without the compiler's warnings."""
    try:
        told = [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [code] * len(processes), "\n".join(t[-2000:] for t in told)
    return told


def await_step(processes: list[subprocess.Popen[str]], workdir: Path, step: int) -> None:
    """Waits until these processes, not some before them, have written the record of `step`."""
    began, deadline = time.time(), time.monotonic() + 240
    metrics = workdir / "metrics.jsonl"
    while not any(record["step"] >= step and record["time"] > began for record in read_records(metrics)):
        assert time.monotonic() < deadline, f"step {step} does not come"
        assert all(process.poll() is None for process in processes), finish(processes, 0)
        time.sleep(0.05)
