"""Adafactor from optax, on each layer alone and each hidden matrix as a matrix.

Left to itself, optax would factor over the layer axis of a stack, clip by the root mean square of a whole run, and
leave attention weights [D, H, K] unfactored, since it looks at single axes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from tlm_jax.train.per_layer import Path, as_matrices, each_layer, is_matrix


def _view(path: Path, leaf: jax.Array) -> jax.Array:
    return as_matrices(path, leaf) if is_matrix(path) else leaf


def adafactor(train: ConfigDict) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018, arXiv 1804.04235) without learning rate and decay, from `config.train`.

    Its state is optax's `FactoredState`, each tree like the parameters': `v_row` and `v_col` of a factored matrix lack
    its longer and its shorter side, `v` of another parameter has its shape, and what is not used is one zero a layer.
    """
    parts = [
        optax.scale_by_factored_rms(
            decay_rate=train.adafactor_decay_exponent, min_dim_size_to_factor=train.adafactor_min_factored
        )
    ]
    if train.adafactor_clip:
        parts.append(optax.clip_by_block_rms(train.adafactor_clip))
    if train.adafactor_parameter_scale:
        parts.append(optax.scale_by_param_block_rms())
    one_layer, others = optax.chain(*parts), (optax.EmptyState(),) * (len(parts) - 1)

    def separate(results: Any) -> list[Any]:
        """A tree with a tuple at each parameter as a list of trees."""
        leaves, structure = jax.tree.flatten(results, is_leaf=lambda node: isinstance(node, tuple))
        return [jax.tree.unflatten(structure, parts) for parts in zip(*leaves, strict=True)]

    def init(parameters: Any) -> optax.FactoredState:
        def start(path: Path, leaf: jax.Array) -> Any:
            return each_layer(lambda p: tuple(one_layer.init(p)[0][1:]), path)(_view(path, leaf))

        started = jax.tree_util.tree_map_with_path(start, parameters)
        return optax.FactoredState(jnp.zeros((), jnp.int32), *separate(started))

    def update(updates: Any, state: optax.FactoredState, parameters: Any) -> tuple[Any, optax.FactoredState]:
        def move(path: Path, g: jax.Array, p: jax.Array, *moments: jax.Array) -> Any:
            def of_layer(g: jax.Array, p: jax.Array, *moments: jax.Array) -> Any:
                u, (factored, *_) = one_layer.update(g, (optax.FactoredState(state.count, *moments), *others), p)
                return u, *factored[1:]

            u, *moments = each_layer(of_layer, path)(_view(path, g), _view(path, p), *moments)
            return u.reshape(g.shape), *moments

        trees = (state.v_row, state.v_col, state.v)
        moved = jax.tree_util.tree_map_with_path(move, updates, parameters, *trees)
        moves, *moments = separate(moved)
        return moves, optax.FactoredState(optax.safe_increment(state.count), *moments)

    factored = optax.GradientTransformation(init, update)
    if not train.adafactor_momentum:
        return factored
    return optax.chain(factored, optax.ema(train.adafactor_momentum, debias=False, accumulator_dtype=jnp.float32))
