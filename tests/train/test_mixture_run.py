"""A run on a mixture: epochs in its records, resumed, evaluated; a changed mixture is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from whole_run import arguments, saved_state, setup_for, write_documents

from tlm_jax.cli import main
from tlm_jax.errors import EXIT_BAD_INPUT, EXIT_COMPLETE
from tlm_jax.train.writers import read_records

pytestmark = pytest.mark.slow
# Little to compile and to save.
KEYS = ["train.optimizer=adamw", "train.adam_learning_rate=0", "profile.schedule=uniform", "profile.plateaus=0"]
KEYS += ["validation.every_steps=0", "checkpoint.every_steps=3", "train.num_steps=6"]


def _mixture(stores: list[Path], *weights: float) -> str:
    pairs = tuple((str(store), weight) for store, weight in zip(stores, weights, strict=True))
    return f"--config.data.mixture={pairs!r}"


def _train(workdir: Path, mixture: str) -> int:
    command = [argument for argument in arguments(Path("-"), workdir) if "data.store" not in argument]
    return main([*command, mixture, *(f"--config.{key}" for key in KEYS)])


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    directory = tmp_path_factory.mktemp("mixture")
    made = []
    for name, count, holdout in (("large", 300, 0.1), ("small", 30, 0.0)):
        text = write_documents(directory / f"{name}.txt", count, seed=count)
        command = ["prepare", text, "--tokenizer=byte", "--split-text=line", f"--holdout={holdout}"]
        assert main([*map(str, command), f"--output={directory / name}"]) == EXIT_COMPLETE
        made.append(directory / name)
    return made


def test_epochs_are_recorded_and_a_changed_mixture_is_refused(
    stores: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = tmp_path / "run"
    assert _train(workdir, _mixture(stores, 3, 1)) == EXIT_COMPLETE
    told = capsys.readouterr().err
    assert "data large: 75.0% of windows, " in told
    assert "data small: 25.0% of windows, " in told
    records = read_records(workdir / "metrics.jsonl")
    small = [record["epochs"]["small"] for record in records]
    assert small == pytest.approx([small[0] * step for step in range(1, 7)])
    assert small[0] > records[0]["epochs"]["large"] > 0
    assert records[-1]["validation"]["tokens"] > 0

    shutil.rmtree(workdir / "checkpoints" / "6")
    shutil.copytree(stores[1], tmp_path / "moved")
    assert _train(workdir, _mixture(stores, 2, 2)) == EXIT_BAD_INPUT
    told = capsys.readouterr().err
    assert f"{workdir}: the saved position is of another corpus or mixture: components was 3/4 large (" in told
    assert "now 1/2 large (" in told
    assert _train(workdir, _mixture([stores[0], tmp_path / "moved"], 0.75, 0.25)) == EXIT_COMPLETE

    capsys.readouterr()
    assert main(["eval", f"--checkpoint={workdir}", "--baselines"]) == EXIT_COMPLETE
    found = json.loads(capsys.readouterr().out)
    assert found["bits_per_byte"] > 0
    assert found["baselines"]["bigram_bits_per_byte"] > 0
    assert found["data"] == f"{stores[0]} + {tmp_path / 'moved'}"


def test_the_saved_position_names_its_stores(stores: list[Path], tmp_path: Path) -> None:
    assert _train(tmp_path / "run", _mixture(stores, 3, 1)) == EXIT_COMPLETE
    setup = setup_for(Path(), _mixture(stores, 3, 1), *(f"--config.{key}" for key in (*KEYS, "data.store=")))
    _, data_state = saved_state(setup, tmp_path / "run")
    assert data_state["next_window"] == 48
    assert [(part["name"], part["share"]) for part in data_state["components"]] == [("large", "3/4"), ("small", "1/4")]
