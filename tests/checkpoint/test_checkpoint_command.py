"""`tlm checkpoint`: what it shows, what it removes, what it refuses."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tlm_jax import files
from tlm_jax.capacity.from_config import profile_from_config
from tlm_jax.checkpoint import restore, retention
from tlm_jax.checkpoint.inventory import inventory
from tlm_jax.checkpoint.layout import Metadata, complete_steps, remove_checkpoint
from tlm_jax.checkpoint.manager import CheckpointManager
from tlm_jax.cli import main
from tlm_jax.config import default_config, to_json
from tlm_jax.errors import EXIT_BAD_INPUT, EXIT_COMPLETE, UserError
from tlm_jax.model.functional import FunctionalDecoder
from tlm_jax.model.settings import settings_from_config

LOSSES = {2: 3.0, 4: 2.0, 5: float("nan"), 6: 2.5, 7: None}


def model(stacking: str) -> FunctionalDecoder:
    config = default_config()
    config.profile.update(num_layers=3, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, multiple_of=16)
    config.model.vocab_size = 264
    config.model.layer_stacking = stacking
    return FunctionalDecoder(profile_from_config(config), settings_from_config(config, "cpu"))


def state(stacking: str) -> dict[str, Any]:
    parameters = jax.jit(model(stacking).init)(jax.random.key(0))
    optimizer = optax.adam(1e-3)
    moments = optimizer.update(parameters, optimizer.init(parameters), parameters)[1]
    average = jax.tree.map(lambda leaf: leaf / 2, parameters)
    return {"params": parameters, "ema": average, "optimizer": moments, "step": jnp.int32(3)}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workdir with checkpoints of the steps in `LOSSES`; those that 4 divides are permanent."""
    workdir = tmp_path_factory.mktemp("command") / "run"
    decoder, config = model("auto"), default_config()
    metadata = Metadata(to_json(config), decoder.profile.to_json(), "byte", b"", {"layer_stacking": "auto"})
    policy = {"every_steps": 4, "every_seconds": 0.0, "keep_last": 9, "timeout_seconds": 60.0}
    policy["measured_on"] = {"weights": "ema"}
    saved = state("auto")
    with CheckpointManager(workdir / "checkpoints", metadata=metadata, **policy) as manager:
        for step, loss in LOSSES.items():
            measured = {"loss": loss, "perplexity": 1.0, "bits_per_byte": 1.0}
            metrics = None if loss is None else retention.storable(measured)
            manager.save(step, saved, {"next_window": step}, force=True, metrics=metrics)
    return workdir


@pytest.fixture
def workdir(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "run"))


def tell(capsys: pytest.CaptureFixture[str], *argv: object, code: int = EXIT_COMPLETE, lines: int = 1) -> str:
    """What the command says: on standard output, or its one line of error, where it has told nothing before."""
    assert main(["checkpoint", *map(str, argv)]) == code
    out, error = capsys.readouterr()
    if code:
        assert error.count("\n") == lines
        return error
    return out


