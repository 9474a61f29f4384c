"""The launch scripts for GPUs, on stand-ins for the driver, Slurm and `tlm`: nothing is installed or trained."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stand_ins import CONFIG, LAUNCH, commands, executable, names, wait_for


def starter(script: str, folder: Path, environment: dict[str, str]) -> Callable[..., subprocess.Popen[str]]:
    """Starts a launch script in a folder, with what lies in its `bin` first on PATH."""
    variables = environment | {"PATH": f"{folder / 'bin'}:{environment['PATH']}"}

    def start(*arguments: str, **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(LAUNCH / script), *arguments],
            cwd=folder,
            env=variables | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


# --- gpu_node.sh ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu_node(tmp_path, environment):
    """Starts launch/gpu_node.sh in an empty folder, on a machine with one GPU and an environment that is ready."""
    executable(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: stand-in'\n")
    venv = Path(environment["TLM_VENV"])
    (venv / ".tlm_accelerator").write_text(f"cuda12 {(venv / '.tlm_requirements').read_text()}")
    return starter("gpu_node.sh", tmp_path, environment)


TRAINING = (CONFIG, "--workdir=run", "--config.mesh.fsdp=8")


def test_gpu_node_trains_to_the_end(gpu_node, environment):
    out, errors = (script := gpu_node(*TRAINING)).communicate(timeout=240)
    assert script.returncode == 0, errors
    assert "GPU 0: stand-in" in out
    assert "tlm eval --checkpoint=run" in out
    wanted = ["train", f"--config={CONFIG}", "--workdir=run", "--config.mesh.fsdp=8"]
    assert commands(Path(environment["TLM_LOG"])) == [wanted]


def test_gpu_node_starts_again_what_was_preempted(gpu_node, tmp_path, environment):
    """The training alone gets the signal, as from whoever takes the machine's devices away."""
    script = gpu_node(CONFIG, f"--workdir={tmp_path}/run")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(metrics)
    subprocess.run(["pkill", "-TERM", "-f", f"stub_tlm.py train .*--workdir={tmp_path}/run"], check=True)
    out, errors = script.communicate(timeout=240)
    assert script.returncode == 0, errors
    assert "it exited with 75, saved and resumable; start 2" in out
    assert names(commands(Path(environment["TLM_LOG"]))) == ["train", "train"]
    assert [json.loads(line)["step"] for line in metrics.open()] == list(range(1, 101))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_gpu_node_passes_a_signal_on_and_is_resumable(gpu_node, tmp_path, number):
    script = gpu_node(*TRAINING)
    wait_for(tmp_path / "run" / "metrics.jsonl")
    script.send_signal(number)
    _, errors = script.communicate(timeout=240)
    assert script.returncode == 75
    assert f"launch/gpu_node.sh {' '.join(TRAINING)}" in errors
    assert 0 < int((tmp_path / "run" / "saved_step").read_text()) < 100


def test_gpu_node_gives_up_and_passes_other_codes_on(gpu_node, environment):
    for code, starts, told in (("75", 3, "stopped early 3 times, and --restarts is 2"), ("2", 1, "with exit code 2")):
        Path(environment["TLM_LOG"]).unlink(missing_ok=True)
        script = gpu_node(*TRAINING, "--restarts=2", TLM_FAIL="train", TLM_FAIL_CODE=code)
        _, errors = script.communicate(timeout=240)
        assert script.returncode == int(code)
        assert told in errors
        assert len(commands(Path(environment["TLM_LOG"]))) == starts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no config"),
        (["missing.py"], "no such config file: missing.py"),
        ([CONFIG], "--workdir says where the run goes"),
        ([CONFIG, "--workdir=w", "--cuda=11"], "--cuda takes 12 or 13, not 11"),
        ([CONFIG, "--workdir=w", "--restarts=-1"], "--restarts takes a number, not -1"),
        ([CONFIG, "--workdir"], "--workdir needs a value"),
        ([CONFIG, "--gpus=8"], "unknown option --gpus"),
    ],
)
def test_gpu_node_says_what_is_wrong_in_one_line(gpu_node, arguments, message):
    script = gpu_node(*arguments)
    _, errors = script.communicate(timeout=240)
    assert script.returncode == 2
    assert message in errors
    assert errors.count("\n") == 1


