"""A checkpoint that is not exactly the model's is refused in one line that names the leaf, before anything is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from small_state import abstract, make_mesh, make_params, make_state

from tlm_jax.checkpoint.manager import CheckpointManager
from tlm_jax.checkpoint.restore import restore_parameters
from tlm_jax.errors import UserError


def narrower(params):
    params["layers_0"]["mlp"]["wi"] = jax.ShapeDtypeStruct((16, 8), jnp.float32)


def wider(params):
    params["layers_0"]["mlp"]["wi"] = jax.ShapeDtypeStruct((16, 40), jnp.float32)


def more_layers_in_a_run(params):
    params["run_1"]["norm"] = jax.ShapeDtypeStruct((4, 16), jnp.float32)


def more_layers(params):
    params["layers_4"] = {"norm": jax.ShapeDtypeStruct((16,), jnp.float32)}


def fewer_layers(params):
    del params["layers_0"]["norm"]


def other_float(params):
    params["run_1"]["mlp"]["wi"] = jax.ShapeDtypeStruct((3, 16, 8), jnp.bfloat16)


def integer(params):
    params["embedding"] = jax.ShapeDtypeStruct((32, 16), jnp.int32)


CASES = [
    (narrower, "params.layers_0.mlp.wi has shape [16, 24] in the checkpoint and [16, 8] in the model"),
    (wider, "params.layers_0.mlp.wi has shape [16, 24] in the checkpoint and [16, 40] in the model"),
    (more_layers_in_a_run, "params.run_1.norm has shape [3, 16] in the checkpoint and [4, 16] in the model"),
    (more_layers, "params.layers_4.norm is not in the checkpoint"),
    (fewer_layers, "params.layers_0.norm is in the checkpoint but not in the model"),
    (other_float, "params.run_1.mlp.wi is float32 in the checkpoint and bfloat16 in the model"),
    (integer, "params.embedding is float32 in the checkpoint and int32 in the model"),
]


@pytest.mark.parametrize(("change", "told"), CASES, ids=[change.__name__ for change, _ in CASES])
def test_parameters_that_differ(saved: Path, change: Callable[[Any], None], told: str):
    params = abstract(make_params())
    change(params)
    with pytest.raises(UserError) as caught:
        restore_parameters(saved, params)
    assert str(caught.value) == (
        f"{saved}/checkpoints/2: the checkpoint does not fit the model: {told}; "
        "use the config that the checkpoint was made with, or another workdir"
    )


def test_a_cast_of_integers_is_refused_even_when_a_float_dtype_is_asked(saved: Path):
    params = abstract(make_params())
    integer(params)
    with pytest.raises(UserError, match=r"params\.embedding is float32 .* and int32"):
        restore_parameters(saved, params, cast_floats=True)


def test_the_train_state_is_compared_too(saved: Path, manager_at: Callable[..., CheckpointManager]):
    state = abstract(make_state(make_mesh(2, 4)), make_mesh(2, 4))
    state["optimizer"]["count"] = jax.ShapeDtypeStruct((), jnp.float32)
    del state["key"]
    state["skipped_steps"] = jax.ShapeDtypeStruct((), jnp.int32)
    with manager_at(saved / "checkpoints") as manager, pytest.raises(UserError) as caught:
        manager.restore(state)
    assert (
        "optimizer.count is int32 in the checkpoint and float32 in the model, skipped_steps is not in the "
        "checkpoint, key is in the checkpoint but not in the model"
    ) in str(caught.value)


def test_many_mismatches_make_one_short_line(saved: Path):
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*x.shape, 2), x.dtype), make_params())
    with pytest.raises(UserError, match=r"layers_0\.mlp\.wi has shape .*, and 4 more;") as caught:
        restore_parameters(saved, params)
    assert "\n" not in str(caught.value)


def test_a_leaf_lost_from_the_checkpoint_is_not_filled_with_zeros(
    saved: Path, tmp_path: Path, manager_at: Callable[..., CheckpointManager]
):
    params = jax.tree.map(jnp.asarray, make_params())
    full = abstract(params)
    del params["run_1"]["attention"]["wq"]
    with manager_at(tmp_path / "other") as manager:
        manager.save(1, {"params": params, "step": jnp.int32(1)}, {}, force=True)
    with pytest.raises(UserError, match=r"params\.run_1\.attention\.wq is not in the checkpoint"):
        restore_parameters(tmp_path / "other", full)


def test_nothing_is_read_before_the_comparison(saved: Path):
    for data in (saved / "checkpoints" / "2" / "params").glob("ocdbt.process_*/d"):
        shutil.rmtree(data)
    params = abstract(make_params())
    wider(params)
    with pytest.raises(UserError, match="does not fit the model"):
        restore_parameters(saved, params)
