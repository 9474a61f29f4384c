"""Progress of long work: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_SECONDS_BETWEEN_LINES = 10.0


class ByteProgress:
    """Tells how many of `total` bytes are done; a context manager.

    On a terminal a bar on standard error; elsewhere a line on standard output every ten seconds.
    """

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._bar: Progress | None = None
        self._last_line = time.monotonic()

    def __enter__(self) -> ByteProgress:
        if sys.stderr.isatty():
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            console = Console(stderr=True)
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._label, total=self._total)
        return self

    def advance(self, count: int) -> None:
        """Counts `count` more bytes as done."""
        self._done += count
        if self._bar is not None:
            self._bar.advance(self._task, count)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            share = self._done / self._total if self._total else 1.0
            print(f"{self._label}: {share:.0%} of {self._total / 1e6:.1f} MB", flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
