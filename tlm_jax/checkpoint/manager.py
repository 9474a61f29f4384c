"""Saving checkpoints while training goes on, and keeping the right ones."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from tlm_jax.checkpoint import checksum, layout, restore, retention, storage
from tlm_jax.checkpoint.layout import Metadata
from tlm_jax.errors import EXIT_BAD_INPUT, UserError, raise_together

__all__ = ["CheckpointManager", "Metadata"]

Metrics = Mapping[str, float | None]


class CheckpointManager:
    """Saves train states of one run, asynchronously, and deletes those no longer needed.

    Permanent checkpoints are made every `every_steps`, temporary ones every `every_seconds`. The newest `keep_last`
    of all are kept, and of the older ones those that are permanent and the `keep_best` lowest in `best_metric`. At most
    one save is on its way at a time. A save that fails or takes too long raises in the next call of `save`, `wait` or
    `close`, and leaves the checkpoints before it as they were.

    With several processes each one makes the same calls; the directory is shared by all.

    Args:
      directory: the `checkpoints` folder of the workdir; created if need be, and cleaned of what interrupted saves
        left behind.
      every_steps: between permanent checkpoints; 0: none.
      every_seconds: between temporary checkpoints; 0: none.
      keep_last: how many of the newest checkpoints are kept.
      timeout_seconds: a save that takes longer is a failure.
      metadata: stored in each checkpoint.
      best_metric: one of `retention.METRICS`.
      keep_best: how many of the best are kept; with other ones for each kind of measurement that the directory holds.
      measured_on: what the metrics are measured on, JSON values; only those with the same are compared.

    Raises:
      UserError: a setting out of range, or the directory cannot be made or written.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every_steps: int,
        every_seconds: float,
        keep_last: int,
        timeout_seconds: float,
        metadata: Metadata,
        best_metric: str = retention.METRICS[0],
        keep_best: int = 0,
        measured_on: Mapping[str, Any] | None = None,
    ) -> None:
        raise_together(
            check_checkpoint_keys(every_steps, every_seconds, keep_last, timeout_seconds, best_metric, keep_best)
        )
        self.directory = Path(directory).absolute()
        self._every_steps, self._every_seconds, self._keep_last = every_steps, every_seconds, keep_last
        self._timeout_seconds, self._best_metric, self._keep_best = timeout_seconds, best_metric, keep_best
        self._metadata, self._measured_on = metadata, dict(measured_on or {})
        self._in_flight: _BackgroundSave | None = None
        self._last_save_time = time.monotonic()
        self._begun_step = -1
        self._values: dict[int, float | None] | None = None  # best_metric by step; read when first asked for
        if jax.process_index() == 0:
            self._prepare_directory()
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("checkpoint directory is ready")

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, UserError) and jax.process_count() > 1:
            return  # it may be that another process is lost, without which a save never ends
        try:
            self.close()
        except UserError as failure:
            if error is None:
                raise
            error.add_note(str(failure))

    def _prepare_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe = self.directory / f".writable.{os.getpid()}"
            probe.touch()
            probe.unlink()
            layout.remove_leftovers(self.directory)
        except OSError as error:
            raise UserError(
                f"checkpoints cannot be written here: {storage.system_reason(error)}",
                where=str(self.directory),
                mend="give another workdir, or make this one writable",
            ) from error

    def due_by_step(self, step: int) -> bool:
        """Whether a permanent checkpoint is due at `step`."""
        return self._every_steps > 0 and step > 0 and step % self._every_steps == 0

    def due_by_time(self) -> bool:
        """Whether a temporary checkpoint is due by this process's clock, and no save is on its way.

        Other processes may see it differently: agree with them before acting on it. `save` does so itself without
        `force`, by a collective that waits for the device.

        Raises:
          UserError: the save on its way failed or took too long.
        """
        self._raise_failure()
        elapsed = time.monotonic() - self._last_save_time
        return 0 < self._every_seconds <= elapsed and self._in_flight is None

    def due_by_metric(self, metrics: Metrics) -> bool:
        """Whether a checkpoint with these metrics would be one of the best that are kept; the same on all processes.

        Cheap without the metric, which all processes have or none: most steps are not validated.
        """
        value = metrics.get(self._best_metric)
        if not self._keep_best or value is None:
            return False
        among = retention.is_among_best(value, self._known_values(), self._keep_best)
        return bool(from_first_process(among))

    def _known_values(self) -> dict[int, float | None]:
        """Each step's `best_metric`, of our kind: as found in the directory once, and of what was saved since.

        What has been deleted since was not among the best, and so decides nothing.
        """
        if self._values is None:
            ours, found = retention.kind(self._measured_on), retention.metric_values(self.directory, self._best_metric)
            self._values = {step: value.number for step, value in found.items() if value.kind == ours}
        return self._values

    def save(
        self,
        step: int,
        state: dict[str, Any],
        data_state: dict[str, Any] | None,
        *,
        force: bool = False,
        metrics: Metrics | None = None,
    ) -> bool:
        """Begins to save, if it is time to; call it after every step.

        When it returns, the arrays have been copied and may be donated; the writing goes on in the background.

        Args:
          step: completed steps.
          state: the train state, a dictionary with "params"; each value a pytree of arrays.
          data_state: what the data loader needs to go on, JSON values; None: no training goes on from here.
          force: save whether or not it is time.
          metrics: measured at this step, as `retention.storable` gives them.

        Returns:
          Whether a save of this step was begun; False too when its checkpoint exists already.

        Raises:
          UserError: this save or the one before it failed or took too long.
        """
        self._raise_failure()
        permanent = self.due_by_step(step)
        if not (force or permanent or from_first_process(self.due_by_time())):
            return False
        if step == self._begun_step:  # not whether it is still on its way, on which processes may differ
            return False
        self.wait()
        path = layout.step_directory(self.directory, step)
        if from_first_process(layout.is_complete(path)):
            return False
        self._last_save_time, self._begun_step = time.monotonic(), step
        if self._keep_best:
            self._known_values()[step] = (metrics or {}).get(self._best_metric)
        items = restore.split_items(state)
        description = self._metadata.to_json() | {
            layout.PERMANENT: permanent,
            layout.METRICS: dict(metrics or {}),
            layout.MEASURED_ON: self._measured_on,
            layout.CHECKSUMS: checksum.checksums(restore.items_by_name(items)),
        }
        data = {} if data_state is None else {layout.DATA: data_state}
        self._begin(step, path, items | data | {layout.METADATA: layout.sealed(description, data_state)})
        return True

    def _begin(self, step: int, path: Path, items: dict[str, Any]) -> None:
        # What may lie at `path` is no complete checkpoint: a copy that was interrupted, say.
        overwrite = bool(from_first_process(path.exists()))
        with storage.unheard(), storage.storage_context(self._timeout_seconds):
            try:
                response = ocp.save_checkpointables_async(path, items, overwrite=overwrite)
                self._in_flight = _BackgroundSave(step, response.result, self._delete_superfluous)
                return
            except Exception as error:
                reason = storage.system_reason(error)
                if reason is None:
                    raise
            storage.discard_unfinished()
        self._fail(step, reason)

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step, or None; the same on all processes."""
        steps = layout.complete_steps(self.directory)
        latest = int(from_first_process(steps[-1] if steps else -1))
        return None if latest < 0 else latest

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, ascending."""
        return layout.complete_steps(self.directory)

    def restore(
        self, abstract_state: dict[str, Any], step: int | None = None
    ) -> tuple[dict[str, Any], dict[str, Any], Metadata]:
        """Restores a checkpoint.

        Args:
          abstract_state: the train state as `jax.ShapeDtypeStruct`, each with its sharding.
          step: which one; the latest complete one by default.

        Returns:
          The train state, the data state, and the metadata stored with them.

        Raises:
          UserError: no such checkpoint; a leaf missing, superfluous or of another shape or dtype; damaged files.
        """
        self.wait()
        step = self.latest_step() if step is None else step
        return restore.restore_state(restore.find_checkpoint(self.directory, step), abstract_state)

    def _raise_failure(self) -> None:
        """Looks after the save on its way, without waiting for it."""
        if self._in_flight and (self._in_flight.finished or self._in_flight.age > self._timeout_seconds):
            self.wait()

    def wait(self) -> None:
        """Waits until the save on its way is complete.

        Raises:
          UserError: it failed or took too long.
        """
        save = self._in_flight
        if save is None:
            return
        finished = save.join(self._timeout_seconds - save.age)
        self._in_flight = None
        if not finished:
            _exit_without(save)
            self._fail(save.step, f"it took longer than {self._timeout_seconds:g} seconds", clean=False)
        if save.error is not None:
            reason = storage.system_reason(save.error)
            if reason is None and not isinstance(save.error, TimeoutError):
                raise save.error
            save.error = None
            with storage.unheard():
                storage.discard_unfinished()
            self._fail(save.step, reason or f"it took longer than {self._timeout_seconds:g} seconds")

    def close(self) -> None:
        """Waits for the save on its way; raises as `wait` does."""
        self.wait()

    def _fail(self, step: int, reason: str, clean: bool = True) -> None:
        if clean and jax.process_index() == 0:
            layout.remove_leftovers(self.directory, step)
        self._begun_step = -1
        (self._values or {}).pop(step, None)
        steps = self.steps()
        left = f"the newest complete one is step {steps[-1]}" if steps else "no complete one exists"
        raise UserError(
            f"the checkpoint of step {step} could not be written: {reason}; {left}",
            where=str(self.directory),
            mend="remove the cause and run the same command again",
        )

    def _delete_superfluous(self) -> None:
        """Deletes all but the newest, the permanent and the best ones, after a checkpoint has become complete."""
        if jax.process_index() != 0:
            return
        steps, values, keep = self.steps(), {}, set()
        for step in steps:
            try:
                description = layout.read_json(layout.step_directory(self.directory, step), layout.METADATA)
            except UserError:
                keep.add(step)  # damaged: not ours to throw away
                continue
            values[step] = retention.value_of(description, self._best_metric)
            if description.get(layout.PERMANENT, True):
                keep.add(step)
        for step in retention.superfluous(
            steps, keep_last=self._keep_last, keep=keep, values=values, keep_best=self._keep_best
        ):
            layout.remove_checkpoint(layout.step_directory(self.directory, step))


