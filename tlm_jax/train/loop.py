"""The training loop, top to bottom."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tlm_jax import config as configs
from tlm_jax.capacity.table import width_words
from tlm_jax.checkpoint.manager import CheckpointManager, Metadata, from_first_process
from tlm_jax.checkpoint.restore import find_checkpoint, read_metadata, restore_state
from tlm_jax.checkpoint.retention import storable
from tlm_jax.counts import counted
from tlm_jax.data.loader import Batch, TrainLoader, train_loader, validation_batches
from tlm_jax.data.order import TrainOrder, check_identity
from tlm_jax.data.packing import packing_by_store
from tlm_jax.errors import EXIT_COMPLETE, EXIT_RESUMABLE, UserError
from tlm_jax.files import only_one
from tlm_jax.model.functional import Parameters
from tlm_jax.parallel.devices import peak_flops, to_global
from tlm_jax.parallel.rules import batch_sharding, replicated_bytes
from tlm_jax.train.hunt import explained
from tlm_jax.train.metrics import Meter, Pending
from tlm_jax.train.recorder import Recorder
from tlm_jax.train.setup import Setup, jitted_train_step, validation_batch_size
from tlm_jax.train.signals import StopRequest
from tlm_jax.train.state import State, init_state
from tlm_jax.train.step import MODEL_KEYS, EvalStep, make_eval_step
from tlm_jax.train.tracing import Tracer
from tlm_jax.train.validation import evaluate
from tlm_jax.train.watchdog import PATIENCE, Watchdog
from tlm_jax.train.workdir import check_same_run, check_workdir, claim, steps_taken
from tlm_jax.train.writers import Terminal

STOP, SAVE = 0, 1  # columns of batch["requests"]
STEP_KEYS = (*MODEL_KEYS, "bytes", "requests")  # what of a batch goes to the device


def train(
    setup: Setup,
    workdir: Path,
    resume_command: str,
    stop: StopRequest | None = None,
    resume_from: str | Path | None = None,
) -> int:
    """Trains to `train.num_steps`, from the newest complete checkpoint in `workdir` if there is one.

    Args:
      setup: the run's parts.
      workdir: its directory.
      resume_command: told to the user if the run stops early.
      stop: a request that is already being listened for; by default the loop listens by itself.
      resume_from: a checkpoint of another run, from which this one goes on if `workdir` has none yet.

    Returns:
      0 when the run is complete, 75 when it stopped early on a signal and can be resumed.

    Raises:
      UserError: the directory, the saved data index or `resume_from` belongs to another run, or another process
        trains in the directory; a save failed; too many steps in a row were not finite.
    """
    config, mesh, first_host = setup.config, setup.mesh, jax.process_index() == 0
    longest_save = config.checkpoint.timeout_seconds
    check_workdir(workdir, config, steps_taken(workdir))
    with (
        jax.set_mesh(mesh),
        nullcontext(stop) if stop else StopRequest() as stop,
        only_one(workdir) if first_host else nullcontext(),
        Watchdog(config.train.hang_seconds) as watchdog,
        _checkpoints(setup, workdir) as checkpoints,
    ):
        # --- Where the run stands
        start_step, state, data_state = _restore_or_begin(setup, workdir, checkpoints, resume_from)
        if start_step >= config.train.num_steps:
            if first_host:
                claim(workdir, config, setup.profile)
            _say(first_host, f"complete: {workdir} is at step {start_step} of {config.train.num_steps}")
            return EXIT_COMPLETE

        # --- The parts that run
        train_step = jitted_train_step(setup)
        eval_step = make_eval_step(setup.model)
        peak, peak_source = _peak(setup)
        tokens_per_step = config.train.global_batch_size * config.data.sequence_length
        meter = Meter(
            setup.profile, config.data.sequence_length, tokens_per_step, peak * jax.device_count(), start_step
        )

        # --- The loop: step n is dispatched, then step n - 1 is read
        with (
            _loader(setup, data_state, str(workdir)) as loader,
            Recorder(config, workdir, meter, start_step, loader.order.epochs, first_host=first_host) as recorder,
            Tracer(workdir / "profile", config.log.profile_at_step, recorder.terminal.say) as tracer,
        ):
            if first_host:
                claim(workdir, config, setup.profile)
                _greet(setup, loader.order, recorder.terminal, start_step, peak, peak_source)
            pending: Pending | None = None
            for step, batch in _steps(loader, meter, start_step + 1, config.train.num_steps):
                tracer.before(step)
                batch["requests"] = _requests(len(batch["bytes"]), stop, checkpoints)
                device_batch = to_global({key: batch[key] for key in STEP_KEYS}, batch_sharding(mesh))
                with jax.transfer_guard("disallow"):
                    state, step_metrics = train_step(state, device_batch)
                requests = recorder.read(pending) if pending else np.zeros(2, np.int32)
                watchdog.alive(f"the end of step {step}", patience=1.0 if step > start_step + 1 else PATIENCE)
                pending = Pending(step, step_metrics, batch["window"])
                if config.train.nonfinite == "hunt" and not step_metrics["finite"]:  # waits for the step
                    watchdog.alive("the hunt for what is not finite", patience=math.inf)
                    raise _hunted(setup, state, device_batch, pending, workdir)

                last = step == config.train.num_steps
                # One host need not wait until its own request comes back.
                asked = bool(requests[STOP]) or (jax.process_count() == 1 and stop.signal_name is not None)
                stopping = asked and not last
                every = config.validation.every_steps
                validating = last or (bool(every) and step % every == 0 and not stopping)
                saving = last or stopping or bool(requests[SAVE]) or checkpoints.due_by_step(step)
                measured: dict[str, float | None] = {}
                if validating or saving:
                    validate = (
                        cache(partial(_validate, setup, eval_step, state[config.validation.weights], watchdog))
                        if validating
                        else None
                    )
                    # The record of a step is written before its checkpoint can be.
                    recorder.read(pending, validate)
                    pending = None
                    measured = storable(validate()) if validate else {}
                if saving or checkpoints.due_by_metric(measured):
                    watchdog.alive(f"the checkpoint of step {step}", patience=PATIENCE, extra=longest_save)
                    data_state = loader.order.identity | {"next_window": loader.next_index}
                    checkpoints.save(step, state, data_state, force=True, metrics=measured)
                if validating or saving:
                    meter.pause()
                    watchdog.alive(f"the end of step {step + 1}", patience=PATIENCE)
                if stopping:
                    break
            watchdog.alive("the last checkpoint", extra=longest_save)
            checkpoints.wait()
    if stopping:
        reason = stop.signal_name or "another host's signal"
        _say(first_host, f"stopped on {reason} at step {step}; resume with:\n  {resume_command}")
        return EXIT_RESUMABLE
    _say(first_host, f"complete: step {step} of {config.train.num_steps}, in {workdir}")
    return EXIT_COMPLETE


def _checkpoints(setup: Setup, workdir: Path) -> CheckpointManager:
    tokenizer, keys = setup.store.tokenizer(), setup.config.checkpoint
    metadata = Metadata(
        config=configs.to_json(setup.config),
        profile=setup.profile.to_json(),
        tokenizer_kind=tokenizer.kind,
        tokenizer=tokenizer.to_bytes(),
        extra={"layer_stacking": setup.config.model.layer_stacking},
    )
    return CheckpointManager(
        workdir / "checkpoints",
        every_steps=keys.every_steps,
        every_seconds=keys.every_seconds,
        keep_last=keys.keep_last,
        best_metric=keys.best_metric,
        keep_best=keys.keep_best,
        timeout_seconds=keys.timeout_seconds,
        metadata=metadata,
        measured_on={
            "weights": setup.config.validation.weights,
            "num_windows": setup.config.validation.num_windows,
            "data": setup.store.fingerprint,
        },
    )


def _restore_or_begin(
    setup: Setup, workdir: Path, checkpoints: CheckpointManager, resume_from: str | Path | None
) -> tuple[int, State, dict[str, Any]]:
    """Completed steps, train state and data state: of the newest complete checkpoint, of another run's, or new ones."""
    start_step = checkpoints.latest_step() or 0
    if start_step:
        state, data_state, saved = checkpoints.restore(setup.abstract)
        check_same_run(workdir, saved.config, setup.config, str(checkpoints.directory), start_step)
        return start_step, state, data_state
    if resume_from is not None:
        return _branch(setup, checkpoints, resume_from)
    return 0, init_state(setup.model, setup.optimizer, setup.abstract, setup.config.seed), {"next_window": 0}


