"""The held-out loss of a run's newest checkpoint on the devices at hand.

python restored_loss.py WORKDIR together|alone --config.data.store=STORE [--config.KEY=VALUE ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
from whole_run import CONFIG

from tlm_jax.checkpoint.restore import find_checkpoint, restore_state
from tlm_jax.config import load_config
from tlm_jax.parallel.distributed import start_distributed
from tlm_jax.train.loop import _validate
from tlm_jax.train.setup import Setup, build
from tlm_jax.train.step import make_eval_step
from tlm_jax.train.watchdog import Watchdog


def restored_loss(setup: Setup, workdir: Path) -> float:
    """Restores the whole train state into the setup's mesh and evaluates its parameters."""
    with jax.set_mesh(setup.mesh):
        state, _, _ = restore_state(find_checkpoint(workdir), setup.abstract)
        return _validate(setup, make_eval_step(setup.model), state["params"], Watchdog(0.0))["loss"]


if __name__ == "__main__":
    if sys.argv[2] == "together":
        start_distributed()
    print(repr(restored_loss(build(load_config(str(CONFIG), sys.argv[3:])), Path(sys.argv[1]))))
