"""`tlm train`."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tlm_jax.config import load_config
from tlm_jax.errors import EXIT_COMPLETE
from tlm_jax.train.signals import StopRequest

_SMALLER = (
    "lower config.data.sequence_length or config.train.global_batch_size, raise config.train.gradient_accumulation, "
    "set config.model.remat (full keeps least), or spread the model over more devices with config.mesh.fsdp; "
    "where validation asked for it, lower config.validation.batch_size"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command's arguments."""
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="a Python file with get_config(); FILE:TEXT calls get_config(TEXT)",
    )
    parser.add_argument(
        "--workdir", required=True, metavar="DIR", help="where the run lives; an existing run of this config is resumed"
    )
    parser.add_argument(
        "--resume-from",
        metavar="CHECKPOINT",
        help="begin a new workdir with all of another run's checkpoint (a workdir or one step in it); keys of the "
        "schedule may differ, such as train.decay_steps, where no step taken had another learning rate",
    )
    parser.add_argument(
        "--check-config",
        action="store_true",
        help="check what of the config needs no data, and that the workdir is not another run's; train nothing",
    )
    parser.add_argument(
        "--distributed",
        action="store_true",
        help="this process is one of several: on a TPU pod, under Slurm or Open MPI, or as JAX_COORDINATOR_ADDRESS, "
        "JAX_NUM_PROCESSES and JAX_PROCESS_ID say",
    )
    parser.epilog = (
        "Any key of the config can be set: --config.train.learning_rate=3e-4. `tlm config` lists them all with their "
        "meaning, as does docs/config.md. Exit code 0: the run is complete; "
        "2: bad input, one line says which; 75: stopped early by Ctrl-C or SIGTERM, or because another of several "
        "processes is lost, or nothing has moved for config.train.hang_seconds; the same command resumes."
    )


def _heartbeat_seconds(hang_seconds: float) -> int:
    return int(min(max(hang_seconds or math.inf, 20), 100))


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Runs the command; see `tlm_jax.train.loop.train`."""
    # From here on a signal ends the run in an orderly way: imports and compilation may take minutes.
    with StopRequest() as stop:
        config = load_config(args.config, overrides)
        from tlm_jax.data.mixture import with_absolute_paths
        from tlm_jax.parallel.devices import use_compilation_cache
        from tlm_jax.parallel.distributed import start_distributed
        from tlm_jax.parallel.lost import ends_with_the_others
        from tlm_jax.parallel.memory import told_when_exhausted
        from tlm_jax.train.loop import train
        from tlm_jax.train.setup import build, check_config
        from tlm_jax.train.workdir import check_workdir, steps_taken

        if args.distributed:
            start_distributed(_heartbeat_seconds(config.train.hang_seconds))
        if args.check_config:
            check_config(config)
            check_workdir(Path(args.workdir), config, steps_taken(Path(args.workdir)))
            print(f"{args.config}: no problem found without data", file=sys.stderr)
            return EXIT_COMPLETE
        use_compilation_cache()
        if config.data.store:
            config.data.store = os.path.abspath(config.data.store)  # evaluation may be started from elsewhere
        config.data.mixture = with_absolute_paths(config.data.mixture)
        command = shlex.join(["tlm", "train", f"--config={args.config}", f"--workdir={args.workdir}", *overrides])
        command += f" {shlex.quote(f'--resume-from={args.resume_from}')}" if args.resume_from is not None else ""
        command += " --distributed" if args.distributed else ""
        together = ends_with_the_others("tlm train") if args.distributed else contextlib.nullcontext()
        with together, told_when_exhausted(_SMALLER, Path(args.workdir)):
            return train(build(config), Path(args.workdir), command, stop, args.resume_from)
