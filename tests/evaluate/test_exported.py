"""Exported weights evaluate as the run's own, and say what they were rounded to."""

from __future__ import annotations

import json

from tlm_jax.cli import main


def evaluate(capsys, *argv) -> tuple[dict, str]:
    assert main(["eval", *map(str, argv)]) == 0
    out, error = capsys.readouterr()
    return json.loads(out), error


def test_the_same_numbers_from_the_weights_alone(run, tmp_path, capsys):
    keys = ("loss", "tokens", "bytes", "step")
    assert main(["checkpoint", "export", str(run.workdir), f"--output={tmp_path / 'whole'}"]) == 0
    assert main(["checkpoint", "export", str(run.workdir), f"--output={tmp_path / 'half'}", "--dtype=bfloat16"]) == 0
    capsys.readouterr()
    own, _ = evaluate(capsys, f"--checkpoint={run.workdir}")
    whole, told = evaluate(capsys, f"--checkpoint={tmp_path / 'whole'}")
    assert [whole[key] for key in keys] == [own[key] for key in keys]
    assert (whole["parameters_dtype"], "rounded" in told) == ("float32", False)

    own, _ = evaluate(capsys, f"--checkpoint={run.workdir}", "--dtype=bfloat16")
    half, told = evaluate(capsys, f"--checkpoint={tmp_path / 'half'}", "--dtype=bfloat16")
    assert [half[key] for key in keys] == [own[key] for key in keys]
    assert (half["parameters_dtype"], own["parameters_dtype"]) == ("bfloat16", "float32")
    assert "weights rounded to bfloat16" in told
    assert half["loss"] != whole["loss"]
    assert main(["generate", f"--checkpoint={tmp_path / 'half'}", "--max-new-tokens=2"]) == 0
