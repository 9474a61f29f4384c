"""A whole run through the real command, and what is left of it: state, data index, records."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tlm_jax.checkpoint.restore import find_checkpoint, restore_state
from tlm_jax.config import load_config
from tlm_jax.train.setup import Setup, build
from tlm_jax.train.writers import read_records

CONFIG = Path(__file__).parent / "configs" / "tiny.py"
# What depends on when and where a step ran, not on what it computed.
OF_THE_MOMENT = ("time", "tokens_per_second", "step_seconds", "mfu_causal", "mfu_full", "data_wait_seconds")
OF_THE_MOMENT += ("memory_bytes",)

WORDS = "the a whale sea ship captain said to and of in was it his old white great deep naïve, end. Oh! café"


def write_documents(path: Path, count: int, seed: int = 0) -> Path:
    """Lines of 1 to 30 words, each to be a document of its own."""
    chance = random.Random(seed)
    path.write_text(
        "".join(" ".join(chance.choices(WORDS.split(), k=chance.randint(1, 30))) + "\n" for _ in range(count))
    )
    return path


def arguments(store: Path, workdir: Path, *overrides: str) -> list[str]:
    """The arguments of `tlm` that train the small model."""
    return ["train", f"--config={CONFIG}", f"--workdir={workdir}", f"--config.data.store={store}", *overrides]


def environment() -> dict[str, str]:
    """One CPU device, and every compiled program kept for the next process."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def tlm(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs the command in a process of its own, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tlm_jax", *argv],
        capture_output=True, text=True, check=False, timeout=300, env=environment(),
    )  # fmt: skip


def setup_for(store: Path, *overrides: str) -> Setup:
    """The small run on this process's devices."""
    return build(load_config(str(CONFIG), [f"--config.data.store={store}", *overrides]))


def saved_state(setup: Setup, workdir: Path, step: int | None = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The train state of a checkpoint as arrays by path, and its data index."""
    state, data_state, _ = restore_state(find_checkpoint(workdir, step), setup.abstract)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}, data_state


def assert_same_bits(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, array in left.items():
        assert array.dtype == right[name].dtype, name
        assert array.tobytes() == right[name].tobytes(), name


def assert_same_end(setup: Setup, workdir: Path, reference: Path, stops: Sequence[int] = ()) -> None:
    """Two runs ended in the same parameters, optimizer state and data index, bit for bit, and logged the same.

    At the steps in `stops` the run was stopped by a signal, which leaves no time for a validation.
    """
    state, data_state = saved_state(setup, workdir)
    reference_state, reference_data_state = saved_state(setup, reference)
    assert int(state["['step']"]) == setup.config.train.num_steps
    assert_same_bits(state, reference_state)
    assert data_state == reference_data_state
    wanted = computed_records(reference)
    for step in stops:
        wanted[step - 1].pop("validation", None)
    assert computed_records(workdir) == wanted


def computed_records(workdir: Path) -> list[dict[str, Any]]:
    """`metrics.jsonl` without what depends on the moment; each step once, or it is an error."""
    records = read_records(workdir / "metrics.jsonl")
    assert len(records) == len((workdir / "metrics.jsonl").read_text().splitlines()), "a line that is no record"
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [{key: value for key, value in record.items() if key not in OF_THE_MOMENT} for record in records]
