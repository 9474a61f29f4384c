"""Runs a module that does not outlive the comparison which started it, however that ends.

    python -m tlm_jax.compare.child MODULE ARGUMENT...

is `python -m MODULE ARGUMENT...`, and gets SIGTERM once standard input has come to its end: the comparison holds the
other side open and never writes, and a process that is killed lets go of it. So a training still saves, and can be
resumed.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading


def stop_with_parent() -> None:
    """Sends this process SIGTERM at the end of standard input, which is read for nothing else."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stop with parent", daemon=True).start()


if __name__ == "__main__":
    stop_with_parent()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