def test_gpu_node_without_a_gpu(gpu_node, tmp_path):
    executable(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\nexit 9\n")
    script = gpu_node(*TRAINING)
    _, errors = script.communicate(timeout=240)
    assert script.returncode == 2
    assert "finds no GPU here" in errors


def test_gpu_node_dry_run(gpu_node, environment):
    out, _ = (script := gpu_node(*TRAINING, "--cuda=13", "--dry-run")).communicate(timeout=240)
    assert script.returncode == 0
    assert out.splitlines() == [
        f"$ TLM_ACCELERATOR=cuda13 {LAUNCH}/environment.sh",
        f"$ tlm train --config={CONFIG} --workdir=run --config.mesh.fsdp=8",
    ]
    assert commands(Path(environment["TLM_LOG"])) == []


def test_what_an_accelerator_needs_is_installed_once_and_as_pinned(tmp_path, environment):
    python = Path(environment["TLM_VENV"]) / "bin" / "python"
    executable(
        python,
        f'#!/bin/sh\ncase "$*" in *"pip install"*) echo "$@" >> {tmp_path}/pip ;; '
        f'*) exec {sys.executable} "$@" ;; esac\n',
    )
    for _ in range(2):
        subprocess.run([str(LAUNCH / "environment.sh")], env=environment | {"TLM_ACCELERATOR": "cuda12"}, check=True)
    (call,) = (tmp_path / "pip").read_text().splitlines()
    assert call.endswith(f"jax[cuda12]=={importlib.metadata.version('jax')}")


# --- slurm.sh ---------------------------------------------------------------------------------------------------------

SBATCH = """#!/usr/bin/env bash
# Notes its arguments and runs a copy of the script at once, as the job.
printf '%s\\n' "$@" >sbatch_arguments
while [ "${1%slurm.sh}" = "$1" ]; do shift; done
mkdir -p spool && cp "$1" spool/slurm_script
shift
SLURM_JOB_ID=7 exec bash spool/slurm_script "$@" >job.out 2>&1
"""
SRUN = """#!/usr/bin/env bash
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""


@pytest.fixture
def slurm(tmp_path, environment, gpu_node):
    """Starts launch/slurm.sh in an empty folder, with stand-ins for Slurm's commands that run the job at once."""
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", '#!/bin/sh\necho "$@" >>scontrol_calls\n')):
        executable(tmp_path / "bin" / name, text)
    return starter("slurm.sh", tmp_path, environment)


JOB = (CONFIG, "--workdir=run", "--nodes=4", "--sbatch=--gpus-per-node=8", "--config.mesh.fsdp=32")


def test_slurm_submits_and_the_job_trains_to_the_end(slurm, tmp_path, environment):
    out, errors = (script := slurm(*JOB)).communicate(timeout=240)
    assert script.returncode == 0, errors + (tmp_path / "job.out").read_text()
    asked = (tmp_path / "sbatch_arguments").read_text().splitlines()
    wanted = ["--nodes=4", "--ntasks-per-node=1", "--requeue", "--signal=B:TERM@300", "--gpus-per-node=8"]
    assert set(wanted) <= set(asked)
    assert asked[-len(JOB) :] == list(JOB)
    assert "squeue --me" in out
    training = ["train", "--distributed", f"--config={CONFIG}", "--workdir=run", "--config.mesh.fsdp=32"]
    assert commands(Path(environment["TLM_LOG"])) == [training]
    assert (
        "srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=300 tlm train --distributed"
        in (tmp_path / "job.out").read_text()
    )


def test_slurm_requeues_a_job_that_is_told_to_stop(slurm, tmp_path, environment):
    """Slurm's signal reaches the batch shell alone; the job that comes again goes on."""
    arguments = (CONFIG, f"--workdir={tmp_path}/run", "--nodes=4")
    script = slurm(*arguments)
    wait_for(tmp_path / "run" / "metrics.jsonl")
    subprocess.run(["pkill", "-TERM", "-f", f"spool/slurm_script .*--workdir={tmp_path}/run"], check=True)
    script.communicate(timeout=240)
    assert (tmp_path / "scontrol_calls").read_text() == "requeue 7\n"
    assert 0 < int((tmp_path / "run" / "saved_step").read_text()) < 100
    again = slurm(*arguments)
    _, errors = again.communicate(timeout=240)
    assert again.returncode == 0, errors
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert steps == list(range(1, 101))


def test_slurm_starts_again_what_one_nodes_notice_stopped(slurm, tmp_path, environment):
    script = slurm(CONFIG, f"--workdir={tmp_path}/run", "--nodes=4")
    wait_for(tmp_path / "run" / "metrics.jsonl")
    subprocess.run(["pkill", "-TERM", "-f", f"stub_tlm.py train .*--workdir={tmp_path}/run"], check=True)
    _, errors = script.communicate(timeout=240)
    assert script.returncode == 0, errors
    assert names(commands(Path(environment["TLM_LOG"]))) == ["train", "train"]
    assert not (tmp_path / "scontrol_calls").exists()


def test_slurm_passes_the_code_of_a_failing_host_on(slurm, tmp_path):
    script = slurm(*JOB, TLM_FAIL="train", TLM_FAIL_CODE="137")
    _, errors = script.communicate(timeout=240)
    assert script.returncode == 2
    assert "sbatch did not take the job" in errors  # the stand-in's code is the job's
    assert "slurm.sh: tlm train ended with exit code 137" in (tmp_path / "job.out").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no config"),
        ([CONFIG, "--nodes=2"], "--workdir says where the run goes"),
        ([CONFIG, "--workdir=w"], "--nodes takes a number from 1 on, not ''"),
        ([CONFIG, "--workdir=w", "--nodes=0"], "--nodes takes a number from 1 on, not '0'"),
        ([CONFIG, "--workdir=w", "--nodes=2", "--cuda=11"], "--cuda takes 12 or 13, not 11"),
        ([CONFIG, "--partition=gpu"], "unknown option --partition"),
    ],
)
def test_slurm_says_what_is_wrong_in_one_line(slurm, arguments, message):
    script = slurm(*arguments)
    _, errors = script.communicate(timeout=240)
    assert script.returncode == 2
    assert message in errors
    assert errors.count("\n") == 1


def test_slurm_dry_run(slurm, tmp_path):
    out, _ = (script := slurm(*JOB, "--dry-run")).communicate(timeout=240)
    assert script.returncode == 0
    lines = out.splitlines()
    assert lines[1].startswith("$ sbatch --job-name=tlm-run --nodes=4 ")
    assert lines[-1].startswith(
        "$ srun --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=300 tlm train --distributed --config="
    )
    assert not (tmp_path / "sbatch_arguments").exists()
