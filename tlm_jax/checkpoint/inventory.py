"""What checkpoints a directory holds, and the removal of those that need not stay. Reads no array."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from tlm_jax.checkpoint import layout, retention
from tlm_jax.errors import UserError

COMPLETE, WEIGHTS_ONLY, INCOMPLETE, DAMAGED = "complete", "weights only", "incomplete", "damaged"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One checkpoint, or what is left of one.

    Attributes:
      path: its directory.
      step: completed steps.
      state: `COMPLETE`, `WEIGHTS_ONLY`, `INCOMPLETE` (being saved or deleted, or left by a kill), or `DAMAGED`: its
        metadata cannot be read.
      time: when it was completed, or last changed.
      size: of its files, in bytes.
      permanent: whether it was made by `checkpoint.every_steps`.
      metrics: what was measured at its step.
      measured_on: and on what: weights, number of windows, data.
    """

    path: Path
    step: int
    state: str
    time: datetime
    size: int
    permanent: bool = False
    metrics: dict[str, float | None] = dataclasses.field(default_factory=dict)
    measured_on: dict[str, Any] = dataclasses.field(default_factory=dict)

    def value(self, metric: str) -> retention.Value:
        """One of the metrics."""
        return retention.Value(self.metrics.get(metric), retention.kind(self.measured_on))

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return dataclasses.asdict(self) | {"path": str(self.path), "time": self.time.isoformat(timespec="seconds")}


def run_directory(run: str) -> Path:
    """The directory of step directories of a run, given by its workdir or that directory itself.

    Raises:
      UserError: there is no such directory, or it is a single checkpoint.
    """
    path = Path(run).absolute()
    if not run or not path.is_dir():
        raise UserError("no such directory", where=run or "RUN", mend="give the workdir of a run")
    if layout.is_complete(path):
        raise UserError("is a single checkpoint", where=run, mend="give the workdir of its run")
    below = path / "checkpoints"
    return below if below.is_dir() else path


def guarded_by(directory: Path) -> list[Path]:
    """The workdirs whose locks guard the step directories in `directory`, each without symbolic links.

    `directory` may be a link to a checkpoints folder, or lie in a workdir as a link to where there is room; not every
    workdir that links to it can be known.
    """
    places = (directory, directory.resolve())
    named = [path.parent for path in places if path.name == "checkpoints" or (path.parent / "config.json").is_file()]
    return list(dict.fromkeys(path.resolve() for path in named or [directory]))


def inventory(directory: Path) -> list[Entry]:
    """Everything in `directory` that is or was to be a checkpoint, by step; what vanishes meanwhile is left out."""
    # Unfinished ones first: one that is completed now, and so renamed, is found under its new name.
    found = [_entry(path) for path in layout.leftovers(directory)]
    found += [_entry(path) for path in directory.iterdir() if path.name.isdecimal() and path.is_dir()]
    return sorted((entry for entry in found if entry), key=lambda entry: (entry.step, entry.path.name))


def _entry(path: Path) -> Entry | None:
    """None: it has been renamed or removed while it was being read."""
    files, own = _stats(path)
    if own is None:
        return None
    changed = datetime.fromtimestamp(max((file.st_mtime for file in files), default=own.st_mtime)).astimezone()
    entry = Entry(path, int(path.name.split(".", 1)[0]), INCOMPLETE, changed, sum(file.st_size for file in files))
    if not layout.is_complete(path):
        return entry if path.exists() else None
    try:
        metadata, description = layout.read_step_metadata(path), layout.read_json(path, layout.METADATA)
    except UserError:
        return dataclasses.replace(entry, state=DAMAGED) if path.exists() else None
    return dataclasses.replace(
        entry,
        state=WEIGHTS_ONLY if layout.WEIGHTS_ONLY in metadata.extra else COMPLETE,
        permanent=bool(description.get(layout.PERMANENT, True)),
        metrics=description.get(layout.METRICS, {}),
        measured_on=description.get(layout.MEASURED_ON, {}),
    )


def _stats(path: Path) -> tuple[list[os.stat_result], os.stat_result | None]:
    """Of the files below a directory and of itself, as far as they still exist: a training may be at work on it."""
    files = []
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                files.append(os.stat(os.path.join(folder, name)))
    with suppress(FileNotFoundError):
        return files, path.stat()
    return files, None


def to_remove(entries: Sequence[Entry], *, keep_last: int, keep_every: int, keep_best: int, metric: str) -> list[Entry]:
    """The complete checkpoints that are neither among the newest, nor of a step that counts, nor among the best.

    Args:
      keep_last: how many of the newest stay; at least 1.
      keep_every: those of steps that it divides stay; 0: none for that.
      keep_best: how many of the lowest `metric` stay, of each kind of measurement.
      metric: one of `retention.METRICS`.
    """
    whole = {entry.step: entry for entry in entries if entry.state in (COMPLETE, WEIGHTS_ONLY)}
    steps = retention.superfluous(
        sorted(whole),
        keep_last=keep_last,
        keep={step for step in whole if keep_every and step % keep_every == 0},
        values={step: entry.value(metric) for step, entry in whole.items()},
        keep_best=keep_best,
    )
    return [whole[step] for step in steps]
