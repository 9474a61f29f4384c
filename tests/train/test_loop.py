"""The loop asks the device for nothing but one read a step, one step late, and compiles its step once."""

from __future__ import annotations

import logging
import re
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src.array import ArrayImpl
from whole_run import computed_records, setup_for

from tlm_jax.checkpoint.inventory import inventory
from tlm_jax.checkpoint.layout import complete_steps
from tlm_jax.checkpoint.restore import find_checkpoint
from tlm_jax.data.store import TokenStore
from tlm_jax.errors import EXIT_COMPLETE, UserError
from tlm_jax.train import loop
from tlm_jax.train import metrics as metrics_module
from tlm_jax.train.writers import read_records

STEPS = 8
# Neither a save nor a validation before the last step.
QUIET = (
    f"--config.train.num_steps={STEPS}",
    "--config.checkpoint.every_steps=1000",
    "--config.checkpoint.every_seconds=0",
    "--config.validation.every_steps=0",
    "--config.log.every_steps=1",
)


def test_one_compilation_of_the_step_in_a_run(store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        assert loop.train(setup_for(store, "--config.validation.every_steps=2"), tmp_path, "") == EXIT_COMPLETE
    compiled = [
        record.getMessage() for record in caplog.records if record.getMessage().startswith("Compiling jit(step)")
    ]
    # The training step and the evaluation step share the name; each compiles once in twelve steps, six validations.
    assert len(compiled) == 2, compiled


def test_one_device_read_a_step_and_one_step_late(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    events: list[str] = []
    inside = 0
    read, make, value = metrics_module.read, loop.jitted_train_step, ArrayImpl._value

    def counted_read(step_metrics):
        nonlocal inside
        events.append("read")
        inside += 1
        try:
            return read(step_metrics)
        finally:
            inside -= 1

    def counted_make(*arguments):
        step = make(*arguments)

        def counted_step(*inputs):
            events.append("dispatch")
            return step(*inputs)

        return counted_step

    def counted_value(array):
        if not inside and "dispatch" in events and "end" not in events:
            events.append("stray read")
        return value.fget(array)

    def finished(*arguments):
        events.append("end")
        return {"loss": 0.0, "perplexity": 1.0, "bits_per_byte": 0.0, "tokens": 0, "bytes": 0}

    monkeypatch.setattr(metrics_module, "read", counted_read)
    monkeypatch.setattr(loop, "jitted_train_step", counted_make)
    monkeypatch.setattr(ArrayImpl, "_value", property(counted_value))
    monkeypatch.setattr(loop, "evaluate", finished)
    assert loop.train(setup_for(store, *QUIET), tmp_path, "") == EXIT_COMPLETE
    # Two steps are under way before the first is read; the last is read once nothing is left to dispatch.
    before_the_end = events[: events.index("end")]
    assert before_the_end == ["dispatch", *["dispatch", "read"] * (STEPS - 1), "read"]


def test_a_transfer_hidden_in_the_step_is_an_error(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make = loop.jitted_train_step

    def leaky(*arguments):
        step = make(*arguments)
        return lambda state, batch: step(state, dict(batch, mask=np.asarray(batch["mask"])))

    monkeypatch.setattr(loop, "jitted_train_step", leaky)
    with pytest.raises(Exception, match=r"Disallowed \S+-to-\S+ transfer"):
        loop.train(setup_for(store, *QUIET), tmp_path, "")


def test_the_peak_is_measured_where_nothing_says_it(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """On all devices: other tests say it, to save time."""
    assert jax.device_count() > 1
    assert loop.train(setup_for(store, "--config.log.peak_flops=0.0"), tmp_path, "") == EXIT_COMPLETE
    assert "measured 1024^3" in capsys.readouterr().err
    assert all(r["mfu_causal"] > 0 for r in read_records(tmp_path / "metrics.jsonl") if r["tokens_per_second"])


def test_records_hold_what_they_promise(store: Path, tmp_path: Path):
    setup = setup_for(store, "--config.log.tensorboard=True", "--config.log.peak_flops=1e9")
    assert loop.train(setup, tmp_path, "") == EXIT_COMPLETE
    records = read_records(tmp_path / "metrics.jsonl")
    config, profile = setup.config, setup.profile
    positions = config.train.global_batch_size * config.data.sequence_length
    causal, full = (profile.train_flops_per_token(config.data.sequence_length, causal=c) for c in (True, False))
    assert len(computed_records(tmp_path)) == config.train.num_steps
    for record in records:
        assert record["tokens"] == record["step"] * positions
        assert record["train_flops"] == record["tokens"] * causal
        assert record["loss"] > 0
        assert record["bits_per_byte"] > 0
        assert ("norms" in record) == (record["step"] % 4 == 0)
        if record["tokens_per_second"]:
            speed = record["tokens_per_second"]
            assert record["mfu_causal"] == pytest.approx(speed * causal / 1e9 / jax.device_count())
            assert record["mfu_full"] == pytest.approx(speed * full / 1e9 / jax.device_count())
            assert record["step_seconds"] == pytest.approx(positions / speed)
    # The first two steps compile and fill the pipeline: no speed is claimed for them.
    assert records[0]["tokens_per_second"] is None
    assert records[1]["tokens_per_second"] is None
    assert any(record["tokens_per_second"] for record in records)
    norms = records[3]["norms"]
    assert {kind: len(values) for kind, values in norms.items()} == dict.fromkeys(
        ("gradient", "update", "parameter"), len(profile.layers) + 1
    )
    assert np.sqrt(np.sum(np.square(norms["gradient"]))) == pytest.approx(records[3]["gradient_norm"], rel=1e-5)
    assert (tmp_path / "profile.json").exists()
    assert list((tmp_path / "tensorboard").iterdir())


def test_validation_is_outside_of_the_speed(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    evaluate = loop.evaluate

    def slow(*arguments):
        time.sleep(2)
        return evaluate(*arguments)

    monkeypatch.setattr(loop, "evaluate", slow)
    assert loop.train(setup_for(store, "--config.validation.every_steps=4"), tmp_path, "") == EXIT_COMPLETE
    speeds = [record["step_seconds"] for record in read_records(tmp_path / "metrics.jsonl") if record["step_seconds"]]
    assert speeds
    assert max(speeds) < 2


def test_a_checkpoint_knows_its_config_when_the_workdir_has_lost_it(store: Path, tmp_path: Path):
    assert loop.train(setup_for(store, "--config.train.num_steps=6"), tmp_path, "") == EXIT_COMPLETE
    (tmp_path / "config.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints" / "6")
    with pytest.raises(UserError, match=r"another config \(train\.beta1: 0\.9 -> 0\.5\)"):
        loop.train(setup_for(store, "--config.train.num_steps=6", "--config.train.beta1=0.5"), tmp_path, "")
    assert not (tmp_path / "config.json").exists()


def test_a_complete_run_gets_its_config_back(store: Path, tmp_path: Path):
    keys = ("--config.train.num_steps=6", "--config.validation.every_steps=0")
    assert loop.train(setup_for(store, *keys), tmp_path, "") == EXIT_COMPLETE
    written = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").unlink()
    (tmp_path / "metrics.jsonl.partial-1").touch()  # a process was killed while it wrote
    assert loop.train(setup_for(store, *keys), tmp_path, "") == EXIT_COMPLETE
    assert (tmp_path / "config.json").read_text() == written
    assert not list(tmp_path.glob("*.partial-*"))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("--config.mesh.expert=2",), "config.mesh.expert: no layer has experts"),
        (("--config.mesh.tensor=4",), "layer 0's num_kv_heads = 2 does not divide by 4"),
        (("--config.mesh.tensor=8", "--config.profile.num_heads=8"), "num_kv_heads = 2 does not divide by 8; near: 8"),
        (
            ("--config.mesh.fsdp=8", "--config.profile.d_model=36", "--config.profile.head_dim=8"),
            "layer 0's d_model = 36 does not divide by 8",
        ),
        (("--config.mesh.data=3",), "config.mesh: axes"),
        (("--config.train.global_batch_size=12",), "use a multiple of 8"),
        (("--config.train.learning_rate=0",), "config.train.learning_rate: must be above 0"),
        (("--config.train.optimizer=adamw",), "config.train.adam_learning_rate: adamw does not read it"),
        (("--config.seed=4294967296",), "config.seed"),
        (("--config.checkpoint.timeout_seconds=0",), "config.checkpoint.timeout_seconds"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(store: Path, overrides: tuple[str, ...], text: str):
    with pytest.raises(UserError, match=re.escape(text)):
        setup_for(store, *overrides)


def test_the_best_validation_is_saved_and_stays(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    values = iter([5.0, 3.0, float("nan"), 4.0, 3.0, 6.0])

    def evaluate(*_):
        return {"loss": next(values), "perplexity": 1.0, "bits_per_byte": 1.0, "tokens": 1, "bytes": 1}

    monkeypatch.setattr(loop, "evaluate", evaluate)
    keys = ("--config.validation.every_steps=2", "--config.checkpoint.every_steps=0", "--config.checkpoint.keep_last=1")
    assert loop.train(setup_for(store, *keys, "--config.checkpoint.keep_best=1"), tmp_path, "") == EXIT_COMPLETE
    assert complete_steps(tmp_path / "checkpoints") == [4, 12]
    assert find_checkpoint(tmp_path, "best").name == "4"
    for entry in inventory(tmp_path / "checkpoints"):
        fingerprint = TokenStore.open(str(store)).fingerprint
        assert entry.measured_on == {"weights": "params", "num_windows": 12, "data": fingerprint}
    with pytest.raises(UserError, match=r"config\.checkpoint\.keep_best: a run that is validated only at its end"):
        setup_for(store, "--config.validation.every_steps=0", "--config.checkpoint.keep_best=1")
