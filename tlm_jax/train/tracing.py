"""Profiler traces of a few steps of a run that goes on: at a chosen step, and whenever SIGUSR1 asks for one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

import jax

STEPS = 3  # that a trace shows


class Tracer:
    """A context manager that listens for SIGUSR1.

    Args:
      directory: where traces go; TensorBoard's profile plugin and xprof read it.
      at_step: the first step of a trace that is made unasked; 0: none.
      say: tells the user that a trace is written.
    """

    def __init__(self, directory: Path, at_step: int, say: Callable[[str], None]) -> None:
        self._directory, self._at_step, self._say = directory, at_step, say
        self._asked = False
        self._first = 0  # step of the trace under way; 0: none is

    def __enter__(self) -> Tracer:
        self._previous = signal.signal(signal.SIGUSR1, self._ask)
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._asked = True

    def before(self, step: int) -> None:
        """To be called before `step` is dispatched, when all but the last before it have ended."""
        if self._first and step >= self._first + STEPS + 1:
            self._stop()
        if not self._first and (self._asked or step == self._at_step):
            self._asked, self._first = False, step
            jax.profiler.start_trace(self._directory)

    def _stop(self) -> None:
        jax.profiler.stop_trace()
        self._say(f"profiler trace from step {self._first} on: {self._directory}")
        self._first = 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._first:
            self._stop()
        signal.signal(signal.SIGUSR1, self._previous)
