"""The benchmark's side of a worker, alternation between workers, and how figures are printed."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEERS = Path(__file__).parent / "peers"


@dataclass(frozen=True)
class Measurement:
    """Seconds of one measurement, and the CPU seconds (user and system, all threads) that the process took for it."""

    seconds: float
    cpu_seconds: float


class Worker:
    """A process that prepares something, then repeats it whenever it is told to; see `peers/serving.py`.

    Args:
      python: the interpreter of the environment that the worker needs.
      script: file in `peers/`.
      settings: given to the script.
      log: file that takes what the worker prints.
    """

    def __init__(self, python: str, script: str, settings: Mapping[str, Any], log: Path) -> None:
        self._name, self._log = script, log
        # What this process imports from is of no use to another environment.
        ours = [os.environ["PYTHONPATH"]] if python == sys.executable and "PYTHONPATH" in os.environ else []
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [python, str(PEERS / script), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PEERS), *ours])},
            )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "".join(self._log.read_text(errors="replace").splitlines(keepends=True)[-20:])
            raise SystemExit(f"{self._name} ended with code {self._process.wait()}; the end of {self._log}:\n{tail}")
        return json.loads(line)

    def measure(self, steps: int) -> Measurement:
        """Has the worker take so many steps."""
        assert self._process.stdin is not None
        print(steps, file=self._process.stdin, flush=True)
        answer = self._answer()
        return Measurement(answer["seconds"], answer["cpu_seconds"])

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def alternate(start: Mapping[str, Callable[[], Worker]], steps: int, rounds: int) -> dict[str, list[Measurement]]:
    """Starts the workers one after the other, then lets them take turns; the first to go changes every round."""
    found: dict[str, list[Measurement]] = {name: [] for name in start}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(begin()) for name, begin in start.items()}
        for number in range(rounds):
            turn = list(workers)[:: 1 if number % 2 == 0 else -1]
            for name in turn:
                found[name].append(workers[name].measure(steps))
    return found


def spread(values: Sequence[float], digits: int = 0) -> str:
    """`median (lowest … highest)`."""
    low, middle, high = (f"{x:,.{digits}f}" for x in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} … {high})"


def print_bar(name: str, values: Sequence[float], digits: int = 2, bar: float | None = None) -> None:
    """Prints the spread of the values and, where there is a bar, whether their median reaches it."""
    verdict = ""
    if bar is not None:
        verdict = f"; bar {bar}: {'met' if statistics.median(values) >= bar else 'missed'}"
    print(f"  {name:34} {spread(values, digits)}{verdict}", flush=True)
