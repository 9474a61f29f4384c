"""Worker processes that take numbered jobs in order and can be killed at any moment."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from tlm_jax.errors import UserError


def available_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(function: Callable[[Any, int], Any], shared: Any, jobs: Sequence[int], workers: int) -> Iterator[Any]:
    """Yields `function(shared, job)` of every job, as they are done; jobs are begun in order.

    With one worker the work is done in this process. When the caller leaves the iteration early (close, an error,
    Ctrl-C), workers are killed: what a job writes must be atomic.

    Args:
      function: importable by name, since workers are spawned.
      shared: given to every call; pickled once per worker.
      jobs: job numbers.
      workers: number of processes.

    Raises:
      UserError: a worker process died.
    """
    workers = min(workers, len(jobs))
    if workers <= 1:
        yield from (function(shared, job) for job in jobs)
        return
    context = multiprocessing.get_context("spawn")
    waiting = iter(jobs)
    processes: dict[Connection, Any] = {}
    try:
        with signals_held_back(signal.SIGINT):
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(function, shared, theirs), daemon=True)
                process.start()
                theirs.close()  # so that its end is seen here
                processes[ours] = process
        busy = {connection for connection in processes if _send_next(connection, waiting)}
        while busy:
            for connection in [c for c in multiprocessing.connection.wait(list(busy)) if isinstance(c, Connection)]:
                try:
                    failure, result = connection.recv()
                except EOFError:
                    what = f"a worker process died (exit code {_exit_code(processes[connection])})"
                    raise UserError(what, mend="was memory short? run again, with fewer --workers") from None
                if failure is not None:
                    raise failure
                if not _send_next(connection, waiting):
                    busy.remove(connection)
                yield result
    finally:
        for connection, process in processes.items():
            connection.close()
            process.kill()
        for process in processes.values():
            process.join()


def _exit_code(process: Any) -> int | None:
    process.join(1.0)
    return process.exitcode


def _send_next(connection: Connection, waiting: Iterator[int]) -> bool:
    """Sends a worker its next job; False when there is none."""
    for job in waiting:
        connection.send(job)
        return True
    return False


def _work(function: Callable[[Any, int], Any], shared: Any, connection: Connection) -> None:
    """The life of a worker process: it ends when its parent closes the connection, or is gone."""
    exit_with_parent()
    while True:
        try:
            job = connection.recv()
        except (EOFError, ConnectionError):  # the latter if a result was on its way
            return
        try:
            failure, result = None, function(shared, job)
        except Exception as error:
            failure, result = error, None
        try:
            connection.send((failure, result))
        except ConnectionError:
            return


def exit_with_parent() -> None:
    """Makes this worker process end as soon as its parent has, however it ended; a killed one cannot say so."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="exit with parent", daemon=True).start()


@contextmanager
def signals_held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Processes started inside never see these signals, which a terminal or scheduler may send to all of a run's.

    How and when to stop is for the process that started them to decide.
    """
    resource_tracker.ensure_running()  # would otherwise unblock the signals itself when the first process starts
    held = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
