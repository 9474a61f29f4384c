"""The command `tlm`, killed by itself (SIGKILL) at a chosen moment. Run as a program by `test_kill.py`.

    python killed_run.py WORKDIR MOMENT train --config=… --workdir=…

Moments in the file system are told by Python's audit events, just before they take effect.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from tlm_jax.cli import main
from tlm_jax.train import loop

TEMPORARY = ".orbax-checkpoint-tmp"
WRITING = os.O_WRONLY | os.O_RDWR


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_write(event: str, arguments: tuple[Any, ...], ending: str) -> bool:
    return event == "open" and bool(arguments[2] & WRITING) and str(arguments[0]).endswith(ending)


def is_rename(event: str, arguments: tuple[Any, ...], source: str, target: str) -> bool:
    return event == "os.rename" and str(arguments[0]).endswith(source) and str(arguments[1]).endswith(target)


Matcher = Callable[[str, tuple[Any, ...]], bool]
# name -> (the event to die at, how many such events to let pass: a run must get on between two kills)
FILE_SYSTEM: dict[str, tuple[Matcher, int]] = {
    "claiming the directory": (lambda e, a: is_rename(e, a, "", "/config.json"), 0),
    "shortening the metrics": (lambda e, a: is_rename(e, a, "", "/metrics.jsonl"), 0),
    "beginning a save": (lambda e, a: e == "os.mkdir" and str(a[0]).endswith(f"{TEMPORARY}/state"), 2),
    "writing the data index": (lambda e, a: is_write(e, a, f"{TEMPORARY}/data/data.json"), 2),
    "describing the arrays": (lambda e, a: is_write(e, a, f"{TEMPORARY}/params/_METADATA"), 2),
    "marking as complete": (lambda e, a: is_write(e, a, f"{TEMPORARY}/_CHECKPOINT_METADATA"), 2),
    "committing": (lambda e, a: is_rename(e, a, TEMPORARY, ""), 2),
    "setting aside an old one": (lambda e, a: is_rename(e, a, "", ".removed"), 1),
    "deleting an old one": (lambda e, a: e == "os.rmdir" and str(a[0]) == "data", 1),
}
MOMENTS = (*FILE_SYSTEM, "validating")


def die_at_event(workdir: str, matches: Matcher, pass_over: int) -> None:
    seen, lock = 0, threading.Lock()

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in ("open", "os.mkdir", "os.rename", "os.rmdir"):
            return
        # Deletion goes by names relative to an open folder.
        if not (event == "os.rmdir" or str(arguments[0]).startswith(f"{workdir}/")) or not matches(event, arguments):
            return
        with lock:
            if seen == pass_over:
                die()
            seen += 1

    sys.addaudithook(hook)


def die_in_validation(pass_over: int) -> None:
    evaluate, seen = loop.evaluate, 0

    def evaluate_or_die(eval_step: Callable[..., Any], *arguments: Any) -> dict[str, float | int]:
        nonlocal seen
        seen += 1

        def step(*inputs: Any) -> Any:
            if seen > pass_over:
                die()
            return eval_step(*inputs)

        return evaluate(step, *arguments)

    loop.evaluate = evaluate_or_die


if __name__ == "__main__":
    if sys.argv[2] == "validating":
        die_in_validation(1)
    else:
        die_at_event(sys.argv[1], *FILE_SYSTEM[sys.argv[2]])
    sys.exit(main(sys.argv[3:]))
