"""A checkpoint written anew: its weights alone, or all of it with its layers stacked otherwise."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tlm_jax.capacity.profile import Profile
from tlm_jax.checkpoint import layout, regroup, restore
from tlm_jax.checkpoint.layout import Metadata
from tlm_jax.checkpoint.manager import CheckpointManager
from tlm_jax.config import from_json, to_json
from tlm_jax.errors import UserError
from tlm_jax.files import PARTIAL, remove_partials, write_atomically, write_error
from tlm_jax.model.decoder import layout as layer_layout

_DAY = 86400.0  # seconds; no training waits for this save
_MINE = ("config.json", "profile.json", "checkpoints")  # what an export that was interrupted may have left


def export_weights(source: Path, output: Path, dtype: str | None = None, weights: str = layout.PARAMS) -> Path:
    """Writes the weights of the step directory `source` with config, profile, tokenizer and checksums; nothing else.

    Norm scales stay float32 whatever the dtype, as they do in evaluation.

    Args:
      source: a complete checkpoint.
      output: a new directory, to be read as a workdir.
      dtype: "float32" or "bfloat16" to round the weights to; by default they stay as they are.
      weights: `layout.PARAMS`, or `layout.EMA` for their moving average, which then takes their place.

    Returns:
      The new step directory.

    Raises:
      UserError: `source` is damaged, `output` is not new or cannot be written.
    """
    metadata = layout.read_step_metadata(source)
    _check_output(output, metadata)
    exported = restore.restore_stored(source, [weights])[weights]
    extra = {layout.WEIGHTS_ONLY: weights, **metadata.extra}
    if dtype:
        extra[layout.PARAMETERS_DTYPE] = dtype
        exported = jax.tree_util.tree_map_with_path(
            lambda path, x: restore.cast(x, jnp.float32 if path[-1].key == "scale" else jnp.dtype(dtype)), exported
        )
    return _write(source, output, dataclasses.replace(metadata, extra=extra), {layout.PARAMS: exported})


def convert(source: Path, output: Path, layer_stacking: str | None = None) -> Path:
    """Writes all of the step directory `source` anew, its parameters and optimizer state stacked as asked.

    Args:
      source: a complete checkpoint.
      output: a new directory, a workdir from which training goes on.
      layer_stacking: "auto" or "unrolled"; by default as it is.

    Returns:
      The new step directory.

    Raises:
      UserError: `source` is damaged, `output` is not new or cannot be written.
    """
    metadata = layout.read_step_metadata(source)
    config = from_json(metadata.config, where=f"{source}: config")
    stacking = layer_stacking or config.model.layer_stacking
    config.model.layer_stacking = stacking
    metadata = dataclasses.replace(
        metadata, config=to_json(config), extra={**metadata.extra, "layer_stacking": stacking}
    )
    _check_output(output, metadata)
    runs = layer_layout(Profile.from_json(metadata.profile, where=f"{source}: profile"), stacking)
    items = restore.restore_stored(source, rearrange=lambda tree: regroup.restacked(tree, runs))
    return _write(source, output, metadata, items.pop(layout.STATE, {}) | items)


def _check_output(output: Path, metadata: Metadata) -> None:
    """Raises a `UserError` unless `output` is new, empty, or what an interrupted export of the same run left."""
    if not output.is_dir():
        return
    foreign = [path.name for path in output.iterdir() if path.name not in _MINE and PARTIAL not in path.name]
    config = output / "config.json"
    if config.exists() and config.read_bytes() != metadata.config.encode():
        foreign.append(config.name)
    if foreign or layout.checkpoints_directory(output):
        raise UserError("the output exists already", where=str(output), mend="give a new directory as --output")


def _write(source: Path, output: Path, metadata: Metadata, state: dict[str, Any]) -> Path:
    step, description = int(source.name), layout.read_json(source, layout.METADATA)
    try:
        output.mkdir(parents=True, exist_ok=True)
        remove_partials(output)
        write_atomically(output / "config.json", metadata.config)
        write_atomically(output / "profile.json", metadata.profile)
    except OSError as error:
        raise write_error(error, output) from error
    with CheckpointManager(
        output / "checkpoints",
        every_steps=step if description.get(layout.PERMANENT) else 0,
        every_seconds=0.0,
        keep_last=1,
        timeout_seconds=_DAY,
        metadata=metadata,
        measured_on=description.get(layout.MEASURED_ON),
    ) as manager:
        data = None if layout.WEIGHTS_ONLY in metadata.extra else layout.read_json(source, layout.DATA)
        manager.save(step, state, data, force=True, metrics=description.get(layout.METRICS))
    return layout.step_directory(output / "checkpoints", step)
