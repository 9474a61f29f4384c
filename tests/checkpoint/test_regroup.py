"""Layers stored in stacks are restored one by one, the other way round, and into other stacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_state import abstract, assert_equal, make_mesh, place, sharding_of

from tlm_jax.checkpoint.manager import CheckpointManager
from tlm_jax.checkpoint.restore import restore_parameters
from tlm_jax.errors import UserError

GROUPINGS = {
    "alone": [f"layer_{i}" for i in range(6)],
    "halves": ["layers_0_to_2", "layers_3_to_5"],
    "whole": ["layers_0_to_5"],
    "uneven": ["layer_0", "layers_1_to_4", "layer_5"],
}


def layer(index: int) -> dict[str, Any]:
    rng = np.random.default_rng(index)
    return {
        "mlp": {"w_up": rng.standard_normal((16, 8)).astype(np.float32)},
        "norm": {"scale": rng.standard_normal(16).astype(np.float32)},
    }


def params(grouping: str) -> dict[str, Any]:
    """The same six layers, each stack made here by NumPy."""
    tree: dict[str, Any] = {"embedding": np.arange(32 * 16, dtype=np.float32).reshape(32, 16)}
    for name in GROUPINGS[grouping]:
        first, _, last = name.removeprefix("layers_").removeprefix("layer_").partition("_to_")
        layers = [layer(i) for i in range(int(first), int(last or first) + 1)]
        tree[name] = jax.tree.map(lambda *leaves: np.stack(leaves), *layers) if last else layers[0]
    return tree


def state(grouping: str, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Parameters, and moments in named tuples and partitions with holes."""
    weights = params(grouping)
    optimizer = optax.partition(
        {"a": optax.adam(1e-3), "b": optax.sgd(1e-3, momentum=0.9)},
        lambda tree: jax.tree_util.tree_map_with_path(lambda path, _: "b" if path[-1].key == "scale" else "a", tree),
    )
    moments = optimizer.update(weights, optimizer.init(weights), weights)[1]  # functions of the gradient: the weights
    average = jax.tree.map(lambda leaf: leaf / 2, weights)
    tree = {"params": weights, "ema": average, "optimizer": moments, "step": np.int32(3)}
    return place(jax.tree.map(jnp.asarray, tree), mesh)


@pytest.mark.parametrize(
    ("stored", "wanted"), [("alone", "uneven"), ("uneven", "alone"), ("halves", "whole"), ("whole", "uneven")]
)
def test_the_whole_train_state_comes_back_in_any_grouping(
    tmp_path: Path, manager_at: Callable[..., CheckpointManager], stored: str, wanted: str
):
    mesh = make_mesh(2, 4)
    target = state(wanted, mesh)
    with manager_at(tmp_path) as manager:
        manager.save(3, state(stored, mesh), {"next_window": 5}, force=True)
        restored, data_state, _ = manager.restore(abstract(target, mesh))
    assert_equal(restored, target)
    assert data_state == {"next_window": 5}
    for leaf in jax.tree.leaves(restored):
        assert leaf.sharding.is_equivalent_to(sharding_of(leaf, mesh), leaf.ndim)


def test_parameters_alone_and_cast(tmp_path: Path, manager_at: Callable[..., CheckpointManager]):
    with manager_at(tmp_path) as manager:
        manager.save(1, state("uneven", make_mesh(4)), {}, force=True)
    wanted = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), params("alone"))
    assert_equal(restore_parameters(tmp_path, abstract(wanted), cast_floats=True), wanted)


def damage(tree: dict[str, Any]) -> None:
    del tree["layer_4"]


def widen(tree: dict[str, Any]) -> None:
    tree["layer_2"]["mlp"]["w_up"] = np.zeros((16, 12), np.float32)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (damage, "params.layer_4.mlp.w_up is in the checkpoint but not in the model"),
        (widen, "params.layer_2.mlp.w_up has shape [16, 8] in the checkpoint and [16, 12] in the model"),
    ],
)
def test_what_differs_is_named_by_its_layer(
    tmp_path: Path, manager_at: Callable[..., CheckpointManager], change: Callable[[Any], None], told: str
):
    with manager_at(tmp_path) as manager:
        manager.save(1, state("whole", make_mesh(4)), {}, force=True)
    wanted = params("alone")
    change(wanted)
    with pytest.raises(UserError) as caught:
        restore_parameters(tmp_path, abstract(wanted))
    assert told in str(caught.value)


def test_an_array_without_an_axis_over_the_layers_is_not_guessed(
    tmp_path: Path, manager_at: Callable[..., CheckpointManager]
):
    """What a stack shares, such as a counter, belongs to no one layer."""
    with manager_at(tmp_path) as manager:
        manager.save(1, {"params": {"layers_0_to_1": {"count": jnp.zeros(())}}, "step": jnp.int32(1)}, {}, force=True)
    with pytest.raises(UserError, match=r"params\.layer_0\.count is not in the checkpoint"):
        restore_parameters(tmp_path, {f"layer_{i}": {"count": jax.ShapeDtypeStruct((), jnp.float32)} for i in (0, 1)})
