"""Reads dispatched steps, one late, and sends their records to the terminal, `metrics.jsonl` and TensorBoard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from tlm_jax.counts import counted
from tlm_jax.errors import UserError
from tlm_jax.train import metrics
from tlm_jax.train.metrics import Meter, Pending, make_record
from tlm_jax.train.writers import JsonlWriter, Record, TensorBoardWriter, Terminal


class Recorder:
    """A run's records; a context manager that closes its files.

    Args:
      config: the run's.
      workdir: where the files go.
      meter: measures speed.
      start_step: the restored step; later records of an earlier process are dropped.
      epochs: how many epochs of each store a number of windows is.
      first_host: whether this host writes and speaks.

    Raises:
      UserError: a file cannot be written.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: Path,
        meter: Meter,
        start_step: int,
        epochs: Callable[[int], dict[str, float]],
        *,
        first_host: bool,
    ) -> None:
        self._config, self._workdir, self.meter, self._epochs = config, workdir, meter, epochs
        self.terminal = Terminal(config.name, config.train.num_steps, start_step, quiet=not first_host)
        self._writers: list[Any] = [self.terminal]
        if first_host:
            self._writers.append(JsonlWriter(workdir / "metrics.jsonl", start_step))
            if config.log.tensorboard:
                self._writers.append(TensorBoardWriter(workdir / "tensorboard", start_step))

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self._writers:
            writer.close()

    def read(self, pending: Pending, validate: Callable[[], Any] | None = None) -> np.ndarray:
        """Waits for a dispatched step, writes its record if one is due, and returns what any host requested.

        Args:
          pending: the step.
          validate: run after the step's speed is known; its result goes into the record, which is then due.

        Raises:
          UserError: too many steps in a row were not finite, or a record cannot be written.
        """
        values = metrics.read(pending.metrics)
        step, skipped_row = pending.step, int(values["skipped_row"])
        self.meter.finished(step)
        self.terminal.advance(step)
        log, train = self._config.log, self._config.train
        with_norms = bool(log.norms_every_steps) and step % log.norms_every_steps == 0
        if validate or with_norms or skipped_row or step == train.num_steps or step % log.every_steps == 0:
            record: Record = make_record(step, values, self.meter, with_norms=with_norms)
            record["epochs"] = self._epochs(step * train.global_batch_size)
            if validate:
                record["validation"] = validate()
            if skipped_row:
                record["skipped_windows"] = [int(window) for window in pending.windows]
                if values["finite"]:
                    record["spike_limit"] = float(values["spike_limit"])
            for writer in self._writers:
                writer.write(record)
        if skipped_row >= train.max_nonfinite_steps:
            raise UserError(
                f"loss or gradient was not finite{' or the loss a spike' if train.spike_deviations else ''} in "
                f"{counted(skipped_row, 'step')} in a row, up to step {step}",
                where=str(self._workdir),
                mend="the last checkpoint is from before or has the parameters unchanged; look at the windows named in "
                "metrics.jsonl, or begin again with a lower train.learning_rate in another --workdir",
            )
        return values["requests"]
