"""Reading checkpoints: finding one, its metadata, its parameters, or its whole train state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from tlm_jax.checkpoint import agreement, checksum, layout, regroup, retention, storage
from tlm_jax.checkpoint.layout import Metadata
from tlm_jax.config import from_json
from tlm_jax.errors import UserError

T = TypeVar("T")


def find_checkpoint(path: str | Path, step: int | str | None = None) -> Path:
    """Finds the step directory that `path` means.

    Args:
      path: a workdir, its `checkpoints` folder, or a step directory.
      step: which step; the latest complete one by default; `layout.BEST`: the one with the lowest metric.

    Returns:
      The directory of a complete checkpoint.

    Raises:
      UserError: there is none; says where it was looked for and which steps exist.
    """
    if path == "":
        raise UserError("the checkpoint's path is empty", mend="give a workdir or a checkpoint in one")
    path = Path(path).absolute()
    if layout.is_complete(path) and step in (None, int(path.name)):
        return path
    directory = layout.checkpoints_directory(path)
    if directory:
        steps = layout.complete_steps(directory)
        if step == layout.BEST:
            return layout.step_directory(directory, best_step(directory))
        if step is None or step in steps:
            return layout.step_directory(directory, steps[-1] if step is None else int(step))
        raise UserError(
            f"no complete checkpoint of step {step}",
            where=str(directory),
            mend=f"the complete ones are {', '.join(map(str, steps))}",
        )
    if not path.exists():
        raise UserError("no such directory", where=str(path), mend="give a workdir or a checkpoint in one")
    looked = layout.searched(path)
    raise UserError(
        f"no complete checkpoint: looked for <step> directories in {' and '.join(map(str, looked))}",
        where=str(path),
        mend="give a workdir, its checkpoints folder, or a step directory in it",
    )


def best_metric(directory: Path) -> str:
    """The metric that tells the best of `directory`'s checkpoints: what the newest one's config says."""
    path = layout.step_directory(directory, layout.complete_steps(directory)[-1])
    saved = layout.read_step_metadata(path).config
    return str(from_json(saved, where=f"{path}: config").checkpoint.best_metric)


def best_step(directory: Path) -> int:
    """The step with the lowest `best_metric`, of equals the earliest.

    Raises:
      UserError: no complete checkpoint has been measured.
    """
    metric = best_metric(directory)
    best = retention.best(layout.metric_values(directory, metric), 1)
    if best:
        return best[0]
    raise UserError(
        f"no checkpoint has a finite {metric}",
        where=str(directory),
        mend="one is stored where a save and a validation meet, as with checkpoint.keep_best; give a step instead",
    )


def read_metadata(path: str | Path) -> Metadata:
    """Reads a checkpoint's metadata, without touching arrays or devices.

    Args:
      path: anything that `find_checkpoint` takes.

    Raises:
      UserError: no checkpoint there, or its metadata is damaged.
    """
    return layout.read_step_metadata(find_checkpoint(path))


def restore_parameters(
    path: str | Path, abstract_params: Any, *, cast_floats: bool = False, weights: str = layout.PARAMS
) -> Any:
    """Restores only the parameters, onto any mesh and number of devices, whichever way their layers are stacked.

    Args:
      path: anything that `find_checkpoint` takes.
      abstract_params: pytree of `jax.ShapeDtypeStruct`; a leaf without sharding goes to the first local device.
      cast_floats: each floating parameter is cast to the dtype that `abstract_params` has for it, after it has been
        loaded and verified; otherwise the stored dtypes must be those of `abstract_params`.
      weights: `layout.PARAMS`, or `layout.EMA` for their moving average.

    Returns:
      The parameters, a tree like `abstract_params`.

    Raises:
      UserError: no checkpoint, a leaf that is missing, superfluous or of another shape or dtype, or damaged files.
    """
    params = _restore_items(find_checkpoint(path), {weights: abstract_params}, any_float=cast_floats)[weights]
    return jax.tree.map(lambda x, wanted: _cast(x, wanted.dtype), params, abstract_params) if cast_floats else params


def restore_state(path: Path, abstract_state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Metadata]:
    """Restores the train state, the data index and the metadata from the step directory `path`.

    Layers that are stored stacked where the train state has them one by one, or the other way round, are converted.

    Args:
      path: the directory of a complete checkpoint.
      abstract_state: the train state as `jax.ShapeDtypeStruct`, each with its sharding.

    Returns:
      The train state, a tree like `abstract_state`; the data state; the metadata.

    Raises:
      UserError: a leaf that is missing, superfluous or of another shape or dtype, or damaged files.
    """
    metadata = layout.read_step_metadata(path)
    data_state = layout.read_json(path, layout.DATA)
    loaded = _restore_items(path, split_items(abstract_state))
    return loaded.pop(layout.STATE) | loaded, data_state, metadata


def split_items(state: dict[str, Any]) -> dict[str, Any]:
    """Splits a train state into what a checkpoint stores apart: weights that evaluation may read, and all else."""
    weights = {key: state[key] for key in (layout.PARAMS, layout.EMA) if key in state}
    return weights | {layout.STATE: {key: value for key, value in state.items() if key not in weights}}


def items_by_name(items: dict[str, Any]) -> dict[str, Any]:
    """All leaves of all items by their dotted paths in the train state."""
    named: dict[str, Any] = {}
    for item, tree in items.items():
        named |= agreement.leaves_by_name(tree, "" if item == layout.STATE else item)
    return named


def _cast(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A floating array in another dtype, in place of itself."""
    if x.dtype == dtype or not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
        return x
    cast = x.astype(dtype)
    x.delete()
    return cast


