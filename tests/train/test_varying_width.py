"""Training a model whose d_model varies: the same losses on any mesh, stacking and number of micro-batches."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
import small_run
from ml_collections import ConfigDict

from tlm_jax.checkpoint.manager import CheckpointManager, Metadata
from tlm_jax.checkpoint.restore import restore_state
from tlm_jax.model.decoder import layout

OWN_KEYS = {"adamw": {}, "muon": {}, "adafactor": {"learning_rate": 3e-2, "adafactor_min_factored": 16}}


def config_for(optimizer: str, stacking: str = "auto", **train) -> ConfigDict:
    """d_model of 48, 24, 24, 8, 8 and 48 behind an embedding of 32."""
    config = small_run.small_config(optimizer=optimizer, **OWN_KEYS[optimizer], **train)
    config.profile.update(schedule="uniform", plateaus=0, num_layers=6, width_multiple_of=8)
    config.profile.update(width_schedule="x", width_plateaus=4, bottleneck_depth=0.6)
    config.model.layer_stacking = stacking
    return config


@cache
def reference(optimizer: str) -> np.ndarray:
    return small_run.losses(config_for(optimizer))


def test_it_learns():
    model, *_ = small_run.build(config_for("adamw"))
    assert [layer.d_model for layer in model.profile.layers] == [48, 24, 24, 8, 8, 48]
    assert [run.name for run in layout(model.profile, "auto")] == [
        "layer_0",
        "layers_1_to_2",
        "layers_3_to_4",
        "layer_5",
    ]
    assert reference("adamw")[-1] < reference("adamw")[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "stacking", "count", "mesh"),
    [("adamw", "auto", 1, (1, 8)), ("muon", "auto", 2, (2, 4)), ("adafactor", "unrolled", 4, (1, 1))],
)
def test_losses_depend_on_none_of_mesh_stacking_and_micro_batches(optimizer, stacking, count, mesh):
    config = config_for(optimizer, stacking, gradient_accumulation=count)
    np.testing.assert_allclose(small_run.losses(config, mesh), reference(optimizer), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_a_run_goes_on_stacked_otherwise_and_on_another_mesh(optimizer, tmp_path: Path):
    batches, saved = small_run.batches(), small_run.STEPS // 2
    _, mesh, state, step = small_run.build(config_for(optimizer, "unrolled"))
    policy = {"every_steps": 0, "every_seconds": 0.0, "keep_last": 1, "timeout_seconds": 60.0}
    with jax.set_mesh(mesh), CheckpointManager(tmp_path, metadata=Metadata("{}", "{}", "", b""), **policy) as manager:
        for batch in batches[:saved]:
            state, _ = step(state, small_run.place(batch, mesh))
        manager.save(saved, state, {}, force=True)
    _, mesh, other, step = small_run.build(config_for(optimizer, "auto"), (2, 4))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), other)
    state, _, _ = restore_state(tmp_path / str(saved), abstract)
    losses = []
    with jax.set_mesh(mesh):
        for batch in batches[saved:]:
            state, metrics = step(state, small_run.place(batch, mesh))
            losses.append(float(metrics["loss_sum"] / metrics["tokens"]))
    np.testing.assert_allclose(losses, reference(optimizer)[saved:], rtol=0, atol=1e-5)