class _BackgroundSave:
    """A save on its way, followed by the deletion of superfluous checkpoints."""

    def __init__(self, step: int, write: Callable[[], None], clean: Callable[[], None]) -> None:
        self.step = step
        self.error: Exception | None = None
        self._started = time.monotonic()
        self._done = threading.Event()
        threading.Thread(target=self._run, args=(write, clean), name=f"save {step}", daemon=True).start()

    def _run(self, write: Callable[[], None], clean: Callable[[], None]) -> None:
        try:
            write()
            clean()
        except Exception as error:  # raised again in the main thread
            self.error = error
        self._done.set()

    @property
    def finished(self) -> bool:
        return self._done.is_set()

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started

    def join(self, timeout: float) -> bool:
        """Waits; returns whether it is finished."""
        return self._done.wait(max(0.0, timeout))


_LONGEST = threading.TIMEOUT_MAX  # seconds that a thread can wait
EXIT_GRACE_SECONDS = 5.0  # for a save that took too long, after the main thread has ended


def _exit_without(save: _BackgroundSave) -> None:
    """Lets the process end although the threads of a stuck save never do, when its main thread has ended."""

    def run() -> None:
        threading.main_thread().join()
        if not save.join(EXIT_GRACE_SECONDS):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_BAD_INPUT)

    threading.Thread(target=run, name="exit without stuck save", daemon=True).start()


def from_first_process(value: Any) -> Any:
    """The first process's value, on all of them."""
    return value if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(value)


def check_checkpoint_keys(
    every_steps: int,
    every_seconds: float,
    keep_last: int,
    timeout_seconds: float,
    best_metric: str = retention.METRICS[0],
    keep_best: int = 0,
) -> list[UserError]:
    """The problems of `config.checkpoint`."""
    rules = {
        "every_steps": (every_steps, every_steps >= 0, "0 or more"),
        "every_seconds": (every_seconds, every_seconds >= 0, "0 or more"),
        "keep_last": (keep_last, keep_last >= 1, "1 or more"),
        "timeout_seconds": (timeout_seconds, 0 < timeout_seconds <= _LONGEST, f"more than 0, at most {_LONGEST:g}"),
        "best_metric": (repr(best_metric), best_metric in retention.METRICS, ", ".join(retention.METRICS)),
        "keep_best": (keep_best, keep_best >= 0, "0 or more"),
    }
    return [
        UserError(f"{value} is out of range", where=f"config.checkpoint.{key}", mend=f"it takes {wanted}")
        for key, (value, fits, wanted) in rules.items()
        if not fits
    ]
