"""A longer run, and runs that branch from another one's checkpoint: as if they had been so from the beginning."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from ml_collections import ConfigDict
from whole_run import CONFIG, arguments, assert_same_bits, computed_records, saved_state, setup_for

from tlm_jax.checkpoint.layout import complete_steps
from tlm_jax.cli import main
from tlm_jax.config import load_config
from tlm_jax.errors import EXIT_BAD_INPUT, EXIT_COMPLETE
from tlm_jax.train import schedules
from tlm_jax.train.schedules import DECAY_SHAPES, SCHEDULES, first_changed_rate
from tlm_jax.train.workdir import FREE

QUIET = ("validation.every_steps=0", "checkpoint.every_steps=2", "checkpoint.keep_last=9", "train.warmup_steps=2")

COURSE = tuple(f"train.{key}" for key in schedules.COURSE)


def keys(**train: object) -> list[str]:
    """Overrides for keys of `config.train`, and what keeps the runs short."""
    return [f"--config.{each}" for each in QUIET] + [f"--config.train.{key}={value}" for key, value in train.items()]


TINY = str(CONFIG)
WSD = {"schedule": "wsd", "final_learning_rate_ratio": 0.0}


def run(store: Path, workdir: Path, *more: str, **train: object) -> int:
    return main([*arguments(store, workdir, *keys(**train)), *more])


def assert_same_run(store: Path, workdir: Path, reference: Path, first: int, **train: object) -> None:
    """The same end as the reference, bit for bit, and the same records from step `first` on."""
    setup = setup_for(store, *keys(**train))
    ours, theirs = saved_state(setup, workdir), saved_state(setup, reference)
    assert int(ours[0]["['step']"]) == train["num_steps"]
    assert_same_bits(ours[0], theirs[0])
    assert ours[1] == theirs[1]
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = {record["step"]: (record["loss"], record["learning_rate"]) for record in records}
    wanted = {record["step"]: (record["loss"], record["learning_rate"]) for record in computed_records(reference)}
    assert [losses[step] for step in range(first, train["num_steps"] + 1)] == list(wanted.values())[first - 1 :]


@pytest.fixture(scope="module")
def trunk(request: pytest.FixtureRequest, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 8 steps with checkpoints at 2, 4, 6 and 8: of WSD whose last 2 steps decay, or of another schedule."""
    workdir = tmp_path_factory.mktemp("trunk")
    schedule = getattr(request, "param", {"decay_steps": 2, **WSD})
    assert run(store, workdir, num_steps=8, **schedule) == EXIT_COMPLETE
    return workdir


@pytest.mark.parametrize(
    ("trunk", "decay"),
    [
        ({"decay_steps": 2, **WSD}, {"num_steps": 6, "decay_steps": 2}),
        ({"schedule": "constant"}, {"num_steps": 8, "decay_steps": 4}),
    ],
    indirect=["trunk"],
)
def test_a_decay_branched_from_a_wsd_run(store: Path, trunk: Path, tmp_path: Path, decay: dict[str, int]):
    assert run(store, tmp_path / "whole", **decay, **WSD) == EXIT_COMPLETE
    source = Path(shutil.copytree(trunk, tmp_path / "trunk"))
    branch = f"--resume-from={source / 'checkpoints' / '4'}"
    assert run(store, tmp_path / "branch", branch, **decay, **WSD) == EXIT_COMPLETE
    assert complete_steps(tmp_path / "branch" / "checkpoints") == list(range(4, decay["num_steps"] + 1, 2))
    assert_same_run(store, tmp_path / "branch", tmp_path / "whole", 5, **decay, **WSD)
    # The same command resumes the branch, which needs the other run no more.
    shutil.rmtree(source)
    shutil.rmtree(tmp_path / "branch" / "checkpoints" / str(decay["num_steps"]))
    assert run(store, tmp_path / "branch", branch, **decay, **WSD) == EXIT_COMPLETE
    assert_same_run(store, tmp_path / "branch", tmp_path / "whole", 5, **decay, **WSD)


@pytest.mark.parametrize("schedule", ["constant", "inverse_sqrt"])
def test_a_complete_run_is_made_longer(store: Path, tmp_path: Path, schedule: str):
    assert run(store, tmp_path / "whole", num_steps=8, schedule=schedule) == EXIT_COMPLETE
    for num_steps in (4, 8):
        assert run(store, tmp_path / "longer", num_steps=num_steps, schedule=schedule) == EXIT_COMPLETE
    assert_same_run(store, tmp_path / "longer", tmp_path / "whole", 1, num_steps=8, schedule=schedule)
    assert json.loads((tmp_path / "longer" / "config.json").read_text())["train"]["num_steps"] == 8


def test_what_would_change_steps_already_taken(store: Path, trunk: Path, tmp_path: Path, capsys):
    def told(workdir: Path, *more: str, **train: object) -> str:
        capsys.readouterr()
        assert run(store, workdir, *more, **train) == EXIT_BAD_INPUT
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    again = told(trunk, num_steps=16, decay_steps=2, **WSD)
    assert f"{trunk}: the directory holds a run of another config (train.num_steps: 8 -> 16): step 7, already" in again
    assert "already taken, would have had another learning rate; give another directory, or" in again
    for key in (*FREE, *COURSE):
        assert key in again
    assert "it has taken 8 steps already" in told(trunk, num_steps=7, decay_steps=1, **WSD)
    branch = f"--resume-from={trunk}/checkpoints/4"
    assert "step 4, already taken" in told(tmp_path / "a", branch, num_steps=6, decay_steps=3, **WSD)
    assert "(train.beta1: 0.9 -> 0.5); give" in told(
        tmp_path / "a", branch, num_steps=6, decay_steps=2, beta1=0.5, **WSD
    )
    assert "no such directory" in told(
        tmp_path / "a", f"--resume-from={tmp_path}/no", num_steps=6, decay_steps=2, **WSD
    )
    assert "path is empty" in told(tmp_path / "a", "--resume-from=", num_steps=6, decay_steps=2, **WSD)
    assert not list((tmp_path / "a").rglob("config.json"))
    assert complete_steps(tmp_path / "a" / "checkpoints") == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_which_schedules_can_go_on_to_more_steps(schedule: str):
    decay = {"decay_steps": 3} if schedule in ("wsd", "power") else {}
    configs = [load_config(TINY, keys(schedule=schedule, num_steps=num_steps, **decay)) for num_steps in (10, 20)]
    first = {"cosine": 3, "linear": 3, "wsd": 8, "power": 8}.get(schedule)
    assert first_changed_rate(*configs, 10) == first
    assert first_changed_rate(*configs, (first or 11) - 1) is None


@pytest.mark.parametrize("shape", DECAY_SHAPES)
def test_before_its_decay_wsd_is_constant_to_the_last_bit(shape: str):
    def config(**train: object) -> ConfigDict:
        return load_config(TINY, keys(num_steps=40, **train))

    constant = config(schedule="constant")
    for ratio in (0.1, 0.37, 0.73):
        wsd = config(schedule="wsd", decay_steps=10, decay_shape=shape, final_learning_rate_ratio=ratio)
        assert first_changed_rate(constant, wsd, 40) == 31, ratio


def test_the_guide_lists_what_may_change():
    guide = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()
    section = guide.partition("## Stopping and resuming\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"`((?:[a-z]+\.)?[a-z_]+)`", section.partition("What may change")[2].partition("\n\n")[0]))
    assert listed == {key.removesuffix(".") for key in (*FREE, *COURSE)}
