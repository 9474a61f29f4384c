"""Reading checkpoints: finding one, its metadata, its parameters, or its whole train state."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from orbax.checkpoint import v1 as ocp

from tlm_jax.checkpoint import agreement, checksum, layout, regroup, retention, storage
from tlm_jax.checkpoint.layout import Metadata
from tlm_jax.errors import UserError

T = TypeVar("T")

_VERIFIED_AT_ONCE = 2**30  # bytes


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
            return layout.step_directory(directory, retention.best_step(directory))
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
    return jax.tree.map(lambda x, wanted: cast(x, wanted.dtype), params, abstract_params) if cast_floats else params


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
    if layout.WEIGHTS_ONLY in metadata.extra:
        mend = "give the workdir of the run itself; `tlm eval` and `tlm generate` take this one"
        raise UserError("holds weights only: training cannot go on from it", where=str(path), mend=mend)
    data_state = layout.read_json(path, layout.DATA)
    loaded = _restore_items(path, split_items(abstract_state))
    return loaded.pop(layout.STATE) | loaded, data_state, metadata


def restore_stored(
    path: Path, items: Sequence[str] = (), *, rearrange: Callable[[Any], Any] = lambda tree: tree
) -> dict[str, Any]:
    """Restores arrays of the step directory `path` as they are stored, each item's tree as nested dicts and lists.

    Args:
      path: the directory of a complete checkpoint.
      items: which; all that hold arrays by default.
      rearrange: from an item's tree of shapes and dtypes to one that groups the same layers otherwise.

    Raises:
      UserError: damaged files, or no moving average.
    """
    trees = {item: _stored_tree(path, item) for item in items or _stored_items(path)}
    shapes = jax.tree.map(lambda leaf: _like(leaf, None), trees)
    return _restore_items(path, {item: rearrange(tree) for item, tree in shapes.items()})


def _stored_items(path: Path) -> list[str]:
    """The items that hold arrays; what else must be there is read."""
    if layout.WEIGHTS_ONLY in layout.read_step_metadata(path).extra:
        return [layout.PARAMS]
    layout.read_json(path, layout.DATA)
    names = layout.read_json(path, layout.METADATA).get(layout.CHECKSUMS, {})
    averaged = any(name.startswith(f"{layout.EMA}.") for name in names)
    return [layout.PARAMS, *([layout.EMA] if averaged else []), layout.STATE]


def damaged_arrays(path: Path) -> list[str]:
    """Reads every array of the step directory `path`, a part at a time, and names those that are not what was saved.

    Raises:
      UserError: what describes the arrays is damaged, or the checkpoint is removed meanwhile.
    """
    trees = {item: _stored_tree(path, item) for item in _stored_items(path)}
    stored, structure = items_by_name(trees), jax.tree.structure(trees)
    known = layout.read_json(path, layout.METADATA).get(layout.CHECKSUMS, {})
    damaged = [name for name in {**stored, **known} if name not in stored or name not in known]

    def differ(names: Collection[str]) -> list[str]:
        part = [_like(leaf, None) if name in names else ocp.PLACEHOLDER for name, leaf in stored.items()]
        try:
            _load(path, jax.tree.unflatten(structure, part))
        except UserError:
            if not path.exists():
                raise
            return list(names) if len(names) == 1 else [name for one in names for name in differ([one])]
        return []

    names = [name for name in stored if name in known]
    while names:
        size, count = 0, 0
        while count < len(names) and (not count or size < _VERIFIED_AT_ONCE):
            leaf = stored[names[count]]
            size, count = size + math.prod(leaf.shape) * leaf.dtype.itemsize, count + 1
        damaged += differ(names[:count])
        names = names[count:]
    return damaged


def split_items(state: dict[str, Any]) -> dict[str, Any]:
    """Splits a train state into what a checkpoint stores apart: weights that evaluation may read, and all else."""
    weights = {key: state[key] for key in (layout.PARAMS, layout.EMA) if key in state}
    rest = {key: value for key, value in state.items() if key not in weights}
    return weights | ({layout.STATE: rest} if rest else {})


def items_by_name(items: dict[str, Any]) -> dict[str, Any]:
    """All leaves of all items by their dotted paths in the train state, in the order in which `jax.tree` has them."""
    named: dict[str, Any] = {}
    for item, tree in sorted(items.items()):
        named |= agreement.leaves_by_name(tree, "" if item == layout.STATE else item)
    return named


def cast(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """A floating array in another dtype, in place of itself; other arrays as they are."""
    if x.dtype == dtype or not jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
        return x
    cast = x.astype(dtype)
    x.delete()
    return cast


def _restore_items(path: Path, items: dict[str, Any], any_float: bool = False) -> dict[str, Any]:
    """Compares the stored trees with the wanted ones, all items together, and loads them in their stored dtypes."""
    layout.check_completion_mark(path)
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
    if item == layout.EMA and not (path / layout.EMA).is_dir():
        mend = "set train.ema_decay in a run that is to keep one"
        raise UserError("the checkpoint has no moving average of the weights", where=str(path), mend=mend)

    def describe() -> Any:
        tree = ocp.metadata(path, item).metadata
        if tree is None:  # Orbax only logs why
            raise ValueError(f"the description of {item} cannot be read")
        return tree

    return _read(path, describe)


def _load(path: Path, items: dict[str, Any]) -> dict[str, Any]:
    """Loads items whose trees are known to agree, but for placeholders, and verifies each array."""
    wanted = layout.read_json(path, layout.METADATA).get(layout.CHECKSUMS, {})
    target = jax.tree.map(lambda leaf: leaf if leaf is ocp.PLACEHOLDER else storage.with_sharding(leaf), items)
    loaded = _read(path, lambda: ocp.load_checkpointables(path, target))
    leaves = {name: leaf for name, leaf in items_by_name(loaded).items() if leaf is not ocp.PLACEHOLDER}
    found = checksum.checksums(leaves)
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
