"""What is saved comes back bit for bit, on any mesh, whatever happens to the state after `save` returns."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_state import METADATA, abstract, assert_equal, in_bfloat16, make_mesh, make_params, make_state

from tlm_jax.checkpoint.manager import CheckpointManager
from tlm_jax.checkpoint.restore import find_checkpoint, read_metadata, restore_parameters
from tlm_jax.errors import UserError


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 4)])
def test_restores_on_another_mesh(saved: Path, manager_at: Callable[..., CheckpointManager], shape: tuple[int, ...]):
    mesh = make_mesh(*shape)
    wanted = make_state(mesh, 2)
    with manager_at(saved / "checkpoints") as manager:
        state, data_state, metadata = manager.restore(abstract(wanted, mesh))
    assert_equal(state, wanted)
    assert data_state == {"next_window": 16}
    assert metadata == METADATA
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert got.sharding == want.sharding


def test_restores_an_older_step(saved: Path, manager_at: Callable[..., CheckpointManager]):
    mesh = make_mesh(2, 4)
    with manager_at(saved / "checkpoints") as manager:
        assert manager.steps() == [1, 2]
        assert manager.latest_step() == 2
        state, data_state, _ = manager.restore(abstract(make_state(mesh), mesh), step=1)
    assert_equal(state, make_state(mesh, 1))
    assert data_state == {"next_window": 8}


def test_state_may_be_donated_right_after_save(tmp_path: Path, manager_at: Callable[..., CheckpointManager]):
    mesh = make_mesh(2, 4)

    def advance(state):
        return jax.tree.map(lambda x: x + jnp.ones_like(x), state)

    step_function = jax.jit(advance, donate_argnums=0)
    state, expected = make_state(mesh), jax.tree.map(np.asarray, make_state(mesh))
    with manager_at(tmp_path, keep_last=100) as manager:
        for step in range(12):
            manager.save(step, state, {"next_window": step}, force=True)
            donated = state
            for _ in range(3):
                state = step_function(state)
            assert any(leaf.is_deleted() for leaf in jax.tree.leaves(donated))
        for step in range(12):
            restored, data_state, _ = manager.restore(abstract(make_state(mesh), mesh), step)
            assert_equal(restored, expected)
            assert data_state == {"next_window": step}
            for _ in range(3):
                expected = jax.tree.map(lambda x: x + np.ones_like(x), expected)


def test_save_writes_in_the_background(tmp_path: Path, manager_at: Callable[..., CheckpointManager], monkeypatch):
    import threading

    from orbax.checkpoint import v1 as ocp

    release = threading.Event()
    dispatch = ocp.save_checkpointables_async

    def dispatch_slowly(*args, **kwargs):
        response = dispatch(*args, **kwargs)
        result = response.result
        response.result = lambda timeout=None: (release.wait(30), result(timeout))[1]
        return response

    monkeypatch.setattr(ocp, "save_checkpointables_async", dispatch_slowly)
    with manager_at(tmp_path, every_seconds=1e-9) as manager:
        assert manager.save(1, make_state(make_mesh(4)), {}, force=True)
        assert not manager.save(2, make_state(make_mesh(4)), {}), "a temporary one does not wait for the one before"
        release.set()
    assert manager.latest_step() == 1


def test_optimizer_state_of_tuples_and_named_tuples(tmp_path: Path, manager_at: Callable[..., CheckpointManager]):
    import optax

    params = jax.tree.map(jnp.asarray, make_params())
    state = {"params": params, "optimizer": optax.chain(optax.clip(1.0), optax.adamw(1e-3)).init(params)}
    with manager_at(tmp_path) as manager:
        manager.save(1, state, {}, force=True)
        restored, _, _ = manager.restore(abstract(state))
    assert_equal(restored, state)


def test_parameters_alone_in_bfloat16(saved: Path):
    mesh = make_mesh(4)
    params = restore_parameters(saved, abstract(in_bfloat16(make_params()), mesh), cast_floats=True)
    expected = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), make_params(2))
    assert_equal(params, expected)
    assert params["embedding"].sharding.mesh == mesh


def test_parameters_need_no_sharding_and_no_other_item(saved: Path):
    import shutil

    shutil.rmtree(saved / "checkpoints" / "2" / "state")
    assert_equal(restore_parameters(saved, abstract(make_params())), jax.tree.map(jnp.asarray, make_params(2)))


@pytest.mark.parametrize("below", ["", "checkpoints", "checkpoints/2"])
def test_finds_a_checkpoint_from_any_of_its_paths(saved: Path, below: str):
    assert find_checkpoint(saved / below) == saved / "checkpoints" / "2"
    assert read_metadata(saved / below) == METADATA


def test_says_what_it_looked_for(saved: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"no complete checkpoint of step 7; the complete ones are 1, 2$"):
        find_checkpoint(saved, 7)
    with pytest.raises(UserError, match="no such directory"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"looked for <step> directories in .*empty/checkpoints and .*empty;"):
        find_checkpoint(tmp_path / "empty")


def test_metadata_and_parameters_on_one_device_print_nothing(saved: Path):
    program = """
import json, sys
from tlm_jax.checkpoint import layout
from tlm_jax.checkpoint.restore import read_metadata, restore_parameters
import jax
from jax._src import xla_bridge
metadata = read_metadata(sys.argv[1])
assert not xla_bridge.backends_are_initialized(), "reading metadata started a device"
shapes = json.loads(sys.argv[2])
params = restore_parameters(sys.argv[1], {"embedding": jax.ShapeDtypeStruct((32, 16), "float32"), **{
    layer: {"attention": {"wq": jax.ShapeDtypeStruct((*n, 16, 16), "float32")},
            "mlp": {"wi": jax.ShapeDtypeStruct((*n, 16, d_ff), "float32")},
            "norm": jax.ShapeDtypeStruct((*n, 16), "float32")} for layer, (n, d_ff) in shapes.items()}})
assert len(jax.devices()) == 1
print(float(params["embedding"][0, 0]), metadata.extra)
"""
    shapes = json.dumps({"layers_0": [[], 24], "run_1": [[3], 8]})
    done = subprocess.run(
        [sys.executable, "-W", "always", "-c", program, str(saved), shapes],
        capture_output=True, text=True, check=False, env={"PATH": "", "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout == f"{float(make_params(2)['embedding'][0, 0])} {METADATA.extra}\n"
