"""Progress of long work, on standard error: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_SECONDS_BETWEEN_LINES = 10.0


class ProgressBar:
    """Shows how much of `total` is done; a context manager.

    Args:
      label: the work, such as "tokenising".
      total: how much there is; None: `show` will say.
      unit: what is counted; "bytes" are shown as sizes, with their speed.
    """

    def __init__(self, label: str, total: int | None = None, *, unit: str) -> None:
        self._label, self._total, self._unit, self._done = label, total, unit, 0
        self._bar: Progress | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> ProgressBar:
        if sys.stderr.isatty():
            of_bytes: tuple[ProgressColumn, ...] = (DownloadColumn(), TransferSpeedColumn())
            counts = of_bytes if self._unit == "bytes" else (MofNCompleteColumn(),)
            columns = (TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=self._total)
        return self

    def advance(self, count: int) -> None:
        """Counts `count` more as done."""
        self.show(self._done + count, self._total)

    def show(self, done: int, total: int | None) -> None:
        """Shows `done` of `total`."""
        self._done, self._total = done, total
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            print(f"{self._label}: {self._share()}", file=sys.stderr, flush=True)

    def _share(self) -> str:
        if self._total is None:
            return f"{self._done:,} {self._unit}"
        if self._unit == "bytes":
            return f"{self._done / max(self._total, 1):.0%} of {self._total / 1e6:.1f} MB"
        return f"{self._done:,} of {self._total:,} {self._unit}"

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