def _restore_items(path: Path, items: dict[str, Any], any_float: bool = False) -> dict[str, Any]:
    """Compares the stored trees with the wanted ones, all items together, and loads them in their stored dtypes."""
    layout.check_completion_mark(path)
    if layout.EMA in items and not (path / layout.EMA).is_dir():
        mend = "set train.ema_decay in a run that is to keep one"
        raise UserError("the checkpoint has no moving average of the weights", where=str(path), mend=mend)
    trees = {item: _stored_tree(path, item) for item in items}
    stored, wanted = items_by_name(trees), items_by_name(items)
    if regroup.same_grouping(stored, wanted):
        agreement.require_agreement(stored, wanted, path=path, any_float=any_float)
        placed = [_like(stored[name], leaf.sharding) for name, leaf in wanted.items()]
        return _load(path, jax.tree.unflatten(jax.tree.structure(items), placed))
    by_layer = regroup.by_layer(stored), regroup.by_layer(wanted)
    agreement.require_agreement(*by_layer, path=path, any_float=any_float)
    shardings = regroup.stored_shardings(stored, wanted)
    placed = [_like(leaf, shardings[name]) for name, leaf in stored.items()]
    loaded = _load(path, jax.tree.unflatten(jax.tree.structure(trees), placed))
    leaves = regroup.convert(items_by_name(loaded), wanted)
    return jax.tree.unflatten(jax.tree.structure(items), leaves)


def _like(stored: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(stored.shape, stored.dtype, sharding=sharding)


def _stored_tree(path: Path, item: str) -> Any:
    """The tree of one item with a shape and dtype at each leaf."""

    def describe() -> Any:
        tree = ocp.metadata(path, item).metadata
        if tree is None:  # Orbax only logs why
            raise ValueError(f"the description of {item} cannot be read")
        return tree

    return _read(path, describe)


def _load(path: Path, items: dict[str, Any]) -> dict[str, Any]:
    """Loads items whose trees are known to agree, and verifies each array."""
    wanted = layout.read_json(path, layout.METADATA).get(layout.CHECKSUMS, {})
    target = jax.tree.map(storage.with_sharding, items)
    loaded = _read(path, lambda: ocp.load_checkpointables(path, target))
    found = checksum.checksums(items_by_name(loaded))
    wrong = [name for name, value in found.items() if wanted.get(name) != value]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise layout.damaged(path, f"the data of {wrong[0]}{more} is not what was saved")
    return loaded


def _read(path: Path, read: Callable[[], T]) -> T:
    """Calls Orbax, and tells what is wrong with the data as a `UserError`."""
    with storage.unheard(), storage.storage_context():
        try:
            return read()
        except Exception as error:
            reason = storage.damage_reason(error)
            if reason is None:
                raise
        storage.discard_unfinished()
    storage.ignore_late_reads()
    raise layout.damaged(path, reason)
