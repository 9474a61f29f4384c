"""A run's directory: its resolved config and profile beside metrics and checkpoints, and whose it is."""

from __future__ import annotations

import json
from pathlib import Path

from ml_collections import ConfigDict

from tlm_jax import config as configs
from tlm_jax.capacity.profile import Profile
from tlm_jax.errors import UserError
from tlm_jax.files import remove_partials, write_atomically, write_error

# Keys that may change when a run is resumed: where and how fast it runs and what it tells, never what it computes.
FREE = (
    "name",
    "data.store",  # what counts is the store's content, which the checkpoint knows
    "data.mixture",  # likewise, and the proportions
    "data.num_workers",
    "model.attention",
    "model.layer_stacking",  # a checkpoint is converted
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


def check_same_run(workdir: Path, saved: str, config: ConfigDict, where: str) -> None:
    """Checks that a saved config's run is this one.

    Args:
      workdir: the run's directory.
      saved: the JSON text of the config found there.
      config: the one given now.
      where: what holds `saved`.

    Raises:
      UserError: they differ in keys that matter (names them), or the text is damaged.
    """
    try:
        changed = changed_keys(configs.from_json(saved, where), config)
    except UserError as error:
        mend = error.mend or "give another --workdir, or delete it"
        raise UserError(error.what, where=error.where, mend=mend) from error
    if changed:
        raise UserError(
            f"the directory holds a run of another config ({'; '.join(changed)})",
            where=str(workdir),
            mend="give another --workdir, or the config of that run",
        )


def check_workdir(workdir: Path, config: ConfigDict) -> None:
    """Checks that `workdir`, where it exists, is of this run.

    Raises:
      UserError: it belongs to a run of another config, or cannot be read.
    """
    path = workdir / "config.json"
    try:
        if path.exists():
            check_same_run(workdir, path.read_text(), config, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from error


def claim(workdir: Path, config: ConfigDict, profile: Profile) -> None:
    """Writes the run's config and profile into its directory; for one host only.

    Raises:
      UserError: it cannot be written.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        remove_partials(workdir)
        write_atomically(workdir / "config.json", configs.to_json(config))
        write_atomically(workdir / "profile.json", profile.to_json())
    except OSError as error:
        raise write_error(error, workdir) from error
