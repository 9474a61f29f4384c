"""From a step's device metrics to a record: loss, bits per byte, speed, MFU, norms. Read one step late."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tlm_jax.capacity.profile import Profile
from tlm_jax.parallel.devices import memory_bytes
from tlm_jax.train.step import Metrics
from tlm_jax.train.writers import Record


def read(metrics: Metrics) -> dict[str, Any]:
    """Brings a step's metrics to the host: the only device read of the training loop, once a step."""
    return jax.device_get(metrics)


@dataclass
class Meter:
    """Speed over blocked windows: from one step known to be finished to another, compilation and pauses left out.

    MFU = tokens/s · training FLOPs per token / (devices · peak FLOP/s of one), with the FLOPs of attention either
    halved for the causal mask or in full. Tokens are positions: sequences × length, padding included.
    """

    profile: Profile
    sequence_length: int
    tokens_per_step: int
    peak_flops: float  # of all devices together
    start_step: int
    _mark: tuple[float, int] | None = None
    _waited: float = 0.0

    def waited(self, seconds: float) -> None:
        """Adds time that the loop stood waiting for data."""
        self._waited += seconds

    def pause(self) -> None:
        """Ends the window: what follows (validation, a save) is not training."""
        self._mark = None

    def finished(self, step: int) -> None:
        """Notes that `step` has ended; the first two of a process compile and fill the pipeline."""
        if self._mark is None and step >= self.start_step + 2:
            self._mark, self._waited = (time.perf_counter(), step), 0.0

    def window(self, step: int) -> dict[str, float | None]:
        """Speed from the last mark to now, where `step` has just ended; a new window begins."""
        keys = ("tokens_per_second", "step_seconds", "mfu_causal", "mfu_full", "data_wait_seconds")
        if self._mark is None or step <= self._mark[1]:
            return dict.fromkeys(keys)
        now, (then, first), waited = time.perf_counter(), self._mark, self._waited
        self._mark, self._waited = (now, step), 0.0
        rate = (step - first) * self.tokens_per_step / (now - then)
        flops = (self.profile.train_flops_per_token(self.sequence_length, causal=causal) for causal in (True, False))
        mfu = [rate * count / self.peak_flops for count in flops]
        return dict(zip(keys, (rate, (now - then) / (step - first), *mfu, waited / (step - first)), strict=True))


@dataclass
class Pending:
    """A dispatched step whose metrics have not been read."""

    step: int
    metrics: Metrics
    windows: np.ndarray  # store indices of this host's windows


def make_record(step: int, values: dict[str, Any], meter: Meter, *, with_norms: bool) -> Record:
    """The record of one step, from metrics that have been read; fields as in docs/guide.md."""
    tokens, num_bytes = int(values["tokens"]), int(values["bytes"])
    loss_sum = float(values["loss_sum"])
    positions = step * meter.tokens_per_step
    record: Record = {
        "step": step,
        "tokens": positions,
        "loss": loss_sum / max(tokens, 1),
        "bits_per_byte": loss_sum / math.log(2) / num_bytes if num_bytes else None,  # None: no tokenizer knows them
        "targets": tokens,
        "learning_rate": float(values["learning_rate"]),
        "gradient_norm": float(values["gradient_norm"]),
        "update_norm": float(values["update_norm"]),
        "parameter_norm": float(values["parameter_norm"]),
        **meter.window(step),
        "memory_bytes": memory_bytes(),
        "skipped_steps": int(values["skipped"]),
        "train_flops": positions * meter.profile.train_flops_per_token(meter.sequence_length, causal=True),
        "time": time.time(),
    }
    if z_loss_sum := float(values["z_loss_sum"]):
        record["z_loss"] = z_loss_sum / max(tokens, 1)
    if with_norms:
        kinds = ("gradient", "update", "parameter")
        record["norms"] = {kind: [float(v) for v in row] for kind, row in zip(kinds, values["norms"], strict=True)}
    return record
