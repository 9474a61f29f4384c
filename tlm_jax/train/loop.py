"""The training loop, top to bottom."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tlm_jax import config as configs
from tlm_jax.checkpoint.manager import CheckpointManager, Metadata
from tlm_jax.data.loader import check_identity, train_loader, validation_batches
from tlm_jax.errors import EXIT_COMPLETE, EXIT_RESUMABLE, UserError
from tlm_jax.parallel.devices import peak_flops, to_global
from tlm_jax.parallel.rules import batch_sharding, replicated_bytes
from tlm_jax.train import metrics as metrics_module
from tlm_jax.train.metrics import Meter, Pending, make_record
from tlm_jax.train.setup import Setup, validation_batch_size
from tlm_jax.train.signals import StopRequest
from tlm_jax.train.state import init_state
from tlm_jax.train.step import MODEL_KEYS, make_eval_step, make_train_step
from tlm_jax.train.validation import evaluate
from tlm_jax.train.workdir import claim
from tlm_jax.train.writers import JsonlWriter, Record, TensorBoardWriter, Terminal

STOP, SAVE = 0, 1  # columns of batch["requests"]


def train(setup: Setup, workdir: Path, resume_command: str) -> int:
    """Trains to `train.num_steps`, from the newest complete checkpoint in `workdir` if there is one.

    Returns:
      0 when the run is complete, 75 when it stopped early on a signal and can be resumed.

    Raises:
      UserError: the directory or the saved data index belongs to another run; a save failed; too many steps in a row
        were not finite.
    """
    config, profile, mesh = setup.config, setup.profile, setup.mesh
    first_host, hosts = jax.process_index() == 0, jax.process_count()
    claim(workdir, config, profile, write=first_host)
    tokenizer = setup.store.tokenizer()
    metadata = Metadata(
        config=configs.to_json(config),
        profile=profile.to_json(),
        tokenizer_kind=tokenizer.kind,
        tokenizer=tokenizer.to_bytes(),
        extra={"layer_stacking": config.model.layer_stacking},
    )
    with (
        jax.set_mesh(mesh),
        StopRequest() as stop,
        CheckpointManager(
            workdir / "checkpoints",
            every_steps=config.checkpoint.every_steps,
            every_seconds=config.checkpoint.every_seconds,
            keep_last=config.checkpoint.keep_last,
            timeout_seconds=config.checkpoint.timeout_seconds,
            metadata=metadata,
        ) as checkpoints,
    ):
        # --- Where the run stands
        start_step = checkpoints.latest_step() or 0
        if start_step:
            state, data_state, _ = checkpoints.restore(setup.abstract)
        else:
            state = init_state(setup.model, setup.optimizer, setup.abstract, config.seed)
            data_state = {"next_window": 0}
        if start_step >= config.train.num_steps:
            print(f"complete: {workdir} is at step {start_step} of {config.train.num_steps}", file=sys.stderr)
            return EXIT_COMPLETE

        # --- The parts that run
        train_step = make_train_step(
            setup.model, setup.optimizer, setup.learning_rate, config.train.gradient_accumulation, setup.abstract
        )
        eval_step = make_eval_step(setup.model)
        batch_size, length = config.train.global_batch_size, config.data.sequence_length
        loader = train_loader(
            setup.store,
            sequence_length=length,
            global_batch_size=batch_size,
            seed=config.data.seed,
            num_workers=config.data.num_workers,
            host_index=jax.process_index(),
            host_count=hosts,
            start_index=data_state["next_window"],
        )
        if start_step:
            check_identity(data_state, loader.identity, str(workdir))
        peak, peak_source = _peak(setup)
        meter = Meter(profile, length, batch_size * length, peak * jax.device_count(), start_step)
        terminal = Terminal(config.name, config.train.num_steps, start_step, quiet=not first_host)
        writers: list[Any] = [terminal]
        if first_host:
            writers.append(JsonlWriter(workdir / "metrics.jsonl", start_step))
            if config.log.tensorboard:
                writers.append(TensorBoardWriter(workdir / "tensorboard", start_step))
        _greet(setup, terminal, start_step, peak, peak_source)

        def validate() -> dict[str, float | int]:
            batches = validation_batches(
                setup.store,
                sequence_length=length,
                batch_size=validation_batch_size(config),
                num_windows=config.validation.num_windows,
                host_index=jax.process_index(),
                host_count=hosts,
            )
            return evaluate(eval_step, state["params"], batches, mesh)

        def finish(pending: Pending, **more: Any) -> np.ndarray:
            """Reads a dispatched step, writes its record if it is due, and returns what any host requested."""
            pending.values = metrics_module.read(pending.metrics)
            step, skipped_row = pending.step, int(pending.values["skipped_row"])
            meter.finished(step)
            terminal.advance(step)
            every = config.log.norms_every_steps
            with_norms = bool(every) and step % every == 0
            last = step == config.train.num_steps
            if more or with_norms or last or skipped_row or step % config.log.every_steps == 0:
                record: Record = make_record(pending, meter, with_norms=with_norms) | more
                if skipped_row:
                    record["skipped_windows"] = [int(w) for w in pending.windows]
                for writer in writers:
                    writer.write(record)
            if skipped_row >= config.train.max_nonfinite_steps:
                raise UserError(
                    f"loss or gradient was not finite in {skipped_row} steps in a row, up to step {step}",
                    where=str(workdir),
                    mend="the parameters are those before them; lower train.learning_rate or look at the windows named "
                    "in metrics.jsonl",
                )
            return pending.values["requests"]

        # --- The loop: step n is dispatched, then step n - 1 is read
        pending: Pending | None = None
        stopping = False
        try:
            for step, batch in _steps(loader, meter, start_step + 1, config.train.num_steps):
                batch["requests"] = np.tile(
                    np.array([stop.signal_name is not None, checkpoints.due_by_time()], np.int32),
                    (len(batch["bytes"]), 1),
                )
                device_batch = to_global(
                    {key: batch[key] for key in (*MODEL_KEYS, "bytes", "requests")}, batch_sharding(mesh)
                )
                with jax.transfer_guard("disallow"):
                    state, step_metrics = train_step(state, device_batch)
                requests = finish(pending) if pending else np.zeros(2, np.int32)
                pending = Pending(step, step_metrics, batch["window"])
                last = step == config.train.num_steps
                stopping = bool(requests[STOP]) or (hosts == 1 and stop.signal_name is not None)
                every = config.validation.every_steps
                validating = last or (bool(every) and step % every == 0 and not stopping)
                saving = last or stopping or bool(requests[SAVE]) or checkpoints.due_by_step(step)
                if validating or saving:
                    # The record of a step is on disk before its checkpoint can be.
                    finish(pending, **({"validation": validate()} if validating else {}))
                    pending = None
                if saving:
                    checkpoints.save(step, state, loader.identity | {"next_window": loader.next_index}, force=True)
                if validating or saving:
                    meter.pause()
                if stopping and not last:
                    break
            stopping = stopping and not last
            checkpoints.wait()
        finally:
            terminal.close()
            loader.close()
            for writer in writers[1:]:
                writer.close()
    if stopping:
        _say(
            first_host, f"stopped on {stop.signal_name or 'a signal'} at step {step}; resume with:\n  {resume_command}"
        )
        return EXIT_RESUMABLE
    _say(first_host, f"complete: step {step} of {config.train.num_steps}, in {workdir}")
    return EXIT_COMPLETE


def _steps(loader: Any, meter: Meter, first: int, last: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
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


def _greet(setup: Setup, terminal: Terminal, start_step: int, peak: float, peak_source: str) -> None:
    config, profile = setup.config, setup.profile
    widths = [layer.d_ff for layer in profile.layers]
    axes = " × ".join(f"{name} {size}" for name, size in setup.mesh.shape.items() if size > 1) or "1 device"
    tokens = config.train.num_steps * config.train.global_batch_size * config.data.sequence_length
    shardings = jax.tree.map(lambda leaf: leaf.sharding, setup.abstract["params"])
    whole = replicated_bytes(setup.abstract["params"], shardings)
    terminal.say(
        f"{config.name}: {profile.parameters:,} parameters in {len(widths)} layers, d_ff {widths[0]} … {widths[-1]}, "
        f"{config.train.optimizer}, {tokens:,} tokens · {axes} · {setup.model.settings.compute_dtype} compute"
    )
    terminal.say(
        f"peak {peak / 1e12:.3f} TFLOP/s a device ({peak_source})"
        + (f" · {whole / 2**20:.1f} MiB of parameters replicated on every device" if whole else "")
        + (f" · resuming at step {start_step}" if start_step else "")
    )
