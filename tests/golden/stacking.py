"""Stacks of layers taken apart and put together by their definition, against which the stored forms are tested."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tlm_jax.capacity.profile import Profile
from tlm_jax.model.decoder import layout


def split_layers(tree: dict[str, Any], profile: Profile, layer_stacking: str) -> dict[str, Any]:
    """The same parameters with every layer under its own name, `layer_0` …"""
    tree = dict(tree)
    for run in layout(profile, layer_stacking):
        if run.stacked:
            stack = tree.pop(run.name)
            for i in range(run.length):
                tree[f"layer_{run.start + i}"] = jax.tree.map(lambda leaf, i=i: leaf[i], stack)
    return tree


def join_layers(tree: dict[str, Any], profile: Profile, layer_stacking: str) -> dict[str, Any]:
    """Inverts `split_layers`."""
    tree = dict(tree)
    for run in layout(profile, layer_stacking):
        if run.stacked:
            layers = [tree.pop(f"layer_{run.start + i}") for i in range(run.length)]
            tree[run.name] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return tree
