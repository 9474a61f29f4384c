"""Kills processes while they save, and looks at what each leaves behind. Run as a program by `test_crash.py`.

    python crash_harness.py DIRECTORY every-event      one process per file-system event of a save, killed before it
    python crash_harness.py DIRECTORY random ROUNDS    killed at random moments of saving without pause
    python crash_harness.py DIRECTORY prune            one process per file-system event of `tlm checkpoint prune`
    python crash_harness.py DIRECTORY export           the same of `tlm checkpoint export`, every fourth event

Prints one JSON object per killed process. Each process begins by restoring what the killed one before it left, so a
failed check ends the program. Processes are forked before JAX starts a backend, which saves importing JAX each time.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tlm_jax.checkpoint.layout import complete_steps
from tlm_jax.checkpoint.manager import CheckpointManager, Metadata
from tlm_jax.cli import main

METADATA = Metadata(config="{}", profile="{}", tokenizer_kind="bytes", tokenizer=b"\0")
EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")
WRITING = os.O_WRONLY | os.O_RDWR


def state_of(step: int) -> dict[str, Any]:
    """A state that tells its step in every element; about 1 MB, of which little compresses."""
    noise = np.random.default_rng(step).standard_normal((256, 512)).astype(np.float32)
    return {"params": {"w": jnp.asarray(noise)}, "optimizer": {"mu": jnp.asarray(-noise)}, "step": jnp.int32(step)}


def open_manager(directory: Path, keep_last: int = 1) -> CheckpointManager:
    return CheckpointManager(
        directory, every_steps=0, every_seconds=0.0, keep_last=keep_last, timeout_seconds=60.0, metadata=METADATA
    )


def check(manager: CheckpointManager, at_least: int) -> int:
    """Restores the newest checkpoint and compares it bit for bit; returns its step."""
    step = manager.latest_step() or 0
    assert step >= at_least, f"step {step} is in force, {at_least} was complete"
    wanted = state_of(step)
    state, data_state, metadata = manager.restore(jax.eval_shape(lambda: wanted))
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(got, want)
    assert data_state == {"next_window": step}
    assert metadata == METADATA
    names = sorted(path.name for path in manager.directory.iterdir())
    assert names == sorted(map(str, manager.steps())), f"left behind: {names}"
    return step


def die_at_event(directory: Path, number: int, report: Path) -> None:
    """Kills this process just before its `number`-th change of the file system below `directory`."""
    seen, lock = 0, threading.Lock()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in EVENTS:
            return
        in_rmtree = event in ("os.remove", "os.rmdir") and not os.path.isabs(arguments[0])  # names below an open folder
        if not (in_rmtree or str(arguments[0]).startswith(f"{directory}/")):
            return
        if event == "open" and not arguments[2] & WRITING:
            return
        with lock:
            if seen == number:
                paths = [str(a).removeprefix(f"{directory}/") for a in arguments[: 2 if event == "os.rename" else 1]]
                report.write_text(json.dumps({"event": event, "arguments": paths}))
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(hook)


def in_child(work: Any) -> int:
    """Forks, runs `work` in the child; returns its process id."""
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of fork; its threads start with the backend, in the child
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(code)
    return child


def first_save(directory: Path) -> None:
    with open_manager(directory) as manager:
        manager.save(1, state_of(1), {"next_window": 1}, force=True)


def every_event(directory: Path) -> None:
    assert os.waitpid(in_child(lambda: first_save(directory)), 0)[1] == 0
    report = directory.with_suffix(".event")
    step_file = directory.with_suffix(".step")

    def save_and_die(number: int) -> None:
        with open_manager(directory) as manager:
            step = check(manager, int(step_file.read_text()) if step_file.exists() else 1)
            step_file.write_text(str(step))
            die_at_event(directory, number, report)
            manager.save(step + 1, state_of(step + 1), {"next_window": step + 1}, force=True)

    number = 0
    while True:
        status = os.waitpid(in_child(lambda number=number: save_and_die(number)), 0)[1]
        if status == 0:
            return
        assert os.WIFSIGNALED(status), f"event {number}: the process failed by itself"
        print(report.read_text())
        number += 1


def random_moments(directory: Path, rounds: int) -> None:
    assert os.waitpid(in_child(lambda: first_save(directory)), 0)[1] == 0
    progress = directory.with_suffix(".progress")
    rng = random.Random(0)

    def save_without_pause() -> None:
        with open_manager(directory) as manager:
            step = check(manager, int(progress.read_text()))
            while True:
                step += 1
                manager.save(step, state_of(step), {"next_window": step}, force=True)
                manager.wait()
                progress.with_suffix(".new").write_text(str(step))
                progress.with_suffix(".new").rename(progress)

    progress.write_text("1")
    for _ in range(rounds):
        before = int(progress.read_text())
        child = in_child(save_without_pause)
        while int(progress.read_text()) < before + 2:  # at work, and two checkpoints further
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the process failed by itself"
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        unfinished = [path.name for path in directory.iterdir() if not path.name.isdecimal()]
        print(json.dumps({"completed": int(progress.read_text()), "unfinished": unfinished}))

    def final_check() -> None:
        with open_manager(directory) as manager:
            check(manager, int(progress.read_text()))

    assert os.waitpid(in_child(final_check), 0)[1] == 0, "the last process left something that cannot be restored"


def four_checkpoints(directory: Path) -> None:
    """Steps 1 to 4, of which 2 has the lowest loss."""
    with open_manager(directory, keep_last=9) as manager:
        for step, loss in enumerate((5.0, 3.0, 4.0, 6.0), 1):
            metrics = {"validation/loss": loss}
            manager.save(step, state_of(step), {"next_window": step}, force=True, metrics=metrics)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def killed_prunes(directory: Path) -> None:
    assert os.waitpid(in_child(lambda: four_checkpoints(directory)), 0)[1] == 0
    whole = {step: contents(directory / str(step)) for step in complete_steps(directory)}
    report, copy = directory.with_suffix(".event"), directory.with_suffix(".copy")
    command = ["checkpoint", "prune", str(copy), "--keep-last=1", "--keep-best=1"]

    def prune_and_die(number: int) -> None:
        die_at_event(copy, number, report)
        assert main(command) == 0

    for number in itertools.count():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(directory, copy)
        status = os.waitpid(in_child(lambda number=number: prune_and_die(number)), 0)[1]
        left = complete_steps(copy)
        assert {2, 4} <= set(left), f"event {number}: the newest and the best do not stay"
        assert all(contents(copy / str(step)) == whole[step] for step in left), f"event {number}: a damaged one counts"
        if status == 0:
            assert left == [2, 4]
            return
        assert os.WIFSIGNALED(status), f"event {number}: the process failed by itself"
        print(report.read_text(), flush=True)
        assert main(command) == 0
        assert sorted(path.name for path in copy.iterdir()) == [".lock", "2", "4"], "left behind"


def killed_exports(directory: Path) -> None:
    assert os.waitpid(in_child(lambda: four_checkpoints(directory)), 0)[1] == 0
    report, output = directory.with_suffix(".event"), directory.with_suffix(".export")
    command = ["checkpoint", "export", str(directory), f"--output={output}", "--step=best"]

    def export_and_die(number: int) -> None:
        die_at_event(output, number, report)
        assert main(command) == 0

    for number in itertools.count(0, 4):
        status = os.waitpid(in_child(lambda number=number: export_and_die(number)), 0)[1]
        if status == 0:
            assert complete_steps(output / "checkpoints") == [2]
            assert sorted(path.name for path in output.iterdir()) == ["checkpoints", "config.json", "profile.json"]
            return
        assert os.WIFSIGNALED(status), f"event {number}: the process failed by itself"
        assert complete_steps(output / "checkpoints") == []
        print(report.read_text(), flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "prune":
        killed_prunes(Path(sys.argv[1]))
    elif sys.argv[2] == "export":
        killed_exports(Path(sys.argv[1]))
    elif sys.argv[2] == "random":
        random_moments(Path(sys.argv[1]), int(sys.argv[3]))
    else:
        every_event(Path(sys.argv[1]))