def _branch(setup: Setup, checkpoints: CheckpointManager, resume_from: str | Path) -> tuple[int, State, dict[str, Any]]:
    """Makes another run's checkpoint the first of this one, so that this one needs no other from then on."""
    path = find_checkpoint(resume_from)
    step = int(from_first_process(int(path.name)))  # the other run may be making more
    path = path.with_name(str(step))
    check_same_run(path, read_metadata(path).config, setup.config, str(path), step)
    state, data_state, _ = restore_state(path, setup.abstract)
    order = TrainOrder(setup.store, setup.config.data.sequence_length, setup.config.data.seed)
    check_identity(data_state, order.identity, str(path))
    checkpoints.save(step, state, data_state, force=True)
    checkpoints.wait()
    return step, state, data_state


def _loader(setup: Setup, data_state: dict[str, Any], where: str) -> TrainLoader:
    config = setup.config
    loader = train_loader(
        setup.store,
        sequence_length=config.data.sequence_length,
        global_batch_size=config.train.global_batch_size,
        seed=config.data.seed,
        num_workers=config.data.num_workers,
        host_index=jax.process_index(),
        host_count=jax.process_count(),
        start_index=data_state["next_window"],
    )
    if data_state["next_window"]:
        try:
            check_identity(data_state, loader.order.identity, where)
        except UserError:
            loader.close()
            raise
    return loader