def test_list(workdir: Path, capsys: pytest.CaptureFixture[str]):
    (workdir / "checkpoints" / "8.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    (workdir / "checkpoints" / "2" / "metadata" / "data.json").write_text("{")
    header, *lines = tell(capsys, "list", workdir).splitlines()
    assert header.split() == ["step", "time", "size", "state", "validation/loss"]
    told = [[word for word in line.split() if not word.startswith("20")] for line in lines]
    assert [(words[0], *words[5:]) for words in told] == [
        ("2",),
        ("4", "2.0000", "permanent,", "best"),
        ("5",),
        ("6", "2.5000"),
        ("7",),
        ("8",),
    ]
    assert [words[4] for words in (told[0], told[2], told[5])] == ["damaged", "complete", "incomplete"]

    entries = json.loads(tell(capsys, "list", workdir / "checkpoints", "--json"))["checkpoints"]
    best = entries[1]
    size = sum(file.stat().st_size for file in (workdir / "checkpoints" / "4").rglob("*") if file.is_file())
    assert (best["step"], best["size"], best["permanent"], best["best"]) == (4, size, True, True)
    assert best["metrics"] == {"validation/loss": 2.0, "validation/perplexity": 1.0, "validation/bits_per_byte": 1.0}
    assert [entry["best"] for entry in entries].count(True) == 1
    assert entries[2]["metrics"]["validation/loss"] is None


def test_list_tells_what_cannot_be_compared(workdir: Path, capsys: pytest.CaptureFixture[str]):
    """The lowest of all was measured on other weights, and is not the best."""
    file = workdir / "checkpoints" / "4" / "metadata" / "data.json"
    values = json.loads(file.read_text())
    values["measured_on"] = {"weights": "params"}
    del values["digests"]
    file.write_text(json.dumps(values))
    lines = tell(capsys, "list", workdir).splitlines()[1:]
    ends = ["", "permanent, measured otherwise", "", "best", ""]
    for line, value, end in zip(lines, ["3.0000", "2.0000", "complete", "2.5000", "complete"], ends, strict=True):
        assert line.rstrip().endswith(f"{value}  {end}".rstrip()), line
    tell(capsys, "prune", workdir, "--keep-best=1")
    assert complete_steps(workdir / "checkpoints") == [4, 6, 7]


def change_a_bit_of(array: np.ndarray, directory: Path) -> None:
    """Random bits are stored as they are: nothing can compress them."""
    for file in directory.rglob("*"):
        content = bytearray(file.read_bytes() if file.is_file() else b"")
        place = content.find(array.tobytes()[1000:1032])
        if place >= 0:
            content[place] ^= 1
            file.write_bytes(content)
            return
    raise AssertionError("the array's bytes are nowhere")


def test_verify_names_the_damaged_array(workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert tell(capsys, "verify", workdir).splitlines() == [f"step {step}: as it was saved" for step in LOSSES]
    assert tell(capsys, "verify", workdir, "--step=best") == "step 4: as it was saved\n"
    assert tell(capsys, "verify", workdir / "checkpoints" / "5") == "step 5: as it was saved\n"
    os.truncate(workdir / "checkpoints" / "6" / "data" / "data.json", 3)
    assert "data/data.json cannot be read" in tell(capsys, "verify", workdir, "--step=6", code=EXIT_BAD_INPUT)
    file = workdir / "checkpoints" / "5" / "metadata" / "data.json"
    file.write_text(file.read_text().replace('"permanent": ', '"permanent": 1, "was": '))
    told = tell(capsys, "verify", workdir, "--step=5", code=EXIT_BAD_INPUT)
    assert "step 5: metadata/data.json is not what was saved" in told
    assert re.search(r"^ *5 .* damaged$", tell(capsys, "list", workdir), flags=re.MULTILINE)

    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-(2**31), 2**31, (64, 64), np.int32) for _ in range(3))
    metadata = Metadata("{}", "{}", "byte", b"")
    policy = {"every_steps": 1, "every_seconds": 0.0, "keep_last": 9, "timeout_seconds": 60.0}
    with CheckpointManager(tmp_path / "random", metadata=metadata, **policy) as manager:
        for step in (1, 2):
            manager.save(step, {"params": {"a": a, "b": b}, "moments": [{"c": c}]}, {})
    for array, name in ((b, "params.b"), (c, "moments.0.c")):
        change_a_bit_of(array, tmp_path / "random" / "2")
        told = tell(capsys, "verify", tmp_path / "random", code=EXIT_BAD_INPUT)
        assert f"1 of 2 damaged: step 2: {'params.b, ' * (array is c)}{name}; remove" in told


def test_verify_misses_and_finds_arrays_by_the_saved_checksums(workdir: Path, capsys: pytest.CaptureFixture[str]):
    file = workdir / "checkpoints" / "7" / "metadata" / "data.json"
    values = json.loads(file.read_text())
    del values["checksums"]["step"]
    del values["digests"]
    values["checksums"]["params.bias"] = 1
    values["checksums"]["params.final_norm.scale"] += 1
    file.write_text(json.dumps(values))
    assert main(["checkpoint", "verify", str(workdir), "--step=7", "--json"]) == EXIT_BAD_INPUT
    (result,) = json.loads(capsys.readouterr().out)
    assert sorted(result["damaged"]) == ["params.bias", "params.final_norm.scale", "step"]


def test_verify_tells_what_training_removed_from_damage(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """A checkpoint goes away when its arrays are about to be read."""
    load = restore._load

    def load_late(path: Path, items: dict[str, Any]) -> dict[str, Any]:
        if path.name in ("2", "7") and path.exists():
            remove_checkpoint(path)
        return load(path, items)

    monkeypatch.setattr(restore, "_load", load_late)
    told = tell(capsys, "verify", workdir, "--step=2", code=EXIT_BAD_INPUT, lines=2).splitlines()
    assert told[0] == "step 2: removed while it was being read"
    assert "checkpoints/2: the checkpoint was removed while it was being read; give the command again" in told[1]
    told = tell(capsys, "verify", workdir)
    assert told.splitlines() == [f"step {step}: as it was saved" for step in (4, 5, 6)]


def test_what_vanishes_while_it_is_listed_is_left_out(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A save becomes complete and another step is removed, at each moment in turn."""
    before, after = {"8": "complete", "9.orbax-checkpoint-tmp": "incomplete"}, {"9": "complete"}
    for moment in itertools.count():
        directory = tmp_path / str(moment)
        for name in before:
            (directory / name / "params").mkdir(parents=True)
            (directory / name / "params" / "array").touch()
            for part in ("_CHECKPOINT_METADATA", "metadata"):
                source, target = template / "checkpoints" / "4" / part, directory / name / part
                (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        with monkeypatch.context() as patched:
            changes = Interruption(patched, moment, directory)
            found = {entry.path.name: entry.state for entry in inventory(directory)}
        if not changes.made:
            assert found == before
            assert moment > 20
            break
        assert found.items() <= (before | after).items(), "what is being removed is no damage"
        assert not found.keys().isdisjoint({"9", "9.orbax-checkpoint-tmp"}), "what was completed meanwhile is missing"


class Interruption:
    """Changes a directory at the n-th look of the program at the file system."""

    def __init__(self, patched: pytest.MonkeyPatch, moment: int, directory: Path) -> None:
        self.made, self._left, self._directory = False, moment, directory
        for name in ("stat", "scandir", "listdir"):
            patched.setattr(os, name, partial(self._look, getattr(os, name)))

    def _look(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._left:
            self._left, self.made = -1, True
            (self._directory / "9.orbax-checkpoint-tmp").rename(self._directory / "9")
            remove_checkpoint(self._directory / "8")
        self._left -= 1
        return call(*args, **kwargs)


@pytest.mark.parametrize(
    ("keeps", "stay"),
    [
        (["--keep-last=1"], [7]),
        (["--keep-last=2", "--keep-best=2"], [4, 6, 7]),
        (["--keep-every=2"], [2, 4, 6, 7]),
        (["--keep-best=9"], [2, 4, 6, 7]),
        (["--keep-last=99"], [2, 4, 5, 6, 7]),
    ],
)
def test_prune(workdir: Path, capsys: pytest.CaptureFixture[str], keeps: list[str], stay: list[int]):
    directory = workdir / "checkpoints"
    told = tell(capsys, "prune", workdir, *keeps, "--dry-run")
    assert complete_steps(directory) == list(LOSSES)
    assert f"{len(LOSSES) - len(stay)} would be removed" in told
    told = tell(capsys, "prune", workdir, *keeps)
    assert complete_steps(directory) == stay
    assert f"{len(stay)} complete ones stay" in told
    assert sorted(path.name for path in directory.iterdir()) == sorted(map(str, stay))


def test_prune_counts_and_keeps_no_damaged_one(workdir: Path, capsys: pytest.CaptureFixture[str]):
    """The newest cannot be read: the newest of the others stays too."""
    (workdir / "checkpoints" / "7" / "metadata" / "data.json").write_text("{")
    tell(capsys, "prune", workdir, "--keep-last=1")
    assert complete_steps(workdir / "checkpoints") == [6, 7]


def test_prune_refuses_what_would_leave_nothing_or_is_not_said(workdir: Path, capsys: pytest.CaptureFixture[str]):
    assert "give one or more of --keep-last" in tell(capsys, "prune", workdir, code=EXIT_BAD_INPUT)
    with pytest.raises(SystemExit):
        main(["checkpoint", "prune", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "one is needed" in told
    assert "default" not in told
    assert "--keep-last: must be at least 1, not 0" in tell(
        capsys, "prune", workdir, "--keep-last=0", code=EXIT_BAD_INPUT
    )
    step = workdir / "checkpoints" / "4"
    assert "is a single checkpoint" in tell(capsys, "prune", step, "--keep-last=1", code=EXIT_BAD_INPUT)
    assert "no such directory" in tell(capsys, "prune", "", "--keep-last=1", code=EXIT_BAD_INPUT)
    assert complete_steps(workdir / "checkpoints") == list(LOSSES)


HOLDER = """
import pathlib, sys
from tlm_jax.files import only_one
with only_one(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_prune_leaves_a_run_alone_that_is_going_on(workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = [sys.executable, "-c", HOLDER, str(workdir)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        link, elsewhere = tmp_path / "link", tmp_path / "elsewhere"
        link.symlink_to(workdir / "checkpoints")
        for path in (workdir, workdir / "checkpoints", link):
            told = tell(capsys, "prune", path, "--keep-last=1", code=EXIT_BAD_INPUT)
            assert f"{workdir}: another process is at work here" in told
        tell(capsys, "prune", workdir, "--keep-last=1", "--dry-run")
        (workdir / "checkpoints").rename(elsewhere)
        (workdir / "checkpoints").symlink_to(elsewhere)
        (workdir / "config.json").touch()
        (workdir / "ckpt").symlink_to(elsewhere)
        for path in (workdir, workdir / "checkpoints", workdir / "ckpt"):
            told = tell(capsys, "prune", path, "--keep-last=1", code=EXIT_BAD_INPUT)
            assert f"{workdir}: another process is at work here" in told
        holder.kill()
    assert complete_steps(workdir / "checkpoints") == list(LOSSES)


@pytest.mark.parametrize("place", ["fcntl.lockf", "os.open"])
def test_prune_refuses_where_it_cannot_lock(
    workdir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: str
):
    unfinished = workdir / "checkpoints" / "8.orbax-checkpoint-tmp"
    unfinished.mkdir()

    def refuse(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patched:
        patched.setattr(f"tlm_jax.files.{place}", refuse)
        told = tell(capsys, "prune", workdir, "--keep-last=1", code=EXIT_BAD_INPUT)
        assert f"{workdir}: cannot be locked: No locks available (ENOLCK); make sure" in told
        with files.only_one(workdir):
            pass  # training goes on
    assert complete_steps(workdir / "checkpoints") == list(LOSSES)
    assert unfinished.exists()


def test_convert_there_and_back(workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one_by_one, back = tmp_path / "unrolled", tmp_path / "back"
    tell(capsys, "convert", workdir, f"--output={one_by_one}", "--layer-stacking=unrolled", "--step=best")
    assert complete_steps(one_by_one / "checkpoints") == [4]
    path = one_by_one / "checkpoints" / "4"
    wanted = state("unrolled")
    abstract = jax.eval_shape(lambda: wanted)
    # What is stored is what the unrolled model names, with nothing left to convert.
    assert set(restore.items_by_name(restore.restore_stored(path))) == set(
        restore.items_by_name(restore.split_items(abstract))
    )
    restored, data, metadata = restore.restore_state(path, abstract)
    jax.tree.map(np.testing.assert_array_equal, restored, wanted)
    assert jax.tree.structure(restored) == jax.tree.structure(wanted)
    assert (data, metadata.extra) == ({"next_window": 4}, {"layer_stacking": "unrolled"})
    assert json.loads(metadata.config)["model"]["layer_stacking"] == "unrolled"
    assert (one_by_one / "config.json").read_text() == metadata.config
    assert json.loads(tell(capsys, "list", one_by_one, "--json"))["checkpoints"][0]["permanent"]

    tell(capsys, "convert", one_by_one, f"--output={back}", "--layer-stacking=auto")
    wanted = state("auto")
    restored, _, _ = restore.restore_state(back / "checkpoints" / "4", jax.eval_shape(lambda: wanted))
    jax.tree.map(np.testing.assert_array_equal, restored, wanted)


def test_an_export_holds_the_weights_alone(workdir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = tmp_path / "weights"
    tell(capsys, "export", workdir, f"--output={output}")
    step = output / "checkpoints" / "7"
    assert sorted(path.name for path in step.iterdir() if path.is_dir()) == ["metadata", "params"]
    abstract = jax.eval_shape(lambda: state("auto"))
    with pytest.raises(UserError, match="holds weights only: training cannot go on from it; give the workdir"):
        restore.restore_state(step, abstract)
    parameters = restore.restore_parameters(output, jax.eval_shape(lambda: state("unrolled")["params"]))
    jax.tree.map(np.testing.assert_array_equal, parameters, state("unrolled")["params"])
    assert tell(capsys, "verify", output) == "step 7: as it was saved\n"
    assert "weights only" in tell(capsys, "list", output)
    assert "the output exists already" in tell(capsys, "export", workdir, f"--output={output}", code=EXIT_BAD_INPUT)
    assert "the output exists already" in tell(capsys, "convert", output, f"--output={workdir}", code=EXIT_BAD_INPUT)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    assert "the output exists already" in tell(capsys, "export", workdir, f"--output={other}", code=EXIT_BAD_INPUT)
    assert (other / "config.json").read_text() == "{}"
    blocked = tmp_path / "file"
    blocked.touch()
    assert str(blocked) in tell(capsys, "export", workdir, f"--output={blocked}", code=EXIT_BAD_INPUT)
    told = tell(capsys, "export", workdir, f"--output={tmp_path / 'ema'}", "--step=best")
    assert told.startswith("step 4 (moving average of the weights) in ")
    told = tell(capsys, "export", tmp_path / "ema", f"--output={tmp_path / 'again'}", "--step=best")
    assert told.startswith("step 4 in "), "an export has but one kind of weights"
    average = restore.restore_parameters(tmp_path / "ema", abstract["params"])
    jax.tree.map(np.testing.assert_array_equal, average, state("auto")["ema"])
    assert restore.read_metadata(tmp_path / "ema").extra["weights_only"] == "ema"
    nothing = tell(capsys, "export", output, f"--output={tmp_path / 'x'}", "--weights=ema", code=EXIT_BAD_INPUT)
    assert "no moving average" in nothing
    # Of a float32 weight and two moments a third is left, and half of that in bfloat16.
    tell(capsys, "export", output, f"--output={tmp_path / 'bfloat16'}", "--dtype=bfloat16")
    size = {
        path: sum(f.stat().st_size for f in path.rglob("params/**/d/*")) for path in (output, tmp_path / "bfloat16")
    }
    assert size[tmp_path / "bfloat16"] < 0.6 * size[output]
