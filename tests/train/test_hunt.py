"""The hunt names the layer and operation in which a planted weight first makes something that is not finite."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest
from small_run import batches, build, place, small_config
from whole_run import setup_for

from tlm_jax.errors import UserError
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.train import hunt, loop


def planted(params: Any, weight: str, layer: int, value: float) -> Any:
    """Layers 0 and 1 are one stacked run, 2 and 3 another."""
    name = ("layers_0_to_1", "layers_2_to_3")[layer // 2]
    run = params[name]
    mlp = run["mlp"] | {weight: run["mlp"][weight].at[layer % 2].set(value)}
    return params | {name: run | {"mlp": mlp}}


@pytest.fixture(scope="module")
def run():
    return build(small_config())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plants", "layer", "backward", "accumulation", "remat"),
    [
        ([("w_up", 1, 3e38)], 1, False, 1, "none"),
        ([("w_up", 2, 3e38), ("w_up", 3, 3e38)], 2, False, 2, "none"),  # the first of two
        ([("w_up", 0, 0.0), ("w_down", 0, 3e38), ("w_up", 3, 0.0), ("w_down", 3, 3e38)], 3, True, 1, "full"),
    ],
)
def test_the_first_operation_is_named(run, plants, layer, backward, accumulation, remat):
    model, mesh, state, _ = run
    model = FunctionalDecoder(model.profile, dataclasses.replace(model.settings, remat=remat))
    params = state["params"]
    for plant in plants:
        params = planted(params, *plant)
    with jax.set_mesh(mesh):
        origin = hunt.first_not_finite(model, params, place(batches(1)[0], mesh), accumulation, 0.0)
    assert origin is not None
    assert (origin.layer, origin.backward, origin.operation) == (layer, backward, "dot_general"), origin
    assert origin.source.startswith("plain_mlp.py:")


@pytest.mark.slow
def test_nothing_is_found_in_a_sound_step(run):
    model, mesh, state, _ = run
    with jax.set_mesh(mesh):
        assert hunt.first_not_finite(model, state["params"], place(batches(1)[0], mesh), 1, 1e-4) is None
        params = planted(state["params"], "w_gate", 1, float("nan"))
        assert hunt.parameters_not_finite(params) == ["layers_0_to_1.mlp.w_gate"]


@pytest.mark.slow
def test_a_run_that_hunts_stops_with_the_name(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With so large a learning rate the first step is finite and the second is not."""
    keys = ("nonfinite=hunt", "optimizer=lion", "adam_learning_rate=0", "learning_rate=1e30", "warmup_steps=0")
    setup = setup_for(store, *(f"--config.train.{key}" for key in keys))
    with pytest.raises(UserError, match=r"step \d+ is not finite: first in .*, forward pass, \w+ at \w+\.py:\d+.*wind"):
        loop.train(setup, tmp_path, "")
