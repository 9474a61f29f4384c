"""A run as the report reads it: its config, profile, metrics, evaluation and samples, with notes on what is amiss."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tlm_jax.capacity.budget import TRAIN_TOKENS, budget
from tlm_jax.capacity.profile import Profile
from tlm_jax.counts import counted
from tlm_jax.errors import UserError
from tlm_jax.files import parse_json
from tlm_jax.train.writers import parse_records

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """What one work directory holds.

    Attributes:
      name: the config's name, made unique among the runs of a report.
      directory: where it was read.
      config: every key, dotted, with its value.
      profile: the layers.
      records: the lines of `metrics.jsonl`, one a step, steps rising.
      evaluation: `evaluation.json`, or None.
      samples: `samples.json`, or none.
      notes: what is missing or damaged and was left out, for the reader of the page.
    """

    name: str
    directory: str
    config: Mapping[str, Any]
    profile: Profile
    records: Sequence[Record]
    evaluation: Record | None
    samples: Sequence[Record]
    notes: Sequence[str]

    def series(self, key: str) -> list[tuple[Record, float]]:
        """The records in which `key` has a finite value, each with the value."""
        found = ((record, number(record.get(key))) for record in self.records)
        return [(record, value) for record, value in found if value is not None]

    def validations(self) -> list[tuple[Record, Record]]:
        """The records with a validation loss, each with its validation."""
        found = ((record, record.get("validation")) for record in self.records)
        return [(r, v) for r, v in found if isinstance(v, dict) and number(v.get("loss")) is not None]

    def last(self, key: str) -> float | None:
        """The last finite value of `key`."""
        values = self.series(key)
        return values[-1][1] if values else None

    @property
    def final(self) -> tuple[Record | None, str]:
        """The held-out numbers of the run and their source: the evaluation, else the last validation."""
        if self.evaluation is not None:
            return self.evaluation, "evaluation"
        validations = self.validations()
        return (validations[-1][1], "last validation") if validations else (None, "")

    @property
    def validated_on(self) -> str:
        """What of the held-out split validation during training reads."""
        windows = number(self.config.get("validation.num_windows"))
        return f"at most {windows:,.0f} windows of the held-out split" if windows else "the whole held-out split"

    @property
    def measured_by(self) -> str:
        """The source of `final`, and what a validation read; empty if there is none."""
        _, source = self.final
        return f"{source}, {self.validated_on}" if source == "last validation" else source

    @property
    def final_weights(self) -> str:
        """The weights that `final` is of: those trained, or "ema", their moving average."""
        if self.evaluation is not None:
            return str(self.evaluation.get("weights", "params"))
        return str(self.config.get("validation.weights", "params"))

    @property
    def budget(self) -> dict[str, int | None]:
        """The profile's totals at the config's sequence length, and the tokens trained on so far, if any."""
        tokens = self.last("tokens")
        totals = budget(self.profile, self.config["data.sequence_length"])
        return {**totals, TRAIN_TOKENS: None if tokens is None else int(tokens)}


def number(value: Any) -> float | None:
    """`value` as a finite float, or None if it is anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None  # of an integer, isfinite may overflow


def load_runs(directories: Sequence[str]) -> list[Run]:
    """Reads the runs of a report and gives each a name of its own.

    Raises:
      UserError: a directory without a readable `config.json`, `profile.json` or `metrics.jsonl`.
    """
    runs = [load_run(directory) for directory in directories]
    named: list[Run] = []
    for run in runs:
        name = run.name
        if sum(other.name == run.name for other in runs) > 1:
            name = f"{run.name} ({Path(run.directory).name})"
        taken = [other.name for other in named]
        unique = next(c for c in (name, *(f"{name} #{i}" for i in range(2, len(runs) + 1))) if c not in taken)
        named.append(dataclasses.replace(run, name=unique))
    return named


def load_run(directory: str) -> Run:
    """Reads one work directory.

    Raises:
      UserError: `config.json`, `profile.json` or `metrics.jsonl` is missing, or one of the first two is damaged.
    """
    root = Path(directory)
    if not root.is_dir():
        raise UserError("no such run directory", where=directory)
    config = _config(root / "config.json")
    profile = Profile.from_json(_text(root / "profile.json"), where=str(root / "profile.json"))
    notes: list[str] = []
    records = _records(root / "metrics.jsonl", notes)
    evaluation = _optional(root / "evaluation.json", dict, notes)
    if evaluation is not None and number(evaluation.get("loss")) is None:
        notes.append("evaluation.json has no loss; it is left out.")
        evaluation = None
    samples = _optional(root / "samples.json", list, notes) or []
    usable = [sample for sample in samples if isinstance(sample, dict) and "completion" in sample]
    if len(usable) < len(samples):
        left_out = counted(len(samples) - len(usable), "entry", "entries")
        notes.append(f"Left out of samples.json: {left_out} without a completion.")
    name = str(config.get("name") or root.resolve().name)
    return Run(name, directory, config, profile, records, evaluation, usable, notes)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError("missing", where=str(path), mend="give a work directory of `tlm train`") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from error


def _config(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(_text(path))
    except ValueError as error:
        raise UserError(f"not JSON: {error}", where=str(path)) from error

    def leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            if isinstance(value, dict):
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    if not isinstance(values, dict):
        raise UserError("not a config", where=str(path))
    flat = dict(leaves(values, ""))
    length = flat.get("data.sequence_length")
    if not isinstance(length, int) or length <= 0:
        raise UserError("not a config: data.sequence_length is not a positive integer", where=str(path))
    return flat


def _records(path: Path, notes: list[str]) -> list[Record]:
    """The steps of `metrics.jsonl`, the last of each if one comes twice; what cannot be read is noted."""
    text = _text(path)
    records, damaged = parse_records(text)
    by_step: dict[int, Record] = {record["step"]: record for record in records}
    repeated = len(records) - len(by_step)
    if damaged == [len(text.splitlines())]:
        notes.append("The last line of metrics.jsonl is incomplete; it is left out.")
    elif damaged:
        left_out = counted(len(damaged), "damaged line")
        notes.append(f"Left out of metrics.jsonl: {left_out}, the first of them line {damaged[0]}.")
    if repeated:
        notes.append(f"Left out of metrics.jsonl: {counted(repeated, 'record')} of a step that comes again later.")
    if not by_step:
        notes.append("metrics.jsonl has no steps yet.")
    return [by_step[step] for step in sorted(by_step)]


def _optional(path: Path, kind: type, notes: list[str]) -> Any:
    """A JSON file that a run may lack; None with a note where it cannot be used."""
    if not path.exists():
        notes.append(f"There is no {path.name}.")
        return None
    try:
        value = parse_json(_text(path))
    except (ValueError, UserError):
        value = None
    if not isinstance(value, kind):
        notes.append(f"{path.name} is damaged; it is left out.")
        return None
    return value
