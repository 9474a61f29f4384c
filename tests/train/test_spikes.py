"""A step whose loss is a spike changes nothing, and a run that is stopped between skips the same steps."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from whole_run import assert_same_end, computed_records, setup_for

from tlm_jax.errors import EXIT_COMPLETE
from tlm_jax.train import loop
from tlm_jax.train.step import spike_limit

KEYS = ("--config.train.spike_window=8", "--config.train.spike_deviations=10", "--config.train.num_steps=24")
SPIKE = 18


def test_the_limit_is_robust():
    losses = np.array([3.0, 3.1, 2.9, 3.05, 2.95, 3.0, 50.0, 3.02], np.float32)
    median = np.median(losses)
    expected = median + 10 * 1.4826 * np.median(np.abs(losses - median))
    assert float(spike_limit(jnp.array(losses), 10.0)) == pytest.approx(expected)
    assert float(spike_limit(jnp.array([*losses[:7], np.nan]), 10.0)) == np.inf


@pytest.mark.slow
def test_a_spike_changes_nothing_and_resumes(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tokens drawn at random are the spike: their loss is far above what text has come to by then."""
    steps = loop._steps

    def with_noise(*arguments):
        for step, batch in steps(*arguments):
            if step == SPIKE:
                noise = np.random.default_rng(0).integers(0, 272, batch["targets"].shape)
                batch["inputs"], batch["targets"] = noise.astype(np.int32), noise[::-1].astype(np.int32)
            yield step, batch

    monkeypatch.setattr(loop, "_steps", with_noise)
    setup = setup_for(store, *KEYS)
    assert loop.train(setup, tmp_path / "reference", "") == EXIT_COMPLETE
    records = computed_records(tmp_path / "reference")
    assert [record["step"] for record in records if "skipped_windows" in record] == [SPIKE]
    spike, after = records[SPIKE - 1 : SPIKE + 1]
    assert len(spike["skipped_windows"]) == 8
    assert spike["loss"] > spike["spike_limit"] > max(record["loss"] for record in records[SPIKE - 9 : SPIKE - 1])
    assert after["parameter_norm"] == spike["parameter_norm"]
    assert records[-1]["skipped_steps"] == 1

    def killed(*arguments):
        for step, batch in with_noise(*arguments):
            if step == SPIKE - 2:
                raise KeyboardInterrupt
            yield step, batch

    monkeypatch.setattr(loop, "_steps", killed)
    with pytest.raises(KeyboardInterrupt):
        loop.train(setup, tmp_path / "killed", "")
    monkeypatch.setattr(loop, "_steps", with_noise)
    assert loop.train(setup, tmp_path / "killed", "") == EXIT_COMPLETE
    assert_same_end(setup, tmp_path / "killed", tmp_path / "reference")