def _requests(rows: int, stop: StopRequest, checkpoints: CheckpointManager) -> np.ndarray:
    """[rows, 2] int32: what this host asks for. The step takes the maximum over all hosts' rows, so that whatever one
    host wants, all read in the same step's metrics."""
    wishes = np.zeros(2, np.int32)
    wishes[STOP], wishes[SAVE] = stop.signal_name is not None, checkpoints.due_by_time()
    return np.tile(wishes, (rows, 1))


def _validate(
    setup: Setup, eval_step: EvalStep, params: Parameters, watchdog: Watchdog
) -> dict[str, float | int | None]:
    config = setup.config
    batches = validation_batches(
        setup.store,
        sequence_length=config.data.sequence_length,
        batch_size=validation_batch_size(config),
        num_windows=config.validation.num_windows,
        host_index=jax.process_index(),
        host_count=jax.process_count(),
    )
    watchdog.alive("the validation", patience=PATIENCE)
    return evaluate(eval_step, params, batches, setup.mesh, lambda done: watchdog.alive(f"batch {done} of validation"))


def _hunted(setup: Setup, state: State, batch: dict[str, jax.Array], pending: Pending, workdir: Path) -> UserError:
    """The step has changed no parameter, and the next one is not dispatched yet."""
    return explained(
        setup.model,
        state["params"],
        batch,
        setup.config.train.gradient_accumulation,
        setup.config.train.z_loss,
        step=pending.step,
        windows=pending.windows,
        where=str(workdir),
    )


def _steps(loader: TrainLoader, meter: Meter, first: int, last: int) -> Iterator[tuple[int, Batch]]:
    for step in range(first, last + 1):
        start = time.perf_counter()
        batch = next(loader)
        meter.waited(time.perf_counter() - start)
        yield step, batch


def _say(first_host: bool, text: str) -> None:
    if first_host:
        print(text, file=sys.stderr)


def _peak(setup: Setup) -> tuple[float, str]:
    if setup.config.log.peak_flops:
        return setup.config.log.peak_flops, "config.log.peak_flops"
    return peak_flops(jax.local_devices()[0], jnp.dtype(setup.model.settings.dtype))


def _greet(setup: Setup, order: TrainOrder, terminal: Terminal, start_step: int, peak: float, peak_source: str) -> None:
    config, profile = setup.config, setup.profile
    axes = " × ".join(f"{name} {size}" for name, size in setup.mesh.shape.items() if size > 1) or "1 device"
    length = config.data.sequence_length
    tokens = config.train.num_steps * config.train.global_batch_size * length
    kept = {key: setup.abstract[key] for key in ("params", "ema", "optimizer") if key in setup.abstract}
    whole = replicated_bytes(kept, jax.tree.map(lambda leaf: leaf.sharding, kept))
    terminal.say(
        f"{config.name}: {profile.parameters:,} parameters in {counted(len(profile.layers), 'layer')}, "
        f"{width_words(profile.layers, '…')}, "
        f"{config.train.optimizer}, {tokens:,} tokens · {axes} · {setup.model.settings.compute_dtype} compute"
    )
    terminal.say(
        f"peak {peak / 1e12:.3f} TFLOP/s a device ({peak_source})"
        + (f" · {whole / 2**20:.1f} MiB of parameters and optimizer state replicated on every device" if whole else "")
        + (f" · resuming at step {start_step}" if start_step else "")
    )
    epochs = order.epochs(config.train.num_steps * config.train.global_batch_size)
    for part, found in zip(order.identity["components"], packing_by_store(setup.store, length), strict=True):
        share = f"{float(Fraction(part['share'])):.1%} of windows, " if len(epochs) > 1 else ""
        terminal.say(f"data {part['name']}: {share}{epochs[part['name']]:.2f} epochs · {found.summary()}")
