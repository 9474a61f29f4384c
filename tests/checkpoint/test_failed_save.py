"""A save that cannot be completed stops the run with one line, and leaves the checkpoints before it in force."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest
from orbax.checkpoint import v1 as ocp

from tlm_jax.checkpoint.manager import CheckpointManager
from tlm_jax.errors import UserError

STATE = {"params": {"w": jnp.ones(4)}, "step": jnp.int32(0)}

# Saves 1 KB, sets the limit, then tries 4 MB that do not compress; prints the error and what is left.
PROGRAM = """
import os, resource, signal, sys
import numpy as np
from tlm_jax.checkpoint.manager import CheckpointManager, Metadata
from tlm_jax.errors import UserError
metadata = Metadata(config="", profile="", tokenizer_kind="", tokenizer=b"")
state = {"params": {"w": np.zeros(256, np.float32)}, "step": np.zeros((), np.int32)}
directory, limit = sys.argv[1], int(sys.argv[2])
try:
    with CheckpointManager(directory, every_steps=1, every_seconds=0.0, keep_last=2, timeout_seconds=60.0,
                           metadata=metadata) as manager:
        manager.save(1, state, {})
        manager.wait()
        if limit:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        state["params"]["w"] = np.random.default_rng(0).standard_normal(1_000_000).astype(np.float32)
        manager.save(2, state, {})
except UserError as error:
    print(error, sorted(os.listdir(directory)), sep="\\n")
"""


def run_until_full(directory: Path, limit: int) -> list[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", PROGRAM, str(directory), str(limit)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "Orbax's own reports of the failure reach the terminal"
    return done.stdout.splitlines()


def test_file_size_limit(tmp_path: Path):
    assert run_until_full(tmp_path, 200_000) == [
        f"{tmp_path}: the checkpoint of step 2 could not be written: a file would be larger than the file-size limit "
        "allows (EFBIG); the newest complete one is step 1; remove the cause and run the same command again",
        "['1']",
    ]


def test_full_disk(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("mounting a small file system needs root")
    try:
        what, left = run_until_full(disk, 0)
    finally:
        subprocess.run(["umount", disk], check=True)
    assert "step 2 could not be written: the disk is full (ENOSPC); the newest complete one is step 1;" in what
    assert left == "['1']"


def test_directory_that_cannot_be_made(tmp_path: Path, manager_at: Callable[..., CheckpointManager]):
    (tmp_path / "workdir").touch()
    with pytest.raises(UserError, match=r"workdir/checkpoints: checkpoints cannot be written here: .*ENOTDIR"):
        manager_at(tmp_path / "workdir" / "checkpoints")


def test_directory_that_becomes_unwritable(
    tmp_path: Path, manager_at: Callable[..., CheckpointManager], monkeypatch: pytest.MonkeyPatch
):
    """Permissions do not bind root, so the directory is replaced by a file."""
    manager = manager_at(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").touch()
    with pytest.raises(UserError, match="step 1 could not be written: a part of the path is not a directory"):
        manager.save(1, STATE, {}, force=True)


def failing_late(monkeypatch: pytest.MonkeyPatch, error: Exception, then: threading.Event | None = None) -> None:
    """Orbax's background work first waits for `then` and ends in `error`."""
    dispatch = ocp.save_checkpointables_async

    def dispatch_and_fail(*args, **kwargs):
        response = dispatch(*args, **kwargs)

        def result(timeout=None):
            if then is not None:
                then.wait(60)
            raise error

        response.result()
        response.result = result
        return response

    monkeypatch.setattr(ocp, "save_checkpointables_async", dispatch_and_fail)


CALLS: dict[str, Callable[[CheckpointManager], object]] = {
    "due_by_time": CheckpointManager.due_by_time,
    "save": lambda manager: manager.save(2, STATE, {}),
    "wait": CheckpointManager.wait,
    "close": CheckpointManager.close,
    "leave": lambda manager: manager.__exit__(None, None, None),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_tells_of_a_background_failure(
    tmp_path: Path, manager_at: Callable[..., CheckpointManager], monkeypatch: pytest.MonkeyPatch, call: str
):
    failing_late(monkeypatch, OSError(30, "Read-only file system"))
    manager = manager_at(tmp_path)
    manager.save(1, STATE, {}, force=True)
    manager._in_flight.join(10)
    with pytest.raises(UserError, match="step 1 could not be written: the file system is read-only"):
        CALLS[call](manager)
    manager.close()


def test_an_error_that_is_not_the_systems_stays_a_bug(
    tmp_path: Path, manager_at: Callable[..., CheckpointManager], monkeypatch: pytest.MonkeyPatch
):
    failing_late(monkeypatch, ZeroDivisionError())
    manager = manager_at(tmp_path)
    manager.save(1, STATE, {}, force=True)
    with pytest.raises(ZeroDivisionError):
        manager.wait()


def test_the_error_in_hand_is_not_hidden(
    tmp_path: Path, manager_at: Callable[..., CheckpointManager], monkeypatch: pytest.MonkeyPatch
):
    failing_late(monkeypatch, OSError(28, "No space left on device"))

    def fail_while_saving() -> None:
        with manager_at(tmp_path) as manager:
            manager.save(1, STATE, {}, force=True)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        fail_while_saving()
    assert "the disk is full" in caught.value.__notes__[0]


def test_a_save_that_takes_too_long(
    tmp_path: Path, manager_at: Callable[..., CheckpointManager], monkeypatch: pytest.MonkeyPatch
):
    release = threading.Event()
    failing_late(monkeypatch, OSError(5, "never told"), then=release)
    manager = manager_at(tmp_path, timeout_seconds=0.2)
    manager.save(1, STATE, {}, force=True)
    with pytest.raises(UserError, match=r"step 1 could not be written: it took longer than 0\.2 seconds"):
        manager.close()
    release.set()


def test_the_process_ends_although_a_save_is_stuck(tmp_path: Path):
    """The save hangs in a thread that the interpreter would wait for."""
    program = """
import sys, threading
import numpy as np
from orbax.checkpoint import v1 as ocp
from tlm_jax import errors
from tlm_jax.checkpoint import manager as manager_module
class Response:
    def result(self, timeout=None):
        threading.Event().wait()
def stuck(*args, **kwargs):
    threading.Thread(target=threading.Event().wait).start()
    return Response()
ocp.save_checkpointables_async = stuck
manager_module.EXIT_GRACE_SECONDS = 0.1
metadata = manager_module.Metadata(config="", profile="", tokenizer_kind="", tokenizer=b"")
manager = manager_module.CheckpointManager(sys.argv[1], every_steps=1, every_seconds=0.0, keep_last=2,
                                           timeout_seconds=0.1, metadata=metadata)
manager.save(1, {"params": {"w": np.zeros(1)}, "step": np.zeros(1)}, {})
try:
    manager.close()
except errors.UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=240, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 2
    assert "it took longer than 0.1 seconds" in done.stdout
    assert done.stderr == ""
