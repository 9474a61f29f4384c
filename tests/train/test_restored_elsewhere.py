"""A run of eight devices has the same held-out loss wherever its checkpoint is restored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from restored_loss import restored_loss
from several import variables_of
from whole_run import computed_records, environment, setup_for

from tlm_jax.errors import EXIT_COMPLETE
from tlm_jax.train import loop

HARNESS = Path(__file__).parent / "restored_loss.py"
EIGHT = ("--config.mesh.data=1", "--config.mesh.fsdp=8")


@pytest.mark.slow
def test_a_checkpoint_of_eight_devices_has_the_same_loss_elsewhere(store: Path, tmp_path: Path):
    assert loop.train(setup_for(store, *EIGHT), tmp_path, "") == EXIT_COMPLETE
    trained = computed_records(tmp_path)[-1]["validation"]["loss"]
    assert restored_loss(setup_for(store, *EIGHT), tmp_path) == trained  # to the last bit

    for axes in ({"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2}):
        mesh = [f"--config.mesh.{axis}={axes.get(axis, 1)}" for axis in ("data", "fsdp", "tensor")]
        assert restored_loss(setup_for(store, *mesh), tmp_path) == pytest.approx(trained, abs=1e-5), axes

    command = [sys.executable, str(HARNESS), str(tmp_path)]
    data = f"--config.data.store={store}"
    alone = subprocess.run(
        [*command, "alone", data], capture_output=True, text=True, check=False, timeout=300, env=environment()
    )
    assert alone.returncode == 0, alone.stderr
    assert float(alone.stdout) == pytest.approx(trained, abs=1e-5)

    mesh = ["--config.mesh.data=1", "--config.mesh.fsdp=4"]
    two = [
        subprocess.Popen([*command, "together", data, *mesh], stdout=subprocess.PIPE, text=True, env=variables)
        for variables in variables_of(processes=2, devices=2)
    ]
    for told in [process.communicate(timeout=300)[0] for process in two]:
        loss = float(told.splitlines()[-1])
        assert loss == pytest.approx(trained, abs=1e-5)
    assert [process.returncode for process in two] == [0, 0]
