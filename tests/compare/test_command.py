"""`tlm compare`: which runs it makes, how it stops and goes on, what it writes. The runs are stubs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tlm_jax.cli import main
from tlm_jax.compare import command, execute
from tlm_jax.compare.page import build_page
from tlm_jax.data.prepare import Settings, prepare
from tlm_jax.data.tokenizer import ByteTokenizer

STUB = (sys.executable, str(Path(__file__).parent / "stub_tlm.py"))
TLM = execute.TLM
CONFIG = """
from tlm_jax.config import default_config

def get_config():
    c = default_config()
    c.name = "small"
    c.profile.num_layers, c.profile.d_model, c.profile.d_ff = 4, 32, 64
    c.profile.num_heads, c.profile.num_kv_heads = 4, 4
    c.model.vocab_size, c.data.sequence_length, c.train.num_steps = 272, 32, 8
    c.data.store = {store!r}
    return c
"""
VARY = "--vary=profile.schedule=uniform,cosine"


@pytest.fixture
def compare(tmp_path, monkeypatch, store):
    """Runs `tlm compare` with stubs; returns its exit code. `compare.calls()`: the commands that the stub was given."""
    (tmp_path / "small.py").write_text(CONFIG.format(store=str(store)))
    monkeypatch.setattr(execute, "TLM", STUB)
    monkeypatch.setattr(execute, "CHECK", (sys.executable, "-c", ""))
    monkeypatch.setattr(execute, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(command, "build_page", lambda summary, complete: "")  # takes seconds
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "calls"))

    def run(*arguments):
        return main(["compare", f"--config={tmp_path}/small.py", f"--workdir={tmp_path}/w", *arguments])

    def calls():
        path = tmp_path / "calls"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        path.unlink(missing_ok=True)
        folders = [call[2 if call[0] == "train" else 1].partition("=")[2] for call in found]
        return [(call[0], *Path(folder).parts[-2:]) for call, folder in zip(found, folders, strict=True)]

    run.calls = calls
    run.workdir = tmp_path / "w"
    return run


ALL = [
    (name, variant, f"seed-{seed}")
    for seed in (0, 1)
    for variant in ("uniform", "cosine")
    for name in ("train", "eval")
]


def signal_when(path: Path, text: str, send: Callable[[], None]) -> threading.Thread:
    """Sends a signal once `path` holds `text`."""

    def wait() -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and not (path.exists() and text in path.read_text()):
            time.sleep(0.02)
        send()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_every_variant_and_seed_is_trained_and_evaluated_once(compare, capsys):
    assert compare(VARY, "--seeds=2") == 0
    assert compare.calls() == ALL
    out, err = capsys.readouterr()
    row = next(line for line in out.splitlines() if line.startswith("cosine ")).split()
    assert row[:2] == ["cosine", "2"]
    assert row[-3:] == ["-0.0500", "[-0.0500,", "-0.0500]"]
    assert row[5:8] == ["3.0000", "±", "0.0707"]
    assert "cosine: lower than uniform by 0.0500 nats per token with 2 seeds, less than seeds differ" in out
    assert "uniform, seed 0: 4 of 4 runs to go, time left known after the first\n" in err
    assert re.search(r"cosine, seed 1: 1 of 4 runs to go, about \d+ s left\n", err)
    assert out == (compare.workdir / "results.txt").read_text()
    whole = json.loads((compare.workdir / "results.json").read_text())
    assert [variant["name"] for variant in whole["variants"]] == ["uniform", "cosine"]
    assert whole["variants"][1]["runs"]["1"]["loss"] == pytest.approx(3.05)
    assert (compare.workdir / "results.csv").read_text().startswith("variant,seeds,loss_mean,")


def test_what_is_complete_is_not_made_again_and_more_may_be_asked_for(compare, capsys):
    assert compare(VARY, "--seeds=1") == 0
    compare.calls()
    assert compare(VARY, "--seeds=1") == 0
    assert compare.calls() == []
    assert compare(VARY, "--variant=reversed:profile.start_ratio=0.5,profile.end_ratio=1.5", "--seeds=2") == 0
    assert [call[1:] for call in compare.calls()[::2]] == [
        ("reversed", "seed-0"), ("uniform", "seed-1"), ("cosine", "seed-1"), ("reversed", "seed-1"),
    ]  # fmt: skip
    assert re.search(r"reversed, seed 0: 4 of 6 runs to go, about \d+ s left\n", capsys.readouterr().err)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_run_and_the_same_command_goes_on(compare, capsys, monkeypatch, number):
    monkeypatch.setenv("STUB_SLOW", "cosine/seed-0")
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    thread = signal_when(
        compare.workdir / "cosine/seed-0/metrics.jsonl", '"step": 3', lambda: os.kill(os.getpid(), number)
    )
    assert compare(VARY, "--seeds=2") == 75
    thread.join()
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before
    assert compare.calls() == ALL[:3]
    assert "stopped at step 3, signals: 1\n" in (compare.workdir / "cosine/seed-0/log.txt").read_text()
    told = capsys.readouterr().err
    assert f"stopped on {signal.Signals(number).name}; go on with:\n  tlm compare " in told
    monkeypatch.delenv("STUB_SLOW")
    assert main(shlex.split(told.splitlines()[-1])[1:]) == 0
    assert compare.calls() == ALL[2:]


def program(compare, tlm):
    """A program that is `tlm compare` with `tlm` for its runs."""
    argv = ["compare", f"--config={compare.workdir.parent}/small.py", f"--workdir={compare.workdir}", VARY, "--seeds=1"]
    return (
        "import sys; from tlm_jax.cli import main; from tlm_jax.compare import execute; "
        f"execute.TLM, execute.CHECK = {tlm!r}, (sys.executable, '-c', ''); sys.exit(main({argv!r}))"
    )


def test_ctrl_c_reaches_the_run_once(compare, monkeypatch):
    """A terminal sends it to every process of the group; a second one would end a training without its save."""
    monkeypatch.setenv("STUB_SLOW", "cosine/seed-0")
    code = program(compare, STUB)
    metrics = compare.workdir / "cosine/seed-0/metrics.jsonl"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, process_group=0) as process:
        signal_when(metrics, '"step": 3', lambda: os.killpg(process.pid, signal.SIGINT)).join()
        told = process.communicate(timeout=240)[1].decode()
    assert process.returncode == 75, told
    assert "stopped on SIGINT" in told
    assert "stopped at step 3, signals: 1\n" in (compare.workdir / "cosine/seed-0/log.txt").read_text()


def test_a_killed_comparison_stops_its_run(compare, monkeypatch):
    monkeypatch.setenv("STUB_SLOW", "cosine/seed-0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *sys.path]))
    folder = compare.workdir / "cosine/seed-0"
    with subprocess.Popen([sys.executable, "-c", program(compare, (*TLM[:-1], "stub_tlm"))]) as process:
        signal_when(folder / "metrics.jsonl", '"step": 3', process.kill).join()
    assert process.returncode == -signal.SIGKILL
    signal_when(folder / "log.txt", "stopped at step 3, signals: 1\n", lambda: None).join(10)
    assert "stopped at step 3, signals: 1\n" in (folder / "log.txt").read_text()
    assert compare.calls() == ALL[:3]


def test_nothing_begins_beside_a_run_that_another_process_trains(compare, capsys):
    folder = compare.workdir / "cosine/seed-0"
    hold = (
        "import sys; from pathlib import Path; from tlm_jax.files import only_one\n"
        f"with only_one(Path({str(folder)!r})): print('held', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        assert compare(VARY, "--seeds=1") == 2
        other.communicate(b"\n")
    assert compare.calls() == []
    assert capsys.readouterr().err.startswith(f"tlm compare: error: {folder}: another process is at work here; wait")
    assert compare(VARY, "--seeds=1") == 0


def test_a_run_stopped_by_its_own_signal_stops_the_comparison(compare, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(execute, "TLM", (sys.executable, "-c", "raise SystemExit(75)"))
    assert compare(VARY) == 75
    assert "stopped on a signal to the run" in capsys.readouterr().err


def test_a_failed_run_keeps_no_other_from_being_made(compare, capsys, monkeypatch):
    monkeypatch.setenv("STUB_FAIL", "uniform/seed-0")
    assert compare(VARY, "--seeds=2") == 2
    assert compare.calls() == [ALL[0], *ALL[2:]]
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert last.startswith(
        f"tlm compare: error: {compare.workdir}: 1 of 4 runs failed: uniform, seed 0: the disk is full"
    )
    assert last.endswith("log.txt); the same command tries them again")
    assert re.search(r"^uniform +1 of 2 ", out, flags=re.MULTILINE)
    assert "one seed: without a spread" in out
    monkeypatch.delenv("STUB_FAIL")
    assert compare(VARY, "--seeds=2") == 0
    assert compare.calls() == ALL[:2]


def test_an_evaluation_without_a_loss_is_made_again(compare):
    assert compare(VARY, "--seeds=1") == 0
    compare.calls()
    path = compare.workdir / "cosine/seed-0/evaluation.json"
    whole = path.read_text()
    path.write_text(json.dumps({key: value for key, value in json.loads(whole).items() if key != "loss"}))
    assert compare(VARY, "--seeds=1") == 0
    assert compare.calls() == [("train", "cosine", "seed-0"), ("eval", "cosine", "seed-0")]
    assert path.read_text() == whole


def test_variants_that_are_the_same_model_are_told(compare, capsys):
    vary = "--vary=profile.schedule=uniform,cosine,linear"
    assert compare(vary, "--config.profile.plateaus=2", "--dry-run") == 0
    told = "WARNING: cosine and linear have the same layers and settings: their runs differ in nothing\n"
    assert capsys.readouterr().err == told
    assert compare(VARY, "--dry-run") == 0
    assert capsys.readouterr().err == ""


def test_a_killed_run_is_told(compare, capsys, monkeypatch):
    monkeypatch.setattr(execute, "TLM", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    assert compare(VARY, "--seeds=1") == 2
    err = capsys.readouterr().err
    told = "tlm train was ended by SIGKILL, as the system does when memory runs out (log: "
    assert f"uniform, seed 0: {told}" in err
    last = err.splitlines()[-1]
    assert last.startswith(f"tlm compare: error: {compare.workdir}: 2 of 2 runs failed: uniform, seed 0: {told}")
    assert last.endswith("log.txt); and 1 more, told above; the same command tries them again")


def test_what_the_devices_cannot_run_is_told_before_the_first_run(compare, capsys, monkeypatch):
    fail = "import sys; print('variant cosine: no such store', file=sys.stderr); sys.exit(2)"
    monkeypatch.setattr(execute, "CHECK", (sys.executable, "-c", fail))
    assert compare(VARY) == 2
    assert compare.calls() == []
    assert capsys.readouterr().err == "tlm compare: error: variant cosine: no such store\n"


def test_a_workdir_of_another_config_is_left_alone(compare, capsys):
    assert compare(VARY, "--seeds=1") == 0
    compare.calls()
    assert compare(VARY, "--seeds=2", "--config.train.learning_rate=1e-3") == 2
    assert "holds a run of another config (train.learning_rate: 0.0003 -> 0.001)" in capsys.readouterr().err
    assert compare.calls() == []


def test_the_weights_that_the_config_validates_are_evaluated(compare, capsys):
    changes = [VARY, "--seeds=1", "--config.train.ema_decay=0.9"]
    assert compare(*changes) == 0
    compare.calls()
    assert compare(*changes, "--config.validation.weights=ema") == 0
    assert [call for call in compare.calls() if call[0] == "eval"] == [ALL[1], ALL[3]]
    whole = json.loads((compare.workdir / "results.json").read_text())
    assert [variant["runs"]["0"]["weights"] for variant in whole["variants"]] == ["ema", "ema"]


def test_results_of_other_data_are_not_taken_for_this_datas(compare, capsys, make_store, store):
    assert compare(VARY, "--seeds=1") == 0
    compare.calls()
    capsys.readouterr()
    assert compare(VARY, "--seeds=1", f"--config.data.store={make_store(first=7)}") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"uniform/seed-0/evaluation.json: is of {store}, which does not hold what config.data names; give" in err
    assert compare.calls() == []
    # The same text elsewhere is the same data.
    assert compare(VARY, "--seeds=1", f"--config.data.store={make_store()}") == 0
    assert compare.calls() == []


def test_an_evaluation_without_a_fingerprint_is_made_again(compare):
    assert compare(VARY, "--seeds=1") == 0
    compare.calls()
    (compare.workdir / "cosine/seed-0/evaluation.json").write_text('{"loss": 3.0, "step": 8, "weights": "params"}')
    assert compare(VARY, "--seeds=1") == 0
    assert compare.calls() == ALL[2:4]


def test_dry_run_shows_commands_and_budgets_and_makes_nothing(compare, capsys):
    assert compare(VARY, "--seeds=2", "--dry-run") == 0
    out = capsys.readouterr().out
    assert out.count("\ntlm train ") == 4
    assert "training FLOPs per token, causal" in out
    assert not compare.workdir.exists()


def test_a_dry_run_finds_what_is_wrong_with_the_data(compare, capsys, tmp_path, store):
    (tmp_path / "text.txt").write_text("one document")
    none_held_out = tmp_path / "none"
    prepare([str(tmp_path / "text.txt")], ByteTokenizer(), none_held_out, Settings(holdout=0), workers=1)
    assert compare(VARY, "--dry-run", f"--config.data.store={none_held_out}", "--config.model.vocab_size=200") == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "variant uniform: config.model.vocab_size: 200 is less than the 259 ids" in told
    assert "the split 'validation' holds no document" in told
    assert "variant cosine" not in told  # told once
    assert compare(VARY, "--dry-run", "--config.data.store=") == 2
    assert "names no token store" in capsys.readouterr().err


def test_unequal_budgets_are_an_error_unless_asked_for(compare, capsys):
    assert compare("--vary=profile.d_ff=64,128", "--seeds=1") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "the budgets are not equal: 128 has " in err
    assert "--unequal-budgets" in err
    assert compare("--vary=profile.d_ff=64,128", "--seeds=1", "--unequal-budgets") == 0
    out, err = capsys.readouterr()
    assert out.startswith("WARNING: the budgets are not equal")
    assert err.startswith("WARNING: the budgets are not equal")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "tlm compare: error: a comparison needs at least two variants"),
        ([VARY, "--seeds=0"], "--seeds: must be at least 1, not 0"),
        ([VARY, "--confidence=95"], "--confidence: must lie between 0 and 1, not 95"),
        (["--vary=profile.schedule=uniform,cosin"], "variant cosin: config.profile.schedule: unknown schedule"),
        ([VARY, "--config.sed=1"], "unknown key config.sed"),
        ([VARY, "surplus"], "unknown argument 'surplus'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(compare, arguments, says, capsys):
    assert compare(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1
    assert not compare.workdir.exists()


class Text(HTMLParser):
    """The text of a page whose tags nest."""

    def __init__(self, source):
        super().__init__()
        self.open, self.text = [], ""
        self.feed(source)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


def test_the_page_tells_what_the_table_tells(compare, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "build_page", build_page)
    assert compare(VARY, "--variant=reversed:profile.schedule=cosine,profile.start_ratio=0.5,profile.end_ratio=1.5",
                   "--seeds=2") == 0  # fmt: skip
    source = (compare.workdir / "report.html").read_text()
    text = Text(source).text
    assert "http" not in source
    for told in (
        "3 variants × 2 seeds",
        "3.0000 ± 0.0707",
        "-0.0500 [-0.0500, -0.0500]",
        "cosine: lower than uniform by 0.0500 nats per token with 2 seeds",
        "reversed: no difference seen with 2 seeds.",
        "2 intervals: if no variant differed",
        "The budgets are equal",
        "profile.start_ratio",
    ):
        assert told in text
    assert len(re.findall("<svg", source)) == 2 * 6  # seeds, differences, loss twice, profiles, gradient norm
    assert "wins" not in text


def test_without_matplotlib_the_numbers_are_still_written(compare, capsys, monkeypatch):
    monkeypatch.setattr(command, "build_page", build_page)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert compare(VARY, "--seeds=1") == 0
    assert 'report.html: the report\'s charts need matplotlib; install it with: pip install "tlm_jax[report]"' in (
        capsys.readouterr().err
    )
    assert (compare.workdir / "results.json").exists()
    assert not (compare.workdir / "report.html").exists()


def test_it_leaves_the_devices_to_the_runs():
    """The process that waits imports no JAX, which would take an accelerator's memory from the runs."""
    code = (
        "import sys, tlm_jax.compare.command; "
        "found = {'jax', 'jaxlib', 'flax', 'orbax'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
