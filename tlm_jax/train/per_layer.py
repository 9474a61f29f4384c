"""What a leaf of a parameter tree is, whatever the stacking: one layer's or a stack, a matrix or not, and its name.

Optimizers act on each layer alone. A tree's first key says whether its leaves are stacks (`layers_3_to_7`, see
`tlm_jax.model.decoder.layout`); the number of axes says nothing: a stacked norm scale has two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import optax

from tlm_jax.model.decoder import layers_of
from tlm_jax.model.layers import MATRICES

Path = tuple[Any, ...]  # of jax.tree_util, from the root of a tree of parameters


def is_stack(path: Path) -> bool:
    """Whether the leaf has a leading axis of layers."""
    return len(layers_of(str(path[0].key)) or ()) > 1


def parameter_name(path: Path) -> str:
    """A parameter's dotted name, the same for every layer and stacking: `layers.attention.wq`, `embedding`."""
    first, *rest = (str(part.key) for part in path)
    return ".".join([first if layers_of(first) is None else "layers", *rest])


def parameter_names(parameters: Any) -> list[str]:
    """The names of all parameters, each once, in order."""
    return list(dict.fromkeys(parameter_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(parameters)))


def is_matrix(path: Path) -> bool:
    """Whether the leaf is a hidden matrix of each of its layers."""
    return str(path[-1].key) in MATRICES


def as_matrices(path: Path, leaf: jax.Array) -> jax.Array:
    """A hidden matrix with the axes that are summed over made one and those that remain made one: [(N,) M, K]."""
    summed, kept = MATRICES[str(path[-1].key)]
    stack = leaf.shape[: leaf.ndim - len(summed) - len(kept)]
    own = leaf.shape[len(stack) :]
    return leaf.reshape(*stack, *(math.prod(own[i] for i in axes) for axes in (summed, kept)))


def each_layer(function: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """`function` of arrays of one layer, mapped over the layers where the leaf at `path` is a stack."""
    return jax.vmap(function) if is_stack(path) else function


def stateless_by_leaf(function: Callable[[Path, jax.Array, jax.Array], jax.Array]) -> optax.GradientTransformation:
    """An optimizer part without state: `function(path, update, parameter) -> update` for each leaf."""
    return optax.stateless(lambda updates, parameters: jax.tree_util.tree_map_with_path(function, updates, parameters))
