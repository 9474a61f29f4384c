"""What a process tells jax about itself when it joins others."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import jax
import pytest

from tlm_jax.errors import EXIT_RESUMABLE
from tlm_jax.parallel import distributed

VARIABLES = ("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "JAX_LOCAL_DEVICE_IDS", "CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1"}, [0, 1, 2, 3]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, [0, 1, 2, 3]),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, [0, 1, 2, 3]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "CUDA_VISIBLE_DEVICES": "2,3"}, [0, 1]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "CUDA_VISIBLE_DEVICES": ""}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "JAX_LOCAL_DEVICE_IDS": "3"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, None),
        ({"SLURM_STEP_TASKS_PER_NODE": "1,2"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, None),
    ],
)
@pytest.mark.parametrize("address", [None, "host:1"])
def test_the_only_process_of_a_node_has_all_its_gpus(tmp_path, monkeypatch, variables, devices, address):
    for name in (*VARIABLES, "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if address:
        for name, value in (("COORDINATOR_ADDRESS", address), ("NUM_PROCESSES", "2"), ("PROCESS_ID", "0")):
            monkeypatch.setenv(f"JAX_{name}", value)
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr(distributed, "_DEVICE_FILES", tmp_path)
    told = []
    monkeypatch.setattr(distributed, "listen_for_abort", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: told.append(options["local_device_ids"]))
    distributed.start_distributed()
    assert told == [devices]


def test_a_machine_without_gpus_is_left_to_jax(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "1(x4)")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(distributed, "_DEVICE_FILES", tmp_path)
    assert distributed._devices_of_the_node() is None


@pytest.mark.parametrize("process", ["0", "1"])
def test_others_that_do_not_come_end_it_resumably(process):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code = "from tlm_jax.parallel import distributed; distributed._TIMEOUT_SECONDS = 2; distributed.start_distributed()"
    variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": process}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **variables}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_RESUMABLE, done.stderr
    assert "tlm train: not all processes of the run came within 2 s; start all of them again\n" in done.stderr
