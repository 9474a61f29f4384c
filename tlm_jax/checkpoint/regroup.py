"""Layers stored in stacks where the model has them one by one, the other way round, or in other stacks.

The names of a checkpoint's leaves say how its layers are stacked (`tlm_jax.model.decoder.layout`), those of the model
how they are wanted. An optimizer's leaf is reached as its parameter is: its path ends in the parameter's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tlm_jax.errors import UserError
from tlm_jax.model.decoder import Run, layers_of


class _Place(NamedTuple):
    """A dotted name around its run: `params.` layers 4 to 9, stacked, `.mlp.w_up`."""

    before: str
    layers: range
    after: str

    @property
    def stacked(self) -> bool:
        return len(self.layers) > 1

    def name(self, layer: int) -> str:
        """The leaf's name where each layer is stored alone."""
        return f"{self.before}layer_{layer}{self.after}"


def _place(name: str) -> _Place | None:
    parts = name.split(".")
    for i, part in enumerate(parts):
        layers = layers_of(part)
        if layers is not None:
            before, after = ".".join(parts[:i]), ".".join(parts[i + 1 :])
            return _Place(before and f"{before}.", layers, after and f".{after}")
    return None


def _runs(names: Iterable[str]) -> set[range]:
    return {place.layers for place in map(_place, names) if place}


def same_grouping(left: Iterable[str], right: Iterable[str]) -> bool:
    """Whether two sets of leaf names group the layers alike."""
    return _runs(left) == _runs(right)


def by_layer(leaves: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each leaf, by the name it would have with every layer stored alone.

    A leaf below a stack's name that has no axis over the stack's layers keeps its name: it belongs to no one layer.
    """
    found = {}
    for name, leaf in leaves.items():
        place = _place(name)
        if place is None or (place.stacked and tuple(leaf.shape[:1]) != (len(place.layers),)):
            found[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            continue
        for layer in place.layers:
            found[place.name(layer)] = jax.ShapeDtypeStruct(leaf.shape[place.stacked :], leaf.dtype)
    return found


def _sources(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Where each layer's leaf lies: its name with every layer stored alone, to the stored name and the index there."""
    found = {}
    for name in names:
        place = _place(name)
        for index, layer in enumerate(place.layers if place else ()):
            assert place is not None
            found[place.name(layer)] = (name, index)
    return found


def _needed(name: str, sources: Mapping[str, tuple[str, int]]) -> list[tuple[str, int]]:
    """What a wanted leaf is made of: stored names, each with an index into the stack."""
    place = _place(name)
    return [sources[place.name(layer)] for layer in place.layers] if place else [(name, 0)]


def restacked(tree: Any, runs: Iterable[Run]) -> Any:
    """A tree of shapes and dtypes, in nested dicts and lists, with its layers grouped as `runs` instead.

    Raises:
      UserError: a layer of `runs` is missing.
    """
    if isinstance(tree, (list, tuple)):
        return [restacked(branch, runs) for branch in tree]
    if not isinstance(tree, dict):
        return tree
    made: dict[str, Any] = {}
    layers: dict[int, Any] = {}
    for name, branch in tree.items():
        stored = layers_of(name)
        if stored is None:
            made[name] = restacked(branch, runs)
            continue
        one = jax.tree.map(lambda leaf: _shaped(leaf, leaf.shape[1:]), branch) if len(stored) > 1 else branch
        layers |= dict.fromkeys(stored, one)
    for run in runs if layers else ():
        if run.start not in layers:
            raise UserError(f"layer {run.start} is missing")
        stack = (run.length,) if run.stacked else ()
        made[run.name] = jax.tree.map(lambda leaf, s=stack: _shaped(leaf, (*s, *leaf.shape)), layers[run.start])
    return made


def _shaped(leaf: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, leaf.dtype)


def stored_shardings(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """A sharding for each stored leaf, under which a layer lies as it does in the wanted leaf."""
    sources = _sources(stored)
    found: dict[str, Any] = {}
    for name, leaf in wanted.items():
        into = _place(name)
        for source, _ in _needed(name, sources):
            out_of, sharding = _place(source), leaf.sharding
            if isinstance(sharding, NamedSharding) and into and out_of:
                spec = tuple(sharding.spec)[into.stacked :]
                sharding = NamedSharding(sharding.mesh, PartitionSpec(*([None] if out_of.stacked else []), *spec))
            found.setdefault(source, sharding)
    return found


def convert(stored: dict[str, jax.Array], wanted: Mapping[str, Any]) -> list[jax.Array]:
    """The wanted leaves, in order, made of the stored ones, which are given up one after the other.

    Args:
      stored: arrays by dotted name, of the layers and shapes of `wanted`; emptied.
      wanted: leaves with `shape` and `sharding` by dotted name.
    """
    sources = _sources(stored)
    uses = Counter(source for name in wanted for source, _ in _needed(name, sources))
    made = []
    for name, leaf in wanted.items():
        needed = _needed(name, sources)
        if name in stored:
            made.append(stored[name])
        else:
            place = _place(name)
            assert place is not None  # what belongs to no layer has the same name in both
            join = jax.jit(_join, static_argnames=("rank", "stacked"), out_shardings=leaf.sharding)
            parts, indices = [stored[source] for source, _ in needed], [index for _, index in needed]
            made.append(join(parts, indices, rank=leaf.ndim - place.stacked, stacked=place.stacked))
        for source, _ in needed:
            uses[source] -= 1
            if not uses[source]:
                del stored[source]
    return made


def _join(parts: list[jax.Array], indices: list[jax.Array], *, rank: int, stacked: bool) -> jax.Array:
    """One layer of `rank` axes out of each of `parts`, which may be stacks; several layers make a stack."""
    layers = [
        part if part.ndim == rank else jax.lax.dynamic_index_in_dim(part, index, 0, keepdims=False)
        for part, index in zip(parts, indices, strict=True)
    ]
    return jnp.stack(layers) if stacked else layers[0]
