"""Whether the arrays a checkpoint holds are exactly those that a model asks for.

Orbax casts silently to the target's dtype, so trees are compared here, from metadata, before a byte is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tlm_jax.errors import UserError

_SHOWN = 3  # mismatches told in full


def leaves_by_name(tree: Any, prefix: str) -> dict[str, Any]:
    """The leaves of a pytree by dotted path, such as `params.layers_0.attention.wq`."""

    def part(key: Any) -> str:
        for attribute in ("key", "name", "idx"):
            if hasattr(key, attribute):
                return str(getattr(key, attribute))
        return str(key)

    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join([prefix, *map(part, path)] if prefix else map(part, path)): leaf for path, leaf in flat}


def _differences(stored: dict[str, Any], target: dict[str, Any], any_float: bool) -> list[str]:
    """Says of each leaf that differs how it does."""
    found = []
    for name in [*target, *(name for name in stored if name not in target)]:
        if name not in stored:
            found.append(f"{name} is not in the checkpoint")
        elif name not in target:
            found.append(f"{name} is in the checkpoint but not in the model")
        elif tuple(stored[name].shape) != tuple(target[name].shape):
            found.append(
                f"{name} has shape {_shape(stored[name])} in the checkpoint and {_shape(target[name])} in the model"
            )
        elif np.dtype(stored[name].dtype) != np.dtype(target[name].dtype):
            floats = all(jnp.issubdtype(leaf[name].dtype, jnp.floating) for leaf in (stored, target))
            if not (any_float and floats):
                dtypes = [np.dtype(leaf[name].dtype).name for leaf in (stored, target)]
                found.append(f"{name} is {dtypes[0]} in the checkpoint and {dtypes[1]} in the model")
    return found


def _shape(leaf: Any) -> str:
    return "[" + ", ".join(map(str, leaf.shape)) + "]"


def require_agreement(stored: dict[str, Any], target: dict[str, Any], *, path: Path, any_float: bool = False) -> None:
    """Compares stored with wanted leaves: names, shapes and dtypes.

    Args:
      stored: leaves with `shape` and `dtype`, by dotted path.
      target: the same, of the model.
      path: the checkpoint.
      any_float: a floating leaf may have another floating dtype.

    Raises:
      UserError: one line that names the first mismatching leaves and counts the others.
    """
    differences = _differences(stored, target, any_float)
    if differences:
        told = ", ".join(differences[:_SHOWN])
        more = f", and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise UserError(
            f"the checkpoint does not fit the model: {told}{more}",
            where=str(path),
            mend="use the config that the checkpoint was made with, or another workdir",
        )
