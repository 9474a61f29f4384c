"""A run's directory: its resolved config and profile beside metrics and checkpoints, and whose it is."""

from __future__ import annotations

import json
from pathlib import Path

from ml_collections import ConfigDict

from tlm_jax import config as configs
from tlm_jax.capacity.profile import Profile
from tlm_jax.checkpoint.layout import complete_steps
from tlm_jax.counts import counted
from tlm_jax.errors import UserError
from tlm_jax.files import remove_partials, write_atomically, write_error

# Keys that may change when a run is resumed: where and how fast it runs and what it tells, never what it computes.
FREE = (
    "name",
    "data.store",  # what counts is the store's content, which the checkpoint knows
    "data.mixture",  # likewise, and the proportions
    "data.num_workers",
    "model.attention",
    "model.mlp_kernel",
    "model.mlp_keeps",
    "model.layer_stacking",  # a checkpoint is converted
    "model.remat",
    "model.loss_chunk_tokens",
    "train.gradient_accumulation",
    "train.nonfinite",
    "train.max_nonfinite_steps",
    "train.hang_seconds",
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


def check_same_run(workdir: Path, saved: str, config: ConfigDict, where: str, taken: int | None = None) -> None:
    """Checks that a saved config's run is this one.

    Args:
      workdir: the run's directory.
      saved: the JSON text of the config found there.
      config: the one given now, valid.
      where: what holds `saved`.
      taken: how many steps the run has taken: the keys of `schedules.COURSE` may differ where all these steps had the
        learning rate that they have now; finding that out uses a device. None: these keys must be equal too.

    Raises:
      UserError: they differ in keys that matter (names them), or the text is damaged.
    """
    try:
        old = configs.from_json(saved, where)
    except UserError as error:
        mend = error.mend or "give another --workdir, or delete it"
        raise UserError(error.what, where=error.where, mend=mend) from error
    changed, conflict, further = changed_keys(old, config), "", ""
    if changed and taken is not None:
        from tlm_jax.train import schedules  # and with it JAX, which a comparison leaves to its runs

        keys = tuple(f"train.{key}" for key in schedules.COURSE)
        course = [text for text in changed if text.partition(":")[0] in keys]
        if course:
            conflict = _course_conflict(old, config, taken)
            further = f"; and, where the steps taken keep their learning rate, {', '.join(keys)}"
            changed = changed if conflict else [text for text in changed if text not in course]
    if changed:
        free = ", ".join(f"{key}*" if key.endswith(".") else key for key in FREE)
        mend = f"give another directory, or the config of that run; what may change is {free}{further}"
        raise UserError(
            f"the directory holds a run of another config ({'; '.join(changed)}){conflict}",
            where=str(workdir),
            mend=mend,
        )


def _course_conflict(old: ConfigDict, new: ConfigDict, taken: int) -> str:
    """Why a run that has taken so many steps cannot go on along the new learning-rate schedule; empty: it can."""
    if new.train.num_steps < taken:
        return f": it has taken {counted(taken, 'step')} already"
    from tlm_jax.train.schedules import first_changed_rate

    step = first_changed_rate(old, new, taken)
    return f": step {step}, already taken, would have had another learning rate" if step else ""


def check_workdir(workdir: Path, config: ConfigDict, taken: int | None = None) -> None:
    """Checks that `workdir`, where it exists, is of this run; arguments as for `check_same_run`.

    Raises:
      UserError: it belongs to a run of another config, or cannot be read.
    """
    path = workdir / "config.json"
    try:
        if path.exists():
            check_same_run(workdir, path.read_text(), config, str(path), taken)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from error


def steps_taken(workdir: Path) -> int:
    """The step of the newest complete checkpoint in a run's directory, 0 without one."""
    return max(complete_steps(workdir / "checkpoints"), default=0)


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
