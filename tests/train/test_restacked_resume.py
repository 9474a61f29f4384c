"""A run resumed with its layers stacked otherwise goes on as if nothing had changed."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import small_run

from tlm_jax.checkpoint import regroup, restore
from tlm_jax.checkpoint.manager import CheckpointManager, Metadata
from tlm_jax.checkpoint.restore import restore_state
from tlm_jax.train.optimizer import build_optimizer
from tlm_jax.train.workdir import changed_keys

STEPS, SAVED = 10, 5


def test_factored_moments_and_the_moving_average_there_and_back():
    """Adafactor's moments have other shapes than their parameters."""

    def leaves(stacking: str) -> dict[str, jax.Array]:
        config = small_run.small_config(
            optimizer="adafactor", adafactor_min_factored=16, adafactor_momentum=0.9, ema_decay=0.5
        )
        config.model.layer_stacking = stacking
        _, mesh, state, _ = small_run.build(config)
        params = state["params"]
        with jax.set_mesh(mesh):
            moments = jax.jit(build_optimizer(config).update)(params, state["optimizer"], params)[1]
        state |= {"optimizer": moments, "ema": jax.tree.map(lambda leaf: leaf / 2, params)}
        return restore.items_by_name(restore.split_items(state))

    stacked, unrolled = leaves("auto"), leaves("unrolled")
    factored = [name for name, leaf in stacked.items() if "layers_0_to_1" in name and leaf.ndim == 2 and ".v_" in name]
    assert factored, sorted(stacked)
    assert any(name.startswith("ema.layers_0_to_1") for name in stacked)
    apart = dict(zip(unrolled, regroup.convert(dict(stacked), unrolled), strict=True))
    for name, leaf in unrolled.items():
        np.testing.assert_allclose(apart[name], leaf, rtol=1e-5, atol=1e-9, err_msg=name)
    again = dict(zip(stacked, regroup.convert(dict(apart), stacked), strict=True))
    for name, leaf in stacked.items():
        np.testing.assert_array_equal(again[name], leaf, err_msg=name)


@pytest.mark.parametrize(
    ("optimizer", "first", "second"), [("adamw", "auto", "unrolled"), ("muon", "unrolled", "auto")]
)
def test_losses_continue(tmp_path: Path, optimizer: str, first: str, second: str):
    """`auto` stacks the layers 0 and 1, and 2 and 3."""
    batches = small_run.batches(STEPS)

    def config(stacking: str, micro_batches: int = 1):
        made = small_run.small_config(optimizer=optimizer, gradient_accumulation=micro_batches)
        made.model.layer_stacking = stacking
        return made

    def train(step, mesh, state, batches) -> list[float]:
        losses = []
        with jax.set_mesh(mesh):
            for batch in batches:
                state, metrics = step(state, small_run.place(batch, mesh))
                losses.append(float(metrics["loss_sum"] / metrics["tokens"]))
        return losses

    assert changed_keys(config(first), config(second)) == [], "the workdir refuses the resumed run"
    _, mesh, state, step = small_run.build(config(first))
    metadata = Metadata("{}", "{}", "", b"")
    policy = {"every_steps": 0, "every_seconds": 0.0, "keep_last": 1, "timeout_seconds": 60.0}
    with jax.set_mesh(mesh), CheckpointManager(tmp_path, metadata=metadata, **policy) as manager:
        for batch in batches[:SAVED]:
            state, _ = step(state, small_run.place(batch, mesh))
        manager.save(SAVED, state, {}, force=True)
    whole = train(step, mesh, state, batches[SAVED:])

    _, mesh, other, step = small_run.build(config(second, micro_batches=2))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), other)
    assert jax.tree.structure(abstract) != jax.tree.structure(state)
    restored, _, _ = restore_state(tmp_path / str(SAVED), abstract)
    np.testing.assert_allclose(train(step, mesh, restored, batches[SAVED:]), whole, rtol=0, atol=1e-5)
    assert np.ptp(whole) > 1e-2, "the losses hardly move: nothing is compared"
