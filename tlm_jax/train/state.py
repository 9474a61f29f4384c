"""The train state: a plain dict of arrays, where each of them lives, and how it starts.

params        nested dict of float32 master weights
optimizer     optax's state for them
ema           their moving average, only if it is kept: float32, named and placed as the parameters
step          int32 steps taken, skipped ones included
skipped       int32 steps that changed nothing because loss or gradient was not finite, or the loss a spike
skipped_row   int32 of those, how many in a row up to now
losses        [W] float32 mean losses of the last W steps, only if spikes are skipped; that of step n at n % W, NaN
              where there is none yet
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.parallel.rules import parameter_shardings, parameter_spec, replicated

State = dict[str, Any]


def _initial(
    model: FunctionalDecoder, optimizer: optax.GradientTransformation, ema: bool, spike_window: int, key: jax.Array
) -> State:
    params = model.init(key)
    zero = jnp.zeros((), jnp.int32)
    state = {"params": params, "optimizer": optimizer.init(params), "step": zero, "skipped": zero, "skipped_row": zero}
    if spike_window:
        state["losses"] = jnp.full(spike_window, jnp.nan, jnp.float32)
    return state | ({"ema": jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params)} if ema else {})


def _optimizer_shardings(model: FunctionalDecoder, placed: Any, tree: Any, mesh: Mesh) -> Any:
    """Where each leaf of an optimizer state lives.

    One that belongs to a parameter (its path ends in the parameter's) lies as the parameter does, if it has its shape;
    of another shape, such as the vectors of a factored moment, it is cut over fsdp along its last axis where that
    divides. The rest is replicated.
    """
    known = {
        jax.tree_util.keystr(path): (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree_util.tree_leaves_with_path(model.abstract_parameters), jax.tree.leaves(placed), strict=True
        )
    }

    def find(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        suffixes = (jax.tree_util.keystr(path[i:]) for i in range(len(path)))
        shape, sharding = next((known[suffix] for suffix in suffixes if suffix in known), (None, replicated(mesh)))
        if shape in (None, leaf.shape):
            return sharding
        return NamedSharding(mesh, parameter_spec(leaf.shape, ("embed",), dict(mesh.shape)))

    return jax.tree_util.tree_map_with_path(find, tree)


def abstract_state(
    model: FunctionalDecoder,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    ema: bool = False,
    spike_window: int = 0,
) -> State:
    """The state as `jax.ShapeDtypeStruct`s with shardings; nothing is allocated.

    Args:
      ema: whether a moving average of the parameters is kept.
      spike_window: how many losses are kept to tell a spike by; 0: none.
    """
    shapes = jax.eval_shape(lambda: _initial(model, optimizer, ema, spike_window, jax.random.key(0)))
    placed = parameter_shardings(model.abstract_parameters, model.logical_axes, mesh)
    whole = replicated(mesh)
    shardings = {
        "params": placed,
        "optimizer": _optimizer_shardings(model, placed, shapes["optimizer"], mesh),
        "step": whole,
        "skipped": whole,
        "skipped_row": whole,
    }
    if ema:
        shardings["ema"] = placed
    if spike_window:
        shardings["losses"] = whole
    return jax.tree.map(lambda s, place: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place), shapes, shardings)


def init_state(model: FunctionalDecoder, optimizer: optax.GradientTransformation, abstract: State, seed: int) -> State:
    """Draws the initial state in place: no device ever holds more than its part."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)

    def start(key: jax.Array) -> State:
        window = abstract["losses"].shape[0] if "losses" in abstract else 0
        return _initial(model, optimizer, "ema" in abstract, window, key)

    return jax.jit(start, out_shardings=shardings)(jax.random.key(seed, impl="threefry2x32"))
