"""Ends a process that waits for what never comes: a collective that lacks a process, a dead device or disk."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from types import TracebackType

import jax

from tlm_jax.errors import EXIT_RESUMABLE

PATIENCE = 10.0  # times as long where programs are compiled


class Watchdog:
    """A context manager; while it is open, more than `seconds` without a sign of life end the process with 75.

    It ends it from a thread of its own, for the main thread may be in a call that never returns. The stacks of all
    threads are written before.

    Args:
      seconds: longest time between two signs of life; 0: no limit.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._awaited, self._limit, self._since = "the first step", PATIENCE * seconds, time.monotonic()
        self._closed = threading.Event()

    def __enter__(self) -> Watchdog:
        if self._seconds:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()

    def alive(self, awaited: str, *, patience: float = 1.0, extra: float = 0.0) -> None:
        """A sign of life.

        Args:
          awaited: what comes next, as "the end of step 7".
          patience: how many times `seconds` it may take.
          extra: how many seconds more.
        """
        self._awaited, self._limit, self._since = awaited, patience * self._seconds + extra, time.monotonic()

    def _watch(self) -> None:
        while not self._closed.wait(min(self._seconds / 10, 1.0)):
            waited = time.monotonic() - self._since
            if waited > self._limit:
                self._end(waited)

    def _end(self, waited: float) -> None:
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
        count, who, cause = jax.process_count(), "", "the data, a device or a disk hangs (the stacks above show where)"
        if count > 1:
            who = f"process {jax.process_index()} of {count}: "
            cause = "another process has died or hangs, or " + cause
        sys.stderr.write(
            f"tlm train: {who}waited {waited:.0f} s for {self._awaited}: {cause}; the same command resumes the run, "
            "and config.train.hang_seconds is how long to wait\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_RESUMABLE)
