"""Start-up of one process among several."""

from __future__ import annotations

import os

import jax

from tlm_jax.errors import UserError

_TIMEOUT_SECONDS = 300


def start_distributed() -> None:
    """Joins the other processes of this run; the first jax call of each.

    Who and where they are comes from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID where the first is
    set, else from what jax itself recognises: TPU metadata, Slurm, Open MPI, Kubernetes.

    Raises:
      UserError: the variables are incomplete, nothing is recognised, or the others do not come in time.
    """
    # The service would take SIGTERM for itself; the loop's own request reaches all hosts without it.
    jax.config.update("jax_enable_preemption_service", False)
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    try:
        if address:
            jax.distributed.initialize(
                address,
                int(os.environ["JAX_NUM_PROCESSES"]),
                int(os.environ["JAX_PROCESS_ID"]),
                initialization_timeout=_TIMEOUT_SECONDS,
            )
        else:
            jax.distributed.initialize(initialization_timeout=_TIMEOUT_SECONDS)
    except (KeyError, ValueError, RuntimeError) as error:
        raise UserError(
            f"this process could not join the others ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})",
            where="--distributed",
            mend="start it by Slurm, Open MPI or on a TPU pod, or set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
            "JAX_PROCESS_ID",
        ) from error
