"""The Orbax settings that every save and load uses, what Orbax prints, and what its errors mean."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from tlm_jax.checkpoint import layout
from tlm_jax.files import reason


def _from_elsewhere(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def storage_context(timeout_seconds: float | None = None) -> ocp.Context:
    """The Orbax context of this project; enter it around every call of Orbax."""
    # Orbax logs each step of its work, and each failure many times over, through absl; we report failures ourselves.
    logging.getLogger("absl").addFilter(_from_elsewhere)
    context = ocp.Context()
    registry = ocp.handlers.local_registry()
    for item in (layout.DATA, layout.METADATA):
        registry.add(ocp.handlers.JsonHandler, checkpointable_name=item)
    context.checkpointables.registry = registry
    # When directories are made in the background and that fails, Orbax's other threads wait for the whole timeout.
    context.asynchronous.create_directories_asynchronously = False
    if timeout_seconds is not None:
        context.asynchronous.timeout_secs = max(1, int(timeout_seconds))
    return context


def system_reason(error: BaseException) -> str | None:
    """Why the operating system refused, in words; None when it was not the operating system."""
    for link in _chain(error):
        code = link.errno if isinstance(link, OSError) else None
        if code is None:
            match = re.search(r"os_error_code='(\d+)'", str(link))  # TensorStore raises ValueError
            code = int(match[1]) if match else None
        if code is not None:
            return reason(code)
    return None


def damage_reason(error: BaseException) -> str | None:
    """Why stored data cannot be read, in words; None when the error does not come from the data."""
    root = list(_chain(error))[-1]
    # Orbax wraps some read errors in a bare Exception; what JAX raises (out of memory) is a RuntimeError.
    if not isinstance(root, (OSError, ValueError, LookupError)) and type(root) is not Exception:
        return None
    text = str(root).split(" [tensorstore_spec=")[0].splitlines()
    return text[0][:300] if text else type(root).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and what caused it, outermost first."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Nothing reaches the terminal that is reported while Orbax's unfinished work is torn down after a failure.

    Only reports that cannot be raised are meant: warnings, what asyncio logs, errors in destructors. Call
    `discard_unfinished` inside, after the exception has been let go of: its traceback keeps that work alive.
    """
    asyncio_logger, hook = logging.getLogger("asyncio"), sys.unraisablehook
    was_disabled = asyncio_logger.disabled
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asyncio_logger.disabled, sys.unraisablehook = True, lambda _: None
        try:
            yield
        finally:
            asyncio_logger.disabled, sys.unraisablehook = was_disabled, hook


def discard_unfinished() -> None:
    """Destroys the coroutines and tasks that a failed Orbax call has left behind."""
    gc.collect()


def _not_a_late_read(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Task exception was never retrieved")


def ignore_late_reads() -> None:
    """After a failed load, silences its other reads: they end later, in other threads, and find nobody who waits."""
    logging.getLogger("asyncio").addFilter(_not_a_late_read)
    hook = sys.unraisablehook

    def without_late_reads(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    if getattr(hook, "__name__", "") != without_late_reads.__name__:
        sys.unraisablehook = without_late_reads


def with_sharding(leaf: Any) -> Any:
    """A `jax.ShapeDtypeStruct` with a sharding: its own, or the first local device, so never the stored one."""
    sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
