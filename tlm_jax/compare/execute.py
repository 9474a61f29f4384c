"""Makes the runs one after the other, each a `tlm train` and a `tlm eval` in a process of its own."""

from __future__ import annotations

import functools
import json
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tlm_jax import config as configs
from tlm_jax.compare.plan import Run
from tlm_jax.counts import counted
from tlm_jax.data.mixture import open_data
from tlm_jax.errors import EXIT_BAD_INPUT, EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_RESUMABLE, UserError, raise_together
from tlm_jax.files import only_one, parse_json, reason
from tlm_jax.progress import ProgressBar
from tlm_jax.report.runs import load_run
from tlm_jax.train.data_check import data_problems
from tlm_jax.train.workdir import check_workdir

TLM = (sys.executable, "-m", "tlm_jax.compare.child", "tlm_jax")
CHECK = (sys.executable, "-m", "tlm_jax.compare.check")
LOG, EVALUATION = "log.txt", "evaluation.json"
_DATA = "data_fingerprint"  # in it
_POLL_SECONDS = 1.0

# What a run ends with that a signal stopped, early in its start-up by the signal itself.
_SIGNALLED = (EXIT_RESUMABLE, EXIT_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)


class Stopped(Exception):
    """A signal came; the runs can be resumed."""


class Processes:
    """One child process at a time; signals to this process are passed on to it. A context manager.

    The child has a process group of its own, so that Ctrl-C reaches it once, through here: a second signal would end a
    training at once. Its standard input stays open as long as this process lives, by which `compare.child` knows.

    Attributes:
      signal_name: of the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._child: subprocess.Popen[str] | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Processes:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` wants it
                self._previous[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal_name = self.signal_name or signal.Signals(number).name
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def run(
        self, command: Sequence[str], log: Path, *, stdin: str | None = None, tick: Callable[[], None] = lambda: None
    ) -> int:
        """Runs a command to its end, what it prints appended to `log`, and returns its exit code.

        Args:
          command: with its arguments.
          log: a file.
          stdin: given to the command, and nothing more; None: nothing, and no end before the command's.
          tick: called about once a second.

        Raises:
          Stopped: a signal came before the command was a success.
          UserError: the log cannot be written.
        """
        if self.signal_name:
            raise Stopped
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a") as file:
                file.write(f"$ {shlex.join(command)}\n")
                file.flush()
                self._child = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=file, stderr=file, text=True, process_group=0
                )
        except OSError as error:
            raise UserError(f"cannot be written: {reason(error)}", where=str(error.filename or log)) from error
        child = self._child
        if self.signal_name:  # it came while the child was being born
            child.terminate()
        assert child.stdin is not None
        if stdin is not None:
            try:
                child.stdin.write(stdin)
                child.stdin.close()
            except BrokenPipeError:
                pass  # its exit code says why
        while True:
            try:
                code = child.wait(_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                tick()
        child.stdin.close()
        self._child = None
        if code != EXIT_COMPLETE and (self.signal_name or code in _SIGNALLED):
            raise Stopped
        return code


def evaluation(run: Run) -> dict[str, Any] | None:
    """The held-out numbers of a run that is complete; None for any other.

    Raises:
      UserError: the run's data cannot be opened.
    """
    found = _read_evaluation(run)
    return None if _mismatch(run, found) else found


def _read_evaluation(run: Run) -> dict[str, Any]:
    try:
        found = parse_json((run.workdir / EVALUATION).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _mismatch(run: Run, found: Mapping[str, Any]) -> str:
    """By what an evaluation is not the one that the run's config asks for; empty if it is."""
    c = run.config
    if found and not (isinstance(found.get("loss"), int | float) and isinstance(found.get("tokens"), int)):
        return "no loss or no number of tokens"
    asked = {"step": c.train.num_steps, "weights": c.validation.weights, _DATA: _fingerprint(configs.to_json(c.data))}
    return ", ".join(f"{key} {found.get(key)}, not {value}" for key, value in asked.items() if found.get(key) != value)


@functools.cache
def _fingerprint(data: str) -> str:
    """Of what a `config.data`, as JSON text, names: its path may name other text today than when a run was made."""
    named = json.loads(data)
    return open_data(named["store"], named["mixture"]).fingerprint


