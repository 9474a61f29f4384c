"""Where a run's numbers go: `metrics.jsonl`, TensorBoard events, and the terminal."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tlm_jax.errors import UserError
from tlm_jax.files import parse_json, reason, write_atomically

Record = dict[str, Any]


def _finite(value: Any) -> Any:
    """JSON has no NaN: such a number is null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_records(text: str) -> tuple[list[Record], list[int]]:
    """The records of a `metrics.jsonl`'s text in order, and the numbers of the lines that are none, from 1."""
    records, damaged = [], []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = parse_json(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        elif line.strip():
            damaged.append(number)
    return records, damaged


def read_records(path: Path) -> list[Record]:
    """The records of a `metrics.jsonl`; a last line cut short by a kill is left out, and a missing file is empty."""
    return parse_records(path.read_text())[0] if path.exists() else []


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Tells a full disk and the like as the user's to mend."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot be written: {reason(error)}",
            where=str(path),
            mend="remove the cause and run the same command again",
        ) from error


class JsonlWriter:
    """Appends one record a step to `path`, which first loses all records after `restored_step`.

    Raises:
      UserError: the file cannot be written; `write` raises it too.
    """

    def __init__(self, path: Path, restored_step: int) -> None:
        self._path = path
        with _told(path):
            kept = [record for record in read_records(path) if record["step"] <= restored_step]
            write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))
            self._file = path.open("a")

    def write(self, record: Record) -> None:
        """Writes a record and hands it to the operating system, so that a kill of the process loses none."""
        with _told(self._path):
            self._file.write(json.dumps(_finite(record)) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file, of which nothing is unwritten unless a `write` has failed."""
        with contextlib.suppress(OSError):
            self._file.close()


class TensorBoardWriter:
    """Writes the numbers of a record as scalars; TensorBoard hides events after `restored_step` of earlier files.

    tensorboardX's own `SummaryWriter` writes from a thread, which dies on a full disk and leaves its caller waiting.

    Raises:
      UserError: the directory or file cannot be written; `write` raises it too.
    """

    def __init__(self, directory: Path, restored_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        self._directory = directory
        with _told(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._events = EventsWriter(str(directory / "events"), f".{os.getpid()}")
            self._write(step=restored_step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, record: Record) -> None:
        """One scalar for each number, nested names joined by a slash; per-layer lists become one series a layer."""
        from tensorboardX.proto.summary_pb2 import Summary

        numbers = _scalars("", {key: value for key, value in record.items() if key not in ("step", "time")})
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers]
        with _told(self._directory):
            self._write(step=record["step"], summary=Summary(value=values))

    def _write(self, **event: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._events.write_event(Event(wall_time=time.time(), **event))
        self._events.flush()

    def close(self) -> None:
        """Closes the event file, of which nothing is unwritten unless a `write` has failed."""
        with contextlib.suppress(OSError):
            self._events.close()


def _scalars(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _scalars(f"{prefix}/{key}" if prefix else key, item)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _scalars(f"{prefix}/{i:03d}", item)
    elif isinstance(value, (int, float)) and math.isfinite(value):
        yield prefix, float(value)


def _bits(values: Record) -> list[str]:
    """Bits per byte as a part of a line; nothing where the text's bytes are not known."""
    return [] if values["bits_per_byte"] is None else [f"{values['bits_per_byte']:.4f} bits/byte"]


class Terminal:
    """A progress bar on a terminal, one plain line a logged step elsewhere; silent on all hosts but the first."""

    def __init__(self, name: str, num_steps: int, start_step: int, *, quiet: bool) -> None:
        self._console = Console(file=sys.stderr, quiet=quiet, soft_wrap=True, highlight=False)
        self._num_steps = num_steps
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task(name, total=num_steps, completed=start_step, numbers="compiling")
            self._bar.start()

    def say(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        self._console.print(text, markup=False)

    def advance(self, step: int) -> None:
        """Moves the bar to `step`."""
        if self._bar:
            self._bar.update(self._task, completed=step)

    def write(self, record: Record) -> None:
        """Shows a logged record."""
        speed = record["tokens_per_second"]
        parts = [f"loss {record['loss']:.4f}", *_bits(record)]
        if speed:
            parts += [f"{speed:,.0f} tokens/s", f"MFU {100 * record['mfu_causal']:.0f}%"]
        if record["skipped_steps"]:
            parts.append(f"{record['skipped_steps']} skipped")
        if self._bar:
            self._bar.update(self._task, numbers=" · ".join(parts[1:3]))
        else:
            self.say(f"step {record['step']:>{len(str(self._num_steps))}}/{self._num_steps} · " + " · ".join(parts))
        if "validation" in record:
            v = record["validation"]
            told = [f"loss {v['loss']:.4f}", f"perplexity {v['perplexity']:.2f}", *_bits(v)]
            self.say(f"step {record['step']} · held out: {' · '.join(told)} over {v['tokens']:,} tokens")

    def close(self) -> None:
        """Takes the bar down."""
        if self._bar:
            self._bar.stop()
