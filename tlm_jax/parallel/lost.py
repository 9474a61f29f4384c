"""When one of several processes is lost: the others end with 75, and none waits for one that has failed."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator

import jax
from jax._src import distributed  # the client has no public name

from tlm_jax.errors import EXIT_BAD_INPUT, EXIT_RESUMABLE, UserError

_FAILED = 1  # Python's own code for an exception that nobody caught
_PROBE_SECONDS = 2.0
_GRACE_SECONDS = 3.0  # for a failure of this process's own to be told first

# How a broken connection is told by gloo, NCCL, the TPU runtime and the coordination service.
_LOST = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|socket closed|timed? ?out|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED"
    r"|coordination service|heartbeat|another task died",
    re.IGNORECASE,
)


@contextlib.contextmanager
def ends_with_the_others(command: str) -> Iterator[None]:
    """Around the work of one process among several, after `start_distributed`, which calls `listen_for_abort`.

    A collective that fails because another process is gone ends this one with 75 and one line. So does JAX's own
    check, which aborts a process when the first one cannot be reached or another one has long been silent. A failure of
    this process's own goes on as it is, but does not wait for the others at exit, as JAX would for minutes: they are
    waiting for this one.

    Args:
      command: what the line begins with, such as "tlm train".
    """
    try:
        yield
    except BaseException as error:
        if _is_lost(error):
            _end(command, str(error))
        atexit.register(_leave, EXIT_BAD_INPUT if isinstance(error, UserError) else _FAILED)
        raise


def _is_lost(error: BaseException) -> bool:
    # Gloo's failures come as ValueError, others as JaxRuntimeError.
    return isinstance(error, (ValueError, jax.errors.JaxRuntimeError)) and _LOST.search(str(error)) is not None


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end(command: str, reason: str) -> None:
    reason = " ".join(reason.split())[:200]
    sys.stderr.write(
        f"{command}: process {jax.process_index()} of {jax.process_count()}: another process is gone and its own "
        f"output says why; the same command resumes the run ({reason})\n"
    )
    _leave(EXIT_RESUMABLE)


def listen_for_abort(command: str, seconds: int) -> None:
    """Makes 75 of the abort by which JAX's coordination service ends a process whose others are lost, or do not come.

    Args:
      command: what the line begins with.
      seconds: how long the service waits for the others to come.

    The service calls abort() in a thread of C++, where no handler of Python's would ever run.
    """

    def on_abort(number: int) -> None:
        del number
        if not JOINED.is_set():
            sys.stderr.write(
                f"{command}: not all processes of the run came within {seconds} s; start all of them again\n"
            )
            _leave(EXIT_RESUMABLE)
        if _service_answers():  # the abort has another cause, and goes on
            library.signal(int(signal.SIGABRT), None)
            os.abort()
        time.sleep(_GRACE_SECONDS)
        _end(command, "the coordination service ended this process")

    library = ctypes.CDLL(None)
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(on_abort)
    library.signal.restype = ctypes.c_void_p
    library.signal(int(signal.SIGABRT), handler)
    _KEPT.append(handler)


JOINED = threading.Event()  # all processes have come
_KEPT: list[object] = []  # the handler must live as long as the process


def _service_answers() -> bool:
    """Whether the coordination service is well: in its state of error a call raises, or never returns."""
    answered = threading.Event()

    def ask() -> None:
        client = distributed.global_state.client
        assert client is not None
        try:
            client.key_value_try_get("tlm_jax/probe")
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" not in str(error):
                return
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(_PROBE_SECONDS)
