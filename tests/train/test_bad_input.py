"""Bad input to `tlm train`: exit code 2, one clear line, nothing lost.

Other rooms test what is theirs at their own commands: tokens that do not fit in a dtype, empty and broken text
(tests/data), profiles (tests/capacity), checkpoints that are missing or of another tokenizer (tests/evaluate).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from whole_run import (
    CONFIG,
    arguments,
    assert_same_bits,
    assert_same_end,
    environment,
    saved_state,
    setup_for,
    tlm,
    write_documents,
)

from tlm_jax.checkpoint.layout import complete_steps
from tlm_jax.cli import main
from tlm_jax.data.tokenizer import ByteTokenizer
from tlm_jax.errors import EXIT_BAD_INPUT, EXIT_COMPLETE
from tlm_jax.files import write_result
from tlm_jax.train.writers import read_records

Complain = Callable[..., str]


@pytest.fixture
def complaint(capsys: pytest.CaptureFixture[str]) -> Complain:
    """Runs `tlm`, expects exit code 2 and returns the line on stderr, before which only `eval` says what it does."""

    def run(*argv: str | Path) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in argv]) == EXIT_BAD_INPUT
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == (2 if err.startswith("evaluating ") else 1), err
        last = err.splitlines()[-1]
        assert last.startswith(f"tlm {argv[0]}: error: ")
        return last

    return run


@pytest.fixture
def copy(store: Path, tmp_path: Path) -> Path:
    """A token store to spoil."""
    return Path(shutil.copytree(store, tmp_path / "copy"))


@pytest.fixture(scope="module")
def run(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints at 3 and 6."""
    workdir = tmp_path_factory.mktemp("run")
    assert main(arguments(store, workdir, "--config.train.num_steps=6")) == EXIT_COMPLETE
    return workdir


