"""`python -m tlm_jax` is `tlm`."""

import signal

# Before the imports, which take most of the first second: a KeyboardInterrupt in one of them is a traceback, and some
# swallow it. Ctrl-C that is ignored, as a shell does for what it runs in the background, stays ignored.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import os
import sys
from types import FrameType

from tlm_jax.cli import main


def run() -> int:
    """Runs the command `tlm` on this process's arguments; from its end on, a signal cannot change the exit code."""
    code = main()

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        sys.stderr.flush()
        os._exit(code)

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    return code


if __name__ == "__main__":
    sys.exit(run())
