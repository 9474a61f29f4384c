"""The worker's side of a benchmark: takes steps when told to, and answers how long they took.

Standard library only, since every peer runs in its own environment. `measuring.Worker` is the other side: it gives the
settings as the first argument, JSON, and for every measurement a line with the number of steps.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

WARM_UP_STEPS = 2


def _cpu_seconds() -> float:
    """User and system time of all threads, and of child processes that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Session:
    """A worker's conversation with the benchmark; begin it before anything is printed.

    Attributes:
      settings: what the benchmark asks for.
    """

    def __init__(self) -> None:
        self.settings: dict[str, Any] = json.loads(sys.argv[1])
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what libraries print to standard output is no answer

    def steps(self, wait: Callable[[], object]) -> Iterator[None]:
        """Yields whenever a step is to be taken.

        Between measurements it blocks, so that the peers can alternate, each alone on the machine.

        Args:
          wait: returns when everything that was dispatched is done.
        """
        for _ in range(WARM_UP_STEPS):
            yield
        wait()
        self._answer(ready=True)
        for line in sys.stdin:
            wall, cpu = time.perf_counter(), _cpu_seconds()
            for _ in range(int(line)):
                yield
            wait()
            self._answer(seconds=time.perf_counter() - wall, cpu_seconds=_cpu_seconds() - cpu)

    def _answer(self, **values: Any) -> None:
        print(json.dumps(values), file=self._answers)
