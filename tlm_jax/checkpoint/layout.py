"""What lies where in a checkpoint directory, and which step directories count as complete.

    <workdir>/checkpoints/<step>/params      parameters: all that evaluation reads
                                /ema         the same of the parameters' moving average, where one is kept
                                /state       the other keys of the train state: optimizer, step, counters
                                /data        JSON: where the data loader stands
                                /metadata    JSON: config, profile, tokenizer; metrics; each array's checksum, and
                                             the digests of data and of metadata itself

Nothing here touches a device or reads an array.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from tlm_jax.errors import UserError
from tlm_jax.files import parse_json

PARAMS = "params"
EMA = "ema"
WEIGHTS = (PARAMS, EMA)  # those that can be validated and evaluated
STATE = "state"
DATA = "data"
METADATA = "metadata"
CHECKSUMS = "checksums"  # keys beside the metadata's own
DIGESTS = "digests"
PERMANENT = "permanent"
METRICS = "metrics"
MEASURED_ON = "measured_on"  # what the metrics were measured on: weights, number of windows, data
WEIGHTS_ONLY = "weights_only"  # in the metadata's `extra`: nothing but PARAMS; says whether they were PARAMS or EMA
PARAMETERS_DTYPE = "parameters_dtype"  # the same: what the weights were rounded to for it

BEST = "best"  # in the place of a step: the one with the lowest `checkpoint.best_metric`

_COMPLETION_MARK = "_CHECKPOINT_METADATA"  # Orbax writes it last, just before the rename
_TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of what Orbax has not finished
_REMOVED = ".removed"  # in the name of what we are deleting


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What a checkpoint says about itself, next to the arrays.

    Attributes:
      config: the resolved config, JSON text.
      profile: the profile, JSON text.
      tokenizer_kind: how to read `tokenizer`.
      tokenizer: the tokenizer's model file.
      extra: anything else that JSON can hold, such as how layers are stacked.
    """

    config: str
    profile: str
    tokenizer_kind: str
    tokenizer: bytes
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The metadata as JSON values."""
        return dataclasses.asdict(self) | {"tokenizer": base64.b64encode(self.tokenizer).decode("ascii")}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Metadata:
        """Inverts `to_json`; keys it does not know are left alone."""
        known = {field.name: values[field.name] for field in dataclasses.fields(cls)}
        return cls(**known | {"tokenizer": base64.b64decode(values["tokenizer"], validate=True)})


def step_argument(text: str) -> int | str:
    """Reads a step from the command line: a number, or `BEST`.

    Raises:
      argparse.ArgumentTypeError: it is neither.
    """
    if text != BEST and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor {BEST!r}")
    return text if text == BEST else int(text)


def step_directory(directory: Path, step: int) -> Path:
    """The directory of a step's checkpoint."""
    return directory / str(step)


def is_complete(path: Path) -> bool:
    """Whether `path` is the directory of a finished checkpoint."""
    return path.name.isdecimal() and (path / _COMPLETION_MARK).is_file() and (path / METADATA).is_dir()


def complete_steps(directory: Path) -> list[int]:
    """The steps of all complete checkpoints in `directory`, ascending; empty when it does not exist."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if is_complete(path))


def checkpoints_directory(path: Path) -> Path | None:
    """The directory of step directories that `path`, a workdir or that directory, means; None: it holds none."""
    return next((directory for directory in searched(path) if complete_steps(directory)), None)


def searched(path: Path) -> tuple[Path, Path]:
    """Where the step directories of `path` may lie."""
    return path / "checkpoints", path


def remove_checkpoint(path: Path) -> None:
    """Deletes a checkpoint; from the first moment on it no longer counts as complete, whatever happens then."""
    doomed = path.with_name(path.name + _REMOVED)
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(directory: Path, step: int | None = None) -> None:
    """Deletes what interrupted saves and deletions left behind, of one step or of all; never a complete checkpoint."""
    for path in leftovers(directory):
        if step in (None, int(path.name.split(".", 1)[0])):
            shutil.rmtree(path, ignore_errors=True)


def leftovers(directory: Path) -> list[Path]:
    """What interrupted saves and deletions left behind, and what is being saved or deleted right now."""
    found = []
    for path in directory.iterdir() if directory.is_dir() else ():
        number = path.name.split(".", 1)[0]
        if number.isdecimal() and path.name.startswith((f"{number}{_TEMPORARY}", f"{number}{_REMOVED}")):
            found.append(path)
    return sorted(found)


def sealed(description: dict[str, Any], data_state: dict[str, Any] | None) -> dict[str, Any]:
    """The metadata item's JSON values with the digests by which `read_json` knows both JSON items."""
    return description | {DIGESTS: {METADATA: _digest(description), DATA: _digest(data_state)}}


def _digest(values: Any) -> str:
    as_read = json.loads(json.dumps(values))  # tuples are lists then, all keys text
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def read_json(path: Path, item: str) -> dict[str, Any]:
    """Reads one of a checkpoint's JSON items, `METADATA` or `DATA`.

    Raises:
      UserError: the file is missing or is not what was written.
    """
    file = path / item / "data.json"
    try:
        values = parse_json(file.read_text())
    except (OSError, ValueError) as error:
        raise damaged(path, f"{item}/data.json cannot be read ({type(error).__name__})") from error
    if not isinstance(values, dict):
        raise damaged(path, f"{item}/data.json is not what was saved")
    if item == METADATA:
        digests, content = values.get(DIGESTS), {key: value for key, value in values.items() if key != DIGESTS}
    else:
        digests, content = read_json(path, METADATA).get(DIGESTS), values
    # Checkpoints of earlier versions have no digests.
    if digests is not None and (not isinstance(digests, dict) or digests.get(item) != _digest(content)):
        raise damaged(path, f"{item}/data.json is not what was saved")
    return values


def check_completion_mark(path: Path) -> None:
    """Raises a `UserError` when Orbax's completion mark does not read as it was written."""
    try:
        parse_json((path / _COMPLETION_MARK).read_text())
    except (OSError, ValueError) as error:
        raise damaged(path, f"{_COMPLETION_MARK} cannot be read ({type(error).__name__})") from error


def read_step_metadata(path: Path) -> Metadata:
    """Reads the metadata of the step directory `path`.

    Raises:
      UserError: it is missing or damaged.
    """
    check_completion_mark(path)
    values = read_json(path, METADATA)
    try:
        return Metadata.from_json(values)
    except (KeyError, TypeError, binascii.Error) as error:
        raise damaged(path, f"{METADATA}/data.json is not a checkpoint's metadata") from error


def damaged(path: Path, reason: str) -> UserError:
    """The error for a checkpoint that cannot be read: says which older one can be used instead."""
    if not path.exists():
        mend = "give the command again for the newest one"
        return UserError("the checkpoint was removed while it was being read", where=str(path), mend=mend)
    older = [step for step in complete_steps(path.parent) if path.name.isdecimal() and step < int(path.name)]
    if older:
        mend = f"the newest complete checkpoint before it is step {older[-1]}: remove {path} to go on from there"
    else:
        mend = "there is no older complete checkpoint"
    return UserError(f"the checkpoint is damaged: {reason}", where=str(path), mend=mend)
