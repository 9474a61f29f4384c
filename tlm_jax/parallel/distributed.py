"""Start-up of one process among several."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jax

from tlm_jax.errors import UserError
from tlm_jax.parallel.lost import JOINED, listen_for_abort

_TIMEOUT_SECONDS = 300
_DEVICE_FILES = Path("/dev")  # one `nvidia0`, `nvidia1`, … for each GPU


def _devices_of_the_node() -> list[int] | None:
    """All GPUs, for the only process that Slurm or Open MPI has started on a node; None: as jax would have it.

    Under these two jax gives a process one GPU, whether or not others are there for the rest.
    """
    slurm, open_mpi = os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""), os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    alone = re.fullmatch(r"1(\(x\d+\))?", slurm) or open_mpi == "1"
    if not alone or os.environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len([*_DEVICE_FILES.glob("nvidia[0-9]*")]) if visible is None else len([*filter(None, visible.split(","))])
    return list(range(count)) or None


def start_distributed(heartbeat_seconds: int = 100) -> None:
    """Joins the other processes of this run; the first jax call of each.

    Who and where they are comes from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID where the first is
    set, else from what jax itself recognises: TPU metadata, Slurm, Open MPI, Kubernetes.

    Args:
      heartbeat_seconds: without a sign of life from one of them for so long, all are ended; see `parallel.lost`.

    Raises:
      UserError: the variables are incomplete, or nothing is recognised. Where the others do not come in time, JAX ends
        the process; `parallel.lost` makes 75 of it.
    """
    devices = _devices_of_the_node()
    # The service would take SIGTERM for itself; the loop's own request reaches all hosts without it.
    jax.config.update("jax_enable_preemption_service", False)
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    listen_for_abort("tlm train", _TIMEOUT_SECONDS)
    try:
        if address:
            jax.distributed.initialize(
                address,
                int(os.environ["JAX_NUM_PROCESSES"]),
                int(os.environ["JAX_PROCESS_ID"]),
                local_device_ids=devices,
                initialization_timeout=_TIMEOUT_SECONDS,
                heartbeat_timeout_seconds=heartbeat_seconds,
            )
        else:
            jax.distributed.initialize(
                local_device_ids=devices,
                initialization_timeout=_TIMEOUT_SECONDS,
                heartbeat_timeout_seconds=heartbeat_seconds,
            )
    except (KeyError, ValueError, RuntimeError) as error:
        raise UserError(
            f"this process could not join the others ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})",
            where="--distributed",
            mend="start it by Slurm, Open MPI or on a TPU pod, or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID",
        ) from error
    JOINED.set()