def test_a_truncated_shard(copy: Path, tmp_path: Path, complaint: Complain):
    shard = copy / "train" / "00000.tokens"
    os.truncate(shard, shard.stat().st_size - 2)
    assert f"{shard}: the shard has " in complaint(*arguments(copy, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_another_tokenizer_in_the_store(copy: Path, tmp_path: Path, complaint: Complain):
    (copy / "tokenizer.json").write_text('{"kind": "byte", "vocab_size": 260}')
    assert "tokenizer.json: not the tokenizer that made this store; run" in complaint(
        *arguments(copy, tmp_path / "run")
    )


def test_a_corpus_that_changed_under_a_saved_index(store: Path, run: Path, tmp_path: Path, complaint: Complain):
    other = tmp_path / "other"
    text = str(write_documents(tmp_path / "other.txt", 300, seed=1))
    assert main(["prepare", text, "--tokenizer=byte", "--split-text=line", f"--output={other}"]) == EXIT_COMPLETE
    workdir = Path(shutil.copytree(run, tmp_path / "run"))
    shutil.rmtree(workdir / "checkpoints" / "6")
    before = (workdir / "metrics.jsonl").read_bytes()
    told = complaint(*arguments(other, workdir, "--config.train.num_steps=6"))
    assert f"{workdir}: the saved position is of another corpus or mixture: components was 1 store (" in told
    assert "now 1 other (" in told
    assert (workdir / "metrics.jsonl").read_bytes() == before
    assert complete_steps(workdir / "checkpoints") == [3]


def test_an_unknown_key_in_a_file_and_on_the_command_line(store: Path, tmp_path: Path, complaint: Complain):
    told = complaint(*arguments(store, tmp_path / "run", "--config.train.learning_rat=1"))
    assert "unknown key config.train.learning_rat; the nearest key is config.train.learning_rate" in told
    file = tmp_path / "wrong.py"
    file.write_text(CONFIG.read_text().replace("c.profile.num_heads", "c.profile.n_heads"))
    told = complaint("train", f"--config={file}", f"--workdir={tmp_path / 'run'}")
    assert told.startswith(f"tlm train: error: {file}: unknown key")
    assert "n_heads" in told
    assert "the nearest key is config.profile.num_heads" in told


def test_everything_wrong_with_a_config_at_once(copy: Path, tmp_path: Path, complaint: Complain):
    told = complaint(
        *arguments(
            copy / "nowhere", tmp_path / "run", "--config.profile.d_ff=100", "--config.profile.plateaus=0",
            "--config.profile.num_heads=5", "--config.mesh.data=3", "--config.train.optimizer=adm",
            "--config.log.every_steps=0",
        )
    )  # fmt: skip
    for key in ("profile.d_ff", "profile.num_heads", "mesh", "train.optimizer", "log.every_steps"):
        assert f"config.{key}: " in told, key
    assert f"{copy / 'nowhere'}: no such token store" in told
    assert "nearest" in told[told.index("config.profile.d_ff") :].split(" (")[0], "the d_ff that works is not named"


def test_check_config_needs_no_data_and_makes_nothing(copy: Path, run: Path, tmp_path: Path, complaint: Complain):
    check, nowhere = "--check-config", copy / "nowhere"
    told = complaint(*arguments(nowhere, tmp_path / "run", check, "--config.train.warmup_steps=99"))
    assert "config.train.warmup_steps: 99 is not between 0 and train.num_steps = 12; take fewer" in told
    assert "no such token store" not in told
    told = complaint(*arguments(nowhere, run, check, "--config.train.num_steps=6", "--config.seed=3"))
    assert "the directory holds a run of another config (seed: 0 -> 3)" in told
    assert main(arguments(nowhere, tmp_path / "run", check)) == EXIT_COMPLETE
    assert not (tmp_path / "run").exists()


def test_numbers_that_are_not_finite(store: Path, tmp_path: Path, complaint: Complain):
    keys = ("train.z_loss", "train.epsilon", "model.rope_theta", "model.norm_epsilon", "model.init_scale")
    keys += ("train.learning_rate", "train.beta1", "train.gradient_clip", "model.final_soft_cap", "log.peak_flops")
    for value in ("inf", "nan"):
        told = complaint(*arguments(store, tmp_path / "run", *(f"--config.{key}={value}" for key in keys)))
        for key in keys:
            assert f"config.{key}: must be " in told, key
        assert told.count(f", not {value}") == len(keys)


def test_numbers_that_are_too_large(store: Path, tmp_path: Path, complaint: Complain):
    keys = ("train.num_steps", "train.global_batch_size", "data.sequence_length", "validation.batch_size")
    told = complaint(*arguments(store, tmp_path / "run", *(f"--config.{key}=5000000000" for key in keys)))
    for key in keys:
        assert f"config.{key}: must be below 2^31, not 5000000000" in told, key
    keys = ("train.learning_rate", "profile.d_ff", "profile.group_ratios", "model.vocab_size", "train.groups")
    values = [f"{{'match': 'mlp', 'weight_decay': {10**400}}}" if key == "train.groups" else 10**400 for key in keys]
    told = complaint(
        *arguments(store, tmp_path / "run", *(f"--config.{k}={v}" for k, v in zip(keys, values, strict=True)))
    )
    for key in keys:
        assert f"config.{key} is beyond what 64 bits can hold" in told, key


def test_more_loader_processes_than_a_host_could_have(store: Path, tmp_path: Path, complaint: Complain):
    told = complaint(*arguments(store, tmp_path / "run", "--config.data.num_workers=1025"))
    assert "config.data.num_workers: must be at most 1024, not 1025; take no more than the host has CPUs" in told


def test_names_that_are_no_text(store: Path, tmp_path: Path, complaint: Complain):
    told = complaint(*arguments(store, tmp_path / "run", "--config.train.weight_decay_exclude=(1, 2)"))
    assert "config.train.weight_decay_exclude: 1 is no part of a parameter's name; give texts" in told


def test_a_tokenizer_larger_than_the_models_vocabulary(store: Path, tmp_path: Path, complaint: Complain):
    told = complaint(*arguments(store, tmp_path / "run", "--config.model.vocab_size=256"))
    assert "config.model.vocab_size: 256 is less than the 259 ids of the tokenizer of " in told
    assert "set it to at least 259" in told


def test_a_best_metric_that_the_store_cannot_have(tmp_path: Path, complaint: Complain):
    (np.arange(2000) % 20).astype("<u2").tofile(tmp_path / "train.bin")
    argv = ["adopt", str(tmp_path / "train.bin"), "--vocab-size=20", "--separator=0", f"--output={tmp_path / 'store'}"]
    assert main(argv) == EXIT_COMPLETE
    told = complaint(
        *arguments(tmp_path / "store", tmp_path / "run", "--config.checkpoint.best_metric=validation/bits_per_byte")
    )
    assert "config.checkpoint.best_metric: the bytes of the text are not known; take validation/loss" in told
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_too_large_for_the_dtype(tmp_path: Path, complaint: Complain, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ByteTokenizer, "vocab_size", 65_537)
    text = write_documents(tmp_path / "text.txt", 3)
    told = complaint("prepare", text, "--tokenizer=byte", "--dtype=uint16", f"--output={tmp_path / 'store'}")
    assert "--dtype: a vocabulary of 65537 does not fit in uint16; use uint32 or auto" in told
    assert not (tmp_path / "store").exists()


def test_empty_data(tmp_path: Path, complaint: Complain):
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert "empty.txt:1: empty file" in complaint("prepare", empty, "--tokenizer=byte", f"--output={tmp_path / 'a'}")
    store = tmp_path / "nothing held out"
    text = str(write_documents(tmp_path / "text.txt", 30))
    assert main(["prepare", text, "--tokenizer=byte", "--holdout=0", f"--output={store}"]) == EXIT_COMPLETE
    told = complaint(*arguments(store, tmp_path / "run"))
    assert f"{store}: the split 'validation' holds no document; prepare more text, or another --holdout" in told
    assert not (tmp_path / "run").exists()


def test_a_workdir_of_another_config(store: Path, run: Path, complaint: Complain):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    told = complaint(*arguments(store, run, "--config.train.learning_rate=1.0", "--config.profile.plateaus=4"))
    assert f"{run}: the directory holds a run of another config (" in told
    assert "train.learning_rate: 0.01 -> 1.0" in told
    assert "profile.plateaus: 2 -> 4" in told
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_model_that_no_memory_holds(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Of more bytes a device than an address can name: refused before a page of it is touched."""
    wide = ["--config.profile.d_model=32768", "--config.model.vocab_size=2147483616", "--config.mesh.data=-1"]
    assert main(arguments(store, tmp_path / "w", *wide, "--config.mesh.fsdp=1")) == EXIT_BAD_INPUT
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("tlm train: error: cpu device ")
    assert "memory does not suffice: Out of memory allocating 281474972516352 bytes (262,144.00 GiB)" in told
    assert "lower config.data.sequence_length or config.train.global_batch_size" in told


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full")
def test_a_full_standard_output():
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "tlm_jax", "profile", f"--config={CONFIG}"]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == EXIT_BAD_INPUT
    assert done.stderr == "tlm profile: error: standard output: the disk is full (ENOSPC)\n"


def test_a_result_written_into_a_pipe(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_result(str(pipe), "text\n")
    assert os.read(reader, 100) == b"text\n"
    os.close(reader)
    assert pipe.is_fifo()


HOLDER = """
import pathlib, sys
from tlm_jax.files import only_one
with only_one(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_workdir_in_which_another_process_trains(store: Path, run: Path, complaint: Complain):
    argv = [sys.executable, "-c", HOLDER, str(run)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        told = complaint(*arguments(store, run, "--config.train.num_steps=6"))
        assert f"{run}: another process is at work here; wait until it has ended, stop it, or give another" in told
        holder.kill()
    assert main(arguments(store, run, "--config.train.num_steps=6")) == EXIT_COMPLETE


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "config is not an object"),
        ('{"train": 5}', "config.train is not an object"),
        ('{"seed": "x"}', 'config.seed is no int: "x"'),
        ("{", "not JSON: Expecting property name"),
        (f'{{"seed": {10**30}}}', "config.seed is beyond what 64 bits can hold"),
        (f'{{"train": {{"learning_rate": {10**400}}}}}', "config.train.learning_rate is beyond what 64 bits can hold"),
    ],
)
def test_a_damaged_config_in_the_workdir(store: Path, tmp_path: Path, complaint: Complain, text: str, told: str):
    path = tmp_path / "config.json"
    path.write_text(text)
    message = complaint(*arguments(store, tmp_path))
    assert f"{path}: {told}" in message
    assert message.endswith("; give another --workdir, or delete it")
    assert path.read_text() == text


def test_a_missing_and_a_corrupt_checkpoint(store: Path, run: Path, tmp_path: Path, complaint: Complain):
    assert "no such directory" in complaint("eval", f"--checkpoint={tmp_path / 'nowhere'}")
    workdir = Path(shutil.copytree(run, tmp_path / "run"))
    for file in (workdir / "checkpoints" / "6" / "params").rglob("*"):
        if file.is_file():
            os.truncate(file, file.stat().st_size // 2)
    argv = arguments(store, workdir, "--config.train.num_steps=6")
    latest = workdir / "checkpoints" / "6"
    for command in (["eval", f"--checkpoint={workdir}"], argv):
        told = complaint(*command)
        assert f"{latest}: the checkpoint is damaged: " in told
        assert f"checkpoint before it is step 3: remove {latest} to go on from there" in told
    shutil.rmtree(latest)
    assert main(argv) == EXIT_COMPLETE
    assert_same_end(setup_for(store, "--config.train.num_steps=6"), workdir, run)


def test_losses_that_stay_infinite(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    argv = arguments(
        store, tmp_path, "--config.train.optimizer=adamw", "--config.train.learning_rate=1e30",
        "--config.train.adam_learning_rate=0",
        "--config.train.max_nonfinite_steps=3", "--config.checkpoint.every_steps=1", "--config.train.warmup_steps=0",
        "--config.train.num_steps=20",
    )  # fmt: skip
    assert main(argv) == EXIT_BAD_INPUT
    told = capsys.readouterr().err
    assert "Traceback" not in told
    records = read_records(tmp_path / "metrics.jsonl")
    skipped = [record for record in records if "skipped_windows" in record]
    assert len(skipped) == 3
    last = skipped[-1]["step"]
    assert told.splitlines()[-1].startswith(
        f"tlm train: error: {tmp_path}: loss or gradient was not finite in 3 steps in a row, up to step {last}; "
    )
    assert all(len(record["skipped_windows"]) == 8 for record in skipped)
    assert all(record["loss"] is None or record["gradient_norm"] is None for record in skipped)
    setup = setup_for(
        store, "--config.train.optimizer=adamw", "--config.train.adam_learning_rate=0", "--config.train.num_steps=20"
    )
    before, _ = saved_state(setup, tmp_path, last - 3)
    after, _ = saved_state(setup, tmp_path, last - 1)
    counters = ("['step']", "['skipped']", "['skipped_row']")
    assert_same_bits(*({k: v for k, v in state.items() if k not in counters} for state in (before, after)))


# No file may grow beyond so many bytes. Python turns the signal that comes with it into an OSError.
LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
os.execv(sys.executable, [sys.executable, "-m", "tlm_jax", *sys.argv[2:]])
"""


def tlm_limited(limit: int, *argv: str) -> subprocess.CompletedProcess[str]:
    """Runs the command under a file-size limit, which would apply to the compilation cache as well."""
    without_cache = environment() | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    return subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), *argv],
        capture_output=True, text=True, check=False, timeout=300, env=without_cache,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "every_steps", "told"),
    [
        (100_000, 3, "the checkpoint of step 3 could not be written: "),
        (5_000, 1000, "metrics.jsonl: cannot be written"),  # beyond config.json and profile.json
    ],
)
def test_no_room_for_what_a_run_writes(store: Path, tmp_path: Path, limit: int, every_steps: int, told: str):
    argv = arguments(store, tmp_path / "run", "--config.train.num_steps=24", "--config.log.tensorboard=True")
    argv.append(f"--config.checkpoint.every_steps={every_steps}")
    done = tlm_limited(limit, *argv)
    assert done.returncode == EXIT_BAD_INPUT, done.stderr
    *before, last = done.stderr.splitlines()
    assert last.startswith("tlm train: error: ")
    assert told in last
    assert "(EFBIG)" in last
    assert all(line.startswith(("tiny: ", "peak ", "data ", "step ")) for line in before), done.stderr
    again = tlm(*argv)
    assert again.returncode == EXIT_COMPLETE, again.stderr


def test_a_tensorboard_directory_that_cannot_be(store: Path, tmp_path: Path, complaint: Complain):
    (tmp_path / "tensorboard").touch()
    told = complaint(*arguments(store, tmp_path, "--config.log.tensorboard=True"))
    assert f"{tmp_path / 'tensorboard'}: cannot be written: File exists (EEXIST); remove the cause" in told


def test_no_room_for_a_token_store(tmp_path: Path):
    text = write_documents(tmp_path / "text.txt", 1000)
    argv = ["prepare", str(text), "--tokenizer=byte", "--split-text=line", f"--output={tmp_path / 'store'}"]
    done = tlm_limited(20_000, *argv)
    assert done.returncode == EXIT_BAD_INPUT, done.stderr
    assert "store: cannot be written: a file would be larger" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert tlm(*argv).returncode == EXIT_COMPLETE
