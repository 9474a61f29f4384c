"""`tlm compare` as its users call it: two variants, stopped in the middle and called again.

That seeds differ in their configs is tested in test_plan, what is said of several seeds in test_summary.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tlm_jax.compare import check
from tlm_jax.config import load_config, to_json

CONFIG = Path(__file__).resolve().parents[1] / "train" / "configs" / "tiny.py"
STEPS = 12


def command(store, workdir):
    return [
        sys.executable, "-m", "tlm_jax", "compare", f"--config={CONFIG}", f"--workdir={workdir}", "--seeds=1",
        "--vary=profile.schedule=uniform,cosine", f"--config.data.store={store}",
        f"--config.train.num_steps={STEPS}", "--config.profile.num_layers=2", "--config.profile.plateaus=0",
        "--config.validation.every_steps=0", "--config.checkpoint.every_steps=1000",
    ]  # fmt: skip


def environment():
    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def records(workdir, variant):
    return [json.loads(line) for line in (workdir / variant / "seed-0" / "metrics.jsonl").open()]


@pytest.mark.slow
def test_stopped_in_the_second_run_and_called_again(store, tmp_path):
    argv = command(store, tmp_path)
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        for line in process.stderr:
            if line.startswith("cosine, seed 0: 1 of 2 runs to go"):
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 75
    finished = tmp_path / "uniform" / "seed-0"
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}

    done = subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    assert "cosine, seed 0: 1 of 2 runs to go, about " in done.stderr

    uniform, cosine = (records(tmp_path, variant) for variant in ("uniform", "cosine"))
    assert [r["step"] for r in uniform] == [r["step"] for r in cosine] == list(range(1, STEPS + 1))
    # The same text in the same order, but other weights, of the MLPs.
    assert [r["targets"] for r in uniform] == [r["targets"] for r in cosine]
    assert [r["loss"] for r in uniform] != [r["loss"] for r in cosine]

    whole = json.loads((tmp_path / "results.json").read_text())
    losses = [variant["runs"]["0"]["loss"] for variant in whole["variants"]]
    assert whole["variants"][1]["difference"]["values"] == pytest.approx([losses[1] - losses[0]])
    assert losses[0] != losses[1]
    assert "without a spread, no difference can be told from chance" in done.stdout


def test_what_a_variant_lacks_on_these_devices_is_told_once_by_name(store, monkeypatch, capsys):
    good = load_config(str(CONFIG), [f"--config.data.store={store}"])
    odd = load_config(str(CONFIG), [f"--config.data.store={store}", "--config.train.gradient_accumulation=3"])
    waiting = {"as it is": good, "odd": odd, "odd too": odd}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps([(name, to_json(c)) for name, c in waiting.items()])))
    assert check.main() == 2
    told = capsys.readouterr().err
    assert told.startswith("variant odd: config.train.global_batch_size: 8 does not divide")
    assert told.count("\n") == 1
    assert "odd too" not in told
