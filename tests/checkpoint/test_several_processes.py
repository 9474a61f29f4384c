"""Two processes that share a directory: they save, delete, and decide by time together, and one process can go on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_state import METADATA, abstract, assert_equal, make_mesh, make_state

from tlm_jax.checkpoint.manager import CheckpointManager

PROGRAM = """
import sys
import jax
port, index, directory, tests = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=index)
sys.path.insert(0, tests)
import numpy as np
from small_state import METADATA, abstract, make_mesh, make_params, sharding_of
from tlm_jax.checkpoint import manager as manager_module
mesh = make_mesh(2, 4)

def state_of(step):
    whole = {"params": make_params(step), "optimizer": {"mu": make_params(step + 1)}, "step": np.array(step, np.int32)}
    return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, sharding_of(x, mesh), lambda i: x[i]), whole)

class Clock:
    now = 0.0
    monotonic = classmethod(lambda cls: cls.now)
manager_module.time = Clock
with manager_module.CheckpointManager(directory, every_steps=4, every_seconds=3.0, keep_last=1, timeout_seconds=60.0,
                                      metadata=METADATA) as manager:
    start = manager.latest_step() or 0
    saved = []
    for step in range(start + 1, start + 7):
        Clock.now += 1.0 if index == 0 else 0.0  # the second one's clock stands still
        if manager.save(step, state_of(step), {"next_window": step}):
            saved.append(step)
            manager.wait()
    state, data_state, metadata = manager.restore(abstract(state_of(0), mesh))
    assert metadata == METADATA and data_state == {"next_window": saved[-1]}
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(state_of(saved[-1])), strict=True):
        for a, b in zip(got.addressable_shards, want.addressable_shards, strict=True):
            np.testing.assert_array_equal(a.data, b.data)
    print(saved, manager.steps())
"""


def run_two(directory: Path) -> list[str]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    arguments = [str(directory), str(Path(__file__).parent)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port), str(index), *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [out.splitlines()[-1] for out, _ in outputs]  # Gloo greets on stdout


@pytest.mark.slow
def test_two_processes_save_and_resume_in_place(tmp_path: Path, manager_at: Callable[..., CheckpointManager]):
    directory = tmp_path / "checkpoints"
    assert run_two(directory) == ["[3, 4] [4]"] * 2
    assert run_two(directory) == ["[7, 8] [4, 8]"] * 2
    mesh = make_mesh(4)
    wanted = make_state(mesh, 8)
    wanted = {"params": wanted["params"], "optimizer": {"mu": make_state(mesh, 9)["params"]}, "step": wanted["step"]}
    with manager_at(directory) as manager:
        state, data_state, metadata = manager.restore(abstract(wanted, mesh))
    assert_equal(state, wanted)
    assert (data_state, metadata) == ({"next_window": 8}, METADATA)
    assert np.asarray(state["step"]) == 8
