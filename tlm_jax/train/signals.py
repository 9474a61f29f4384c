"""Ctrl-C and SIGTERM become a request that the loop carries to all hosts; a second one ends the process at once."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopRequest:
    """Context manager; `signal_name` is None until SIGINT or SIGTERM arrives."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal_name = signal.Signals(number).name
        for each in self._previous:
            # Not Python's handler: a KeyboardInterrupt would wait for the device, and for the save on its way.
            signal.signal(each, signal.SIG_DFL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
