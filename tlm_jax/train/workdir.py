"""A run's directory: its resolved config and profile beside metrics and checkpoints, and whose it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ml_collections import ConfigDict

from tlm_jax import config as configs
from tlm_jax.capacity.profile import Profile
from tlm_jax.errors import UserError

# Keys that may change when a run is resumed: where and how fast it runs and what it tells, never what it computes.
FREE = (
    "name",
    "data.store",  # what counts is the store's content, which the checkpoint knows
    "data.num_workers",
    "model.attention",
    "model.remat",
    "model.loss_chunk_tokens",
    "train.gradient_accumulation",
    "train.max_nonfinite_steps",
    "validation.",
    "checkpoint.",
    "log.",
    "mesh.",
)


def changed_keys(old: ConfigDict, new: ConfigDict) -> list[str]:
    """The keys by which two configs are different runs, as `key: old -> new`."""

    def value(config: ConfigDict, key: str) -> object:
        node = config
        for part in key.split("."):
            node = node[part]
        return json.loads(json.dumps(node, default=list))

    names = [key for key in configs.keys(new) if not any(key == f or key.startswith(f) for f in FREE)]
    return [f"{k}: {value(old, k)} -> {value(new, k)}" for k in names if value(old, k) != value(new, k)]


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file's content in one step."""
    draft = path.with_name(path.name + ".tmp")
    draft.write_text(text)
    os.replace(draft, path)


def claim(workdir: Path, config: ConfigDict, profile: Profile, *, write: bool) -> None:
    """Makes `workdir` this run's, or checks that it already is; `write` is for one host only.

    Raises:
      UserError: the directory belongs to a run of another config (names the keys), or cannot be written.
    """
    path = workdir / "config.json"
    try:
        if path.exists():
            changed = changed_keys(configs.from_json(path.read_text(), str(path)), config)
            if changed:
                raise UserError(
                    f"the directory holds a run of another config ({'; '.join(changed)})",
                    where=str(workdir),
                    mend="give another --workdir, or the config of that run",
                )
        if write:
            workdir.mkdir(parents=True, exist_ok=True)
            write_atomically(path, configs.to_json(config))
            write_atomically(workdir / "profile.json", profile.to_json())
    except OSError as error:
        raise UserError(f"cannot be used: {error.strerror}", where=str(workdir)) from error
    except json.JSONDecodeError as error:
        raise UserError("is not JSON", where=str(path), mend="delete it if the run is worth nothing") from error
