"""Profiler traces: at a chosen step, and on SIGUSR1 while the run goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from whole_run import setup_for

from tlm_jax.errors import EXIT_COMPLETE
from tlm_jax.train import loop


@pytest.mark.slow
def test_traces_at_a_step_and_on_a_signal(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    steps, before = loop._steps, signal.getsignal(signal.SIGUSR1)

    def with_signal(*arguments):
        for step, batch in steps(*arguments):
            if step == 8:
                os.kill(os.getpid(), signal.SIGUSR1)
            yield step, batch

    monkeypatch.setattr(loop, "_steps", with_signal)
    assert loop.train(setup_for(store, "--config.log.profile_at_step=3"), tmp_path, "") == EXIT_COMPLETE
    told = capsys.readouterr().err
    assert [line for line in told.splitlines() if line.startswith("profiler")] == [
        f"profiler trace from step {first} on: {tmp_path / 'profile'}" for first in (3, 8)
    ]
    assert [*(tmp_path / "profile").rglob("*.xplane.pb")]
    assert signal.getsignal(signal.SIGUSR1) is before
