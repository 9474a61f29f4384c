"""A signal while a command begins or has ended: no traceback, none swallowed, no exit code changed."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# As `python -m tlm_jax`, which sends itself a signal when it is about to import a module, or at its very end.
PROGRAM = """
import atexit, os, runpy, signal, sys
number, moment = int(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGINT, signal.default_int_handler)  # as on a terminal
def hook(event, arguments):
    if event == "import" and arguments[0] == moment:
        os.kill(os.getpid(), number)
sys.addaudithook(hook)
if moment == "exit":
    atexit.register(os.kill, os.getpid(), number)
del sys.argv[1:3]
runpy.run_module("tlm_jax", run_name="__main__", alter_sys=True)
"""


def signalled(number: int, moment: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(int(number)), moment, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("moment", "command", "number"),
    [
        ("tlm_jax.cli", "train", signal.SIGINT),
        ("argparse", "prepare", signal.SIGINT),
        ("ml_collections", "train", signal.SIGINT),
        ("ml_collections", "train", signal.SIGTERM),
        ("jax", "eval", signal.SIGINT),
        ("flax", "generate", signal.SIGINT),
    ],
)
def test_while_it_is_imported_it_ends_the_command_at_once(moment, command, number):
    done = signalled(number, moment, command)
    assert (done.returncode, done.stdout, done.stderr) == (-number, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_after_the_commands_end_it_changes_no_exit_code(number):
    done = signalled(number, "exit", "config", "seed")
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr == ""


def test_a_command_that_tidies_up_still_has_its_own_ctrl_c(tmp_path):
    """Past its imports: `tlm prepare` loads the tokenizer when it runs."""
    arguments = ["prepare", __file__, "--tokenizer=byte", f"--output={tmp_path}/store"]
    done = signalled(signal.SIGINT, "tlm_jax.data.adopted_tokenizer", *arguments)
    assert (done.returncode, done.stderr) == (75, "tlm prepare: interrupted; the same command goes on from here\n")
