"""`tlm compare` as its users call it: two variants, two seeds, stopped in the middle and called again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 16


def command(store, workdir, *more):
    config = ROOT / "tests" / "train" / "configs" / "tiny.py"
    return [
        sys.executable, "-m", "tlm_jax", "compare", f"--config={config}", f"--workdir={workdir}", "--seeds=2",
        "--vary=profile.schedule=uniform,cosine", f"--config.data.store={store}",
        f"--config.train.num_steps={STEPS}", "--config.profile.num_layers=2", "--config.profile.plateaus=0",
        "--config.validation.every_steps=0", "--config.checkpoint.every_steps=1000", *more,
    ]  # fmt: skip


def environment():
    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def records(workdir, variant, seed):
    return [json.loads(line) for line in (workdir / variant / f"seed-{seed}" / "metrics.jsonl").open()]


@pytest.mark.slow
def test_stopped_in_the_second_run_and_called_again(store, tmp_path):
    argv = command(store, tmp_path)
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        for line in process.stderr:
            if line.startswith("cosine, seed 0: 3 of 4 runs to go"):
                process.send_signal(signal.SIGTERM)
    assert process.returncode == 75
    finished = tmp_path / "uniform" / "seed-0"
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}

    done = subprocess.run(argv, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before
    assert "cosine, seed 0: 3 of 4 runs to go, about " in done.stderr

    for seed in (0, 1):
        uniform, cosine = (records(tmp_path, variant, seed) for variant in ("uniform", "cosine"))
        assert [r["step"] for r in uniform] == [r["step"] for r in cosine] == list(range(1, STEPS + 1))
        # The same text in the same order ...
        assert [r["targets"] for r in uniform] == [r["targets"] for r in cosine]
        # ... but other weights, of the MLPs.
        assert [r["loss"] for r in uniform] != [r["loss"] for r in cosine]
    # Another seed is another order and other initial weights.
    assert [r["targets"] for r in records(tmp_path, "uniform", 0)] != [
        r["targets"] for r in records(tmp_path, "uniform", 1)
    ]
    assert records(tmp_path, "uniform", 0)[0]["parameter_norm"] != records(tmp_path, "uniform", 1)[0]["parameter_norm"]

    whole = json.loads((tmp_path / "results.json").read_text())
    losses = {variant["name"]: [variant["runs"][str(seed)]["loss"] for seed in (0, 1)] for variant in whole["variants"]}
    assert len({loss for each in losses.values() for loss in each}) == 4
    pairs = [c - u for u, c in zip(losses["uniform"], losses["cosine"], strict=True)]
    found = whole["variants"][1]["difference"]
    assert found["values"] == pytest.approx(pairs)
    half = 12.7062 * abs(pairs[0] - pairs[1]) / 2  # two values: s / √2 is half their distance
    assert found["interval"] == pytest.approx([sum(pairs) / 2 - half, sum(pairs) / 2 + half], rel=1e-4)
    inside = found["interval"][0] <= 0 <= found["interval"][1]
    assert ("no difference seen with 2 seeds" in done.stdout) == inside


@pytest.mark.slow
def test_what_a_later_variant_lacks_is_told_before_the_first_run(store, tmp_path):
    workdir = tmp_path / "w"
    done = subprocess.run(
        command(store, workdir, "--variant=odd:train.gradient_accumulation=3"),
        capture_output=True, text=True, env=environment(), timeout=300,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "variant odd: config.train.global_batch_size: 8 sequences do not divide" in done.stderr
    assert not (workdir / "uniform").exists()
