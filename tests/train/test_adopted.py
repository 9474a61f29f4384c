"""Training, evaluation and generation on ids whose tokenizer is not known."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from whole_run import arguments

from tlm_jax.cli import main
from tlm_jax.errors import EXIT_COMPLETE
from tlm_jax.train.writers import read_records

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store of the documents "7 8 9 … " of various lengths, each ended by 0, and a run on it."""
    directory = tmp_path_factory.mktemp("adopted")
    rng = np.random.default_rng(0)
    ids = [i for _ in range(400) for i in (*range(7, 7 + rng.integers(2, 9)), 0)]
    np.array(ids, "<u2").tofile(directory / "train.bin")
    command = ["adopt", directory / "train.bin", "--vocab-size=20", "--separator=0", f"--output={directory / 'store'}"]
    assert main([str(part) for part in command]) == EXIT_COMPLETE
    # Little to compile and to save.
    keys = ["model.vocab_size=20", "train.num_steps=40", "train.optimizer=adamw", "profile.schedule=uniform"]
    keys += [
        "profile.plateaus=0",
        "validation.every_steps=0",
        "checkpoint.every_steps=40",
        "train.adam_learning_rate=0",
    ]
    overrides = [f"--config.{key}" for key in keys]
    assert main(arguments(directory / "store", directory / "run", *overrides)) == EXIT_COMPLETE
    return directory / "store", directory / "run"


def test_bits_per_byte_are_not_made_up(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    store, workdir = run
    records = read_records(workdir / "metrics.jsonl")
    assert all(record["bits_per_byte"] is None for record in records)
    assert records[-1]["validation"]["bits_per_byte"] is None
    assert records[-1]["validation"]["loss"] < 1.0 < records[0]["loss"]
    capsys.readouterr()
    assert main(["eval", f"--checkpoint={workdir}"]) == EXIT_COMPLETE
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["bits_per_byte"] is None
    assert found["bytes"] is None
    assert err.endswith("bytes of text: not known: the store has no byte counts, so no bits per byte\n")
    assert found["loss"] == pytest.approx(records[-1]["validation"]["loss"], abs=0.1)
    assert main(["eval", f"--checkpoint={workdir}", "--baselines"]) == 2
    assert f"{store}: the bytes of the text are not known; leave out --baselines" in capsys.readouterr().err


def test_generation_speaks_in_ids_and_comes_to_an_end(run: tuple[Path, Path], tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    command = ["generate", f"--checkpoint={run[1]}", "--prompt=", "--prompt=7 8", "--temperature=0", "--top-k=0"]
    assert main([*command, "--max-new-tokens=20", f"--output={output}"]) == EXIT_COMPLETE
    empty, begun = json.loads(output.read_text())
    assert re.fullmatch(r"7 8( [0-9]+)*", empty["completion"])
    # With spaces between, the last id of the prompt and the first of the completion too.
    assert re.fullmatch(r"7 8 [0-9]+( [0-9]+)*", begun["prompt"] + begun["completion"])
    assert re.fullmatch(r" 9( [0-9]+)*", begun["completion"])
    assert empty["finish_reason"] == begun["finish_reason"] == "end"


def test_a_prompt_that_is_no_id(run: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", f"--checkpoint={run[1]}", "--prompt=hello"]) == 2
    assert "'hello' is no id below 20; the tokenizer is not known" in capsys.readouterr().err
