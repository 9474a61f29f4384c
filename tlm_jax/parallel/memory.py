"""Memory that does not suffice, told as what it is: the user's to mend, by asking for less at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from tlm_jax.errors import UserError

# How XLA's message begins when it compiles, allocates or runs. A program begun long ago is told as an INTERNAL error.
_EXHAUSTED = re.compile(r"RESOURCE_EXHAUSTED:|.*?(?=out of memory)", re.IGNORECASE | re.DOTALL)
_MESSAGE_CHARACTERS = 300  # of XLA's, which may go on with a table of buffers


@contextmanager
def told_when_exhausted(mend: str, directory: Path | None = None) -> Iterator[None]:
    """Turns XLA's error about memory, which comes with a long traceback, into a `UserError`.

    Args:
      mend: what the user can do about it.
      directory: where each process writes what its devices hold, as `memory_0.pprof` for pprof and xprof; nothing is
        written where there is no such directory.

    Raises:
      UserError: memory did not suffice; says what was asked for and what the device has.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        found = _EXHAUSTED.match(message)
        if not found:
            raise
        what = f"memory does not suffice: {_asked(message[found.end() :])}"
        if directory is not None and directory.is_dir():
            mend = f"{_profile(directory)}; {mend}"
        raise UserError(what, where=_device(), mend=mend) from error


def _profile(directory: Path) -> str:
    """Writes the memory profile and says where; it must not hide what it is about."""
    path = directory / f"memory_{jax.process_index()}.pprof"
    try:
        jax.profiler.save_device_memory_profile(path)
    except (OSError, jax.errors.JaxRuntimeError) as error:
        return f"no memory profile could be written ({type(error).__name__})"
    return f"what the devices hold is in {path}"


def _asked(message: str) -> str:
    """XLA's words, on one line, with bytes also in GiB."""
    words = " ".join(message.split())
    words = words if len(words) <= _MESSAGE_CHARACTERS else f"{words[:_MESSAGE_CHARACTERS]} …"
    asked = re.search(r"(\d+) bytes", words)
    return words.rstrip(".") + (f" ({_gibibytes(int(asked[1]))})" if asked else "")


def _device() -> str:
    """The fullest local device, with its memory where it tells."""
    told = [(device, device.memory_stats() or {}) for device in jax.local_devices()]
    device, stats = max(told, key=lambda pair: pair[1].get("bytes_in_use", 0))
    name = f"{device.platform} device {device.id}" + ("" if device.platform == "cpu" else f", {device.device_kind}")
    if not stats.get("bytes_limit"):
        return name
    in_use = _gibibytes(stats.get("bytes_in_use", 0))
    return f"{name} with {_gibibytes(stats['bytes_limit'])} to allocate from, {in_use} of it in use"


def _gibibytes(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB"
