"""The moving average of the weights: its values, where it lives, and that it is what is asked for."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from small_run import batches, build, place, small_config
from whole_run import saved_state, setup_for

from tlm_jax.cli import main
from tlm_jax.errors import EXIT_BAD_INPUT, EXIT_COMPLETE, UserError
from tlm_jax.evaluate.restored import load_model, read_checkpoint
from tlm_jax.train import loop
from tlm_jax.train.writers import read_records

DECAY = 0.8


def test_it_follows_the_weights_and_a_skipped_step_leaves_it_alone():
    _, mesh, state, step = build(small_config(ema_decay=DECAY), (2, 4))
    wanted = jax.device_get(state["params"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state["ema"]), wanted)
    with jax.set_mesh(mesh):
        for batch in batches(4):
            state, _ = step(state, place(batch, mesh))
            params = jax.device_get(state["params"])
            wanted = jax.tree.map(lambda e, p: DECAY * e + (1 - DECAY) * p, wanted, params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jax.device_get(state["ema"]), wanted)
        distance = jax.tree.map(lambda a, b: np.abs(a - b).max(), wanted, params)
        assert max(jax.tree.leaves(distance)) > 1e-3
        before = jax.device_get(state["ema"])
        state["params"]["embedding"] = state["params"]["embedding"].at[5].set(np.nan)
        state, metrics = step(state, place(batches(1)[0], mesh))
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state["ema"]), before)


def test_it_is_float32_and_lies_where_the_parameters_do():
    _, mesh, state, step = build(small_config(ema_decay=DECAY), (2, 4))
    with jax.set_mesh(mesh):
        state, _ = step(state, place(batches(1)[0], mesh))
    pairs = zip(jax.tree.leaves(state["ema"]), jax.tree.leaves(state["params"]), strict=True)
    for average, parameter in pairs:
        assert average.dtype == np.float32
        assert average.sharding.is_equivalent_to(parameter.sharding, parameter.ndim)
    assert "ema" not in build(small_config())[2]


@pytest.mark.slow
def test_validation_evaluation_and_generation_take_it(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    keys = (f"--config.train.ema_decay={DECAY}", "--config.validation.weights=ema")
    setup = setup_for(store, *keys)
    assert loop.train(setup, tmp_path / "run", "") == EXIT_COMPLETE
    saved, _ = saved_state(setup, tmp_path / "run")
    for weights, group in (("ema", "ema"), ("params", "params")):
        _, parameters, _ = load_model(read_checkpoint(tmp_path / "run", weights=weights), "fsdp")
        np.testing.assert_array_equal(parameters["embedding"], saved[f"['{group}']['embedding']"])
    validation = read_records(tmp_path / "run" / "metrics.jsonl")[-1]["validation"]
    found = {}
    for weights in ("ema", "params"):
        assert main(["eval", f"--checkpoint={tmp_path / 'run'}", f"--weights={weights}"]) == EXIT_COMPLETE
        found[weights] = capsys.readouterr().out
        assert f'"weights": "{weights}"' in found[weights]
        argv = ["generate", f"--checkpoint={tmp_path / 'run'}", f"--weights={weights}", "--max-new-tokens=4"]
        assert main(argv) == EXIT_COMPLETE
        capsys.readouterr()
    assert main(["eval", f"--checkpoint={tmp_path / 'run'}", "--step=best"]) == EXIT_COMPLETE
    out, error = capsys.readouterr()
    assert out == found["ema"], "the best by one set of weights is evaluated with another"
    assert "12, the moving average of its weights on" in error
    assert found["ema"].splitlines()[1] != found["params"].splitlines()[1]
    again = setup_for(store, keys[0], "--config.train.num_steps=12")
    assert loop.train(again, tmp_path / "again", "") == EXIT_COMPLETE
    other = read_records(tmp_path / "again" / "metrics.jsonl")[-1]
    assert other["validation"]["loss"] != validation["loss"]
    assert other["loss"] == read_records(tmp_path / "run" / "metrics.jsonl")[-1]["loss"]


@pytest.mark.slow
def test_a_checkpoint_without_it_says_so(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert loop.train(setup_for(store), tmp_path, "") == EXIT_COMPLETE
    assert not list((tmp_path / "checkpoints").glob("*/ema"))
    assert main(["eval", f"--checkpoint={tmp_path}", "--weights=ema"]) == EXIT_BAD_INPUT
    assert "has no moving average of the weights; set train.ema_decay" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("--config.validation.weights=ema", "config.validation.weights: no moving average is kept"),
        ("--config.validation.weights=emma", "'emma' is not one of params, ema"),
        ("--config.train.ema_decay=1.0", "config.train.ema_decay: must be in [0, 1), not 1.0"),
    ],
)
def test_what_cannot_be_is_told(store: Path, override: str, told: str):
    with pytest.raises(UserError) as error:
        setup_for(store, override)
    assert told in str(error.value)