def evaluations(runs: Sequence[Run]) -> dict[str, dict[int, dict[str, Any]]]:
    """The held-out numbers of all complete runs, by variant and seed."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        measured = evaluation(run)
        if measured is not None:
            found.setdefault(run.variant.name, {})[run.index] = measured
    return found


def check_data(runs: Sequence[Run]) -> None:
    """Finds what is wrong with the runs' data, without the devices, as a dry run has none.

    Raises:
      UserError: all that is wrong, together.
    """
    problems: dict[str, UserError] = {}
    for run in {run.variant.name: run for run in runs}.values():
        try:
            found = data_problems(run.config, open_data(run.config.data.store, run.config.data.mixture))
        except UserError as problem:
            found = [problem]
        for each in found:
            problems.setdefault(str(each), UserError(str(each), where=f"variant {run.variant.name}"))
    raise_together(list(problems.values()))


def check(runs: Sequence[Run], processes: Processes, log: Path) -> None:
    """Finds what is wrong before the first run: work directories that are foreign or in use, configs that cannot run.

    Raises:
      UserError: told.
      Stopped: a signal came.
    """
    for run in runs:
        check_workdir(run.workdir, run.config)
        found = _read_evaluation(run)
        if found.get(_DATA) not in (None, _fingerprint(configs.to_json(run.config.data))):
            what = f"is of {found.get('data')}, which does not hold what config.data names"
            mend = "give another --workdir, or the data of that run"
            raise UserError(what, where=str(run.workdir / EVALUATION), mend=mend)
        if run.workdir.is_dir():
            _check_idle(run)
    waiting = {run.variant.name: configs.to_json(run.config) for run in runs if evaluation(run) is None}
    if not waiting:
        return
    start = log.stat().st_size if log.exists() else 0
    code = processes.run(CHECK, log, stdin=json.dumps(list(waiting.items())))
    if code != EXIT_COMPLETE:
        raise UserError(_last_line(log, start), mend="" if code == EXIT_BAD_INPUT else f"all of it is in {log}")


def _check_idle(run: Run) -> None:
    """Raises a `UserError` if a training is at work on a run: no other may begin beside it on its devices."""
    with only_one(run.workdir):
        pass


def make(runs: Sequence[Run], processes: Processes, after_each: Callable[[], None]) -> list[str]:
    """Trains and evaluates what is not complete, and returns what failed, a text for each run.

    A run that fails does not keep the others from being made; the next time it is tried again.

    Args:
      runs: in order.
      processes: runs them.
      after_each: called when a run is complete.

    Raises:
      Stopped: a signal came.
      UserError: another process trains the run that is next.
    """
    failed: list[str] = []
    taken: list[float] = []  # seconds of each run made here from its first step
    for position, run in enumerate(runs):
        if evaluation(run) is not None:
            continue
        left = [other for other in runs[position:] if evaluation(other) is None]
        _say(f"{run.label}: {len(left)} of {counted(len(runs), 'run')} to go, {_time_left(runs, left, taken)}")
        _check_idle(run)
        begun, start = _last_step(run), time.monotonic()
        problem = _make_one(run, processes)
        if problem:
            _say(f"{run.label}: {problem}")
            failed.append(f"{run.label}: {problem}")
            continue
        if not begun:
            taken.append(time.monotonic() - start)
        measured = evaluation(run)
        if measured is not None:
            _say(f"{run.label}: held-out loss {measured['loss']:.4f}")
        after_each()
    return failed


def _make_one(run: Run, processes: Processes) -> str:
    """Trains and evaluates a run; what went wrong, or nothing."""
    log = run.workdir / LOG
    commands = (
        ["train", *run.arguments],
        [
            "eval",
            f"--checkpoint={run.workdir}",
            f"--output={run.workdir / EVALUATION}",
            f"--weights={run.config.validation.weights}",
        ],
    )
    for command in commands:
        start = log.stat().st_size if log.exists() else 0
        with ProgressBar(f"  {run.label}, {command[0]}", run.config.train.num_steps, unit="steps") as progress:
            code = processes.run(
                [*TLM, *command], log, tick=lambda: progress.show(_last_step(run), run.config.train.num_steps)
            )
        if code < 0:  # the last line of its log is about something else then
            hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else ""
            return f"tlm {command[0]} was ended by {signal.Signals(-code).name}{hint} (log: {log})"
        if code:
            return f"{_last_line(log, start)} (tlm {command[0]}: exit code {code}; log: {log})"
    wrong = _mismatch(run, _read_evaluation(run))
    return f"its evaluation has {wrong} (log: {log})" if wrong else ""


def _last_step(run: Run) -> int:
    """The last step in a run's metrics, 0 before the first; only the end of the file is read."""
    try:
        with (run.workdir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 65536))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(parse_json(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def _last_line(log: Path, start: int) -> str:
    """The last line that a command wrote to its log, from byte `start`, without the name of the command."""
    with log.open("rb") as file:
        file.seek(start)
        lines = [line for line in file.read().decode(errors="replace").splitlines()[1:] if line.strip()]
    last = lines[-1].strip() if lines else "it printed nothing"
    return last.partition(": error: ")[2] if last.startswith("tlm ") and ": error: " in last else last


def _time_left(runs: Sequence[Run], left: Sequence[Run], taken: Sequence[float]) -> str:
    """An estimate: runs to go times what one takes, known from this process, else from the steps of complete runs."""
    share = sum(1 - _last_step(run) / run.config.train.num_steps for run in left)
    if taken:
        seconds = statistics.mean(taken)
    else:
        found = []
        for run in runs:
            if evaluation(run) is not None:
                steps = [seconds for _, seconds in load_run(str(run.workdir)).series("step_seconds")]
                found += [statistics.median(steps) * run.config.train.num_steps] if steps else []
        if not found:
            return "time left known after the first"
        seconds = statistics.mean(found)
    return f"about {duration(seconds * share)} left"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
