"""Files that appear whole or not at all, directories of one process at a time, what a failed write means, any JSON."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tlm_jax.errors import UserError

PARTIAL = ".partial-"  # in the names of files that are being written
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would be larger than the file-size limit allows",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is not a directory",
    errno.EIO: "the device reports an input/output error",
}


def reason(error: OSError | int) -> str:
    """Why the operating system refused, in words and with its own name for it; of an error or its number."""
    code = error if isinstance(error, int) else error.errno
    if code is None:
        return str(error)
    return f"{_REASONS.get(code, os.strerror(code))} ({errno.errorcode.get(code, code)})"


def parse_json(text: str | bytes) -> Any:
    """`json.loads` for text that may be anything.

    Raises:
      ValueError: it is not JSON, or nested too deeply to be read.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def partial_path(path: Path) -> Path:
    """The name under which this process writes a file before it takes its own."""
    return path.with_name(f"{path.name}{PARTIAL}{os.getpid()}")


def write_atomically(path: Path, data: bytes | str) -> None:
    """Writes a file, text as UTF-8, by renaming: a crash at any instant leaves the old one or the new one.

    Raises:
      OSError: it cannot be written; the old one is untouched.
    """
    partial = partial_path(path)
    try:
        with open(partial, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def remove_partials(directory: Path) -> None:
    """Deletes what interrupted calls of `write_atomically` left in a directory that is this process's."""
    for leftover in directory.glob(f"*{PARTIAL}*"):
        leftover.unlink(missing_ok=True)


def write_result(path: str, text: str) -> None:
    """Writes what a command was asked for, whole or not at all; a pipe or device is written as it is, never replaced.

    Raises:
      UserError: it cannot be written.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_text(text, encoding="utf-8")
        else:
            write_atomically(target, text)
    except OSError as error:
        raise UserError(f"cannot be written: {reason(error)}", where=path) from error


def write_error(error: OSError, output: Path) -> UserError:
    """The error to tell when writing below `output` failed."""
    full = error.errno in _NO_SPACE
    mend = "finished work is kept: make room and give the same command again" if full else ""
    where = output if full else error.filename or output
    return UserError(f"cannot be written: {reason(error)}", where=str(where), mend=mend)


@contextmanager
def only_one(workdir: Path, *, required: bool = False) -> Iterator[None]:
    """Keeps the directory to this process; for one host only. The lock goes with the process, however that ends.

    A file system without locks goes unguarded, and so does a directory that cannot be written: that is told where it
    matters. Not so with `required`, for what must not go on beside another process.

    Raises:
      UserError: another process holds it; with `required`, it cannot be locked.
    """
    mend = "make sure that no process is at work there, and remove by hand what is to go"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = os.open(workdir / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if required:
            raise UserError(f"cannot be locked: {reason(error)}", where=str(workdir), mend=mend) from error
        yield
        return
    try:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process: a forked loader process inherits none
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                stop = "wait until it has ended, stop it, or give another --workdir"
                raise UserError("another process is at work here", where=str(workdir), mend=stop) from error
            if required:
                raise UserError(f"cannot be locked: {reason(error)}", where=str(workdir), mend=mend) from error
        yield
    finally:
        os.close(file)


@contextmanager
def only_writer(output: Path) -> Iterator[None]:
    """Locks a directory that exists while it is filled, and leaves nothing in it.

    Raises:
      UserError: another process fills it.
    """
    descriptor = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError("another process is writing this store", where=str(output)) from None
        yield
    finally:
        os.close(descriptor)
